"""What one server gives to whom at most, so that nobody can take it from the others.

Each limit is far above what a run of 10,000 members needs, and is met with a sentence, not with silence.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from .frames import FRAME_MAX

logger = logging.getLogger("rdzv.server")

DESCRIPTORS_SPARED = 64
"""For the rest of the process: its files, its own connections."""
PEERS_REMEMBERED = 1024


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Of one server."""

    connections: int = 16_000
    """Fewer if the system allows the process fewer open files."""
    runs: int = 10_000
    keys: int = 1_000_000
    """Of one run."""
    bytes: int = 256 * 1024 * 1024
    """Of one run: its keys and values."""
    leases: int = 100_000
    """Of one run."""
    history: int = 16_384
    """Of one run: changes kept for watches from the past. A large one counts once per KiB."""
    frame: int = FRAME_MAX
    unanswered: int = 1024 * 1024
    """Bytes that a connection may leave unread before its next requests wait."""
    backlog: int = 8 * 1024 * 1024
    """Bytes that its watches may add to that before they are cut off."""
    unread: int = 512 * 1024 * 1024
    """Bytes that all connections together may leave unread, or have sent by halves; then the slowest are closed."""
    watches: int = 1_000
    """Of one connection."""
    targets: int = 10_000
    """Of all watches of one connection."""
    operations: int = 100_000
    """Compares, and operations of each branch, of one transaction."""
    greeting_s: float = 5.0
    """Who connects says hello within this time."""
    slow_s: float = 30.0
    """Who has not read for so long is not coming back."""
    silent_s: float = 60.0
    """A driver says something every 10 s at least; who does not is gone."""


def raise_nofile() -> int:
    """Allow this process as many open files as it may have, and say how many that is."""
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
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            return soft
        return wanted
    return soft


class Complaints:
    """Warns at most once per second and peer: whoever sends rubbish must not fill the log as well."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._said: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def __call__(self, peer: str, problem: str) -> None:
        """`peer` is an address without the port, which is another one each time."""
        now = self._now()
        at, silent = self._said.pop(peer, (now - 1.0, 0))
        if now - at < 1.0:
            self._said[peer] = (at, silent + 1)
            return
        self._said[peer] = (now, 0)
        while len(self._said) > PEERS_REMEMBERED:
            self._said.popitem(last=False)
        more = f" ({silent} more were not logged)" if silent else ""
        logger.warning("peer %s: %s%s", peer, problem, more)
