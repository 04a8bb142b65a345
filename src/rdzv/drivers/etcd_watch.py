"""Watches on etcd, also of several targets in one order.

etcd orders the events of one watch, not those of two: one that catches up, or whose stream is full, lags behind the others. So
a watch with several targets holds events back until it knows that nothing before them is missing. It asks, at one revision,
how many keys each target has and when the newest of them was written; what that shows and no event has brought yet is
still to come. Only a key that came and went unseen escapes this question; its events come too late then, and are told as a Gap.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import Unreachable
from ..etcd.faults import EtcdError, Refused, Unanswered
from ..etcd.messages import Change, Found
from .base import Batch, Event, Gap
from .inbox import Inbox, wake

if TYPE_CHECKING:
    from ..etcd.watches import Subscription
    from .etcd import EtcdSession

RETRY_S = 0.2


class _Part:
    """One target: how far its own watch has come."""

    def __init__(self, watch: EtcdWatch, key: bytes, end: bytes, since: int) -> None:
        self.span = key, end
        self.watched: Subscription | None = None
        self.counted: int | None = None
        """Keys at `since`, once it had to be known."""
        self.net = 0
        """Keys that came, less those that went."""
        self.put_at = since
        """All that was written up to this revision has been told."""
        self.seen = since
        self.expected = Found()
        self._watch = watch

    def changed(self, changes: Sequence[Change]) -> None:
        """See the client's Listener."""
        for change in changes:
            if change.deleted:
                self.net -= 1
            else:
                self.net += change.kv.created == change.kv.modified
                self.put_at = change.kv.modified
        self.seen = changes[-1].kv.modified
        self._watch.changed(changes)

    def ended(self, fault: EtcdError) -> None:
        """See the client's Listener."""
        self._watch.end(Gap(fault.problem))  # If listing is refused as well, the list says so.

    def has_all(self, revision: int) -> bool:
        """Everything up to that revision, of which `expected` tells, has been told."""
        if self.seen >= revision:
            return True
        newest = max((item.modified for item in self.expected.items), default=0)
        if newest > self.put_at:
            return False
        # The one key of a part without an end is the same that was told; of others some may have gone.
        is_there = newest > 0 and not self.span[1]
        return is_there or self.expected.count == (self.counted or 0) + self.net


class EtcdWatch(Inbox):
    """A watch of one or several parts."""

    def __init__(self, session: EtcdSession, targets: Sequence[str], since: int) -> None:
        super().__init__(since)
        self._session = session
        self._parts = [_Part(self, *session.span(target), since) for target in _apart(targets)]
        self._since = since
        self._held: list[Event] = []
        self._asking: asyncio.Task[None] | None = None
        self._came: asyncio.Future[None] | None = None

    def begin(self) -> None:
        """Tell etcd of it."""
        for part in self._parts:
            part.watched = self._session.client.watch(*part.span, self._since + 1, part)

    def before_waiting(self) -> None:
        """Raises Unreachable in a forked child, where nothing comes."""
        try:
            self._session.client.cluster.check()
        except Unanswered as fault:
            raise Unreachable("etcd", fault.problem, applied=False) from None

    def ended(self) -> None:
        """Tell etcd, unless it is not ours to speak to."""
        self._session.forget(self)
        for part in self._parts:
            if part.watched is not None and not self._session.client.cluster.forked:
                self._session.client.unwatch(part.watched)
        if self._asking is not None:
            self._asking.cancel()

    # ---- what comes

    def changed(self, changes: Sequence[Change]) -> None:
        """A part has news: whole revisions, in order."""
        events = [self._event(change) for change in changes]
        if len(self._parts) == 1:
            self.deliver(Batch(events[-1].revision, tuple(events)))
            return
        if events[0].revision <= self.seen:
            self.end(Gap(f"a change of revision {events[0].revision} came after others up to {self.seen}"))
            return
        self._held += events
        wake(self._came)
        if self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._sort_out(), name="rdzv orders a watch")

    def _event(self, change: Change) -> Event:
        kv = change.kv
        item = self._session.item(kv)
        return Event(item.key, kv.modified, None if change.deleted else item)

    # ---- one order

    async def _sort_out(self) -> None:
        """Deliver what is held as soon as nothing before it is missing."""
        try:
            while self._held:
                revision = await self._ask()
                while not all(part.has_all(revision) for part in self._parts):
                    self._came = asyncio.get_running_loop().create_future()
                    await self._came
                ready = sorted((one for one in self._held if one.revision <= revision), key=lambda one: one.revision)
                self._held = [one for one in self._held if one.revision > revision]
                if ready:
                    self.deliver(Batch(revision, tuple(ready)))
        except Refused as fault:
            self.end(Gap(fault.problem))
        except Exception as error:  # noqa: BLE001  A defect of ours must reach whoever reads, not vanish in a task.
            self.end(error)
        finally:
            self._asking = None

    async def _ask(self) -> int:
        """Have every part know what it must have heard; of which revision that is. Raises Refused, as Compacted."""
        spans = [part.span for part in self._parts]
        unknown = [part for part in self._parts if part.counted is None]
        while True:
            try:
                counted = await self._session.client.census.count(spans, [part.span for part in unknown], self._since)
            except Unanswered:
                await asyncio.sleep(RETRY_S)
            else:
                break
        for part in unknown:
            part.counted = counted.before.get(part.span)
        for part in self._parts:
            part.expected = counted.now[part.span]
        return counted.revision


def _apart(targets: Sequence[str]) -> list[str]:
    """The targets without those that another covers, so that no event comes twice."""
    prefixes = {target for target in targets if target.endswith("/")}
    return [
        one
        for one in dict.fromkeys(targets)
        if not any(one != prefix and one.startswith(prefix) for prefix in prefixes)
    ]
