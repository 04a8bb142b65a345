"""The end of child processes that help this one."""

from __future__ import annotations

import asyncio
import subprocess
import time

END_S = 2.0
"""Time that a child has to end before it is killed."""
POLL_S = (0.001, 0.05)
"""First and longest pause between two looks at a child."""


async def reap(child: subprocess.Popen[bytes]) -> None:
    """Wait until a child that was told to end is gone, so that no zombie stays; kill one that does not end."""
    deadline = time.monotonic() + END_S
    pause_s, longest_s = POLL_S
    while child.poll() is None:
        if time.monotonic() > deadline:
            child.kill()
            child.wait()
            return
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
