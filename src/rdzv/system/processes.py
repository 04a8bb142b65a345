"""The end of child processes that help this one."""

from __future__ import annotations

import asyncio
import subprocess

END_POLLS = 200
"""How often `reap` looks, every 10 ms, whether a child has ended."""


async def reap(child: subprocess.Popen[bytes]) -> None:
    """Wait until a child that was asked to end is gone, so that no zombie stays; kill one that does not end."""
    for _ in range(END_POLLS):
        if child.poll() is not None:
            return
        await asyncio.sleep(0.01)
    child.kill()
    child.wait()
