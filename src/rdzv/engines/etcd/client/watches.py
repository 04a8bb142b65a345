"""Watching: one stream for all watches of a client, each resumed where it was when the stream breaks.

Where a watch resumes is never taken from the header of a message that carries events or says that the watch was made: while a
watch catches up, that header is ahead of it. It is the last event's revision, or what a progress message says.

Those who watch the same keys share one watch of etcd's, if what they missed of it is remembered. Members of a run in one
process all watch its head, and each its predecessor, which watches itself; etcd would tell each of them by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from .cluster import Cluster
from .errors import Compacted, Denied, EtcdError, TokenInvalid, refusal_of
from .messages import Header, WatchEvent, decode_watch, encode_unwatch, encode_watch
from .stream import Stream

RECENT_MAX = 16
"""Changes remembered for those who join a watch a little later than the first."""


class Listener(Protocol):
    """Who is told of changes."""

    def changed(self, changes: Sequence[WatchEvent]) -> None:
        """What changed next: whole revisions, in their order."""

    def ended(self, fault: EtcdError) -> None:
        """There will be no more: Compacted, or a refusal."""


class Subscription:
    """One listener's interest in all changes from revision `start` on."""

    __slots__ = ("end", "key", "listener", "over", "start", "watched")

    def __init__(self, key: bytes, end: bytes, start: int, listener: Listener) -> None:
        self.key = key
        self.end = end
        self.start = start
        self.listener = listener
        self.watched: _Watched | None = None
        self.over = False

    def tell(self, changes: Sequence[WatchEvent]) -> None:
        """Only what the listener asked for."""
        if changes and changes[0].kv.modified < self.start:
            changes = [change for change in changes if change.kv.modified >= self.start]
        if changes:
            self.listener.changed(changes)


class _Watched:
    """A watch of etcd's. `next` is the revision from which it goes on."""

    __slots__ = ("denied", "end", "floor", "key", "next", "number", "recent", "subscribers")

    def __init__(self, number: int, key: bytes, end: bytes, start: int) -> None:
        self.number = number
        self.key = key
        self.end = end
        self.next = start
        self.subscribers: dict[Subscription, None] = {}
        self.recent: deque[WatchEvent] = deque()
        self.denied = False
        """etcd refused to make it once, since it last was made."""
        self.floor = start
        """All changes from this revision on are in `recent`, or still to come."""

    def request(self) -> bytes:
        """What makes it, from where it is."""
        return encode_watch(self.number, self.key, self.end, self.next)

    def tell(self, changes: Sequence[WatchEvent]) -> None:
        """After a break a member may tell again what another had told; that is left out."""
        if changes[0].kv.modified < self.next:
            changes = [change for change in changes if change.kv.modified >= self.next]
            if not changes:
                return
        self.next = changes[-1].kv.modified + 1
        self.recent.extend(changes)
        while len(self.recent) > RECENT_MAX:
            self.floor = self.recent.popleft().kv.modified + 1
        for subscriber in tuple(self.subscribers):
            subscriber.tell(changes)


class Watches:
    """All watches of a client."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._watched: dict[int, _Watched] = {}
        self._by_span: dict[tuple[bytes, bytes], _Watched] = {}
        self._numbers = count(1)
        self._stream = Stream(cluster, "/etcdserverpb.Watch/Watch", self._greet, self._hear)

    def add(self, key: bytes, end: bytes, start: int, listener: Listener) -> Subscription:
        """Watch from revision `start` on. The listener hears nothing before this has returned."""
        subscription = Subscription(key, end, start, listener)
        if self._to_share(subscription) is None:
            self._make(subscription)
        else:
            self._cluster.loop.call_soon(self._share, subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Tell it nothing any more. Harmless when it has ended."""
        subscription.over = True
        watched, subscription.watched = subscription.watched, None
        if watched is None:
            return
        watched.subscribers.pop(subscription, None)
        if not watched.subscribers and watched.number in self._watched:
            self._forget(watched)
            self._stream.send(encode_unwatch(watched.number))

    async def close(self) -> None:
        """End them all; whoever listens knows."""
        self._watched.clear()
        self._by_span.clear()
        await self._stream.close()

    def _to_share(self, subscription: Subscription) -> _Watched | None:
        watched = self._by_span.get((subscription.key, subscription.end))
        return None if watched is None or watched.floor > subscription.start else watched

    def _share(self, subscription: Subscription) -> None:
        if subscription.over:
            return
        watched = self._to_share(subscription)
        if watched is None:
            self._make(subscription)
            return
        subscription.watched = watched
        watched.subscribers[subscription] = None
        subscription.tell(tuple(watched.recent))

    def _make(self, subscription: Subscription) -> None:
        key, end = subscription.key, subscription.end
        watched = subscription.watched = _Watched(next(self._numbers), key, end, subscription.start)
        watched.subscribers[subscription] = None
        self._watched[watched.number] = self._by_span[key, end] = watched
        self._stream.send(watched.request())

    def _forget(self, watched: _Watched) -> None:
        self._watched.pop(watched.number, None)
        if self._by_span.get((watched.key, watched.end)) is watched:
            del self._by_span[watched.key, watched.end]

    def _greet(self) -> Iterator[bytes]:
        return (watched.request() for watched in tuple(self._watched.values()))

    def _hear(self, message: bytes) -> Header:
        told = decode_watch(message)
        watched = self._watched.get(told.watch)
        if watched is None:
            return told.header  # Removed while this was under way.
        if told.canceled:
            self._canceled(watched, told.compacted, told.reason)
        elif told.changes:
            watched.tell(told.changes)
        elif told.created:
            watched.denied = False
        else:
            watched.next = max(watched.next, told.header.revision + 1)
        return told.header

    def _canceled(self, watched: _Watched, compacted: int, reason: str) -> None:
        if compacted:
            fault: EtcdError = Compacted(f"revision {watched.next} is older than {compacted}, the oldest that etcd keeps")
        else:
            fault = refusal_of(reason or "etcd ended the watch without a reason")
        if isinstance(fault, Denied) and self._cluster.access.user and not watched.denied:
            watched.denied = True  # Some versions say this of a token that has expired, too.
            fault = TokenInvalid(fault.problem)
        if isinstance(fault, TokenInvalid):
            raise fault  # The stream is opened anew, with another token.
        self._forget(watched)
        for subscriber in tuple(watched.subscribers):
            subscriber.listener.ended(fault)
