"""The client against a real etcd: its requests, leases and watches, its choice among members, and its retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rdzv.engines.etcd.client import cluster as cluster_module
from rdzv.engines.etcd.client.client import Client, has_read_crash
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.client.errors import Compacted, EtcdError, LeaderChanged, LeaseNotFound, Unanswered
from rdzv.engines.etcd.client.messages import PutRequest, RangeRequest, WatchEvent, prefix_end
from rdzv.errors import LimitExceeded, SettingsError
from support.etcd_cluster import Cluster, Node
from support.ports import free_port
from support.timing import within

SOON_S = 30.0


def hosts_of(cluster: Cluster) -> list[tuple[str, int]]:
    return [(node.host, node.port) for node in cluster.nodes]


@asynccontextmanager
async def client_of(hosts: Cluster | list[tuple[str, int]], timeout_s: float = 10.0) -> AsyncIterator[Client]:
    client = Client(hosts_of(hosts) if isinstance(hosts, Cluster) else hosts, Credentials(), timeout_s)
    try:
        yield client
    finally:
        await client.close()


def node_in_use(cluster: Cluster, client: Client) -> Node:
    return next(node for node in cluster.nodes if node.port == client.cluster.current.address[1])


class QueueListener:
    """A listener that queues its changes."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[bytes, bytes | None] | EtcdError] = asyncio.Queue()

    def changed(self, changes: list[WatchEvent]) -> None:
        for change in changes:
            self.queue.put_nowait((change.kv.key, None if change.deleted else change.kv.value))

    def ended(self, fault: EtcdError) -> None:
        self.queue.put_nowait(fault)

    async def next(self):
        return await asyncio.wait_for(self.queue.get(), SOON_S)


async def test_a_transaction_above_etcds_limits_is_not_sent(one):
    async with client_of(one) as client:
        with pytest.raises(ValueError, match=r"^a transaction of 129 compares or operations; etcd takes 128$"):
            await client.txn((), [PutRequest(b"%d" % n, b"") for n in range(129)])
        with pytest.raises(LimitExceeded, match=r"^a transaction has \d+ bytes, at most 1572864 are allowed \[RDZV-E16\]$"):
            await client.txn((), [PutRequest(b"k", b"x" * 1024 * 1024 * 2)])


async def test_a_lease_is_granted_renewed_and_revoked(one):
    async with client_of(one) as client:
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


async def test_a_grant_whose_reply_was_lost_finds_its_lease(one, monkeypatch):
    monkeypatch.setattr("rdzv.engines.etcd.client.client.secrets.randbits", lambda _: 4711)

    async with client_of(one) as client:
        first = await client.grant(60)
        again = await client.grant(60)
        assert first.id == again.id == 4712
        await client.revoke(first.id)


async def test_many_renewals_at_once_are_all_answered(one):
    async with client_of(one) as client:
        leases = [(await client.grant(60)).id for _ in range(20)]
        assert await asyncio.gather(*(client.renew(lease) for lease in leases * 2)) == [60] * 40


async def test_a_renewal_that_is_cancelled_just_after_its_answer_stays_cancelled():
    """A heartbeat that lost its cancellation went on for ever."""
    async with client_of([("127.0.0.1", free_port())]) as client:
        renewing = asyncio.ensure_future(client.renew(7))
        await asyncio.sleep(0)
        for waiter in client._keepalive._waiting[7]:
            waiter.set_result(10)
        renewing.cancel()
        await asyncio.wait([renewing])
        assert renewing.cancelled()


async def test_a_renewal_that_is_not_answered_in_time_says_so():
    async with client_of([("127.0.0.1", free_port())]) as client:
        with pytest.raises(Unanswered, match=r"^no answer to a renewal within 0.01 s$") as caught:
            await client.renew(7, 0.01)
        assert caught.value.applied is None
        assert not client._keepalive._waiting


async def test_a_password_file_that_is_gone_is_an_outage_once_the_client_was_logged_in(tmp_path, monkeypatch):
    """It may be being replaced, and a member of a running round must not be ended by that."""
    file = tmp_path / "password"
    client = Client([("127.0.0.1", free_port())], Credentials(user="me", password_file=str(file)))
    with pytest.raises(SettingsError, match=r"token_file is .*, which cannot be read"):
        await client.get(b"k")
    file.write_text("secret")
    monkeypatch.setattr(client.cluster, "_attempt", lambda *_: asyncio.sleep(0, b"\x12\x05token"))
    await client.cluster.log_in()
    file.unlink()
    client.cluster.forget_token("token")
    with pytest.raises(Unanswered, match=r"token_file is .*, which cannot be read") as caught:
        await client.get(b"k")
    assert caught.value.applied is False
    await client.close()


async def test_closing_the_client_ends_pending_calls(one):
    async with client_of(one) as client:
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


# ---- watches


async def test_listeners_to_the_same_key_share_a_watch_and_each_gets_its_revisions(one):
    async with client_of(one) as client:
        first = await client.put(b"w", b"1")
        early, late, none = QueueListener(), QueueListener(), QueueListener()
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
        for n in range(20):  # More than `recent` keeps, so a new listener needs a watch of its own.
            await client.put(b"w", b"%d" % n)
        while await early.next() != (b"w", b"19"):
            pass
        own = QueueListener()
        client.watch(b"w", b"", first, own)
        assert await own.next() == (b"w", b"1")
        assert len(client._watches._watches) == 2
        assert none.queue.empty()


async def test_a_watch_resumes_where_it_was_when_etcd_comes_back(one):
    async with client_of(one) as client:
        listener = QueueListener()
        client.watch(b"r/", prefix_end(b"r/"), await client.put(b"r/0", b""), listener)
        assert await listener.next() == (b"r/0", b"")
        for n in range(1, 4):
            await asyncio.to_thread(one.nodes[0].restart)
            await asyncio.to_thread(one.wait_healthy)
            one.call("kv/put", {"key": "ci8w", "value": ""})  # The key r/0, not through this client.
            assert await listener.next() == (b"r/0", b""), n
        await client.put(b"r/1", b"x")
        assert await listener.next() == (b"r/1", b"x")


async def test_a_watch_from_a_compacted_revision_ends(one):
    async with client_of(one) as client:
        first = await client.put(b"c", b"1")
        await client.compact(await client.put(b"c", b"2"))
        listener = QueueListener()
        client.watch(b"c", b"", first, listener)
        ended = await listener.next()
        assert isinstance(ended, Compacted)
        with pytest.raises(Compacted):
            await client.range(RangeRequest(b"c", revision=first))


async def test_a_listener_that_fails_does_not_end_the_watches_of_others(one, caplog):
    class Broken(QueueListener):
        def changed(self, changes: list[WatchEvent]) -> None:
            raise RuntimeError("a defect")

    async with client_of(one) as client:
        start = await client.put(b"b", b"1")
        client.watch(b"b", b"", start, Broken())
        listener = QueueListener()
        client.watch(b"c2", b"", start, listener)
        await client.put(b"c2", b"1")
        assert await listener.next() == (b"c2", b"1")
        # Two watches of one stream have no common order, so the broken listener may be called a moment later.
        for _ in range(int(SOON_S / 0.01)):
            if "a defect" in caplog.text:
                return
            await asyncio.sleep(0.01)
    assert "a defect" in caplog.text


# ---- the choice among members


async def test_a_dead_member_is_skipped_also_by_writes(one):
    dead = ("127.0.0.1", free_port())

    async with client_of([dead, *hosts_of(one)]) as client:
        for n in range(10):
            client.cluster.current = client.cluster.members[n % 2]
            await client.put(b"n", b"%d" % n)
            assert (await client.get(b"n")).value == b"%d" % n


async def test_a_write_without_a_reply_is_not_repeated_and_its_outcome_is_unknown(one):
    async with client_of(one, timeout_s=1.0) as client:
        before = await client.put(b"u", b"before")
        one.nodes[0].stop()
        try:
            with pytest.raises(Unanswered) as caught:
                await client.put(b"u", b"maybe")
            assert caught.value.applied is None
        finally:
            one.nodes[0].cont()
        assert (await client.get(b"u")).modified <= before + 1


async def test_a_write_certainly_did_not_happen_where_no_server_listens():
    async with client_of([("127.0.0.1", free_port())], timeout_s=0.5) as client:
        with pytest.raises(Unanswered) as caught:
            await client.put(b"k", b"")
        assert caught.value.applied is False


async def test_calls_watches_and_leases_leave_a_frozen_member(three):
    async with client_of(three) as client:
        listener = QueueListener()
        lease = (await client.grant(60)).id
        start = await client.put(b"f", b"0")
        client.watch(b"f", b"", start + 1, listener)
        await client.renew(lease)
        frozen = node_in_use(three, client)
        frozen.stop()
        began_at = time.monotonic()
        try:
            reading, renewing = asyncio.create_task(client.get(b"f")), asyncio.create_task(client.renew(lease))
            with pytest.raises(Unanswered) as caught:
                await client.put(b"f", b"maybe")
            assert caught.value.applied is None
            assert (await reading).value in {b"0", b"maybe"}
            await renewing
            # 2 s is the goal on an idle node; three times that leaves room for a busy one.
            within(time.monotonic() - began_at, 3 * 2.0)
            await client.put(b"f", b"1")
            while await listener.next() != (b"f", b"1"):
                pass
            assert client.cluster.current.address[1] != frozen.port
        finally:
            frozen.cont()


async def test_a_frozen_member_is_noticed_although_no_call_is_pending(three):
    async with client_of(three) as client:
        client.watch(b"f", b"", 0, QueueListener())
        await client.status()
        frozen = node_in_use(three, client)
        moved = asyncio.Event()
        client.cluster.on_switch.add(moved.set)
        frozen.stop()
        try:
            await asyncio.wait_for(moved.wait(), SOON_S)
        finally:
            frozen.cont()
        assert client.cluster.current.address[1] != frozen.port


async def test_a_write_lost_with_etcds_leader_is_given_up_before_etcd_reports_it(three):
    async with client_of(three) as client:
        leader = three.leader()
        member = next(one for one in client.cluster.members if one.address[1] != leader.port)
        client.cluster.current = member
        lease = (await client.grant(60)).id
        leader.kill()

        async def write() -> None:
            while True:  # The first write that is forwarded to the dead leader is lost.
                await client.put(b"t", b"")

        try:
            with pytest.raises(LeaderChanged) as caught:
                await write()
            assert caught.value.applied is None
            # 1 s for the election, 1 s until the probe, 0.5 s of grace. etcd itself reports it after 6 s, in other words.
            assert "no answer came from the former one" in str(caught.value)
            assert await client.renew(lease) == 60
            assert client.cluster.current is member
        finally:
            leader.start()
            await asyncio.to_thread(three.wait_healthy)


async def test_a_cancelled_caller_stays_cancelled_on_a_frozen_member(three):
    async with client_of(three) as client:
        await client.status()
        member = client.cluster.current
        frozen = node_in_use(three, client)
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


async def test_a_pause_of_this_process_does_not_make_a_member_fail(three, monkeypatch):
    monkeypatch.setattr(cluster_module, "PROBE_AFTER_S", 0.05)
    monkeypatch.setattr(cluster_module, "PROBE_TIMEOUT_S", 5.0)

    async with client_of(three) as client:
        client.watch(b"p", b"", 0, QueueListener())
        await client.status()
        member = client.cluster.current
        for _ in range(3):
            time.sleep(0.3)  # noqa: ASYNC251  Blocks the event loop.
            await asyncio.sleep(0.06)
        assert client.cluster.current is member


@pytest.mark.parametrize(
    ("version", "crashes"),
    [("3.4.22", True), ("3.4.23", False), ("3.5.1", True), ("3.5.6", True), ("3.5.7", False), ("3.6.0", False), ("", True)],
)
def test_versions_that_crash_on_abandoned_reads_are_known(version, crashes):
    assert has_read_crash(version) is crashes
