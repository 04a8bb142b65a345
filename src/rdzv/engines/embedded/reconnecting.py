"""A session that outlives its connections: what the remote driver and the simulated one have in common.

It is bound to one engine instance; when another one answers, it is over (EngineReset) and nothing of it is ever sent again.
Calls made while there is no connection wait for one; what was under way when it was lost has failed with an unknown outcome
and is not repeated. Watches go on by the next connection from where they were.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import count
from typing import Generic, TypeVar

from ...errors import Unreachable
from ...system.timers import Timer
from ..port import Batch, EngineReset, Gap
from ..watch_queue import WatchQueue

C = TypeVar("C")
"""A connection."""


class ReconnectingSession(ABC, Generic[C]):
    """Those who derive from it know what a connection is. Used from the loop it was made on."""

    def __init__(
        self,
        endpoint: str,
        instance: str,
        place: str,
        loop: asyncio.AbstractEventLoop,
        later: Callable[[float, Callable[[], object]], Timer],
        patience_s: float,
    ) -> None:
        """`later`: whose clock it goes by. `patience_s`: how long a call waits for a connection."""
        self.instance = instance
        self.place = place
        self._endpoint = endpoint
        self._loop = loop
        self._later = later
        self._patience_s = patience_s
        self._link: C | None = None
        self._redialing: asyncio.Task[None] | None = None
        self._waiters: dict[asyncio.Future[C], None] = {}
        self._watches: dict[int, ReconnectingWatch] = {}
        self._watch_numbers = count(1)
        self._ended: type[Exception] | None = None

    # ---- what a connection is

    @abstractmethod
    def _take_on(self, link: C) -> bool:
        """Have the connection tell us what comes and when it is lost; False: it is lost already."""

    @abstractmethod
    def _hang_up(self, link: C) -> None:
        """It is not wanted."""

    @abstractmethod
    def _begin_watch(self, link: C, watch: ReconnectingWatch, since: int) -> None:
        """Have it told what changed after that revision."""

    @abstractmethod
    def _end_watch(self, link: C, watch: ReconnectingWatch) -> None:
        """No more of that."""

    @abstractmethod
    async def _dial_again(self) -> tuple[C, str]:
        """A connection and the instance that answers, however many attempts it takes."""

    # ---- the port

    def watch(self, targets: Sequence[str], since: int) -> ReconnectingWatch:
        """Whatever is wrong is said by the watch."""
        watch = ReconnectingWatch(self.forget, next(self._watch_numbers), tuple(targets), since)
        if self._ended is not None:
            watch.end(self._end_of_session())
        else:
            self._watches[watch.number] = watch
            if self._link is not None:
                self._begin_watch(self._link, watch, since)
        return watch

    # ---- connections

    async def _connected(self) -> C:
        """Wait for the connection to be restored."""
        if self._ended is not None:
            raise self._end_of_session()
        waiter: asyncio.Future[C] = self._loop.create_future()
        self._waiters[waiter] = None
        limit_s = self._patience_s
        problem = Unreachable(self._endpoint, "the connection was lost and is not back", limit_s, applied=False)
        timer = self._later(limit_s, lambda: None if waiter.done() else waiter.set_exception(problem))
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)

    def _use(self, link: C) -> bool:
        """Go on with this connection; False if it is lost already, before anybody here could be told."""
        if not self._take_on(link):
            return False
        self._link = link
        for watch in self._watches.values():
            self._begin_watch(link, watch, watch.seen)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(link)
        return True

    def _lost(self) -> None:
        """Look for another."""
        self._link = None
        if self._ended is None:
            self._redialing = self._loop.create_task(self._redial(), name=f"rdzv reconnects to {self._endpoint}")

    async def _redial(self) -> None:
        link, instance = await self._dial_again()
        self._redialing = None
        if instance != self.instance:
            self._hang_up(link)
            self._end(EngineReset)
        elif not self._use(link):
            self._lost()

    def _end(self, how: type[Exception]) -> None:
        """For good: every call and watch fails from now on."""
        self._ended = how
        self._link = None
        if self._redialing is not None:
            self._redialing.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._end_of_session())
        for watch in tuple(self._watches.values()):
            watch.end(self._end_of_session())

    def _end_of_session(self) -> Exception:
        if self._ended is EngineReset:
            return EngineReset(f"instance {self.instance} at {self.place} is gone")
        return Unreachable(self._endpoint, "the session is closed", applied=False)

    # ---- watches

    def _told(self, number: int, news: Batch | Exception) -> None:
        watch = self._watches.get(number)
        if watch is None:
            return  # Closed while this was under way.
        if isinstance(news, Batch):
            watch.deliver(news)
        else:
            watch.at_engine = not isinstance(news, Gap)
            watch.end(news)

    def forget(self, watch: ReconnectingWatch) -> None:
        """The watch ended, from whichever side."""
        if self._watches.pop(watch.number, None) is not None and self._link is not None and watch.at_engine:
            self._end_watch(self._link, watch)


class ReconnectingWatch(WatchQueue):
    """A watch that a new connection can be told to go on with."""

    def __init__(
        self, forget: Callable[[ReconnectingWatch], None], number: int, targets: tuple[str, ...], since: int
    ) -> None:
        super().__init__(since)
        self.number = number
        self.targets = targets
        self.at_engine = True
        """The engine still has it."""
        self._forget = forget

    def ended(self) -> None:
        """The engine must hear of it, unless it was it that said so."""
        self._forget(self)
