"""The journal file of one agent: what it was told, as JSON lines that outlive the run, the engine and the process.

The first line of a file says whose it is. Each other line is a notice, with the seconds since the first line by the
agent's own clock, and a stamp of its wall clock for people. `operate/account.py` merges the files of several nodes.

A thread of its own writes: the folder may be on a file system that hangs, and a member that cannot renew its lease is
lost. A file that cannot be written is given up with one warning; the run goes on.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import queue
import re
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from ..config.settings import Settings
from ..system.node import Node
from .notices import Notice
from .registration import member_name

logger = logging.getLogger("rdzv.journal")

VERSION = 1
SIZE_MAX = 2 * 1024 * 1024
"""Bytes of an agent's journal. A restart takes about 1 KB in each node's file."""
FILES_MAX = 200
"""Files kept in a folder that only rdzv uses; the oldest are deleted."""
CLOSE_S = 1.0
"""How long an agent that leaves waits for its last lines to be written."""
SUFFIX = ".rdzv.jsonl"
_numbers = itertools.count()
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_NOT_KEPT = frozenset({"lost", "left", "banned", "gave up"})
"""Kinds that repeat what `broken` says, once for each member."""


class JournalLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the file: a notice, when it came, and by the wall clock."""

    at: float
    stamp: str
    notice: Notice


class JournalHeader(msgspec.Struct, frozen=True):
    """The first line of the file."""

    rdzv_journal: int
    run_id: str
    member: str
    pid: int
    stamp: str
    continued: bool = False
    """Lines before this file's were dropped, to keep to its size."""


def state_folder(environ: Mapping[str, str]) -> str:
    """Return the folder for files of this user that should stay, by the rules of XDG; empty if the user has no home."""
    given, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if given.startswith("/"):
        return f"{given}/rdzv"
    return f"{home}/.local/state/rdzv" if home.startswith("/") else ""


def journal_for(settings: Settings, node: Node) -> JournalFile | None:
    """Return the journal that the settings ask for, if any."""
    if not settings.journal_dir:
        return None
    folder = Path(settings.journal_dir).expanduser()
    return JournalFile(
        folder, settings.run_id, member_name(settings, node), node.now, node.stamp,
        own_folder=str(folder) == state_folder(os.environ),
    )  # fmt: skip


class JournalFile:
    """Writes notices to a file in a folder, in a thread of its own. Nothing is made before the first notice."""

    def __init__(
        self, folder: Path, run_id: str, member: str, now: Callable[[], float], stamp: Callable[[], str], *,
        size_max: int = SIZE_MAX, own_folder: bool = False,
    ) -> None:  # fmt: skip
        """`own_folder`: the folder is for journals only, so that the oldest may be deleted."""
        self._folder = folder
        self._member, self._run_id = member, run_id
        self._now, self._stamp = now, stamp
        self._size_max = size_max
        self._own_folder = own_folder
        self._began_at = 0.0
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        name = "_".join(_UNSAFE.sub("-", text)[:80] for text in (run_id, member))
        # Several agents of one process may share run and name. The first one has no number.
        number = next(_numbers)
        self.path = folder / f"{name}_{os.getpid()}{f'-{number}' if number else ''}{SUFFIX}"

    def __call__(self, notice: Notice) -> None:
        """Keep a notice. Never waits and never raises."""
        if notice.kind in _NOT_KEPT or (notice.kind == "drained" and notice.cause):
            return
        if self._thread is None:
            self._began_at = self._now()
            self._thread = threading.Thread(target=self._write_all, name="rdzv journal", daemon=True)
            self._thread.start()
        at = round(self._now() - self._began_at, 3)
        line = JournalLine(at, self._stamp(), notice)
        self._queue.put(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """Let the thread write what it has, and wait for it a little."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    # ---- in the thread

    def _write_all(self) -> None:
        try:
            descriptor, size = self._open(continued=False)
            try:
                while (line := self._queue.get()) is not None:
                    if size + len(line) > self._size_max // 2:
                        # The first half is replaced, so that the newest lines are always there.
                        os.close(descriptor)
                        self.path.replace(self.path.with_name(f"{self.path.name}.old"))
                        descriptor, size = self._open(continued=True)
                    os.write(descriptor, line)
                    size += len(line)
            finally:
                os.close(descriptor)
        except OSError as error:
            why = error.strerror or error
            logger.warning("the journal %s cannot be written, and the run goes on without: %s", self.path, why)
            while self._queue.get() is not None:
                pass

    def _open(self, *, continued: bool) -> tuple[int, int]:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._own_folder and not continued:
            _delete_oldest(self._folder)
        # A link that somebody else put there is not followed, and the file is nobody else's to read: reasons may quote
        # what programs wrote.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self.path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            header = JournalHeader(VERSION, self._run_id, self._member, os.getpid(), self._stamp(), continued)
            line = msgspec.json.encode(header) + b"\n"
            os.write(descriptor, line)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor, size + len(line)


@functools.cache
def _delete_oldest(folder: Path) -> None:
    """Delete, once in the life of a process, the oldest files, and leave room for one more."""
    ages = []
    for path in folder.glob(f"*{SUFFIX}*"):
        with suppress(OSError):
            ages.append((path.stat().st_mtime_ns, path))
    for _, path in sorted(ages)[: max(0, len(ages) - FILES_MAX + 1)]:
        with suppress(OSError):
            path.unlink()
