"""The agent's end of the worker channel: a Unix socket in a folder of its own, and the pages of the workers behind it.

Only processes of the same user may connect: the folder is closed to others, and the kernel tells who a peer is. Whatever a
worker sends is bounded in size, number and time, because it shares this event loop with the renewal of the lease. The steps
themselves do not come by the socket at all (`core/worker_messages.py`).
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import os
import signal
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec

from ..core.worker_messages import (
    LINE_MAX,
    PAGE_NAME,
    SAID_MAX,
    FromWorker,
    NoticeSent,
    WorkerHello,
    WorkerListens,
    WorkerSaved,
    decode,
    encode,
)
from ..system.dial import in_daemon_thread
from ..system.timers import in_time

logger = logging.getLogger("rdzv.workers")

WORKERS_MAX = 256
"""Connections that are served at once."""
HELLO_S = 5.0
"""How long a process that connected may take to say who it is."""
PATH_MAX = 100
"""Bytes of a path that a socket can surely have; Linux allows 107."""
SIGNALS = (0, signal.SIGURG)
"""Signals that a worker may ask for, to write its stacks: only such as harm no process."""
SAME_S = 0.1
"""Two ends of a notice that are no further apart are the same: both were computed from ages."""
FOLDER = "rdzv-worker-"
"""The beginning of the names of folders. One that no process has locked is one of a dead agent."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
STACKS_MAX = 64 * 1024
"""Bytes of stacks that are read."""
_decode_said = msgspec.json.Decoder(FromWorker).decode


class ConnectedWorker:
    """A worker that said hello, and its page."""

    def __init__(self, hello: WorkerHello, pid: int, page: int, writer: asyncio.StreamWriter) -> None:
        self.rank = hello.rank
        self.round = hello.round
        self.signal = hello.signal
        self.pid = pid
        """The process, as the kernel tells it; 0: it does not."""
        self.listens = False
        """It asks for notices."""
        self.saved = 0
        """The last notice that it has answered."""
        self._sent = NoticeSent(0)
        self._notices = 0
        self._page = page
        self._writer = writer

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"

    @property
    def step(self) -> int | None:
        """The last step that it told; None: none yet."""
        # Read, not mapped: a page that the worker cuts short must not end the agent.
        data = os.pread(self._page, 8, 0)
        step = struct.unpack("@q", data)[0] - 1 if len(data) == 8 else -1
        return step if step >= 0 else None

    def tell(self, notice: NoticeSent) -> None:
        """Send a notice, if it is news to a worker that listens."""
        same = notice.id == self._sent.id and abs(notice.until - self._sent.until) < SAME_S
        if same or not self.listens or self._writer.transport.get_write_buffer_size() > LINE_MAX:
            return
        self._sent = notice
        self._notices += 1
        self._writer.write(encode(notice))
        with suppress(OSError):  # A full disk: then the worker is not told, and the time of the notice runs out.
            os.pwrite(self._page, struct.pack("@q", self._notices), 8)

    def stacks_size(self) -> int:
        """Return how far the page is written."""
        return os.fstat(self._page).st_size

    def stacks(self, since: int) -> str:
        """Return the stacks that were written behind that size."""
        return os.pread(self._page, STACKS_MAX, since).decode(errors="replace")

    def close(self) -> None:
        # Whatever still waits for its stacks finds no page, and not another file that has got the same number.
        page, self._page = self._page, -1
        os.close(page)
        self._writer.close()


class WorkerChannel:
    """The socket, and the workers that are connected to it at present."""

    def __init__(self, news: Callable[[], object] = lambda: None) -> None:
        """`news` is called when a worker has come, or has said something."""
        self._news = news
        self.path = ""
        """Where workers connect, once it was opened."""
        self.workers: dict[int, ConnectedWorker] = {}
        """Connected workers by rank."""
        self.came = asyncio.Event()
        """Set when a worker has said hello."""
        self.furthest: tuple[int, int] = (0, -1)
        """The last round of which a worker has ended, and the highest step that such workers had told in it."""
        self._folder: Path | None = None
        self._lock = -1
        """The folder, locked for as long as this process lives."""
        self._server: asyncio.Server | None = None
        self._connections = 0

    async def open(self) -> None:
        """Listen. Raises OSError."""
        self._folder, self._lock = make_folder()
        path = self._folder / "worker"
        self._server = await asyncio.start_unix_server(self._serve, path, limit=LINE_MAX)
        path.chmod(0o600)
        self.path = str(path)
        # Not waited for: a folder for temporary files may be large, and the workers should start.
        in_daemon_thread(functools.partial(_remove_dead, self._folder.parent), "rdzv removes folders")

    def close(self) -> None:
        """Stop listening, let all workers go and remove the folder."""
        if self._server is not None:
            self._server.close()
        for worker in tuple(self.workers.values()):
            self._drop(worker)
        if self._folder is not None:
            import shutil  # noqa: PLC0415  As in `make_folder`.

            shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        worker: ConnectedWorker | None = None
        try:
            pid, problem = peer_of(writer.get_extra_info("socket"))
            if self._connections > WORKERS_MAX:
                problem = f"{WORKERS_MAX} are connected already"
            if not problem:
                hello = await in_time(HELLO_S, reader.readline())
                worker, problem = self._admit(hello, pid, writer)
            if worker is None:
                logger.warning("a process that wanted to be a worker of this agent was refused: %s", problem)
                return
            await self._hear(worker, reader)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            if worker is None:
                logger.warning("a process that wanted to be a worker of this agent was refused: %r", error)
        except asyncio.CancelledError:
            pass  # The agent ends. asyncio would log a cancelled connection as an error.
        finally:
            self._connections -= 1
            if worker is not None:
                self._drop(worker)
            writer.close()

    def _admit(self, line: bytes, pid: int, writer: asyncio.StreamWriter) -> tuple[ConnectedWorker | None, str]:
        """Return the worker, or why it is refused."""
        hello = decode(WorkerHello, line)
        if hello is None or not PAGE_NAME.fullmatch(hello.page) or hello.signal not in SIGNALS or self._folder is None:
            return None, f"it said {line[:80]!r}, which is no hello"
        path = self._folder / hello.page
        page = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        path.unlink(missing_ok=True)
        former = self.workers.get(hello.rank)
        if former is not None and former.round >= hello.round:
            os.close(page)
            return None, f"{former} is connected already, and process {pid} says that it has the same rank"
        if former is not None:
            self._drop(former)
        worker = self.workers[hello.rank] = ConnectedWorker(hello, pid, page, writer)
        self.came.set()
        self._news()
        return worker, ""

    async def _hear(self, worker: ConnectedWorker, reader: asyncio.StreamReader) -> None:
        """Read until the worker ends."""
        said = 0
        while line := await reader.readline():
            said += len(line)
            if said > SAID_MAX:
                logger.warning("%s has sent more than %d bytes: it is not listened to any longer", worker, SAID_MAX)
                return
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                message = _decode_said(line)
                if isinstance(message, WorkerListens):
                    worker.listens = True
                elif isinstance(message, WorkerSaved):
                    worker.saved = message.notice
                self._news()

    def _drop(self, worker: ConnectedWorker) -> None:
        if self.workers.get(worker.rank) is worker:
            del self.workers[worker.rank]
            with suppress(OSError):
                self.furthest = max(self.furthest, (worker.round, worker.step if worker.step is not None else -1))
                worker.close()

    def reached(self, round: int) -> int:
        """Return the highest step that a worker has told in that round; -1: none."""
        steps = [worker.step for worker in self.workers.values() if worker.round == round]
        ended = self.furthest[1] if self.furthest[0] == round else -1
        return max([ended, *(step for step in steps if step is not None)])


def make_folder() -> tuple[Path, int]:
    """Make a folder for this user only, with a path that is short enough for a socket, and lock it. Raises OSError."""
    import tempfile  # noqa: PLC0415  It imports three compressors, and most members have no channel.

    usual = tempfile.gettempdir()
    short = usual if len(os.fsencode(usual)) < PATH_MAX - 30 else "/tmp"  # noqa: S108  The folder in it is not shared.
    with ExitStack() as undo:
        made = Path(tempfile.mkdtemp(prefix="rdzv-", dir=short))
        undo.callback(made.rmdir)
        lock = os.open(made, _FOLDER_FLAGS)
        undo.callback(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_SH)
        # Named when it is locked, so that no other agent takes it for one of a dead agent.
        named = made.rename(made.with_name(FOLDER + made.name.removeprefix("rdzv-")))
        undo.pop_all()
    return named, lock


@functools.cache
def _remove_dead(base: Path) -> None:
    """Remove, once in the life of a process, the folders of this user's agents that were killed: they could not do so."""
    import shutil  # noqa: PLC0415  As in `make_folder`.

    with suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if entry.name.startswith(FOLDER):
                with suppress(OSError):
                    lock = os.open(entry.path, _FOLDER_FLAGS)
                    try:
                        if os.fstat(lock).st_uid == os.getuid():
                            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            shutil.rmtree(entry.path, ignore_errors=True)
                    finally:
                        os.close(lock)


def peer_of(connection: socket.socket) -> tuple[int, str]:
    """Return the process at the other end, and why it may not connect; 0 where the kernel does not tell."""
    if not hasattr(socket, "SO_PEERCRED"):  # Then the folder's mode alone keeps others out.
        return 0, ""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, "" if uid == os.getuid() else f"process {pid} belongs to user {uid}, and this agent to {os.getuid()}"
