"""What a watch has been told and its reader has not read yet: the same for every engine that tells by a connection."""

from __future__ import annotations

import asyncio
from collections import deque

from .port import Batch, Gap

BACKLOG_MAX = 100_000
"""Events kept for a reader that does not read them; after that it gets a Gap."""


class WatchQueue:
    """What a session's `watch` gives. For one reader, on the loop of its session."""

    def __init__(self, since: int) -> None:
        self.seen = since
        """Up to where the reader need not be told again."""
        self.problem: Exception | None = None
        self._batches: deque[Batch] = deque()
        self._events = 0
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> WatchQueue:
        return self

    async def __anext__(self) -> Batch:
        while True:
            if self.problem is not None:
                raise self.problem
            if self._batches:
                batch = self._batches.popleft()
                self._events -= len(batch.events)
                return batch
            self.before_waiting()
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def aclose(self) -> None:
        """No more batches. Closing twice is harmless."""
        self.end(StopAsyncIteration())

    def deliver(self, batch: Batch) -> None:
        """The next changes."""
        self.seen = batch.revision
        self._batches.append(batch)
        self._events += len(batch.events)
        if self._events > BACKLOG_MAX:
            self.end(Gap(f"{self._events} events were not read in time"))
        else:
            wake(self._reader)

    def end(self, problem: Exception) -> None:
        """Let the reader find the problem next, not after batches that it no longer explains. The first one stands."""
        if self.problem is None:
            self.problem = problem
            self.ended()
        self._batches.clear()
        wake(self._reader)

    def before_waiting(self) -> None:
        """A chance to raise rather than wait for what cannot come."""

    def ended(self) -> None:
        """Let go of what was held for this watch; called once."""


def wake(waiter: asyncio.Future[None] | None) -> None:
    """Whoever waits, if anybody does."""
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
