"""A register's watch: what changed between the state it saw last and the one its session knows now."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from .base import Batch, Event, Gap
from .document import Document, read_log

BACKLOG_MAX = 100_000
"""Events kept for a watch whose owner does not read them; after that it gets a Gap."""


class RegisterWatch:
    """What a session's `watch` gives. For one reader."""

    def __init__(self, targets: Sequence[str], since: int, *lists: dict[RegisterWatch, None]) -> None:
        """`lists` are those who keep the watches that have not ended."""
        self._prefixes = tuple(target for target in targets if target.endswith("/"))
        self._keys = frozenset(targets)
        self._seen = since
        self._lists = lists
        self._batches: deque[Batch] = deque()
        self._events = 0
        self._problem: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        for watches in lists:
            watches[self] = None

    def __aiter__(self) -> RegisterWatch:
        return self

    async def __anext__(self) -> Batch:
        while True:
            if self._problem is not None:
                raise self._problem
            if self._batches:
                batch = self._batches.popleft()
                self._events -= len(batch.events)
                return batch
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def aclose(self) -> None:
        """No more batches. Closing twice is harmless."""
        self.end(StopAsyncIteration())

    def show(self, document: Document) -> None:
        """This is the state now."""
        if self._seen < document.forgotten:
            self.end(Gap(f"changes after revision {document.forgotten} are known, not those after {self._seen}"))
            return
        if self._seen >= document.revision:
            return  # Its revision may come from a session that has seen more than ours.
        events = tuple(
            event for batch in read_log(document, self._seen) for event in batch.events if self._wants(event)
        )
        self._seen = document.revision
        if not events:
            return
        self._batches.append(Batch(document.revision, events))
        self._events += len(events)
        if self._events > BACKLOG_MAX:
            self.end(Gap(f"{self._events} events were not read in time"))
        else:
            self._wake()

    def _wants(self, event: Event) -> bool:
        return event.key in self._keys or event.key.startswith(self._prefixes)

    def end(self, problem: Exception) -> None:
        """Let the reader find the problem next, not after batches that it no longer explains."""
        for watches in self._lists:
            watches.pop(self, None)
        self._batches.clear()
        if self._problem is None:
            self._problem = problem
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
