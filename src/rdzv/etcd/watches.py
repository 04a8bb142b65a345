"""Watching: one stream for all watches of a client, each resumed where it was when the stream breaks.

Where a watch resumes is never taken from the header of a message that carries events or says that the watch was made: while a
watch catches up, that header is ahead of it. It is the last event's revision, or what a progress message says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Protocol

from .cluster import Cluster
from .faults import Compacted, EtcdError, TokenInvalid, refusal_of
from .messages import Change, Header, decode_watch, encode_unwatch, encode_watch
from .stream import Stream


class Listener(Protocol):
    """Who is told of changes."""

    def changed(self, changes: Sequence[Change]) -> None:
        """What changed next: whole revisions, in their order."""

    def ended(self, fault: EtcdError) -> None:
        """There will be no more: Compacted, or a refusal."""


class Watched:
    """One watch. `next` is the revision from which it goes on."""

    def __init__(self, number: int, key: bytes, end: bytes, start: int, listener: Listener) -> None:
        self.number = number
        self.key = key
        self.end = end
        self.next = start
        self.listener = listener

    def request(self) -> bytes:
        """What makes it, from where it is."""
        return encode_watch(self.number, self.key, self.end, self.next)


class Watches:
    """All watches of a client."""

    def __init__(self, cluster: Cluster) -> None:
        self._watched: dict[int, Watched] = {}
        self._numbers = count(1)
        self._stream = Stream(cluster, "/etcdserverpb.Watch/Watch", self._greet, self._hear)

    def add(self, key: bytes, end: bytes, start: int, listener: Listener) -> Watched:
        """Watch from revision `start` on."""
        watched = Watched(next(self._numbers), key, end, start, listener)
        self._watched[watched.number] = watched
        self._stream.send(watched.request())
        return watched

    def remove(self, watched: Watched) -> None:
        """Tell it nothing any more. Harmless when it has ended."""
        if self._watched.pop(watched.number, None) is not None:
            self._stream.send(encode_unwatch(watched.number))

    async def close(self) -> None:
        """End them all; whoever listens knows."""
        self._watched.clear()
        await self._stream.close()

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
            # After a break a member may tell again what another had told.
            changes = [change for change in told.changes if change.kv.modified >= watched.next]
            watched.next = max(watched.next, told.changes[-1].kv.modified + 1)
            if changes:
                watched.listener.changed(changes)
        elif not told.created:
            watched.next = max(watched.next, told.header.revision + 1)
        return told.header

    def _canceled(self, watched: Watched, compacted: int, reason: str) -> None:
        if compacted:
            fault: EtcdError = Compacted(f"revision {watched.next} is older than {compacted}, the oldest that etcd keeps")
        else:
            fault = refusal_of(reason or "etcd ended the watch without a reason")
        if isinstance(fault, TokenInvalid):
            raise fault  # The stream is opened anew, with another token.
        self._watched.pop(watched.number, None)
        watched.listener.ended(fault)
