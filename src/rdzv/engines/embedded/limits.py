"""Limits of one server, so that no client can take it from the others.

Each limit is far above what a run of 10,000 members needs. A client that meets one is told so with a sentence.
"""

from __future__ import annotations

import ctypes
import logging
import math
from collections.abc import Callable
from contextlib import suppress

import msgspec

from ...printable import shown
from ..tree import STEPS_PER_KEY
from .frames import FRAME_MAX

logger = logging.getLogger("rdzv.server")

DESCRIPTORS_SPARED = 64
"""Descriptors left for the rest of the process: its files, its own connections."""
_M_MMAP_THRESHOLD = -3
_KEYS = 100_000
COMPLAINT_S = 1.0
"""Time between two warnings about peers."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one server."""

    connections: int = 16_000
    """Fewer if the system allows the process fewer open files. An eighth is kept from a single run, for the others."""
    strangers: int = 1_000
    """Connections that have not said hello yet. Under TLS each costs about 75 KB."""
    accepts: int = 32
    """Connections accepted in one turn of the event loop. The rest wait in the kernel."""
    runs: int = 10_000
    keys: int = _KEYS
    """Keys of one run, up to which its program may fill the store. Its own records may be half as many more (`run.py`)."""
    bytes: int = 256 * 1024 * 1024
    """Bytes of all keys and values of one run, in the same way."""
    stored: int = 512 * 1024 * 1024
    """Bytes that all runs together may take: keys, values, history, leases, watches. Half is for runs below their share."""
    leases: int = 100_000
    """Leases of one run."""
    history: int = 16_384
    """Changes that one run keeps for watches from the past. A large one counts once per KiB."""
    frame: int = FRAME_MAX
    unanswered: int = 1024 * 1024
    """Bytes that a connection may leave unread before its next requests wait."""
    backlog: int = 8 * 1024 * 1024
    """Bytes that its watches may add to that before they are cut off."""
    unread: int = 256 * 1024 * 1024
    """Bytes that all connections together may leave unread or have half sent. Above, the worst are closed."""
    watches: int = 1_000
    """Watches of one connection."""
    targets: int = 10_000
    """Keys and prefixes of all watches of one connection."""
    run_targets: int = 250_000
    """The same for one run."""
    run_prefixes: int = 256
    """Prefixes of all watches of one run. Members watch keys; leaders and viewers watch a prefix."""
    operations: int = 25_000
    """Compares, and operations of each branch, of one transaction."""
    steps: int = STEPS_PER_KEY * _KEYS
    """Steps that the compares and reads of one transaction may take, so that it may look at every key of a run, whatever the
    keys are called: the next round deletes the store of the last one. That takes a quarter of a second at most."""
    turn: int = 200_000
    """Steps that a run may spend before other runs have their turn, a quarter if several compete (`turns.py`)."""
    greeting_s: float = 5.0
    """Time within which a client must say hello."""
    slow_s: float = 30.0
    """A client that has not read for this long is dropped."""
    silent_s: float = 60.0
    """A client that has said nothing for this long is dropped. Drivers say something every 10 s at least."""


class Room:
    """The memory that all runs of a server take, and what each of them may still take."""

    def __init__(self, size: int) -> None:
        self.taken = 0
        self.runs = 0
        self.half = size // 2

    @property
    def share(self) -> int:
        """Bytes that every run may have, however much the others took."""
        return self.half // max(1, self.runs)

    def has(self, taken: int, more: int, shares: float = 1.0) -> bool:
        """Whether a run that has taken so much may take more.

        One half is for all runs as they come, the other for runs below their share, or so many `shares`: a run cannot take the
        last from others.
        """
        total = self.taken + more
        return total <= self.half or (total <= 2 * self.half and taken + more <= shares * self.share)


def raise_nofile() -> int:
    """Raise this process's limit of open files as far as allowed, and return it."""
    try:
        import resource  # noqa: PLC0415  Not everywhere.
    except ImportError:
        return 512
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return 1 << 30
    # Where "no limit" is said but not meant, the kernel refuses it.
    wanted = hard if hard != resource.RLIM_INFINITY else 65_536
    if wanted > soft:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return wanted
    return soft


def give_back_freed_memory() -> None:
    """Have large blocks of this process given back to the system when they are freed.

    glibc raises the size that counts as large whenever such a block is freed, up to 32 MiB. A server that once sent many large
    values then keeps hundreds of megabytes, because a small block that lives lies behind each of them.
    """
    with suppress(OSError, AttributeError):  # Another C library.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 128 * 1024)


class Complaints:
    """Logs warnings about peers, at most one per second in total: rubbish must not fill the log as well."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._said_at = -math.inf
        self._unsaid = 0

    def __call__(self, peer: str, problem: str) -> None:
        """Warn of a peer, named by its address without the port: that is another one each time."""
        now = self._now()
        if now - self._said_at < COMPLAINT_S:
            self._unsaid += 1
            return
        more = f" ({self._unsaid} more were not logged)" if self._unsaid else ""
        self._said_at, self._unsaid = now, 0
        logger.warning("peer %s: %s%s", peer, shown(problem), more)
