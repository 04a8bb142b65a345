"""Expiry of leases in a register, as one observer judges it: by the renewals it sees and its own clock.

A register ends no lease by itself. Each process that reads it regularly measures the silence of a lease from the read
that first showed its latest heartbeat, and ends the lease after its time. No instant is stored and no two clocks are
compared.

An observer that did not read for a while knows nothing of that while: perhaps the register was down and no member could
renew. So it starts counting anew. A dead member's lease then lasts longer, but no living member's lease ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from .document import StoredLease

GAP = 0.25
"""Longest pause between two reads, as a share of a lease's time; after a longer one that lease's count starts anew."""


class ExpiryObserver:
    """The silence of every lease, as one process has observed it."""

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._seen: dict[int, tuple[int, float]] = {}
        """Heartbeats by lease, and the time of the read that first showed this number."""

    def look(self, leases: Mapping[int, StoredLease], beats: Mapping[int, int], now: float) -> list[int]:
        """Return the leases that were silent for their time. `beats` are the counters of this read, answered `now`."""
        gap_s = now - self._looked_at
        self._looked_at = now
        seen: dict[int, tuple[int, float]] = {}
        silent = []
        for id, lease in leases.items():
            count = beats.get(id, lease.beats)
            former, since = self._seen.get(id, (count, now))
            if former != count or gap_s > GAP * lease.ttl_s:
                since = now
            seen[id] = (count, since)
            if now - since >= lease.ttl_s:
                silent.append(id)
        self._seen = seen
        return silent
