"""Leases: promises to renew, judged by time that somebody else measures.

There is no clock in here. Time is what the caller passes in, and nothing else: a server that was stopped for ten
seconds passes in one step of its usual length instead of ten seconds, and so the stall is credited to every lease at
once. A slow observer must not condemn others. For the same reason it reads what has arrived before it passes time.

An engine that sees its members' connections may also *hang up* a lease: a killed process is then noticed after a short
linger and not after a whole lease time. Connections are also lost by the hundred when a switch restarts, and a hundred
members cannot all be back within a second, so when many hang up together the lease time decides for them after all.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heapify, heappop, heappush, heapreplace

from .port import LeaseGone

FEW = 3
"""So many leases may hang up within one linger, however few there are, before the network is to blame."""
SHARE = 0.1
"""Or this share of the leases that have a connection."""


class _Lease:
    """`due`: its time is over. `cut`: its linger is over. `queued`: when it is looked at next, never after it ends."""

    __slots__ = ("cut", "due", "queued", "ttl_s")

    def __init__(self, ttl_s: float, due: float) -> None:
        self.ttl_s = ttl_s
        self.due = due
        self.cut = math.inf
        self.queued = due


class Leases:
    """All leases of one engine."""

    def __init__(self) -> None:
        self._now = 0.0
        self._last = 0
        self._leases: dict[int, _Lease] = {}
        self._queue: list[tuple[float, int]] = []
        self._hang_ups: deque[float] = deque()
        self._lingering: set[int] = set()
        self._spared: set[int] = set()

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, lease: int) -> bool:
        return lease in self._leases

    def grant(self, ttl_s: float, lease: int = 0) -> int:
        """Make a lease and give its id, never 0 and never used before; `lease`: an id that somebody drew at random.

        Who passes time in steps adds the longest to `ttl_s`: a lease granted just before a step is charged all of it.
        """
        if not 0 < ttl_s < math.inf:
            msg = f"a lease of {ttl_s} s: its time to live must be positive and finite"
            raise ValueError(msg)
        if lease in self._leases:
            msg = f"lease {lease} is there already"
            raise ValueError(msg)
        if not lease:
            lease = self._last = self._last + 1
        self._leases[lease] = state = _Lease(ttl_s, self._now + ttl_s)
        self._enqueue(lease, state, state.due)
        return lease

    def adopt(self, lease: int, ttl_s: float) -> None:
        """Make a lease under an id that somebody else chose; one of that id starts anew."""
        self._leases[lease] = state = _Lease(ttl_s, self._now + ttl_s)
        self._enqueue(lease, state, state.due)

    def renew(self, lease: int) -> None:
        """Start its time anew. Whoever renews is there, so this takes back a hang-up, too."""
        state = self._live(lease)
        state.due = self._now + state.ttl_s
        self._connected(lease, state)

    def revoke(self, lease: int) -> bool:
        """End it now; False if it had ended already."""
        if lease not in self._leases:
            return False
        self._remove(lease)
        return True

    def pass_time(self, elapsed_s: float) -> list[int]:
        """Let time pass; the leases that ended by it, in the order in which they did.

        Renewals only move `due`. A lease is looked at when its former time comes, so at most once per time to live, and
        never because others exist.
        """
        if elapsed_s < 0:
            msg = f"{elapsed_s} s passed: time does not go back"
            raise ValueError(msg)
        self._now += elapsed_s
        ended = []
        queue = self._queue
        while queue and queue[0][0] <= self._now:
            when, lease = queue[0]
            state = self._leases.get(lease)
            if state is None or state.queued != when:
                heappop(queue)
                continue
            state.queued = min(state.due, state.cut)
            if state.queued > self._now:
                heapreplace(queue, (state.queued, lease))
            else:
                heappop(queue)
                self._remove(lease)
                ended.append(lease)
        return ended

    def hang_up(self, lease: int, linger_s: float) -> None:
        """Its connection is gone: it ends after `linger_s` unless it is renewed or comes back before.

        But if this happens to more than `FEW` leases, and more than `SHARE` of those with a connection, within one
        linger, then the time to live decides for all of these. A lease that ended, or hung up before, is left alone.
        """
        state = self._leases.get(lease)
        if state is None or lease in self._lingering or lease in self._spared:
            return
        recent = self._hang_ups
        recent.append(self._now)
        while recent and recent[0] <= self._now - linger_s:
            recent.popleft()
        self._lingering.add(lease)
        if len(recent) > max(FEW, SHARE * (len(self._leases) - len(self._spared))):
            for other in self._lingering:
                self._leases[other].cut = math.inf
            self._spared |= self._lingering
            self._lingering.clear()
            return
        state.cut = self._now + linger_s
        if state.cut < state.queued:
            self._enqueue(lease, state, state.cut)

    def come_back(self, lease: int) -> None:
        """It has a connection again: its time goes on as if it had never hung up."""
        self._connected(lease, self._live(lease))

    def _live(self, lease: int) -> _Lease:
        state = self._leases.get(lease)
        if state is None:
            msg = f"lease {lease} has ended"
            raise LeaseGone(msg)
        return state

    def _connected(self, lease: int, state: _Lease) -> None:
        state.cut = math.inf
        self._lingering.discard(lease)
        self._spared.discard(lease)

    def _remove(self, lease: int) -> None:
        del self._leases[lease]
        self._lingering.discard(lease)
        self._spared.discard(lease)

    def _enqueue(self, lease: int, state: _Lease, when: float) -> None:
        """Look at the lease at `when`. Its former entry is void, like those of ended leases: swept when most are."""
        state.queued = when
        heappush(self._queue, (when, lease))
        if len(self._queue) > 2 * len(self._leases) + 64:
            self._queue = [(live.queued, key) for key, live in self._leases.items()]
            heapify(self._queue)
