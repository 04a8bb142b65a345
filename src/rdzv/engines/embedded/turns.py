"""The server's time, shared between runs: a run that has used its share waits until others have had theirs. No I/O.

Work is counted in steps: a key that is looked at is one, and a step takes well below a microsecond. A run may spend `burst`
steps at once, and more as time passes. Beyond that its clients are held back, and its requests wait:

- While the server has time to spare, until the next turn of the event loop, so that others are served in between.
- While runs compete, in a queue of such runs. One of them is served at a time, and then the server is free for all others for
  as long as that took. So light runs wait for one heavy request at most, however many heavy runs there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import msgspec

RATE = 400_000
"""Steps per second that runs may spend together before they compete: about a fifth of the time of a server that has a core."""
CROWDED = RATE // 4
"""Steps spent above the rate from which on the server has no time to spare."""
PAUSE_MAX_S = 0.5
"""Longest time that the server keeps free after it served a heavy run. Leases are longer."""


class Waiting(ABC):
    """A client that can be told to wait."""

    __slots__ = ()

    @abstractmethod
    def take_turn(self) -> None:
        """Serve what has waited."""


class Share(msgspec.Struct, eq=False):
    """The share of one run."""

    spent: int = 0
    """Steps since the share was last settled. The run's sessions add to it."""
    debt: float = 0.0
    """Steps spent above the rate."""
    settled_at: float = 0.0
    is_waiting: bool = False
    clients: deque[Waiting] = msgspec.field(default_factory=deque)
    """The clients whose requests wait, longest first."""


class Turns:
    """Decides which run's requests are served next."""

    def __init__(
        self, burst: int, now: Callable[[], float], call_later: Callable[[float, Callable[[], object]], None]
    ) -> None:
        self.burst = burst
        self.active = 1
        """Runs that were heard lately. Strangers count as one."""
        self._now = now
        self._call_later = call_later
        self._spent = 0.0
        self._spent_at = 0.0
        self._queue: deque[Share] = deque()

    def settle(self, share: Share) -> None:
        """Judge a run whose sessions have spent more than `burst`. It waits if it has not earned that by its patience."""
        now = self._now()
        self._spent = max(0.0, self._spent - (now - self._spent_at) * RATE) + share.spent
        self._spent_at = now
        rate = RATE / self.active if self._is_crowded else RATE
        share.debt = max(0.0, share.debt + share.spent - (now - share.settled_at) * rate)
        share.settled_at, share.spent = now, 0
        if share.debt <= self.burst or share.is_waiting:
            return
        share.is_waiting = True
        self._queue.append(share)
        if len(self._queue) == 1:
            self._call_later(self._pause_s(share.debt), self._serve_next)

    @property
    def _is_crowded(self) -> bool:
        return self.active > 1 and self._spent > CROWDED

    def _pause_s(self, steps: float) -> float:
        return min(steps / RATE, PAUSE_MAX_S) if self._is_crowded else 0.0

    def _serve_next(self) -> None:
        """Let the run that has waited longest go on until it has used its share again."""
        share = self._queue[0]
        share.is_waiting, share.debt, share.settled_at = False, 0.0, self._now()
        clients, share.clients = share.clients, deque()
        while clients and not share.is_waiting:
            clients.popleft().take_turn()
        clients.extend(share.clients)  # A client that has been served stands behind those that still wait.
        share.clients = clients
        self._queue.popleft()
        if self._queue:
            self._call_later(self._pause_s(share.debt + share.spent), self._serve_next)
