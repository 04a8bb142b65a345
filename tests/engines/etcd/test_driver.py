"""The etcd driver beyond the contract: shared clients, replaced clusters, outages and forks."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time

import pytest

from rdzv.aio import AsyncRendezvous
from rdzv.config.endpoint import Endpoint
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.driver import EtcdDriver, own_address
from rdzv.engines.port import EngineReset, Get, List, Put
from rdzv.errors import Unreachable
from support.etcd_cluster import Cluster

SOON_S = 30.0


def driver(cluster: Cluster, prefix: str = "test", timeout_s: float = 10.0) -> EtcdDriver:
    return EtcdDriver(Endpoint.parse(cluster.endpoint(prefix)), Credentials(), read_timeout_s=timeout_s)


async def test_sessions_of_one_loop_share_a_client_until_the_last_is_closed(one):
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


async def test_keys_are_below_the_endpoints_path_and_named_without_it(one):
    below, whole = await driver(one, "a/b").connect(), await driver(one, "").connect()
    await below.txn(then=[Put("k", b"v")])
    assert [item.key for item in (await whole.txn(then=[List("a/")])).reads[0]] == ["a/b/k"]
    assert [item.key for item in (await below.txn(then=[List("")])).reads[0]] == ["k"]
    await below.close()
    await whole.close()


async def test_a_key_that_is_no_text_is_another_programs(one):
    session = await driver(one, "odd").connect()
    await session.txn(then=[Put("a/k", b"v")])
    since = (await session.txn()).revision
    watches = [session.watch(["a/"], since), session.watch(["a/", "b/"], since)]
    for key in (b"odd/a/\xff", b"odd/b/\xff"):
        await session.client.put(key, b"?")
    assert [item.key for item in (await session.txn(then=[List("")])).reads[0]] == ["a/k"]
    await session.txn(then=[Put("a/k", b"w")])
    for watch in watches:
        batch = await asyncio.wait_for(anext(watch), SOON_S)
        assert [event.key for event in batch.events] == ["a/k"]
    await session.close()


async def test_any_number_of_keys_is_read_at_one_revision(one):
    session = await driver(one, "many").connect()
    for start in range(0, 300, 100):
        await session.txn(then=[Put(f"k{n}", b"%d" % n) for n in range(start, start + 100)])
    outcome = await session.txn(then=[Get(f"k{n}") for n in range(300)])
    assert [outcome.item(n).value for n in range(300)] == [b"%d" % n for n in range(300)]
    await session.close()


async def test_the_own_address_is_the_source_of_connections_to_etcd():
    loopback = Endpoint.parse("etcd://127.0.0.1:1")
    assert await own_address(loopback, ("127.0.0.1", 1)) == "127.0.0.1"
    mixed = Endpoint.parse("etcd://127.0.0.1:1,node2:1")
    assert await own_address(mixed, ("127.0.0.1", 1)) != "127.0.0.1"
    assert await own_address(mixed, ("no such host.invalid", 1)) != "127.0.0.1"


@pytest.mark.parametrize("token", ["", "another"])
async def test_an_emptied_or_replaced_cluster_is_another_engine(token):
    with Cluster(1) as cluster:
        session = await driver(cluster).connect()
        since = (await session.txn(then=[Put("k", b"")])).revision
        waiting = asyncio.ensure_future(anext(aiter(session.watch(["k"], since))))
        node = cluster.nodes[0]
        node.kill()
        shutil.rmtree(cluster._folder / node.name)
        cluster.extra = [f"--initial-cluster-token={token}"] if token else []
        node.start()
        await asyncio.to_thread(cluster.wait_healthy)
        with pytest.raises(EngineReset):
            # Every reply names its cluster. An emptied one has the same name: only its older revision gives it away.
            await (session.grant(10) if token else session.txn())
        with pytest.raises(EngineReset):
            await asyncio.wait_for(waiting, SOON_S)
        later = anext(aiter(session.watch(["k"], since)))
        for call in (session.grant(10), session.renew(1), session.revoke(1), session.txn(), later):
            with pytest.raises(EngineReset):
                await call
        fresh = await driver(cluster).connect()
        assert (await fresh.txn(then=[List("")])).reads == ((),)
        assert [fresh.instance == session.instance, fresh.place == session.place] == [not token] * 2
        await fresh.close()
        await session.close()


async def test_a_session_survives_an_etcd_that_is_away_for_a_while():
    with Cluster(1) as cluster:
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


def test_a_forked_child_makes_its_own_connection_and_its_parent_goes_on(one):
    """gRPC does not survive a fork: the child's calls go through a helper process, which ends with its last session."""
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
            await session.close()
            own = await driver().connect()
            lease = await own.grant(60)
            revision = (await own.txn(then=[Put("k", b"child", lease)])).revision
            seen = aiter(own.watch(["k"], revision - 1))
            assert (await anext(seen)).events[0].item.value == b"child"
            await own.renew(lease)
            waiting = asyncio.ensure_future(anext(seen))
            await own.revoke(lease)
            assert (await waiting).events[0].item is None
            await own.close()
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pass
            else:
                raise AssertionError("the helper process is still there")

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
            seen = [(await anext(watch)).events[0].item for _ in range(3)]
            assert [item and item.value for item in seen] == [b"child", None, b"parent"]
            await session.close()

        asyncio.run(main())
        print("well")
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60, env=os.environ, check=False
    )
    assert done.stdout.split() == ["well"], done.stdout + done.stderr


def test_the_end_of_an_event_loop_is_not_reported_by_grpcs_poller(one, caplog):
    """gRPC has one poller for all loops. What came too late for a closed loop was logged as an error of the next loop."""

    async def be_member(slot, leaves):
        member = AsyncRendezvous(one.endpoint("loops"), run_id=f"job{slot}", min_nodes=1, max_nodes=1, last_call=0)
        (await member.join()).bootstrap.release()
        if leaves:
            await member.leave()

    for slot in range(10):
        asyncio.run(be_member(slot, leaves=slot % 3 > 0))
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


async def test_all_keys_of_a_run_have_a_lease(one):
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
        assert time.monotonic() < deadline, f"would stay forever: {free}"
        await asyncio.sleep(0.05)
    await session.close()
    await asyncio.gather(*(member.leave() for member in members))
