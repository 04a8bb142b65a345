"""The stacks of a worker that hangs, without ending it: Python's `faulthandler` writes them at a signal, even in C code.

A worker that was stopped (SIGSTOP) cannot write anything. It is continued: the signal comes first, so the stacks are those of
where it stood.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from ..system.node import Node
from ..system.timers import sleep
from .worker_channel import ConnectedWorker

WAIT_S = 5.0
"""How long a worker may take to write its stacks."""
QUIET_S = 0.2
"""Stacks are complete when nothing was added for so long."""
STOPPED = ("T", "t")


def state_of(pid: int, proc: Path = Path("/proc")) -> str:
    """Return what the kernel says of a process that would explain why it does not move; empty: nothing."""
    states = {
        "T": ", and is stopped (SIGSTOP)", "t": ", and is held by a debugger", "D": ", and waits in the kernel (disk or driver)"
    }  # fmt: skip
    return states.get(_state(pid, proc), "")


def _state(pid: int, proc: Path = Path("/proc")) -> str:
    with suppress(OSError, IndexError):
        return (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    return ""


async def read(worker: ConnectedWorker, node: Node) -> str:
    """Let the worker write its stacks, and return them; empty: it cannot, or did not in time."""
    if not worker.signal or not worker.pid:
        return ""
    with suppress(OSError):  # It has ended.
        before = size = worker.stacks_size()
        os.kill(worker.pid, worker.signal)
        if _state(worker.pid) in STOPPED:
            os.kill(worker.pid, signal.SIGCONT)
        deadline, quiet_at = node.now() + WAIT_S, node.now()
        while node.now() < deadline and (size == before or node.now() - quiet_at < QUIET_S):
            await sleep(node, QUIET_S / 4)
            if worker.stacks_size() != size:
                size, quiet_at = worker.stacks_size(), node.now()
        return worker.stacks(before)
    return ""
