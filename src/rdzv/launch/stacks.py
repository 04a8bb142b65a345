"""The stacks of a worker that does not stop, shown before it is killed, without help from its program.

Workers are started with PYTHONFAULTHANDLER, so Python itself writes the stacks of all threads to stderr on SIGABRT, even
if the program hangs in C code. The signal ends the process, which is what comes next anyway.
"""

from __future__ import annotations

import os
import re
import resource
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_ABORT_BIT = 1 << (signal.SIGABRT - 1)
_THREADS = 14
"""Place of the number of threads in `/proc/PID/stat`, counted from the one behind the group."""


def living(group: int, proc: Path = Path("/proc")) -> dict[int, int]:
    """Return the processes of a group that have not ended, each with its parent. Needs Linux's /proc."""
    parents: dict[int, int] = {}
    for folder in proc.glob("[0-9]*"):
        with suppress(OSError, ValueError):  # Processes end while they are read.
            # The name in brackets may have any characters; state, parent and group follow it.
            state, parent, of_group, *more = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
            # The state is that of the main thread. It may end long before the others.
            if int(of_group) == group and (state not in "ZX" or int(more[_THREADS]) > 1):
                parents[int(folder.name)] = int(parent)
    return parents


def may_signal(pid: int) -> bool:
    """Return whether the process is there and may be sent signals: most processes of other users may not."""
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def catching(group: int, proc: Path = Path("/proc")) -> list[int]:
    """Return the processes of the group that handle SIGABRT, but no children of such processes.

    The worker may be a shell or another wrapper that only waits for the program, and SIGABRT would just end it. The
    children of a Python program, such as those that load data, would hide its stack among theirs.
    """
    parents = {pid: parent for pid, parent in living(group, proc).items() if _handles_abort(proc / str(pid) / "status")}
    return sorted(pid for pid, parent in parents.items() if parent not in parents)


def _handles_abort(status: Path) -> bool:
    try:
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) & _ABORT_BIT)


def show(pids: Iterable[int]) -> None:
    """Make these processes write their stacks, which ends them."""
    for pid in pids:
        with suppress(OSError, ValueError):  # It may have ended by itself.
            _without_core(pid)
            os.kill(pid, signal.SIGABRT)


def _without_core(pid: int) -> None:
    """Keep SIGABRT from writing a core file, which can be as large as the memory of the worker."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_CORE)
    # To the kernel, 1 means none even where a program takes the cores; 0 does not.
    if hard != 0:
        resource.prlimit(pid, resource.RLIMIT_CORE, (1, hard))
