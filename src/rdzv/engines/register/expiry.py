"""Expiry of leases in a register, as one observer judges it: by the renewals it sees and its own clock.

A register ends no lease by itself. Each process that reads it regularly measures the silence of a lease from the read
that first showed its latest heartbeat, and ends the lease after its time. No instant is stored and no two clocks are
compared.

An observer that did not read for a while knows nothing of that while: perhaps the register was down and no member could
renew. So it starts counting anew. A dead member's lease then lasts longer, but no living member's lease ends.

A renewal that is a swap needs a turn: a swap wins only if its writer has seen the swap before it, so a register takes one
swap per round trip, however many members want to renew. With more members than round trips in a lease's time, most of
them must miss that time. So such a lease lasts no less than TURNS swaps for each lease in the register.
"""

from __future__ import annotations

from collections.abc import Mapping

from .document import ELSEWHERE, StoredLease

GAP = 0.25
"""Longest pause between two reads, as a share of a lease's time; after a longer one that lease's count starts anew."""
TURNS = 3
"""Least time of a lease, in swaps per lease that is renewed by swaps. One is the member's turn. The second is lost if a
request of another kind comes first, the third covers the member's pause and this observer's interval between two reads."""
TURNS_MIN = 10
"""Least time of such a lease, in swaps. An observer's interval between two reads is one swap and an eighth of a lease's time,
which must be less than GAP of that time: otherwise it would start anew at every read. That takes 8, and 2 are a reserve."""


class ExpiryObserver:
    """The silence of every lease, as one process has observed it."""

    def __init__(self) -> None:
        self.turns_s = 0.0
        """Least time of a lease that is renewed by swaps, by the slower one of the last two reads."""
        self.steady_s = 0.0
        """The same by the faster one of them."""
        self._looked_at = 0.0
        self._swap_s = 0.0
        self._seen: dict[int, tuple[int, float]] = {}
        """Heartbeats by lease, and its silence so far. Silence on a slow register counts for less."""

    def look(
        self, leases: Mapping[int, StoredLease], beats: Mapping[int, int], now: float, swap_s: float = 0.0
    ) -> list[int]:
        """Return the leases that were silent for their time.

        `beats` are the counters of this read, answered `now`. `swap_s` is the length of a swap or read at present.
        """
        gap_s = now - self._looked_at
        turns = max(TURNS_MIN, TURNS * sum(lease.beats != ELSEWHERE for lease in leases.values()))
        self.turns_s = turns * max(swap_s, self._swap_s)
        # A register that is always slow is read at long intervals, and yet its dead members must be noticed. One slow
        # read, however, is a stall like any other. So the longer gap is allowed after two slow reads in a row.
        self.steady_s = turns * min(swap_s, self._swap_s)
        self._looked_at, self._swap_s = now, swap_s
        seen: dict[int, tuple[int, float]] = {}
        silent = []
        for id, lease in leases.items():
            count = beats.get(id, lease.beats)
            former, silent_s = self._seen.get(id, (None, 0.0))
            by_swaps = lease.beats != ELSEWHERE
            if former != count or gap_s > GAP * max(lease.ttl_s, self.steady_s if by_swaps else 0.0):
                silent_s = 0.0
            else:
                # By shares of the lease's time, since a register may be slow for a part of it only.
                silent_s += gap_s * (lease.ttl_s / max(lease.ttl_s, self.turns_s if by_swaps else 0.0))
            seen[id] = (count, silent_s)
            if silent_s >= lease.ttl_s:
                silent.append(id)
        self._seen = seen
        return silent
