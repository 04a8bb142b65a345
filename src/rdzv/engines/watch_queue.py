"""The queue between a watch and its reader, for every engine behind a connection."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from .port import Batch, Case, Compares, Gap, Operations, Outcome, Session, Watch, WatchPlan
from .reference import starred

BACKLOG_MAX = 100_000
"""Unread events at which a watch ends with Gap: its reader has stopped reading."""


class WatchQueue:
    """A watch of one session, for one reader on the session's loop: a task that iterates, or a listener."""

    def __init__(self, since: int, ends: Sequence[str] = ()) -> None:
        """`ends`: keys whose puts are dropped, if the engine tells them (`Session.watch`)."""
        self.seen = since
        """Revision up to which the reader has all changes."""
        self.problem: Exception | None = None
        self._ends = frozenset(ends)
        self._batches: deque[Batch] = deque()
        self._events = 0
        self._reader: asyncio.Future[None] | None = None
        self._listener: Callable[[Batch | Exception], None] | None = None

    def __aiter__(self) -> WatchQueue:
        return self

    async def __anext__(self) -> Batch:
        while True:
            news = self.take()
            if isinstance(news, Batch):
                return news
            if news is not None:
                raise news
            self.before_waiting()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    def listen(self, listener: Callable[[Batch | Exception], None]) -> None:
        """Call the listener with each batch, and with the exception at the end, each in a callback of its own."""
        self.before_waiting()
        self._listener = listener
        while (news := self.take()) is not None:
            self.call(listener, news)
            if news is self.problem:
                return

    def call(self, listener: Callable[[Batch | Exception], None], news: Batch | Exception) -> None:
        """Call the listener, but not at once: a call of the session that was answered before is told first."""
        asyncio.get_running_loop().call_soon(listener, news)

    async def aclose(self) -> None:
        """End the watch. Closing twice is harmless."""
        self._listener = None
        self.end(StopAsyncIteration())

    def take(self) -> Batch | Exception | None:
        """Take the next batch, or the problem that ended the watch; None: there is nothing yet."""
        if self.problem is not None:
            return self.problem
        if not self._batches:
            return None
        batch = self._batches.popleft()
        self._events -= len(batch.events)
        return batch

    def deliver(self, batch: Batch) -> None:
        self.seen = batch.revision
        if self._ends:
            events = tuple([one for one in batch.events if one.item is None or one.key not in self._ends])
            if not events:
                return
            batch = Batch(batch.revision, events)
        if self._listener is not None:
            self.call(self._listener, batch)
            return
        self._batches.append(batch)
        self._events += len(batch.events)
        if self._events > BACKLOG_MAX:
            self.end(Gap(f"{self._events} events were not read in time"))
        else:
            self.wake()

    def end(self, problem: Exception) -> None:
        """Give the reader the problem next, instead of the queued batches. The first problem stays."""
        if self.problem is None:
            self.problem = problem
            self.ended()
            if self._listener is not None:
                self.call(self._listener, problem)
        self._batches.clear()
        self.wake()

    def wake(self) -> None:
        """Let the waiting reader go on, if there is one."""
        reader = self._reader
        if reader is not None and not reader.done():
            reader.set_result(None)

    def before_waiting(self) -> None:
        """Raise if nothing can come any more. For subclasses."""

    def ended(self) -> None:
        """Release what was held for this watch; called once. For subclasses."""


def only_ends(targets: Sequence[str], ends: Sequence[str]) -> list[str]:
    """Return those of `ends` of which no target wants the puts, too."""
    prefixes = tuple(target for target in targets if target.endswith("/"))
    return [one for one in ends if not (one in targets or one.startswith(prefixes) or starred(one) in targets)]


class WatchesAfterwards:
    """The port's `txn_then_watch` by two requests, for sessions of engines that have no single one for it."""

    async def txn_then_watch(
        self: Session, plan: WatchPlan, compares: Compares = (), then: Operations = (), otherwise: Operations = (),
        instead: Sequence[Case] = (),
    ) -> tuple[Outcome, Watch | None]:  # fmt: skip
        outcome = await self.txn(compares, then, otherwise, instead)
        if not outcome.succeeded:
            return outcome, None
        return outcome, self.watch(plan.targets, outcome.revision, (*plan.ends, *plan.found(outcome)))
