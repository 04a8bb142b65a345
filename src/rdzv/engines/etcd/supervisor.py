"""Runs one program for a parent that may die at any moment, and leaves no process and no folder behind.

This is a script that uses only the standard library, so that it starts quickly:

    python -I -S supervisor.py PARENT FOLDER COMMAND...

It prints the process id of the command. It ends the command when the parent closes or writes to this script's standard
input, or when the parent is gone, however it ended. Then it removes FOLDER with the command's data; '' means no folder.

To ask the kernel to kill the command with its parent (PR_SET_PDEATHSIG) is not enough: the kernel does so when the
*thread* that started the command ends, and a thread of a training process may end long before its process. This script
has one thread, so between it and the command the kernel's rule is the right one.
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
"""Time for a program whose data is kept to close its files."""
POLL_S = 0.5
"""Interval to look for the parent where the kernel has no pidfd to wait on."""


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code, or 0 if this script ended it."""
    parent, folder, command = int(arguments[0]), arguments[1], arguments[2:]
    try:
        return _supervise(parent, command, keeps_data=not folder)
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _supervise(parent: int, command: list[str], *, keeps_data: bool) -> int:
    wakeup = _wake_on(signal.SIGCHLD, signal.SIGTERM)
    child = subprocess.Popen(  # noqa: S603  The parent chooses the command.
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        preexec_fn=_kill_with_parent(),  # noqa: PLW1509  Safe: this process has one thread.
    )
    os.write(sys.stdout.fileno(), b"%d\n" % child.pid)
    os.close(sys.stdout.fileno())
    try:
        ended = _wait(child, wakeup, parent)
    finally:
        _end(child, keeps_data=keeps_data)
    return child.returncode if ended else 0


def _wait(child: subprocess.Popen[bytes], wakeup: int, parent: int) -> bool:
    """Wait until the child has ended (True) or must be ended (False)."""
    sources, poll_s = [sys.stdin.fileno(), wakeup], POLL_S
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):
            sources.append(os.pidfd_open(parent))
            poll_s = None  # type: ignore[assignment]
    while os.getppid() == parent:
        ready = select.select(sources, [], [], poll_s)[0]
        if child.poll() is not None:
            return True
        if set(ready) - {wakeup} or (wakeup in ready and signal.SIGTERM in os.read(wakeup, 64)):
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
    """Return a file descriptor that becomes readable when one of the signals comes."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in signals:
        signal.signal(number, lambda *_: None)
    return reader


def _kill_with_parent() -> Callable[[], object] | None:
    """Return a function for the child that makes the kernel kill it together with this process."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
