"""The journal file of one agent: what it was told, as JSON lines that outlive the run, the engine and the process.

The first line of a file says whose it is. Each other line is a notice, with the seconds since the first line by the
agent's own clock, and a stamp of its wall clock for people. `operate/account.py` merges the files of several nodes.

A thread of its own writes, one for all members of a process: the folder may be on a file system that hangs, and a member
that cannot renew its lease is lost. A file that cannot be written is given up with one warning; the run goes on.
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
    """Writes notices to a file in a folder. Nothing is made before the first notice."""

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
        self._began_at: float | None = None
        self._descriptor, self._size = -1, 0
        self._over = threading.Event()
        """Set when nothing more will be written."""
        name = "_".join(_UNSAFE.sub("-", text)[:80] for text in (run_id, member))
        # Several agents of one process may share run and name. The first one has no number.
        number = next(_numbers)
        self.path = folder / f"{name}_{os.getpid()}{f'-{number}' if number else ''}{SUFFIX}"

    def __call__(self, notice: Notice) -> None:
        """Keep a notice. Never waits and never raises."""
        if notice.kind in _NOT_KEPT or (notice.kind == "drained" and notice.cause):
            return
        now = self._now()
        if self._began_at is None:
            self._began_at = now
        line = JournalLine(round(now - self._began_at, 3), self._stamp(), notice)
        _Writer.of_process().lines.put((self, msgspec.json.encode(line) + b"\n"))

    def close(self) -> None:
        """Let the thread write what it has, and wait for it a little."""
        if self._began_at is not None and os.getpid() in _writers:
            _Writer.of_process().lines.put((self, None))
            self._over.wait(CLOSE_S)

    # ---- in the thread

    def write(self, line: bytes | None) -> None:
        """Write a line, or end the file."""
        if self._over.is_set():
            return
        try:
            if line is not None:
                self._append(line)
                return
            self._shut()
        except OSError as error:  # Also of closing it, as on NFS. Whatever is not caught here would end all journals.
            logger.warning(
                "the journal %s cannot be written, and the run goes on without: %s; journal_dir names its folder",
                self.path, error.strerror or error,
            )  # fmt: skip
            with suppress(OSError):
                self._shut()
        self._over.set()

    def _append(self, line: bytes) -> None:
        if self._descriptor < 0:
            self._open(continued=False)
        if self._size + len(line) > self._size_max // 2:
            # The first half is replaced, so that the newest lines are always there.
            self._shut()
            self.path.replace(self.path.with_name(f"{self.path.name}.old"))
            self._open(continued=True)
        os.write(self._descriptor, line)
        self._size += len(line)

    def _open(self, *, continued: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if self._own_folder and not continued:
            _delete_oldest(self._folder)
        # A link that somebody else put there is not followed, and the file is nobody else's to read: reasons may quote
        # what programs wrote.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        header = JournalHeader(VERSION, self._run_id, self._member, os.getpid(), self._stamp(), continued)
        line = msgspec.json.encode(header) + b"\n"
        os.write(self._descriptor, line)
        self._size = os.fstat(self._descriptor).st_size

    def _shut(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class _Writer(threading.Thread):
    """The thread that writes the journals of this process. It ends with the process."""

    def __init__(self) -> None:
        super().__init__(name="rdzv journal", daemon=True)
        self.lines: queue.SimpleQueue[tuple[JournalFile, bytes | None]] = queue.SimpleQueue()

    @classmethod
    def of_process(cls) -> _Writer:
        """Return the one of this process: threads do not follow into a fork."""
        found = _writers.get(os.getpid())
        if found is None:
            made = cls()
            found = _writers.setdefault(os.getpid(), made)  # Another thread may have been quicker.
            if found is made:
                try:
                    made.start()
                except RuntimeError:  # The system has no room for a thread. The next notice tries again.
                    del _writers[os.getpid()]
                    raise
        return found

    def run(self) -> None:
        while True:
            journal, line = self.lines.get()
            journal.write(line)


_writers: dict[int, _Writer] = {}


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
