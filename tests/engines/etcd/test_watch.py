"""Watches of several targets in one order, on a fake client that lags where a real etcd seldom does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from rdzv.engines.etcd.client.counting import KeyCounts
from rdzv.engines.etcd.client.errors import Compacted, Unanswered
from rdzv.engines.etcd.client.messages import KeyValue, RangeResponse, WatchEvent
from rdzv.engines.etcd.driver import EtcdSession
from rdzv.engines.etcd.watch import EtcdWatch
from rdzv.engines.port import Batch, Gap


class FakeClient:
    """The part of a client that a watch needs."""

    def __init__(self) -> None:
        self.cluster = SimpleNamespace(forked=False, check_usable=lambda: None)
        self.listeners: dict[bytes, object] = {}
        self.unwatched: list[object] = []
        self.replies: asyncio.Queue[KeyCounts | Exception] = asyncio.Queue()
        self.counter = SimpleNamespace(count=self._count)
        self.counts: list[tuple[list[bytes], list[bytes], int]] = []

    def watch(self, key: bytes, _end: bytes, _start: int, listener: object) -> object:
        self.listeners[key] = listener
        return listener

    def unwatch(self, listener: object) -> None:
        self.unwatched.append(listener)

    def _count(self, spans, before, since, callback) -> None:
        self.counts.append(([key for key, _ in spans], [key for key, _ in before], since))

        async def reply() -> None:
            callback(await self.replies.get())

        self.replying = asyncio.ensure_future(reply())

    def reply(self, revision: int, before: dict[bytes, int] | None = None, **keys: int) -> None:
        """Answer a count with the revision of each key; 0 means that it does not exist."""
        now = {
            (key.encode(), b""): RangeResponse((KeyValue(key.encode(), b"", at, at),), 1) if at else RangeResponse()
            for key, at in keys.items()
        }
        self.replies.put_nowait(KeyCounts(revision, now, {(key, b""): count for key, count in (before or {}).items()}))

    def change(self, key: str, *revisions: int, deleted: bool = False, created: int = 0) -> None:
        name = key.encode()
        self.listeners[name].changed(
            [WatchEvent(deleted, KeyValue(name, b"", 0 if deleted else created or at, at)) for at in revisions]
        )


def watching(*targets: str, since: int = 10) -> tuple[FakeClient, EtcdWatch]:
    etcd = FakeClient()
    session = EtcdSession.__new__(EtcdSession)
    session.client, session.prefix, session.watches = etcd, "", set()
    watch = EtcdWatch(session, targets, since)
    watch.begin()
    return etcd, watch


def revisions(batch: Batch) -> list[tuple[str, int]]:
    return [(event.key, event.revision) for event in batch.events]


async def test_an_event_waits_for_earlier_ones_that_lag():
    etcd, watch = watching("a", "b")
    etcd.change("a", 13)
    etcd.reply(13, {b"a": 0, b"b": 0}, a=13, b=12)
    reading = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    assert not reading.done()
    etcd.change("b", 12)
    batch = await reading
    assert (batch.revision, revisions(batch)) == (13, [("b", 12), ("a", 13)])
    assert etcd.counts == [([b"a", b"b"], [b"a", b"b"], 10)]
    etcd.change("b", 15, created=12)
    etcd.reply(15, a=13, b=15)
    assert revisions(await anext(watch)) == [("b", 15)]
    assert etcd.counts[1] == ([b"a", b"b"], [], 10)


async def test_an_event_waits_for_an_earlier_deletion_that_lags():
    etcd, watch = watching("a", "b")
    etcd.change("a", 13)
    etcd.reply(14, {b"a": 0, b"b": 1}, a=13, b=0)
    reading = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0.05)
    assert not reading.done()
    etcd.change("b", 14, deleted=True)
    batch = await reading
    assert (batch.revision, revisions(batch)) == (14, [("a", 13), ("b", 14)])


async def test_an_event_after_the_counted_revision_waits_for_the_next_count():
    etcd, watch = watching("a", "b")
    etcd.change("a", 13)
    etcd.change("b", 12, 16)
    etcd.reply(14, {b"a": 0, b"b": 0}, a=13, b=12)
    assert revisions(await anext(watch)) == [("b", 12), ("a", 13)]
    etcd.reply(16, a=13, b=16)
    assert revisions(await anext(watch)) == [("b", 16)]


async def test_a_key_that_came_and_went_unseen_is_a_gap():
    etcd, watch = watching("a", "b")
    etcd.change("a", 13)
    etcd.reply(13, {b"a": 0, b"b": 0}, a=13, b=0)
    await anext(watch)
    etcd.change("b", 11)
    with pytest.raises(Gap, match="a change of revision 11 came after others up to 13"):
        await anext(watch)
    assert len(etcd.unwatched) == 2


async def test_an_unanswered_count_is_repeated_and_a_compacted_revision_is_a_gap():
    etcd, watch = watching("a", "b")
    etcd.change("a", 13)
    etcd.replies.put_nowait(Unanswered("away"))
    etcd.replies.put_nowait(Compacted("revision 10 is forgotten"))
    with pytest.raises(Gap, match="revision 10 is forgotten"):
        await anext(watch)
    assert len(etcd.counts) == 2


async def test_an_unread_watch_ends_with_a_gap(monkeypatch):
    monkeypatch.setattr("rdzv.engines.watch_queue.BACKLOG_MAX", 2)
    etcd, watch = watching("a")
    etcd.change("a", 11, 12, 13)
    with pytest.raises(Gap, match="3 events were not read in time"):
        await anext(watch)
