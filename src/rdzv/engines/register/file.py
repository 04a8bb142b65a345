"""A file as a register, for members that share a directory and nothing else.

A write renames a new file over the old one, under a lock that the kernel releases when its holder dies. Readers need no
lock. The file system must rename atomically and lock for all members: a local file system, or NFS version 4.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .document import STATE_MAX

LOCK_S = 5.0
"""Longest wait for the lock, which its holder needs for one read and one write."""
RETRY_S = 0.005
_SAFELY = os.O_CLOEXEC | os.O_NOFOLLOW
"""No symbolic link is followed: in a directory that others can write to, it could lead to any file of ours."""


class FileBackend:
    """A `Backend`. The token is the state itself, since no two states are equal."""

    durable = True

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._lock_path = Path(path + ".lock")
        self._new_path = Path(path + ".new")

    def get_state(self) -> tuple[bytes, bytes] | None:
        try:
            with self._path.open("rb") as file:
                state = file.read(STATE_MAX + 1)  # A larger file is not rdzv's; `decode` refuses it.
        except FileNotFoundError:
            return None
        return (state, state) if state else None

    def set_state(self, state: bytes, token: bytes | None = None) -> tuple[bytes, bytes, bool] | None:
        with self._locked():
            present = self.get_state()
            if (present[0] if present else None) != token:
                return (*present, False) if present else None
            # A file that a writer left when it was killed is removed. One that comes between the two lines is another
            # user's, or a link that leads elsewhere: it must not be written through.
            self._new_path.unlink(missing_ok=True)
            descriptor = os.open(self._new_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _SAFELY, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(state)
                file.flush()
                os.fsync(file.fileno())
            self._new_path.replace(self._path)
            return state, state, True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | _SAFELY, 0o600)
        try:
            deadline = time.monotonic() + LOCK_S
            while True:
                with suppress(BlockingIOError, PermissionError):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() > deadline:
                    msg = f"{self._lock_path} is locked by another process"
                    raise OSError(msg)
                time.sleep(RETRY_S)
            yield
        finally:
            # A process that was forked meanwhile has the file open, too: closing it here would leave the lock with that one.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)
