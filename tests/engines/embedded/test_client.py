"""The remote driver when connections break, hang, move and come back."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rdzv.engines import watch_queue
from rdzv.engines.embedded import client_protocol
from rdzv.engines.embedded.frames import LeaseGrant, Renew, Txn
from rdzv.engines.port import Gap, Get, LeaseGone, Put
from rdzv.errors import SettingsError, Unreachable
from rdzv.system.node import FENCES_PER_S
from support.embedded_server import LONG_S, Proxy, Raw, driver_to, serving, session_to, until

# ---- connecting


async def test_neither_end_holds_a_small_frame_back_until_an_earlier_one_is_acknowledged():
    def is_sent_at_once(transport):
        return transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    async with serving() as server, session_to(server.port) as session:
        assert is_sent_at_once(session._link.transport)
        assert all(is_sent_at_once(peer.transport) for peer in server.peers)
        assert server.peers


async def test_a_later_session_is_told_a_higher_floor_for_fences():
    """Otherwise a round of a run that is brought back could have the fence of one that was sealed meanwhile (T6.14)."""
    async with serving() as server:
        async with session_to(server.port) as session:
            before = session.fence_floor
        await asyncio.sleep(2 / FENCES_PER_S)
        async with session_to(server.port) as session:
            assert 0 < before < session.fence_floor


async def test_a_presence_begins_with_what_is_put_under_it_and_begins_only_once():
    async with (
        serving() as server,
        Proxy(server.port) as proxy,
        session_to(server.port) as other,
        session_to(proxy.port, read_timeout_s=0.3) as session,
    ):
        lease = await session.grant(60, presence=True)
        await session.renew(lease)
        assert not len(server.runs["job"].engine.leases), "it costs nothing until then"
        proxy.freeze("down")
        with pytest.raises(Unreachable):
            await session.txn(then=[Put("k", b"", lease)])
        assert (await other.txn(then=[Get("k")])).item(0) is not None, "it has taken effect, unheard"
        await other.revoke(lease)
        proxy.thaw()
        with pytest.raises(LeaseGone):
            await session.txn(then=[Put("k", b"", lease)])


async def test_a_presence_that_could_not_begin_for_want_of_a_connection_begins_with_the_next_transaction():
    async with serving() as server, session_to(server.port, read_timeout_s=0.3) as session:
        lease, link = await session.grant(60, presence=True), session._link
        session._link = None  # As after a loss, with the next connection not there yet.
        with pytest.raises(Unreachable, match="not back") as caught:
            await session.txn(then=[Put("k", b"", lease)])
        assert caught.value.applied is False
        session._link = link
        assert (await session.txn(then=[Put("k", b"", lease)])).succeeded
        assert len(server.runs["job"].engine.leases) == 1


async def test_a_lease_that_is_there_already_is_not_granted_again():
    async with serving() as server:
        raw = await Raw.member(server.port)
        for number in (1, 2):
            raw.write(Txn(number, (), (Put("k", b"", 7),), (), (), (LeaseGrant(7, 60.0),)))
        assert (await raw.frame()).outcome.succeeded
        assert "lease 7 is there already" in (await raw.frame()).text
        await raw.close()


# ---- reconnecting


async def test_a_broken_connection_is_restored_and_leases_and_watches_with_it():
    async with serving() as server, Proxy(server.port) as proxy, session_to(server.port) as other:
        async with session_to(proxy.port) as session:
            lease = await session.grant(60, presence=True)
            await session.txn(then=[Put("k", b"0", lease)])
            watch = aiter(session.watch(["k", "x"], 1))
            assert (await anext(watch)).events[0].item.value == b"0"
            for n in range(1, 6):
                proxy.cut()
                await other.txn(then=[Put("x", b"%d" % n)])
                batch = await anext(watch)
                assert [event.item.value for event in batch.events] == [b"%d" % n], "each change once"
                await session.renew(lease)
            await asyncio.sleep(1.5)
            assert (await other.txn(then=[Get("k")])).item(0) is not None, "it was never lost"
        assert proxy.connections == 6


async def test_a_call_goes_on_by_the_next_connection_if_the_one_it_waited_for_is_lost_at_once():
    async with serving() as server, session_to(server.port) as session:
        lease = await session.grant(60, presence=True)
        await session.txn(then=[Put("k", b"", lease)])
        session._link.lose("cut")
        first = asyncio.get_running_loop().create_future()  # It is told of the next connection before the call is.
        first.add_done_callback(lambda told: told.result().lose("cut again"))
        session._waiters[first] = None
        await asyncio.wait_for(session.renew(lease), LONG_S)
        assert not first.result().is_open


async def test_a_request_by_a_connection_that_is_lost_fails_at_once_and_was_not_applied():
    async with serving() as server, session_to(server.port) as session:
        link = session._link
        link.lose("cut")
        with pytest.raises(Unreachable, match="the connection is lost") as caught:
            await asyncio.wait_for(link.call(Renew, 1), LONG_S)
        assert caught.value.applied is False


async def test_a_session_reconnects_although_a_setting_was_refused_meanwhile(monkeypatch, caplog):
    """The server at the endpoint may be another one for a while, and keep the runs of others too."""
    async with serving() as server:
        driver = driver_to(server.port)
        session = await driver.connect()
        dial, problems = driver.dial, [SettingsError("the run has no id")]

        async def refused_once(greeting):
            if problems:
                raise problems.pop()
            return await dial(greeting)

        monkeypatch.setattr(driver, "dial", refused_once)
        session._link.lose("cut")
        await session.txn()
        assert [record.getMessage() for record in caplog.records] == [f"engine {driver.endpoint}: the run has no id"]
        await session.close()


async def test_a_half_open_connection_is_noticed_by_a_ping(monkeypatch):
    monkeypatch.setattr(client_protocol, "PING_S", 0.2)

    async with (
        serving() as server,
        Proxy(server.port) as proxy,
        session_to(server.port) as other,
        session_to(proxy.port, read_timeout_s=0.3) as session,
    ):
        watch = aiter(session.watch(["k"], 1))
        await session.txn()
        connections = proxy.connections
        await asyncio.sleep(0.8)
        assert proxy.connections == connections, "pings are answered"
        proxy.freeze()
        await other.txn(then=[Put("k", b"")])
        await until(lambda: proxy.connections > connections, "a new connection")
        proxy.thaw()
        assert (await anext(watch)).events[0].item is not None


async def test_attempts_to_reconnect_back_off_but_stay_below_the_linger(monkeypatch):
    async with (
        serving() as server,
        Proxy(server.port) as proxy,
        session_to(proxy.port, linger_s=0.3) as session,
    ):
        await session.txn()
        proxy.accepts = False
        proxy.cut()
        before = proxy.connections
        await asyncio.sleep(1.5)
        attempts = proxy.connections - before
        assert attempts >= 5, "each is due after at most half the linger"
        assert attempts < 60


async def test_a_session_closed_while_it_reconnects_is_closed():
    async with serving() as server:
        session = await driver_to(server.port).connect()
        await server.stop()
        await until(lambda: session._redialing is not None)
        await session.close()
        with pytest.raises(Unreachable, match="the session is closed"):
            await session.txn()
        await session.close()


async def test_a_watch_that_nobody_reads_ends_with_a_gap(monkeypatch):
    monkeypatch.setattr(watch_queue, "BACKLOG_MAX", 10)

    async with serving() as server, session_to(server.port) as session:
        watch = session.watch(["k"], 1)
        for _ in range(11):
            await session.txn(then=[Put("k", b"")])
        with pytest.raises(Gap, match="11 events were not read in time"):
            await anext(aiter(watch))
