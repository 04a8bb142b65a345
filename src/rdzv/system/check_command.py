"""Runs the command that checks a node, within a time limit, and ends all that it started."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
from contextlib import suppress

TAIL_MAX = 4096
"""Bytes of the output that are kept: the last ones."""
END_S = 1.0
"""How long to wait for the rest of the output once the command has ended."""


async def run_check(command: str, timeout_s: float) -> str:
    """Return why the check failed, with the last line that it printed; empty: it passed, with exit code 0."""
    try:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # A group of its own, so that its children can be ended with it.
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"the check {command!r} cannot be run: {getattr(error, 'strerror', None) or error}"
    tail = bytearray()
    reading = asyncio.ensure_future(_read_tail(process, tail))
    try:
        code = await asyncio.wait_for(process.wait(), timeout_s)
    except asyncio.TimeoutError:
        problem = f"the check did not end within {timeout_s:g} s"
    else:
        how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
        problem = f"the check {how}" if code else ""
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([reading, asyncio.ensure_future(process.wait())], timeout=END_S)
        reading.cancel()
    lines = tail.decode(errors="replace").strip().splitlines()
    return f"{problem}: {lines[-1].strip()}" if problem and lines else problem


async def _read_tail(process: asyncio.subprocess.Process, tail: bytearray) -> None:
    """Read all output, so that the command is not held up, and keep the end of it."""
    assert process.stdout is not None, "it was asked for"
    while chunk := await process.stdout.read(TAIL_MAX):
        tail += chunk
        del tail[:-TAIL_MAX]
