"""The folder in which one host keeps its part of one quorum: its record, its etcd's data, and who looks after them.

The record is on the disk before any other host hears of it. The lock is one of the process (POSIX): it ends with the
process, however that ends, and a forked child does not have it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from pathlib import Path

import msgspec

from ...errors import SettingsError
from .agreement import HostRecord

_decode = msgspec.json.Decoder(HostRecord).decode
_held: set[str] = set()
"""Folders that this process has locked: the system would give it the same lock twice."""
os.register_at_fork(after_in_child=_held.clear)  # The locks stay with the parent. The child may have them after it.


def default_base() -> Path:
    """Return where state is kept unless `state_dir` says otherwise: on a local disk, and there after a reboot."""
    return Path("/var/tmp", f"rdzv-{os.geteuid()}")  # noqa: S108  `prepare` refuses a folder that is not ours alone.


def prepare(base: Path) -> None:
    """Make the folder for this user alone. Raises SettingsError if it belongs to others, or others may use it."""
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = base.lstat()
    except OSError as error:
        raise SettingsError(f"state_dir {str(base)!r} cannot be made: {(error.strerror or str(error)).lower()}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise SettingsError(
            f"state_dir {str(base)!r} must be a folder of this user that no other user may read or write (chmod 700): "
            "name another one"
        )


class StateFolder:
    """One host's state of one quorum."""

    def __init__(self, base: Path, name: str) -> None:
        self.path = base / name
        self.data = self.path / "etcd"
        self._base = base
        self._record = self.path / "record.json"
        self._lock = -1

    def lock(self) -> bool:
        """Whether this process, and no other, looks after the folder from now on. Raises SettingsError."""
        if str(self.path) in _held:
            return False
        prepare(self._base)
        prepare(self.path)
        number = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The former owner may have removed the folder since it was opened. Then this lock protects nothing.
            is_current = os.path.samestat(os.fstat(number), (self.path / "lock").stat())
        except OSError:
            is_current = False
        if not is_current:
            os.close(number)
            return False
        self._lock = number
        _held.add(str(self.path))
        return True

    @property
    def is_locked(self) -> bool:
        """Whether this object has the lock."""
        return self._lock >= 0

    def unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _held.discard(str(self.path))

    def load(self) -> HostRecord | None:
        """Return the record; None if there is none, or if etcd has voted and its data is gone."""
        try:
            record = _decode(self._record.read_bytes())
        except (FileNotFoundError, msgspec.DecodeError, UnicodeDecodeError):
            # A record is replaced as a whole, so an unreadable one is the disk's fault. Without it this host is an empty one.
            return None
        is_damaged = bool(record.chosen) and not 0 <= record.me < len(record.chosen)
        return None if is_damaged or (record.started and not self.has_voted) else record

    def save(self, record: HostRecord) -> None:
        """Write the record, and return when it is on the disk."""
        part = self._record.with_suffix(".part")
        with part.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self._record)
        folder = os.open(self.path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @property
    def has_voted(self) -> bool:
        """Whether etcd has a log here. It makes one before it says anything to others."""
        return (self.data / "member" / "wal").is_dir()

    def clear(self) -> None:
        """Remove what an earlier life of this host left behind, which belongs to no record."""
        shutil.rmtree(self.data, ignore_errors=True)

    def remove(self) -> None:
        """Remove everything, and the folder above if nothing is left in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._base == default_base():
            with contextlib.suppress(OSError):
                self._base.rmdir()
