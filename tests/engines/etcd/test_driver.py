"""The etcd driver beyond the contract: who shares what, what a replaced cluster means, forks, and watches in one order."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from types import SimpleNamespace

import pytest

from rdzv.aio import AsyncRendezvous
from rdzv.config.endpoint import Endpoint
from rdzv.engines.etcd.client.counting import KeyCounts, KeyCounter
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.client.errors import Compacted, Unanswered
from rdzv.engines.etcd.client.messages import Header, KeyValue, RangeResponse, TxnResponse, WatchEvent
from rdzv.engines.etcd.driver import EtcdDriver, EtcdSession, own_address
from rdzv.engines.etcd.watch import EtcdWatch
from rdzv.engines.port import Batch, EngineReset, Gap, Get, List, Put
from rdzv.errors import Unreachable
from support.etcd_cluster import Cluster

SOON_S = 30.0


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with Cluster(1) as cluster:
        yield cluster


def driver(cluster: Cluster, prefix: str = "test", timeout_s: float = 10.0) -> EtcdDriver:
    return EtcdDriver(Endpoint.parse(cluster.endpoint(prefix)), Credentials(), read_timeout_s=timeout_s)


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 2 * SOON_S))


# ---- sessions


def test_sessions_of_one_loop_share_a_client_until_the_last_is_closed(one):
    async def work() -> None:
        first, second = [await driver(one).connect() for _ in range(2)]
        other = await driver(one, "elsewhere").connect()
        assert first.client is second.client
        assert first.client is not other.client
        await first.close()
        await second.txn()
        await second.close()
        assert first.client.cluster.closed
        assert not other.client.cluster.closed
        await other.close()

    run(work)


def test_keys_are_below_the_endpoints_path_and_named_without_it(one):
    async def work() -> None:
        below, whole = await driver(one, "a/b").connect(), await driver(one, "").connect()
        await below.txn(then=[Put("k", b"v")])
        assert [item.key for item in (await whole.txn(then=[List("a/")])).reads[0]] == ["a/b/k"]
        assert [item.key for item in (await below.txn(then=[List("")])).reads[0]] == ["k"]
        await below.close()
        await whole.close()

    run(work)


def test_any_number_of_keys_is_read_at_one_revision(one):
    async def work() -> None:
        session = await driver(one, "many").connect()
        for start in range(0, 300, 100):
            await session.txn(then=[Put(f"k{n}", b"%d" % n) for n in range(start, start + 100)])
        outcome = await session.txn(then=[Get(f"k{n}") for n in range(300)])
        assert [outcome.item(n).value for n in range(300)] == [b"%d" % n for n in range(300)]
        with pytest.raises(ValueError, match="a transaction of 129 compares or operations; etcd takes 128"):
            await session.txn(then=[Put(f"k{n}", b"") for n in range(129)])
        await session.close()

    run(work)


def test_others_reach_us_where_we_reach_etcd_from():
    async def work() -> None:
        loopback = Endpoint.parse("etcd://127.0.0.1:1")
        assert await own_address(loopback, ("127.0.0.1", 1)) == "127.0.0.1"
        mixed = Endpoint.parse("etcd://127.0.0.1:1,node2:1")
        assert await own_address(mixed, ("127.0.0.1", 1)) != "127.0.0.1"
        assert await own_address(mixed, ("no such host.invalid", 1)) != "127.0.0.1"

    run(work)


def test_an_etcd_that_was_emptied_is_another_engine_even_if_it_calls_itself_the_same():
    with Cluster(1) as cluster:

        async def work() -> None:
            session = await driver(cluster).connect()
            since = (await session.txn(then=[Put("k", b"")])).revision
            watch = aiter(session.watch(["k"], since))
            waiting = asyncio.ensure_future(anext(watch))
            node = cluster.nodes[0]
            node.kill()
            shutil.rmtree(cluster._folder / node.name)
            node.start()
            await asyncio.to_thread(cluster.wait_healthy)
            with pytest.raises(EngineReset):
                await session.txn()
            with pytest.raises(EngineReset):
                await asyncio.wait_for(waiting, SOON_S)
            for call in (session.grant(10), session.renew(1), session.revoke(1), session.txn()):
                with pytest.raises(EngineReset):
                    await call
            with pytest.raises(EngineReset):
                await anext(aiter(session.watch(["k"], since)))
            fresh = await driver(cluster).connect()
            assert (await fresh.txn(then=[List("")])).reads == ((),)
            await fresh.close()
            await session.close()

        run(work)


def test_another_cluster_under_the_same_address_is_another_engine_elsewhere():
    with Cluster(1) as cluster:

        async def work() -> None:
            session = await driver(cluster).connect()
            node = cluster.nodes[0]
            node.kill()
            shutil.rmtree(cluster._folder / node.name)
            cluster.extra = ["--initial-cluster-token=another"]
            node.start()
            await asyncio.to_thread(cluster.wait_healthy)
            with pytest.raises(EngineReset):
                await session.grant(10)
            fresh = await driver(cluster).connect()
            assert (fresh.instance, fresh.place) != (session.instance, session.place)
            await fresh.close()
            await session.close()

        run(work)


def test_an_engine_that_is_away_is_unreachable_and_the_session_goes_on_when_it_is_back():
    with Cluster(1) as cluster:

        async def work() -> None:
            session = await driver(cluster, timeout_s=1.0).connect()
            lease = await session.grant(60)
            cluster.nodes[0].kill()
            calls = session.txn(then=[Put("k", b"")]), session.grant(60), session.renew(lease), session.revoke(lease)
            failed = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(one) for one in failed] == [Unreachable] * 4
            cluster.nodes[0].start()
            await asyncio.to_thread(cluster.wait_healthy)
            await session.renew(lease)
            await session.txn(then=[Put("k", b"", lease)])
            await session.close()

        run(work)


def test_a_forked_child_uses_nothing_of_its_parents_and_the_parent_goes_on(one):
    program = f"""if True:
        import asyncio, os, sys
        from rdzv.engines.port import Put
        from rdzv.engines.etcd.driver import EtcdDriver
        from rdzv.config.endpoint import Endpoint
        from rdzv.errors import Unreachable
        from rdzv.engines.etcd.client.credentials import Credentials

        def driver():
            return EtcdDriver(Endpoint.parse({one.endpoint("fork")!r}), Credentials())

        async def refused(awaitable):
            try:
                await awaitable
            except Unreachable as error:
                assert error.applied is False
                return "was forked from" in str(error)

        async def child(session, watch):
            assert await refused(session.txn(then=[Put("k", b"child")]))
            assert await refused(anext(watch))
            assert await refused(anext(aiter(session.watch(["k"], 1))))
            assert await refused(driver().connect())
            await session.close()

        async def main():
            session = await driver().connect()
            watch = aiter(session.watch(["k"], (await session.txn()).revision))
            pid = os.fork()
            if pid == 0:
                asyncio._set_running_loop(None)
                asyncio.set_event_loop(asyncio.SelectorEventLoop())
                try:
                    asyncio.get_event_loop().run_until_complete(child(session, watch))
                except BaseException as error:
                    print(repr(error), flush=True)
                    os._exit(1)
                os._exit(0)
            assert await asyncio.to_thread(os.waitpid, pid, 0) == (pid, 0)
            await session.txn(then=[Put("k", b"parent")])
            assert (await anext(watch)).events[0].item.value == b"parent"
            await session.close()

        asyncio.run(main())
        print("well")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60, env=os.environ, check=False
    )
    assert done.stdout.split() == ["well"], done.stdout + done.stderr


def test_members_meet_on_etcd_and_its_keys_hang_on_leases(one):
    async def work() -> None:
        members = [
            AsyncRendezvous(one.endpoint("jobs"), run_id="job", min_nodes=3, max_nodes=3, slot=str(n)) for n in range(3)
        ]
        worlds = await asyncio.gather(*(member.join() for member in members))
        assert {world.rank for world in worlds} == {0, 1, 2}
        await worlds[0].store.set("k", b"v")
        assert await worlds[1].store.get("k") == b"v"
        session = await driver(one, "jobs").connect()
        deadline = time.monotonic() + SOON_S
        while free := [item.key for item in (await session.txn(then=[List("rdzv/job/")])).reads[0] if not item.lease]:
            assert time.monotonic() < deadline, f"would stay for ever: {free}"
            await asyncio.sleep(0.05)
        await session.close()
        await asyncio.gather(*(member.leave() for member in members))

    run(work)


# ---- several targets in one order, with an etcd that is made up: it lags where a real one seldom does


class Etcd:
    """As much of a client as a watch needs."""

    def __init__(self) -> None:
        self.cluster = SimpleNamespace(forked=False, check_usable=lambda: None)
        self.parts: dict[bytes, object] = {}
        self.left: list[object] = []
        self.answers: asyncio.Queue[KeyCounts | Exception] = asyncio.Queue()
        self.counter = SimpleNamespace(count=self._count)
        self.asked: list[tuple[list[bytes], list[bytes], int]] = []

    def watch(self, key: bytes, _end: bytes, _start: int, listener: object) -> object:
        self.parts[key] = listener
        return listener

    def unwatch(self, listener: object) -> None:
        self.left.append(listener)

    def _count(self, spans, before, since, tell) -> None:
        self.asked.append(([key for key, _ in spans], [key for key, _ in before], since))

        async def answer() -> None:
            tell(await self.answers.get())

        self.answering = asyncio.ensure_future(answer())

    def answer(self, revision: int, before: dict[bytes, int] | None = None, **keys: int) -> None:
        """At that revision: each key as last written, 0 if it was not there."""
        now = {
            (key.encode(), b""): RangeResponse((KeyValue(key.encode(), b"", at, at),), 1) if at else RangeResponse()
            for key, at in keys.items()
        }
        self.answers.put_nowait(KeyCounts(revision, now, {(key, b""): count for key, count in (before or {}).items()}))

    def tell(self, key: str, *revisions: int, deleted: bool = False, created: int = 0) -> None:
        name = key.encode()
        self.parts[name].changed(
            [WatchEvent(deleted, KeyValue(name, b"", 0 if deleted else created or at, at)) for at in revisions]
        )


def watching(*targets: str, since: int = 10) -> tuple[Etcd, EtcdWatch]:
    etcd = Etcd()
    session = EtcdSession.__new__(EtcdSession)
    session.client, session.prefix, session.watches = etcd, "", set()
    watch = EtcdWatch(session, targets, since)
    watch.begin()
    return etcd, watch


def revisions(batch: Batch) -> list[tuple[str, int]]:
    return [(event.key, event.revision) for event in batch.events]


def test_an_event_waits_for_those_before_it_that_lag_behind():
    async def work() -> None:
        etcd, watch = watching("a", "b")
        etcd.tell("a", 13)
        etcd.answer(13, {b"a": 0, b"b": 0}, a=13, b=12)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.05)
        assert not reading.done()
        etcd.tell("b", 12)
        batch = await reading
        assert (batch.revision, revisions(batch)) == (13, [("b", 12), ("a", 13)])
        assert etcd.asked == [([b"a", b"b"], [b"a", b"b"], 10)]
        etcd.tell("b", 15, created=12)
        etcd.answer(15, a=13, b=15)
        assert revisions(await anext(watch)) == [("b", 15)]
        assert etcd.asked[1] == ([b"a", b"b"], [], 10)

    run(work)


def test_a_deletion_that_lags_behind_is_waited_for():
    async def work() -> None:
        etcd, watch = watching("a", "b")
        etcd.tell("a", 13)
        etcd.answer(14, {b"a": 0, b"b": 1}, a=13, b=0)
        reading = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0.05)
        assert not reading.done()
        etcd.tell("b", 14, deleted=True)
        batch = await reading
        assert (batch.revision, revisions(batch)) == (14, [("a", 13), ("b", 14)])

    run(work)


def test_what_comes_later_than_was_asked_about_waits_for_the_next_question():
    async def work() -> None:
        etcd, watch = watching("a", "b")
        etcd.tell("a", 13)
        etcd.tell("b", 12, 16)
        etcd.answer(14, {b"a": 0, b"b": 0}, a=13, b=12)
        assert revisions(await anext(watch)) == [("b", 12), ("a", 13)]
        etcd.answer(16, a=13, b=16)
        assert revisions(await anext(watch)) == [("b", 16)]

    run(work)


def test_what_came_and_went_unseen_is_a_gap():
    async def work() -> None:
        etcd, watch = watching("a", "b")
        etcd.tell("a", 13)
        etcd.answer(13, {b"a": 0, b"b": 0}, a=13, b=0)
        await anext(watch)
        etcd.tell("b", 11)
        with pytest.raises(Gap, match="a change of revision 11 came after others up to 13"):
            await anext(watch)
        assert len(etcd.left) == 2

    run(work)


def test_a_question_is_repeated_if_it_is_not_answered_and_a_gap_if_its_revision_is_forgotten():
    async def work() -> None:
        etcd, watch = watching("a", "b")
        etcd.tell("a", 13)
        etcd.answers.put_nowait(Unanswered("away"))
        etcd.answers.put_nowait(Compacted("revision 10 is forgotten"))
        with pytest.raises(Gap, match="revision 10 is forgotten"):
            await anext(watch)
        assert len(etcd.asked) == 2

    run(work)


def test_a_watch_that_nobody_reads_ends_with_a_gap(monkeypatch):
    monkeypatch.setattr("rdzv.engines.watch_queue.BACKLOG_MAX", 2)

    async def work() -> None:
        etcd, watch = watching("a")
        etcd.tell("a", 11, 12, 13)
        with pytest.raises(Gap, match="3 events were not read in time"):
            await anext(watch)

    run(work)


# ---- asking together


def test_those_who_ask_at_once_are_answered_by_one_transaction_and_one_that_is_too_late_alone_hears_it():
    asked: list[list[tuple[bytes, int]]] = []

    async def read(ranges) -> TxnResponse:
        asked.append([(one.key, one.revision) for one in ranges])
        if any(one.revision == 3 for one in ranges):
            raise Compacted("forgotten")
        return TxnResponse(Header(revision=50), True, tuple(RangeResponse(count=len(one.key) - 1) for one in ranges))

    async def work() -> None:
        census = KeyCounter(read)
        a, b = (b"a", b""), (b"bb", b"")

        async def count(*question) -> KeyCounts | Exception:
            answer = asyncio.get_running_loop().create_future()
            census.count(*question, answer.set_result)
            return await answer

        first, second, late = await asyncio.gather(count([a, b], [a, b], 7), count([b], [], 0), count([a], [a], 3))
        # A single key that is there tells by its revision what was before; a missing one, or a prefix, must be asked about.
        assert first == KeyCounts(50, {a: RangeResponse(count=0), b: RangeResponse(count=1)}, {a: 0})
        assert second.before == {}
        assert isinstance(late, Compacted)
        assert asked[0] == [(b"a", 0), (b"bb", 0)]
        many = [(b"%d" % n, b"") for n in range(300)]
        asked.clear()
        assert len((await count(many, [], 0)).now) == 300
        assert [len(one) for one in asked] == [127, 127, 46]
        assert {revision for one in asked[1:] for _, revision in one} == {50}

    run(work)
