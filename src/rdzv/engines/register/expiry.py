"""Who still renews, as one observer of a register can tell: by the changes it sees and its own clock.

A register ends no lease by itself. Whoever looks at it regularly counts how long a lease has not beaten, from the look
that first showed its latest beat, and ends it after its time. No instant is written down and no two clocks are compared.

An observer that did not look for a while knows nothing of that while: perhaps the register was away for everybody, and nobody
could renew. So it starts counting anew, and the silence costs a dead member's lease some time, but no living one's.
"""

from __future__ import annotations

from collections.abc import Mapping

from .document import StoredLease

GAP = 0.25
"""Share of a lease's time that may pass between two looks; after a longer one the count of that lease starts anew."""


class ExpiryObserver:
    """One observer's counts."""

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._seen: dict[int, tuple[int, float]] = {}
        """By lease: its beats, and since when we have seen no other number."""

    def look(self, leases: Mapping[int, StoredLease], beats: Mapping[int, int], now: float) -> list[int]:
        """The leases that were silent for their time. `beats` are those of this look, which was answered `now`."""
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
