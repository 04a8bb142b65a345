"""Runs one program for a parent that may die at any moment, and leaves nothing of it behind: no process, no folder.

A program of its own, with nothing but the standard library, so that it starts quickly:

    python -I -S supervisor.py PARENT FOLDER COMMAND...

It prints the process id of the command. The command is ended when the parent closes our standard input or writes to it, or
when the parent is gone, however it went. FOLDER is removed then, together with what the command kept in it; '' is none.

Why not ask the kernel to kill the command with its parent (PR_SET_PDEATHSIG)? It does so when the *thread* that started it
ends, and a thread of a training process may end long before its process does. This process has one thread, so between
it and the command the kernel's promise is the right one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
GRACE_S = 5.0
"""A program whose data is kept may need this long to close its files."""
LOOK_S = 0.5
"""Where the kernel cannot tell us of the parent's end, look this often."""


def main(arguments: list[str]) -> int:
    """The exit code is the command's, or 0 if it was we who ended it."""
    parent, folder, command = int(arguments[0]), arguments[1], arguments[2:]
    try:
        return _guard(parent, command, keeps_data=not folder)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _guard(parent: int, command: list[str], *, keeps_data: bool) -> int:
    bell = _wake_on(signal.SIGCHLD, signal.SIGTERM)
    child = subprocess.Popen(  # noqa: S603  The command is our parent's.
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=_die_with_me(),  # noqa: PLW1509  Safe: this process has one thread.
    )
    os.write(sys.stdout.fileno(), b"%d\n" % child.pid)
    os.close(sys.stdout.fileno())
    try:
        ended = _wait(child, bell, parent)
    finally:
        _end(child, keeps_data=keeps_data)
    return child.returncode if ended else 0


def _wait(child: subprocess.Popen[bytes], bell: int, parent: int) -> bool:
    """Until the child has ended (True), or must end."""
    sources, look_s = [sys.stdin.fileno(), bell], LOOK_S
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            sources.append(os.pidfd_open(parent))
            look_s = None  # type: ignore[assignment]
    while os.getppid() == parent:
        ready = select.select(sources, [], [], look_s)[0]
        if child.poll() is not None:
            return True
        if bell in ready and signal.SIGTERM in os.read(bell, 64):
            return False
        if set(ready) - {bell}:
            return False
    return False


def _end(child: subprocess.Popen[bytes], *, keeps_data: bool) -> None:
    if keeps_data and child.poll() is None:
        child.terminate()
        child.send_signal(signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_S)
    child.kill()
    child.wait()


def _wake_on(*signals: signal.Signals) -> int:
    """A file that becomes readable when one of the signals comes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reader


def _die_with_me() -> Callable[[], object] | None:
    """What the child does before it becomes the command: it is to be killed with us, if we are killed."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
