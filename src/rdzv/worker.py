"""For training programs: tell the agent how far this worker is, and hear when its round will end. Needs no torch.

    from rdzv import worker

    for step in range(start, steps):
        train(step)
        worker.progress(step)
        if worker.notice():  # All workers must come to this in the same step: docs/workers.md.
            save(step)
            worker.saved()

torchrun with rdzv and `rdzv run` name a Unix socket to their workers (`RDZV_WORKER`). Without it, as in a plain
`python train.py`, every call does nothing. In the loop of `rdzv.torch.rounds` the process is its own agent. The calls may be
made in any thread, and do not wait for the agent.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import operator
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from .core.worker_messages import (
    LINE_MAX,
    PAGE_SIZE,
    SOCKET_ENV,
    STEP_MAX,
    EndNotice,
    NoticeSent,
    WorkerHello,
    WorkerListens,
    WorkerSaved,
    decode,
    encode,
)

__all__ = ["EndNotice", "notice", "progress", "saved"]

logger = logging.getLogger("rdzv.worker")

CONNECT_S = 5.0
"""How long the first call may wait for the agent to accept it."""
STACKS_SIGNAL = signal.SIGURG
"""The signal at which this process writes its stacks. A process that does not know it ignores it."""


class _Channel:
    """This process's connection to its agent; without one, a page that nobody reads."""

    def __init__(self, path: str, rank: str, round: str) -> None:
        self.page = memoryview(bytearray(PAGE_SIZE)).cast("q")
        self.socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._listens = False
        self._heard = 0
        """How many notices have been read. The page says how many were sent."""
        self._unread = b""
        self._notice = NoticeSent(0)
        self._saved = 0
        self._file = -1
        """The page as a file, to which stacks are written; -1: there is none."""
        if path:
            try:
                self._connect(path, int(rank), int(round))
            except (OSError, ValueError) as error:
                logger.warning("this worker cannot talk to its agent: %s (%s=%s)", error, SOCKET_ENV, path)

    def _connect(self, path: str, rank: int, round: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_S)
            connection.connect(path)
            name = secrets.token_hex(8)
            # Beside the socket, in a folder of this user alone. The agent removes the name as soon as it has the file open.
            file = Path(path).with_name(name)
            self._file = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.truncate(self._file, PAGE_SIZE)
                os.lseek(self._file, PAGE_SIZE, os.SEEK_SET)  # Where the stacks will be written.
                shared = memoryview(mmap.mmap(self._file, PAGE_SIZE)).cast("q")
                connection.sendall(encode(WorkerHello(rank, round, name, _register_stacks(self._file))))
            except BaseException:
                file.unlink(missing_ok=True)  # The agent may never have heard of it.
                raise
            connection.setblocking(False)
        except BaseException:
            connection.close()
            self.close()
            raise
        self.page, self.socket = shared, connection

    def close(self) -> None:
        """Close the connection and the page."""
        self.forget()
        if self._file >= 0:
            # With the signal's handler gone, the file may go. The next connection has its own.
            faulthandler.unregister(STACKS_SIGNAL)
            os.close(self._file)
            self._file = -1

    def notice(self) -> NoticeSent | None:
        """Return the notice that runs and was not answered."""
        if not self._listens:
            self._listens = self._say(WorkerListens())
        if self.page[1] != self._heard:
            with self._lock:
                self._read()
        found = self._notice
        return None if found.id in (0, self._saved) else found

    def saved(self) -> None:
        """Answer the notice that runs, if there is one."""
        found = self.notice()
        if found is not None and self._say(WorkerSaved(found.id)):
            self._saved = found.id

    def _say(self, message: WorkerListens | WorkerSaved) -> bool:
        """Send a message, and return whether that is settled: without an agent nothing is to be said."""
        connection = self.socket  # Read once, here and below: another thread may let go of it.
        if connection is None:
            return True
        try:
            connection.sendall(encode(message))
        except BlockingIOError:  # The agent is far behind. The next call tries again.
            return False
        except OSError as error:
            logger.warning("the agent of this worker is gone: %s", error)
            self.forget()
        return True

    def _read(self) -> None:
        connection = self.socket
        try:
            data = connection.recv(4 * LINE_MAX) if connection is not None else b""
        except OSError:  # The line is on its way, or the agent is gone.
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._heard += 1
            self._notice = decode(NoticeSent, line) or self._notice

    def forget(self) -> None:
        """Let go of the connection: in a forked child, such as a data loader, it is the parent's."""
        connection, self.socket = self.socket, None
        if connection is not None:
            connection.close()
        self.page = memoryview(bytearray(PAGE_SIZE)).cast("q")
        self._heard = 0


def _register_stacks(page: int) -> int:
    """Make Python write the stacks of all threads to the page at a signal. Return the signal; 0: it belongs to the program."""
    if signal.getsignal(STACKS_SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN) or _is_caught():
        return 0
    faulthandler.register(STACKS_SIGNAL, page, all_threads=True)
    return int(STACKS_SIGNAL)


def _is_caught() -> bool:
    """Whether any handler is installed. Python does not know of one by C code, such as Go's runtime in a shared library."""
    try:
        found = re.search(r"^SigCgt:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(errors="replace"), re.MULTILINE)
    except OSError:
        return False
    return found is not None and bool(int(found[1], 16) & 1 << (STACKS_SIGNAL - 1))


_channel: _Channel | None = None
_opening = threading.RLock()
"""Held to open the channel: the agent refuses a second one. Reentrant, as a signal's handler may make a call, too."""
_agent: tuple[Callable[[], str], int, int] | None = None
"""For a process that is its own agent: the function that opens its socket, and rank and round of its worker."""


def _open() -> _Channel:
    global _channel  # noqa: PLW0603  One process is one worker.
    if (agent := _agent) is not None:
        # Not under the lock: the thread that answers this runs observers, and one of them may make a first call, too.
        where = agent[0](), str(agent[1]), str(agent[2])
    else:
        environ = os.environ
        where = environ.get(SOCKET_ENV, ""), environ.get("RANK", "0"), environ.get("RDZV_ROUND", "0")
    with _opening:
        if _channel is None:
            _channel = _Channel(*where)
        return _channel


def begin_round(serve: Callable[[], str], rank: int, round: int) -> None:
    """Make this process the worker of an agent in the same process, from this round on. `serve` opens the agent's socket."""
    global _agent  # noqa: PLW0603  One process is one worker.
    introduce_again()
    _agent = serve, rank, round


def end_rounds() -> None:
    """Forget the agent in this process."""
    global _agent  # noqa: PLW0603  One process is one worker.
    if _agent is not None:
        introduce_again()
    _agent = None


def progress(step: int) -> None:
    """Say that this worker has come to a step. It costs less than a microsecond, so call it in every step.

    Any other step than the last one counts as progress. `rdzv status`, the page and the metrics show step, age and rate.
    """
    number = operator.index(step)
    if not 0 <= number < STEP_MAX:
        raise ValueError(f"step is {number}: it must be from 0 to {STEP_MAX - 1}")
    (_channel or _open()).page[0] = number + 1


def notice() -> EndNotice | None:
    """Return why and in how many seconds the round will end, if it is known; None: it is not, or this worker has answered.

    Without a notice it costs less than a microsecond, so call it in every step. The run must have the setting `drain_notice`.
    """
    found = (_channel or _open()).notice()
    return None if found is None else EndNotice(found.reason, max(0.0, found.until - time.monotonic()), found.id)


def saved() -> None:
    """Answer the notice: this worker has saved all that it would lose. When all have answered, the round ends at once."""
    (_channel or _open()).saved()


def introduce_again() -> None:
    """Let the agent go, so that the next call introduces this worker anew. One that stays has a rank per round."""
    global _channel  # noqa: PLW0603  One process is one worker.
    if _channel is not None:
        _channel.close()
    _channel = None


def _forget_in_child() -> None:
    global _opening  # noqa: PLW0603  Another thread of the parent may have held it.
    _opening = threading.RLock()
    if _channel is not None:
        _channel.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
