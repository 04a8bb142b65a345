"""Leases: promises to renew, judged by the time that the caller passes in.

There is no clock here. A server that was stopped for ten seconds passes in one step of its usual length instead, so the
stall is credited to every lease: a slow observer must not end the leases of others. For the same reason the server
reads the requests that have arrived before it passes time.

An engine that sees its members' connections may also *hang up* a lease. A killed process is then noticed after a short
linger instead of a whole lease time. A restarting switch cuts connections by the hundred, and a hundred members cannot
all be back within a second. So when many leases hang up together, they keep their full time.

The end of a process looks different from a lost connection: the kernel of a dead process ends its connections in order, by an
end-of-file. Such a lease is *away*, and its owner can ask for how long.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heapify, heappop, heappush, heapreplace

import msgspec

from .port import LeaseGone

FEW = 3
"""Hang-ups within one linger that are always taken for single failures, however few leases there are."""
SHARE = 0.1
"""The same as a share of the leases that have a connection. More than both: the network is to blame."""


class _Lease(msgspec.Struct, gc=False):
    """The end of a lease's time (`due`) and of its linger (`cut`), and its entry in the queue, at or before both."""

    ttl_s: float
    due: float
    cut: float = math.inf
    queued: float = math.inf
    ended_at: float = math.inf
    """When its process ended, as far as is known."""


class Leases:
    """All leases of one engine."""

    def __init__(self) -> None:
        self._now = 0.0
        self.passing_s = 0.0
        """How much of the next step has passed already, as far as the caller says. It counts only for `away_s`."""
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
        """Make a lease and return its id, never 0 and never used before. `lease`: a random id chosen by the caller.

        Callers that pass time in steps must add the longest step to `ttl_s`: a lease granted just before a step is
        charged all of it.
        """
        if not 0 < ttl_s < math.inf:
            raise ValueError(f"a lease of {ttl_s} s: its time to live must be positive and finite")
        if lease in self._leases:
            raise ValueError(f"lease {lease} is there already")
        if not lease:
            lease = self._last = self._last + 1
        self.adopt(lease, ttl_s)
        return lease

    def adopt(self, lease: int, ttl_s: float) -> None:
        """Make a lease with the given id, or restart it."""
        self._leases[lease] = state = _Lease(ttl_s, self._now + ttl_s)
        self._enqueue(lease, state, state.due)

    def renew(self, lease: int) -> None:
        """Restart the lease's time. A renewal proves that the member is there, so it also takes back a hang-up."""
        state = self._live(lease)
        state.due = self._now + state.ttl_s
        if self._lingering or self._spared:  # Nearly never, and thousands renew.
            self._connected(lease, state)

    def revoke(self, lease: int) -> bool:
        """End the lease now; False if it had ended already."""
        if lease not in self._leases:
            return False
        self._remove(lease)
        return True

    def age_s(self, lease: int) -> float | None:
        """Return the time since the lease was granted or last renewed; None if it has ended."""
        state = self._leases.get(lease)
        return None if state is None else state.ttl_s - (state.due - self._now)

    def pass_time(self, elapsed_s: float) -> list[int]:
        """Advance the time and return the leases that ended, in any order.

        A renewal only moves `due` and leaves the queue alone. The old entry is corrected when its time comes, so a
        lease costs one look per time to live, however many leases there are.
        """
        if elapsed_s < 0:
            raise ValueError(f"{elapsed_s} s passed: time does not go back")
        self._now += elapsed_s
        self.passing_s = 0.0
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

    def hang_up(self, lease: int, linger_s: float, *, process_ended: bool = False) -> None:
        """Let a lease whose connection is lost end after `linger_s`, unless it is renewed or comes back before.

        If more than `FEW` leases, and more than `SHARE` of those with a connection, hang up within one linger, all of
        these keep their full time, and none is away. A lease that ended, or hung up before, is left alone.
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
                self._leases[other].cut = self._leases[other].ended_at = math.inf
            self._spared |= self._lingering
            self._lingering.clear()
            return
        if process_ended:
            state.ended_at = self._now + self.passing_s
        state.cut = self._now + linger_s
        if state.cut < state.queued:
            self._enqueue(lease, state, state.cut)

    def come_back(self, lease: int) -> None:
        """Take back a hang-up: the lease has a connection again."""
        self._connected(lease, self._live(lease))

    def away_s(self, lease: int) -> float:
        """Return how long ago the process of the lease ended; less than 0 if it has not, as far as is known."""
        state = self._leases.get(lease)
        return -math.inf if state is None else self._now + self.passing_s - state.ended_at

    def _live(self, lease: int) -> _Lease:
        state = self._leases.get(lease)
        if state is None:
            raise LeaseGone(f"lease {lease} has ended")
        return state

    def _connected(self, lease: int, state: _Lease) -> None:
        state.cut = state.ended_at = math.inf
        self._lingering.discard(lease)
        self._spared.discard(lease)

    def _remove(self, lease: int) -> None:
        del self._leases[lease]
        self._lingering.discard(lease)
        self._spared.discard(lease)

    def _enqueue(self, lease: int, state: _Lease, when: float) -> None:
        """Check the lease at `when`. Its former entry is void now; void entries are swept when they are the majority."""
        state.queued = when
        heappush(self._queue, (when, lease))
        if len(self._queue) > 2 * len(self._leases) + 64:
            self._queue = [(live.queued, key) for key, live in self._leases.items()]
            heapify(self._queue)
