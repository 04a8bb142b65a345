"""The output of workers: copied to the console and to files, in threads.

A console or a disk that does not take any more must not stop the event loop, in which the member renews its lease. So
each pipe has a thread of its own that reads and writes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import select
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ..errors import SettingsError

logger = logging.getLogger("rdzv.launch")

CHUNK = 65536
LINE_MAX = 65536
"""Bytes of a line that has not ended. Longer ones are shown in parts."""
TAIL_MAX = 65536
"""Bytes of the end of an output that are kept, for the exception in it."""
_UNFIT = re.compile(r"[^A-Za-z0-9._-]+")


def log_folder(path: str) -> str:
    """Make the folder for logs and return its absolute path; empty stays empty. Raises SettingsError."""
    if not path:
        return ""
    folder = Path(path).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return str(folder)
    except OSError as error:
        raise SettingsError(f"--log-dir is {path!r}, where no file can be written: {error.strerror or error}") from None


class Sink(Protocol):
    """A place for output. Raises OSError if it takes no more."""

    def write(self, data: bytes) -> None:
        """Write all of the data, or raise."""

    def close(self) -> None:
        """Write what is left, and give the place back."""


class LogFile:
    """A file that output is appended to."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Appended: a run id that is used again begins at round 1 again.
        self._file = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        _write_all(self._file.fileno(), data)

    def close(self) -> None:
        self._file.close()


class Console:
    """Standard output or error of the launcher, which workers share. With a prefix, it is written in whole lines."""

    def __init__(self, descriptor: int, lock: threading.Lock, prefix: str = "") -> None:
        self._descriptor = descriptor
        self._lock = lock
        self._lines = PrefixedLines(prefix.encode()) if prefix else None

    def write(self, data: bytes) -> None:
        self._write(self._lines.feed(data) if self._lines is not None else data)

    def close(self) -> None:
        if self._lines is not None:
            self._write(self._lines.end())

    def _write(self, data: bytes) -> None:
        with self._lock:
            _write_all(self._descriptor, data)


class PrefixedLines:
    """Puts a prefix before each line. Output without a line break is held back until its line ends."""

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the lines that the data completes. A carriage return, as of a progress bar, ends a line too."""
        lines = (self._rest + data).splitlines(keepends=True)
        unfinished = bool(lines) and not lines[-1].endswith((b"\n", b"\r"))
        self._rest = lines.pop() if unfinished else b""
        whole = b"".join(self._prefix + line for line in lines)
        return whole + self.end() if len(self._rest) > LINE_MAX else whole

    def end(self) -> bytes:
        """Return the rest as a line."""
        rest, self._rest = self._rest, b""
        return self._prefix + rest + b"\n" if rest else b""


class OutputCopy:
    """Copies one output of one worker to its sinks, until every process that has the pipe has closed it.

    A sink that fails is given up, and the rest is copied on: a full disk or a closed terminal must not stop a worker.
    """

    def __init__(self, name: str, sinks: Sequence[Sink]) -> None:
        """Raise OSError if there is no room for a pipe, and RuntimeError if there is none for a thread."""
        self._name = name
        self._sinks = list(sinks)
        self._tail = b""
        self._reader, self.pipe = os.pipe()
        """`pipe` is the end that the worker writes to."""
        self._thread = threading.Thread(target=self._copy, name=f"rdzv copies {name}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self.started()
            os.close(self._reader)
            self._close_sinks()
            raise

    def started(self) -> None:
        """Close this process's copy of the worker's end, so that the end of the output is seen."""
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1

    def finish(self, limit_s: float) -> None:
        """Wait for the end of the output. A process that left the worker's group may keep it open for longer."""
        self._thread.join(limit_s)

    @property
    def tail(self) -> bytes:
        """The end of the output so far."""
        return self._tail

    def _copy(self) -> None:
        with open(self._reader, "rb", buffering=0) as pipe:  # noqa: PTH123  A descriptor.
            while data := pipe.read(CHUNK):
                self._tail = (self._tail + data)[-TAIL_MAX:]
                for sink in list(self._sinks):
                    self._attempt(sink, data)
        self._close_sinks()

    def _close_sinks(self) -> None:
        for sink in self._sinks:
            with suppress(OSError):
                sink.close()

    def _attempt(self, sink: Sink, data: bytes) -> None:
        try:
            sink.write(data)
        except OSError as error:
            self._sinks.remove(sink)
            logger.warning("the %s is no longer written to one of its places: %s", self._name, error.strerror or error)


class Destinations:
    """Chooses the sinks of each worker: files below a folder, the console, or both."""

    def __init__(self, run_id: str, log_dir: str = "", *, tee: bool = False, prefixed: bool = False) -> None:
        self._folder = Path(log_dir) / _folder_name(run_id) if log_dir else None
        self._shown = tee or not log_dir
        self._prefixed = prefixed
        self._locks = {1: threading.Lock(), 2: threading.Lock()}

    def file(self, round: int, rank: int, ending: str) -> Path | None:
        """Return the path of a file about one worker; None: there is no folder for logs. Round 0: it stays for all rounds."""
        if self._folder is None:
            return None
        return self._folder / f"round-{round}" / f"rank-{rank}.{ending}" if round else self._folder / f"worker-{rank}.{ending}"

    def sinks(self, round: int, rank: int, descriptor: int) -> list[Sink]:
        """Make the sinks for one output (1 or 2, as of the process) of one worker. Raises OSError."""
        sinks: list[Sink] = []
        if self._shown:
            prefix = f"[{'rank' if round else 'worker'} {rank}] " if self._prefixed else ""
            sinks.append(Console(descriptor, self._locks[descriptor], prefix))
        path = self.file(round, rank, "out" if descriptor == 1 else "err")
        if path is not None:
            sinks.append(LogFile(path))
        return sinks

    @property
    def copies_stdout(self) -> bool:
        """Whether stdout must be copied; otherwise a worker has that of the launcher."""
        return self._prefixed or self._folder is not None


def _folder_name(run_id: str) -> str:
    """Return the name of a run's folder. Two runs never share one: what is replaced in a name is told apart by a hash."""
    name = _UNFIT.sub("-", run_id).strip("-.") or "run"
    digest = hashlib.sha256(run_id.encode(errors="surrogatepass")).hexdigest()
    return name if name == run_id else f"{name}-{digest[:8]}"


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:  # A program that shares the terminal has made it so.
            select.select([], [descriptor], [])
