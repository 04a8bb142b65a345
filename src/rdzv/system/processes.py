"""Child processes that help this one: their start, which no fork can hold up, and their end."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Sequence
from typing import Any

from .fork import fork_lock

END_S = 2.0
"""Time that a child has to end before it is killed."""
POLL_S = (0.001, 0.05)
"""First and longest pause between two looks at a child."""


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program with the options of `Popen`, while no other thread forks. Raises OSError.

    Python learns by the end of a pipe that the program runs. A process that is forked in that moment, such as a worker of
    torch's agent, has the other end of the pipe, too. Then this thread, often an event loop's, would wait as long as that
    worker lives. The same holds for pipes to and from the program: their end would never be seen.
    """
    with fork_lock:
        return subprocess.Popen(command, **options)  # noqa: S603  The caller chooses the program.


async def ended(child: subprocess.Popen[bytes]) -> int:
    """Wait until a child has ended, and return its exit code. No zombie stays."""
    pause_s, longest_s = POLL_S
    while (code := child.poll()) is None:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, longest_s)
    return code


async def reap(child: subprocess.Popen[bytes]) -> None:
    """Wait until a child that was told to end has ended; kill one that does not end."""
    try:
        await asyncio.wait_for(ended(child), END_S)
    except asyncio.TimeoutError:
        child.kill()
        child.wait()
