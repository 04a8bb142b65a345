"""The server's time, shared between runs: a run that has used its share waits until others have had theirs. No I/O.

Work is counted in steps: a key that is looked at is one, and a step takes well below a microsecond. A run may spend `burst`
steps at once (a quarter while others wait), and more as time passes. Beyond that its clients are held back, and their
requests wait:

- While the server has time to spare, until the next turn of the event loop, so that others are served in between.
- While runs compete, in a queue of such runs. One of them is served at a time, and then the server is free for all others for
  as long as that took. So light runs wait for one heavy request at most, however many heavy runs there are.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

from ..tree import Meter

RATE = 400_000
"""Steps per second that runs may spend together before they compete: about a fifth of the time of a server that has a core."""
CROWDED = RATE // 4
"""Steps spent above the rate from which on the server has no time to spare. At most those of a second are remembered."""
PAUSE_MAX_S = 0.5
"""Longest time that the server keeps free after it served a heavy run. Leases are longer."""


class Waiting(ABC):
    """A client that can be told to wait."""

    __slots__ = ()

    @abstractmethod
    def take_turn(self) -> None:
        """Serve what has waited."""


class Share(Meter):
    """The share of one run. The run's engine and sessions count their steps in it."""

    __slots__ = ("clients", "debt", "end", "is_waiting", "settled_at", "start")

    def __init__(self, now: float) -> None:
        super().__init__()
        self.start = 0
        """The count when the share was last settled, at `settled_at`."""
        self.settled_at = now
        self.end = 0
        """The count above which it must be settled again."""
        self.debt = 0.0
        """Steps spent above the rate."""
        self.is_waiting = False
        self.clients: deque[Waiting] = deque()
        """The clients whose requests wait, longest first."""


class Turns:
    """Decides which run's requests are served next."""

    def __init__(
        self, burst: int, now: Callable[[], float], call_later: Callable[[float, Callable[[], object]], None]
    ) -> None:
        self.burst = burst
        self.active = 1
        """Runs that were heard lately."""
        self.are_strangers_there = False
        """Clients that may belong to another run wait for their first answers: turns must be short."""
        self._now = now
        self._call_later = call_later
        self._spent = 0.0
        self._spent_at = 0.0
        self._queue: deque[Share] = deque()

    def settle(self, share: Share) -> None:
        """Judge a run whose sessions have spent more than `burst`. It waits if it has not earned that by its patience."""
        now = self._now()
        spent, share.start = share.steps - share.start, share.steps
        self._spent = min(max(0.0, self._spent - (now - self._spent_at) * RATE) + spent, RATE)
        self._spent_at = now
        rate = RATE / self.active if self._is_crowded else RATE
        burst = self.burst // 4 if self._is_crowded or self.are_strangers_there else self.burst
        share.end = share.steps + burst
        share.debt = max(0.0, share.debt + spent - (now - share.settled_at) * rate)
        share.settled_at = now
        if share.debt <= burst or share.is_waiting:
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
            self._call_later(self._pause_s(share.debt + share.steps - share.start), self._serve_next)
