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

from ...errors import Unreachable
from ..port import Batch, Event, Gap
from ..watch_queue import WatchQueue
from .client.errors import EtcdError, RequestRefused, Unanswered
from .client.messages import RangeResponse, WatchEvent

if TYPE_CHECKING:
    from .client.counting import Counted
    from .client.watches import Subscription
    from .driver import EtcdSession

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
        self.expected = RangeResponse()
        self._watch = watch

    def changed(self, changes: Sequence[WatchEvent]) -> None:
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


class EtcdWatch(WatchQueue):
    """A watch of one or several parts."""

    def __init__(self, session: EtcdSession, targets: Sequence[str], since: int) -> None:
        super().__init__(since)
        self._session = session
        self._parts = [_Part(self, *session.span(target), since) for target in _apart(targets)]
        self._since = since
        self._held: list[Event] = []
        self._asking = False
        self._until = 0
        """The revision up to which is known what to expect; 0: it is not."""

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

    # ---- what comes

    def changed(self, changes: Sequence[WatchEvent]) -> None:
        """A part has news: whole revisions, in order."""
        events = [self._event(change) for change in changes]
        if len(self._parts) == 1:
            self.deliver(Batch(events[-1].revision, tuple(events)))
            return
        if events[0].revision <= self.seen:
            self.end(Gap(f"a change of revision {events[0].revision} came after others up to {self.seen}"))
            return
        self._held += events
        if self._until:
            self._sort_out()
        elif not self._asking:
            self._ask()

    def _event(self, change: WatchEvent) -> Event:
        kv = change.kv
        item = self._session.item(kv)
        return Event(item.key, kv.modified, None if change.deleted else item)

    # ---- one order

    def _ask(self) -> None:
        """Find out what every part must have heard by now."""
        if self.problem is None:
            self._asking = True
            spans = [part.span for part in self._parts]
            unknown = [part.span for part in self._parts if part.counted is None]
            self._session.client.census.count(spans, unknown, self._since, self._answered)

    def _answered(self, answer: Counted | Exception) -> None:
        if self.problem is not None:
            return
        if isinstance(answer, Unanswered):
            asyncio.get_running_loop().call_later(RETRY_S, self._ask)
        elif isinstance(answer, RequestRefused):
            self.end(Gap(answer.problem))  # As Compacted.
        elif isinstance(answer, Exception):
            self.end(answer)  # A defect of ours must reach whoever reads.
        else:
            for part in self._parts:
                if part.counted is None:
                    part.counted = answer.before.get(part.span)
                part.expected = answer.now[part.span]
            self._until, self._asking = answer.revision, False
            self._sort_out()

    def _sort_out(self) -> None:
        """Deliver what is held up to the revision that was asked about, as soon as nothing before it is missing."""
        revision = self._until
        if not all(part.has_all(revision) for part in self._parts):
            return
        self._until = 0
        ready = sorted((one for one in self._held if one.revision <= revision), key=lambda one: one.revision)
        self._held = [one for one in self._held if one.revision > revision]
        if ready:
            self.deliver(Batch(revision, tuple(ready)))
        if self._held:
            self._ask()


def _apart(targets: Sequence[str]) -> list[str]:
    """The targets without those that another covers, so that no event comes twice."""
    prefixes = {target for target in targets if target.endswith("/")}
    return [
        one
        for one in dict.fromkeys(targets)
        if not any(one != prefix and one.startswith(prefix) for prefix in prefixes)
    ]
