"""Runs the command that checks a node, within a time limit, and ends all that it started."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
from contextlib import suppress
from typing import IO

from .processes import ended, start
from .timers import in_time

TAIL_MAX = 4096
"""Bytes of the output that are kept: the last ones."""
END_S = 1.0
"""How long to wait for the rest of the output once the command has ended."""


async def run_check(command: str, timeout_s: float) -> str:
    """Return why the check failed, with the last line that it printed; empty: it passed, with exit code 0."""
    try:
        process = start(
            shlex.split(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
            start_new_session=True,  # A group of its own, so that its children can be ended with it.
        )  # fmt: skip
    except (OSError, ValueError) as error:
        return f"the check {command!r} cannot be run: {getattr(error, 'strerror', None) or error}"
    assert process.stdout is not None, "stdout is a pipe"
    tail = bytearray()
    reading = asyncio.ensure_future(_read_tail(process.stdout, tail))
    try:
        code = await in_time(timeout_s, ended(process))
    except asyncio.TimeoutError:
        problem = f"the check did not end within {timeout_s:g} s"
    else:
        how = f"was ended by signal {-code}" if code < 0 else f"failed with exit code {code}"
        problem = f"the check {how}" if code else ""
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        ending = asyncio.ensure_future(ended(process))
        await asyncio.wait([reading, ending], timeout=END_S)
        for task in (reading, ending):
            task.cancel()
    lines = tail.decode(errors="replace").strip().splitlines()
    return f"{problem}: {lines[-1].strip()}" if problem and lines else problem


async def _read_tail(output: IO[bytes], tail: bytearray) -> None:
    """Read all output, so that the command is not held up, and keep the end of it."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), output)
    try:
        while chunk := await reader.read(TAIL_MAX):
            tail += chunk
            del tail[:-TAIL_MAX]
    finally:
        transport.close()
