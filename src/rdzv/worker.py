"""For training programs: tell the agent how far this worker is. Needs neither torch nor an event loop.

    from rdzv import worker

    for step in range(start, steps):
        train(step)
        worker.progress(step)

torchrun with rdzv and `rdzv run` name a Unix socket to their workers (`RDZV_WORKER`). Without it, as in a plain
`python train.py`, every call does nothing. The calls may be made in any thread, and do not wait for the agent.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import operator
import os
import secrets
import signal
import socket
from pathlib import Path

from .core.worker_messages import PAGE_SIZE, SOCKET_ENV, STEP_MAX, WorkerHello, encode

__all__ = ["progress"]

logger = logging.getLogger("rdzv.worker")

CONNECT_S = 5.0
"""How long the first call may wait for the agent to accept it."""
STACKS_SIGNAL = signal.SIGURG
"""The signal at which this process writes its stacks. A process that does not know it ignores it."""


class _Channel:
    """This process's connection to its agent; without one, a page that nobody reads."""

    def __init__(self) -> None:
        self.page = memoryview(bytearray(PAGE_SIZE)).cast("q")
        self.socket: socket.socket | None = None
        self._file = -1
        """The page as a file, to which stacks are written; -1: there is none."""
        path = os.environ.get(SOCKET_ENV, "")
        if path:
            try:
                self._connect(path, int(os.environ.get("RANK", "0")), int(os.environ.get("RDZV_ROUND", "0")))
            except (OSError, ValueError) as error:
                logger.warning(
                    "the agent of this worker cannot be told of its progress: %s (%s=%s)", error, SOCKET_ENV, path
                )

    def _connect(self, path: str, rank: int, round: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(CONNECT_S)
        connection.connect(path)
        name = secrets.token_hex(8)
        # Beside the socket, in a folder of this user alone. The agent removes the name as soon as it has the file open.
        page = os.open(Path(path).with_name(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.truncate(page, PAGE_SIZE)
        os.lseek(page, PAGE_SIZE, os.SEEK_SET)  # Where the stacks will be written.
        shared = memoryview(mmap.mmap(page, PAGE_SIZE)).cast("q")
        connection.sendall(encode(WorkerHello(rank, round, name, _register_stacks(page))))
        connection.setblocking(False)
        self.page, self.socket, self._file = shared, connection, page

    def close(self) -> None:
        """Close the connection and the page."""
        self.forget()
        if self._file >= 0:
            # With the signal's handler gone, the file may go. The next connection has its own.
            faulthandler.unregister(STACKS_SIGNAL)
            os.close(self._file)
            self._file = -1

    def forget(self) -> None:
        """Let go of the connection in a forked child, such as a data loader: it is the parent's."""
        if self.socket is not None:
            self.socket.close()
        self.socket = None
        self.page = memoryview(bytearray(PAGE_SIZE)).cast("q")


def _register_stacks(page: int) -> int:
    """Make Python write the stacks of all threads to the page at a signal. Return the signal; 0: it belongs to the program."""
    if signal.getsignal(STACKS_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN):
        return 0
    faulthandler.register(STACKS_SIGNAL, page, all_threads=True)
    return int(STACKS_SIGNAL)


_channel: _Channel | None = None


def _open() -> _Channel:
    global _channel  # noqa: PLW0603  One process is one worker.
    if _channel is None:
        _channel = _Channel()
    return _channel


def progress(step: int) -> None:
    """Say that this worker has come to a step. It costs less than a microsecond, so call it in every step.

    Any other step than the last one counts as progress. `rdzv status`, the page and the metrics show step, age and rate.
    """
    number = operator.index(step)
    if not 0 <= number < STEP_MAX:
        raise ValueError(f"step is {number}: it must be from 0 to {STEP_MAX - 1}")
    (_channel or _open()).page[0] = number + 1


def introduce_again() -> None:
    """Let the agent go, so that the next call introduces this worker anew. One that stays has a rank per round."""
    global _channel  # noqa: PLW0603  One process is one worker.
    if _channel is not None:
        _channel.close()
    _channel = None


def _forget_in_child() -> None:
    if _channel is not None:
        _channel.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
