"""Watches: one stream for all watches of a client. Each resumes where it was when the stream breaks.

A watch resumes after the revision of its last event, or after the revision that a progress message reports. The header
of a message that carries events, or that says that the watch was created, must not be used for this: while a watch
catches up, that header is ahead of it.

Listeners to the same keys share one watch in etcd, if the changes that a later listener missed are still in memory.
Members of a run in one process all watch its head, and each watches its predecessor, which watches itself. Without
sharing, etcd would send each change to each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Protocol

import msgspec

from .cluster import Cluster
from .errors import Compacted, Denied, EtcdError, TokenInvalid, refusal_of
from .messages import Header, WatchEvent, decode_watch, encode_unwatch, encode_watch
from .stream import Stream

RECENT_MAX = 16  # Changes kept in memory for listeners that join a watch a little later than the first.


class Listener(Protocol):
    """The receiver of a watch's changes."""

    def changed(self, changes: Sequence[WatchEvent]) -> None:
        """Take the next changes: whole revisions, in order."""

    def ended(self, fault: EtcdError) -> None:
        """Take the reason why there will be no more changes: Compacted, or a refusal."""


class Subscription(msgspec.Struct, eq=False):
    """One listener's interest in all changes from revision `start` on."""

    key: bytes
    end: bytes
    start: int
    listener: Listener
    watch: _SharedWatch | None = None
    removed: bool = False

    def deliver(self, changes: Sequence[WatchEvent]) -> None:
        if changes := _from(self.start, changes):
            self.listener.changed(changes)


class _SharedWatch(msgspec.Struct, eq=False):
    """A watch in etcd with all its subscribers. `next` is the revision from which it goes on."""

    id: int
    key: bytes
    end: bytes
    next: int
    recent_from: int  # All changes from this revision on are in `recent` or still to come.
    recent: deque[WatchEvent] = msgspec.field(default_factory=deque)
    subscribers: dict[Subscription, None] = {}
    denied: bool = False  # etcd has refused to create this watch once since it was last created.

    def create_request(self) -> bytes:
        return encode_watch(self.id, self.key, self.end, self.next)

    def deliver(self, changes: Sequence[WatchEvent]) -> None:
        # After a break, the new member may repeat changes that the former one has sent.
        changes = _from(self.next, changes)
        if not changes:
            return
        self.next = changes[-1].kv.modified + 1
        self.recent.extend(changes)
        while len(self.recent) > RECENT_MAX:
            self.recent_from = self.recent.popleft().kv.modified + 1
        for subscriber in tuple(self.subscribers):
            subscriber.deliver(changes)


def _from(start: int, changes: Sequence[WatchEvent]) -> Sequence[WatchEvent]:
    """Return the changes from revision `start` on. The usual case, all of them, costs no copy."""
    if changes and changes[0].kv.modified < start:
        return [change for change in changes if change.kv.modified >= start]
    return changes


class Watches:
    """All watches of a client."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._watches: dict[int, _SharedWatch] = {}
        self._by_span: dict[tuple[bytes, bytes], _SharedWatch] = {}
        self._ids = count(1)
        self._stream = Stream(cluster, "/etcdserverpb.Watch/Watch", self._create_requests, self._receive)

    def add(self, key: bytes, end: bytes, start: int, listener: Listener) -> Subscription:
        """Watch from revision `start` on. The listener is not called before this returns."""
        subscription = Subscription(key, end, start, listener)
        if self._shareable(subscription) is None:
            self._create(subscription)
        else:
            self._cluster.loop.call_soon(self._share, subscription)
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Stop calling the listener. Harmless when the watch has ended."""
        subscription.removed = True
        watch, subscription.watch = subscription.watch, None
        if watch is None:
            return
        watch.subscribers.pop(subscription, None)
        if not watch.subscribers and watch.id in self._watches:
            self._forget(watch)
            self._stream.send(encode_unwatch(watch.id))

    async def close(self) -> None:
        self._watches.clear()
        self._by_span.clear()
        await self._stream.close()

    def _shareable(self, subscription: Subscription) -> _SharedWatch | None:
        watch = self._by_span.get((subscription.key, subscription.end))
        return None if watch is None or watch.recent_from > subscription.start else watch

    def _share(self, subscription: Subscription) -> None:
        if subscription.removed:
            return
        if (watch := self._shareable(subscription)) is None:
            self._create(subscription)
            return
        subscription.watch = watch
        watch.subscribers[subscription] = None
        subscription.deliver(tuple(watch.recent))

    def _create(self, subscription: Subscription) -> None:
        key, end = subscription.key, subscription.end
        watch = subscription.watch = _SharedWatch(next(self._ids), key, end, subscription.start, subscription.start)
        watch.subscribers[subscription] = None
        self._watches[watch.id] = self._by_span[key, end] = watch
        self._stream.send(watch.create_request())

    def _forget(self, watch: _SharedWatch) -> None:
        self._watches.pop(watch.id, None)
        if self._by_span.get((watch.key, watch.end)) is watch:
            del self._by_span[watch.key, watch.end]

    def _create_requests(self) -> list[bytes]:
        return [watch.create_request() for watch in self._watches.values()]

    def _receive(self, message: bytes) -> Header:
        reply = decode_watch(message)
        watch = self._watches.get(reply.watch)
        if watch is None:
            return reply.header  # Removed while this message was on its way.
        if reply.canceled:
            self._canceled(watch, reply.compacted, reply.reason)
        elif reply.changes:
            watch.deliver(reply.changes)
        elif reply.created:
            watch.denied = False
        else:  # A progress message: all events up to this revision have been sent.
            watch.next = max(watch.next, reply.header.revision + 1)
        return reply.header

    def _canceled(self, watch: _SharedWatch, compacted: int, reason: str) -> None:
        if compacted:
            fault: EtcdError = Compacted(f"revision {watch.next} is older than {compacted}, the oldest that etcd keeps")
        else:
            fault = refusal_of(reason or "etcd ended the watch without a reason")
        if isinstance(fault, Denied) and self._cluster.credentials.user and not watch.denied:
            watch.denied = True  # Some versions of etcd say "permission denied" for an expired token: try a new token once.
            fault = TokenInvalid(fault.problem)
        if isinstance(fault, TokenInvalid):
            raise fault  # The stream reopens with another token.
        self._forget(watch)
        for subscriber in tuple(watch.subscribers):
            subscriber.listener.ended(fault)
