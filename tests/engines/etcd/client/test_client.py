"""The client against a real etcd: what it asks for, what it repeats, and what it never does twice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from rdzv.engines.etcd.client import cluster as cluster_module
from rdzv.engines.etcd.client.client import Client
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.client.errors import Compacted, EtcdError, LeaderChanged, LeaseNotFound, Unanswered
from rdzv.engines.etcd.client.messages import (
    Compare,
    DeleteRequest,
    PutRequest,
    RangeRequest,
    Sort,
    Target,
    WatchEvent,
    prefix_end,
)
from rdzv.engines.etcd.server import free_ports
from rdzv.errors import LimitExceeded
from support.etcd_cluster import Cluster

SOON_S = 30.0


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with Cluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster


def hosts_of(cluster: Cluster) -> list[tuple[str, int]]:
    return [(node.host, node.port) for node in cluster.nodes]


def use(hosts: Cluster | list[tuple[str, int]], work: Callable[[Client], Awaitable[None]], timeout_s: float = 10.0) -> None:
    async def main() -> None:
        client = Client(hosts_of(hosts) if isinstance(hosts, Cluster) else hosts, Credentials(), timeout_s)
        try:
            await asyncio.wait_for(work(client), 2 * SOON_S)
        finally:
            await client.close()

    asyncio.run(main())


class Heard:
    """A listener that can be waited for."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[bytes, bytes | None] | EtcdError] = asyncio.Queue()

    def changed(self, changes: list[WatchEvent]) -> None:
        for change in changes:
            self.queue.put_nowait((change.kv.key, None if change.deleted else change.kv.value))

    def ended(self, fault: EtcdError) -> None:
        self.queue.put_nowait(fault)

    async def next(self):
        return await asyncio.wait_for(self.queue.get(), SOON_S)


def test_keys_are_put_read_sorted_limited_and_deleted(one):
    async def work(client: Client) -> None:
        for name in (b"s/b", b"s/a", b"s/c"):
            await client.put(name, b"of " + name)
        assert (await client.get(b"s/a")).value == b"of s/a"
        assert await client.get(b"s/none") is None
        _, found = await client.range(RangeRequest(b"s/", prefix_end(b"s/"), 2, sort=Sort.CREATED, descending=True))
        assert ([item.key for item in found.items], found.count) == ([b"s/c", b"s/a"], 3)
        otherwise = [DeleteRequest(b"s/b"), RangeRequest(b"s/b")]
        done = await client.txn([Compare(b"s/a", Target.CREATED, 0)], [PutRequest(b"s/a", b"")], otherwise)
        assert not done.succeeded
        assert done.found[1].items == ()
        before = await client.put(b"s/z", b"")
        assert await client.delete(b"s/", prefix_end(b"s/")) == before + 1
        assert (await client.status()).version.startswith("3.")

    use(one, work)


def test_a_transaction_that_etcd_would_not_take_is_not_sent(one):
    async def work(client: Client) -> None:
        with pytest.raises(ValueError, match=r"^a transaction of 129 compares or operations; etcd takes 128$"):
            await client.txn((), [PutRequest(b"%d" % n, b"") for n in range(129)])
        with pytest.raises(LimitExceeded, match=r"^a transaction has \d+ bytes, at most 1572864 are allowed \[RDZV-E16\]$"):
            await client.txn((), [PutRequest(b"k", b"x" * 1024 * 1024 * 2)])

    use(one, work)


def test_a_lease_is_granted_once_renewed_and_revoked(one):
    async def work(client: Client) -> None:
        lease = await client.grant(60)
        assert lease.ttl_s == 60
        assert await client.renew(lease.id) == 60
        assert 0 < await client.time_to_live(lease.id) <= 60
        await client.revoke(lease.id)
        assert await client.time_to_live(lease.id) <= 0
        with pytest.raises(LeaseNotFound):
            await client.renew(lease.id)
        with pytest.raises(LeaseNotFound):
            await client.revoke(lease.id)

    use(one, work)


def test_a_grant_whose_answer_was_lost_is_found_again(one, monkeypatch):
    monkeypatch.setattr("rdzv.engines.etcd.client.client.secrets.randbits", lambda _: 4711)

    async def work(client: Client) -> None:
        first = await client.grant(60)
        again = await client.grant(60)
        assert first.id == again.id == 4712
        await client.revoke(first.id)

    use(one, work)


def test_many_renewals_at_once_are_all_answered(one):
    async def work(client: Client) -> None:
        leases = [(await client.grant(60)).id for _ in range(20)]
        assert await asyncio.gather(*(client.renew(lease) for lease in leases * 2)) == [60] * 40

    use(one, work)


def test_who_waits_when_the_client_is_closed_is_told(one):
    async def work(client: Client) -> None:
        await client.status()
        one.nodes[0].stop()
        try:
            waiting = [asyncio.create_task(call) for call in (client.renew(1), client.put(b"k", b""), client.status())]
            await asyncio.sleep(0.1)
            await client.close()
            for call in waiting:
                with pytest.raises(Unanswered, match="the client is closed"):
                    await call
        finally:
            one.nodes[0].cont()
        for call in (client.put(b"k", b""), client.renew(1), client.status()):
            with pytest.raises(Unanswered) as caught:
                await call
            assert (caught.value.problem, caught.value.applied) == ("the client is closed", False)

    use(one, work)


# ---- watches


def test_those_who_watch_the_same_share_it_and_each_hears_what_it_asked_for(one):
    async def work(client: Client) -> None:
        first = await client.put(b"w", b"1")
        early, late, none = Heard(), Heard(), Heard()
        client.watch(b"w", b"", first, early)
        assert await early.next() == (b"w", b"1")
        second = await client.put(b"w", b"2")
        assert await early.next() == (b"w", b"2")
        sharing = client.watch(b"w", b"", second, late)
        client.unwatch(client.watch(b"w", b"", first, none))
        assert await late.next() == (b"w", b"2")
        assert len(client._watches._watches) == 1
        await client.put(b"w", b"3")
        assert await early.next() == await late.next() == (b"w", b"3")
        client.unwatch(sharing)
        client.unwatch(sharing)
        for n in range(20):  # More than is remembered: who comes now needs a watch of its own.
            await client.put(b"w", b"%d" % n)
        while await early.next() != (b"w", b"19"):
            pass
        own = Heard()
        client.watch(b"w", b"", first, own)
        assert await own.next() == (b"w", b"1")
        assert len(client._watches._watches) == 2
        assert none.queue.empty()

    use(one, work)


def test_a_watch_goes_on_where_it_was_when_etcd_comes_back(one):
    async def work(client: Client) -> None:
        heard = Heard()
        client.watch(b"r/", prefix_end(b"r/"), await client.put(b"r/0", b""), heard)
        assert await heard.next() == (b"r/0", b"")
        for n in range(1, 4):
            await asyncio.to_thread(one.nodes[0].restart)
            await asyncio.to_thread(one.wait_healthy)
            one.call("kv/put", {"key": "ci8w", "value": ""})  # r/0, by another way than ours.
            assert await heard.next() == (b"r/0", b""), n
        await client.put(b"r/1", b"x")
        assert await heard.next() == (b"r/1", b"x")

    use(one, work)


def test_a_watch_from_what_was_compacted_ends_so(one):
    async def work(client: Client) -> None:
        first = await client.put(b"c", b"1")
        await client.compact(await client.put(b"c", b"2"))
        heard = Heard()
        client.watch(b"c", b"", first, heard)
        ended = await heard.next()
        assert isinstance(ended, Compacted)
        with pytest.raises(Compacted):
            await client.range(RangeRequest(b"c", revision=first))

    use(one, work)


def test_a_listener_that_fails_does_not_end_the_watches_of_others(one, caplog):
    class Broken(Heard):
        def changed(self, changes: list[WatchEvent]) -> None:
            raise RuntimeError("a defect")

    async def work(client: Client) -> None:
        start = await client.put(b"b", b"1")
        client.watch(b"b", b"", start, Broken())
        heard = Heard()
        client.watch(b"c2", b"", start, heard)
        await client.put(b"c2", b"1")
        assert await heard.next() == (b"c2", b"1")
        # Two watches of one stream have no common order, so the other one may hear of its key a moment later.
        for _ in range(int(SOON_S / 0.01)):
            if "a defect" in caplog.text:
                return
            await asyncio.sleep(0.01)

    use(one, work)
    assert "a defect" in caplog.text


# ---- the choice among members


def test_a_member_that_is_not_there_is_passed_over_also_by_writes(one):
    dead = ("127.0.0.1", free_ports(1)[0])

    async def work(client: Client) -> None:
        for n in range(10):
            client.cluster.current = client.cluster.members[n % 2]
            await client.put(b"n", b"%d" % n)
            assert (await client.get(b"n")).value == b"%d" % n

    use([dead, *hosts_of(one)], work)


def test_a_write_without_an_answer_is_not_repeated_and_its_outcome_is_unknown(one):
    async def work(client: Client) -> None:
        before = await client.put(b"u", b"before")
        one.nodes[0].stop()
        try:
            with pytest.raises(Unanswered) as caught:
                await client.put(b"u", b"maybe")
            assert caught.value.applied is None
        finally:
            one.nodes[0].cont()
        assert (await client.get(b"u")).modified <= before + 1

    use(one, work, timeout_s=1.0)


def test_where_nobody_is_a_write_surely_did_not_happen():
    async def work(client: Client) -> None:
        with pytest.raises(Unanswered) as caught:
            await client.put(b"k", b"")
        assert caught.value.applied is False

    use([("127.0.0.1", free_ports(1)[0])], work, timeout_s=0.5)


def test_a_frozen_member_in_use_is_left_by_calls_watches_and_leases(three):
    async def work(client: Client) -> None:
        heard = Heard()
        lease = (await client.grant(60)).id
        start = await client.put(b"f", b"0")
        client.watch(b"f", b"", start + 1, heard)
        await client.renew(lease)
        frozen = next(node for node in three.nodes if node.port == client.cluster.current.address[1])
        frozen.stop()
        began_at = time.monotonic()
        try:
            reading, renewing = asyncio.create_task(client.get(b"f")), asyncio.create_task(client.renew(lease))
            with pytest.raises(Unanswered) as caught:
                await client.put(b"f", b"maybe")
            assert caught.value.applied is None
            assert (await reading).value in {b"0", b"maybe"}
            await renewing
            # 2 s are the aim on an idle machine; three times that leaves room for a busy one.
            assert time.monotonic() - began_at < 3 * 2.0
            await client.put(b"f", b"1")
            while await heard.next() != (b"f", b"1"):
                pass
            assert client.cluster.current.address[1] != frozen.port
        finally:
            frozen.cont()

    use(three, work)


def test_an_idle_member_that_is_frozen_is_noticed_by_its_silence(three):
    async def work(client: Client) -> None:
        client.watch(b"f", b"", 0, Heard())
        await client.status()
        frozen = next(node for node in three.nodes if node.port == client.cluster.current.address[1])
        moved = asyncio.Event()
        client.cluster.on_switch.add(moved.set)
        frozen.stop()
        try:
            await asyncio.wait_for(moved.wait(), SOON_S)
        finally:
            frozen.cont()
        assert client.cluster.current.address[1] != frozen.port

    use(three, work)


def test_a_write_that_etcds_dead_leader_took_along_is_given_up_before_etcd_says_so(three):
    async def work(client: Client) -> None:
        leader = three.leader()
        member = next(one for one in client.cluster.members if one.address[1] != leader.port)
        client.cluster.current = member
        lease = (await client.grant(60)).id
        began_at = time.monotonic()
        leader.kill()

        async def write() -> None:
            while True:  # The first that is handed to the dead leader is lost.
                await client.put(b"t", b"")

        try:
            with pytest.raises(LeaderChanged) as caught:
                await write()
            assert caught.value.applied is None
            # A second for the election, one for the pulse, a half for the answer; etcd itself says so after six.
            assert time.monotonic() - began_at < 5.5
            assert await client.renew(lease) == 60
            assert client.cluster.current is member
        finally:
            leader.start()
            await asyncio.to_thread(three.wait_healthy)

    use(three, work)


def test_a_caller_that_is_cancelled_is_not_answered_by_the_move_to_another_member(three):
    async def work(client: Client) -> None:
        await client.status()
        member = client.cluster.current
        frozen = next(node for node in three.nodes if node.port == member.address[1])
        frozen.stop()
        try:
            asking = asyncio.create_task(client.get(b"x"))
            await asyncio.sleep(0)
            assert member.pending
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert not member.pending
        finally:
            frozen.cont()

    use(three, work)


def test_a_pause_of_our_own_is_not_held_against_the_member(three, monkeypatch):
    monkeypatch.setattr(cluster_module, "PROBE_AFTER_S", 0.05)
    monkeypatch.setattr(cluster_module, "PROBE_TIMEOUT_S", 5.0)

    async def work(client: Client) -> None:
        client.watch(b"p", b"", 0, Heard())
        await client.status()
        member = client.cluster.current
        for _ in range(3):
            time.sleep(0.3)  # noqa: ASYNC251  The whole loop stands still.
            await asyncio.sleep(0.06)
        assert client.cluster.current is member

    use(three, work)
