"""Watches on etcd. A watch of several targets delivers their events in one order.

etcd orders the events of one watch, but not those of two: a watch that catches up, or whose buffer is full, lags
behind. So a watch of several targets holds events back until it knows that no earlier one is missing. It asks, at one
revision, how many keys each target has and when the newest was written. The difference to the events received so far is
what is still to come. Only a key that was created and deleted unseen escapes this; its events come too late then, and
the watch ends with a Gap.

etcd's progress messages would be cheaper, but before 3.4.25 and 3.5.8 they overtake events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...errors import Unreachable
from ..port import Batch, Event, Gap
from ..watch_queue import WatchQueue, only_ends
from .client.errors import EtcdError, RequestRefused, Unanswered
from .client.messages import RangeResponse, WatchEvent

if TYPE_CHECKING:
    from .client.counting import KeyCounts
    from .client.watches import Subscription
    from .driver import EtcdSession

RETRY_S = 0.2  # Pause before an unanswered count is repeated.


class _TargetWatch:
    """The watch of one target, and how far it has come. Listens to the client."""

    def __init__(self, watch: EtcdWatch, key: bytes, end: bytes, since: int) -> None:
        self.span = key, end
        self.subscription: Subscription | None = None
        self.count_before: int | None = None  # Keys at the start of the watch; None until it had to be known.
        self.added = 0  # Keys created since, less those deleted.
        self.put_at = since  # All puts up to this revision have been received.
        self.seen = since
        self.expected = RangeResponse()
        self._watch = watch

    def changed(self, changes: Sequence[WatchEvent]) -> None:
        for change in changes:
            if change.deleted:
                self.added -= 1
            else:
                self.added += change.kv.created == change.kv.modified
                self.put_at = change.kv.modified
        self.seen = changes[-1].kv.modified
        self._watch.changed(changes)

    def ended(self, fault: EtcdError) -> None:
        # The reader lists again after a Gap. If the fault is a lack of permission, that list reports it.
        self._watch.end(Gap(fault.problem))

    def has_all(self, revision: int) -> bool:
        """Whether all events up to the revision, which `expected` describes, have been received."""
        if self.seen >= revision:
            return True
        newest = max((item.modified for item in self.expected.items), default=0)
        if newest > self.put_at:
            return False
        # A single key that exists is the one whose put was received. In a range, a deletion may still be missing.
        exists = newest > 0 and not self.span[1]
        return exists or self.expected.count == (self.count_before or 0) + self.added


class EtcdWatch(WatchQueue):
    """A watch of one or several targets."""

    def __init__(self, session: EtcdSession, targets: Sequence[str], since: int, ends: Sequence[str] = ()) -> None:
        # etcd can leave out puts, but only by them a watch of several targets knows that it has everything (`has_all`).
        super().__init__(since, only_ends(targets, ends))
        self._session = session
        every = _without_covered((*targets, *ends))
        self._targets = [_TargetWatch(self, *session.span(target), since) for target in every]
        self._since = since
        self._held: list[Event] = []
        self._counting = False
        self._counted_at = 0  # The revision of the counts in `expected`; 0 if there are none.

    def begin(self) -> None:
        for target in self._targets:
            target.subscription = self._session.client.watch(*target.span, self._since + 1, target)

    def before_waiting(self) -> None:
        """Raise Unreachable in a forked child, which never receives anything."""
        try:
            self._session.client.cluster.check_usable()
        except Unanswered as fault:
            raise Unreachable("etcd", fault.problem, applied=False) from None

    def ended(self) -> None:
        """Cancel the watch in etcd, unless this is a forked child: the connection is the parent's."""
        self._session.watches.discard(self)
        for target in self._targets:
            if target.subscription is not None and not self._session.client.cluster.forked:
                self._session.client.unwatch(target.subscription)

    def changed(self, changes: Sequence[WatchEvent]) -> None:
        """Take the next changes of one target: whole revisions, in order."""
        items = [(item, change) for change in changes if (item := self._session.item(change.kv)) is not None]
        events = [Event(item.key, item.modified, None if change.deleted else item) for item, change in items]
        if len(self._targets) == 1:
            if events:
                self.deliver(Batch(events[-1].revision, tuple(events)))
            return
        if events and events[0].revision <= self.seen:
            self.end(Gap(f"a change of revision {events[0].revision} came after others up to {self.seen}"))
            return
        self._held += events
        if self._counted_at:
            self._deliver_complete()
        elif events and not self._counting:
            self._count()

    def _count(self) -> None:
        """Ask what every target must have received by now."""
        if self.problem is None:
            self._counting = True
            spans = [target.span for target in self._targets]
            unknown = [target.span for target in self._targets if target.count_before is None]
            self._session.client.counter.count(spans, unknown, self._since, self._count_done)

    def _count_done(self, counts: KeyCounts | Exception) -> None:
        if self.problem is not None:
            return
        if isinstance(counts, Unanswered):
            asyncio.get_running_loop().call_later(RETRY_S, self._count)
        elif isinstance(counts, RequestRefused):
            self.end(Gap(counts.problem))  # Compacted, mostly.
        elif isinstance(counts, Exception):
            self.end(counts)  # A bug must reach the reader.
        else:
            for target in self._targets:
                if target.count_before is None:
                    target.count_before = counts.before.get(target.span)
                target.expected = counts.now[target.span]
            self._counted_at, self._counting = counts.revision, False
            self._deliver_complete()

    def _deliver_complete(self) -> None:
        """Deliver the held events up to the counted revision as soon as no event before it is missing."""
        revision = self._counted_at
        if not all(target.has_all(revision) for target in self._targets):
            return
        self._counted_at = 0
        ready = sorted((one for one in self._held if one.revision <= revision), key=lambda one: one.revision)
        self._held = [one for one in self._held if one.revision > revision]
        if ready:
            self.deliver(Batch(revision, tuple(ready)))
        if self._held:
            self._count()


def _without_covered(targets: Sequence[str]) -> list[str]:
    """Return the targets that no other one covers, so that no event comes twice."""
    prefixes = {target for target in targets if target.endswith("/")}
    return [one for one in dict.fromkeys(targets) if not any(one != some and one.startswith(some) for some in prefixes)]
