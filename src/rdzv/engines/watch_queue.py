"""The queue between a watch and its reader, for every engine behind a connection."""

from __future__ import annotations

import asyncio
from collections import deque

from .port import Batch, Gap

BACKLOG_MAX = 100_000
"""Unread events at which a watch ends with Gap: its reader has stopped reading."""


class WatchQueue:
    """A watch of one session, for one reader on the session's loop."""

    def __init__(self, since: int) -> None:
        self.seen = since
        """Revision up to which the reader has all changes."""
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
        """End the watch. Closing twice is harmless."""
        self.end(StopAsyncIteration())

    def deliver(self, batch: Batch) -> None:
        self.seen = batch.revision
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
