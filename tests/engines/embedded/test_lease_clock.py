"""Time as the server passes it: a stop of the server is nobody's fault but its own."""

from __future__ import annotations

import asyncio
import socket
import time

from rdzv.engines.embedded.frames import LeaseGrant, Txn
from rdzv.engines.embedded.lease_clock import STEP_MAX_S, TICK_S, LeaseClock
from rdzv.engines.port import Get, Put
from support.embedded_server import Raw, ServerThread, driver_to, run, session_to, until


def test_time_passes_in_steps_of_about_a_tick():
    async def scenario():
        steps = []
        began_at = time.monotonic()
        clock = LeaseClock(steps.append, asyncio.get_running_loop())
        await until(lambda: len(steps) >= 5)
        clock.stop()
        took_s = time.monotonic() - began_at
        assert 5 * TICK_S * 0.99 <= sum(steps) <= took_s
        count = len(steps)
        await asyncio.sleep(3 * TICK_S)
        assert len(steps) == count

    run(scenario)


def test_of_a_stop_only_one_step_counts():
    async def scenario():
        steps = []
        clock = LeaseClock(steps.append, asyncio.get_running_loop())
        await until(lambda: steps)
        time.sleep(1.2)  # noqa: ASYNC251  This is the stop.
        assert clock.stalled
        count = len(steps)
        await until(lambda: len(steps) > count)
        clock.stop()
        assert steps[count] == STEP_MAX_S
        assert not clock.stalled

    run(scenario)


def test_what_waited_during_a_stop_is_read_before_the_step_is_judged():
    """Even what was sent over a connection that had not been accepted yet."""

    async def scenario():
        order = []

        class Ear(asyncio.Protocol):
            def connection_made(self, transport):
                self.transport = transport

            def data_received(self, data):
                order.append(data)
                self.transport.close()

        loop = asyncio.get_running_loop()
        server = await loop.create_server(Ear, "127.0.0.1", 0)
        clock = LeaseClock(order.append, asyncio.get_running_loop())
        await until(lambda: order)
        order.clear()
        with socket.create_connection(server.sockets[0].getsockname()) as late:
            late.sendall(b"here")
            time.sleep(0.5)  # noqa: ASYNC251
            await until(lambda: STEP_MAX_S in order and b"here" in order)
        clock.stop()
        server.close()
        assert order.index(b"here") < order.index(STEP_MAX_S)

    run(scenario)


def test_a_stall_of_the_server_is_credited_to_all_leases():
    with ServerThread() as thread:

        async def scenario():
            async with session_to(thread.server.port) as session:
                lease = await session.grant(1.0, presence=True)
                await session.txn(then=[Put("k", b"", lease)])
                for _ in range(2):
                    thread.stall(2.5)  # Two and a half times the lease.
                    await session.renew(lease)
                assert (await session.txn(then=[Get("k")])).item(0) is not None

        run(scenario)


async def holder(thread, ttl_s):
    """A member with a key; and another, who watches for its end."""
    other = await driver_to(thread.server.port).connect()
    raw = await Raw.member(thread.server.port)
    raw.write(Txn(1, (), (Put("k", b"", 7),), (), (), (LeaseGrant(7, ttl_s),)))
    await raw.frame()
    watch = aiter(other.watch(["k"], 1))
    assert (await anext(watch)).events[0].item is not None
    return raw, other, watch


async def kept_alive(other, watch):
    """Until the key is gone, while the other one is heard."""
    waiting = asyncio.ensure_future(anext(watch))
    while not waiting.done():
        await other.txn()
        await asyncio.wait([waiting], timeout=0.1)
    assert waiting.result().events[0].item is None


def test_a_connection_given_up_during_a_stall_is_not_a_death():
    with ServerThread() as thread:

        async def scenario():
            raw, other, watch = await holder(thread, 3.0)
            thread.stall(1.5)
            raw.writer.transport.abort()
            await other.txn()
            resumed_at = time.monotonic()
            await kept_alive(other, watch)
            assert time.monotonic() - resumed_at > 1.8, "not after the linger of 1 s, but when its lease ran out"
            await other.close()

        run(scenario)


def test_a_member_that_dies_during_a_short_stop_is_lost_after_the_linger():
    with ServerThread() as thread:

        async def scenario():
            raw, other, watch = await holder(thread, 60.0)
            thread.stall(0.3)
            raw.writer.transport.abort()
            died_at = time.monotonic()
            await kept_alive(other, watch)
            assert 1.0 <= time.monotonic() - died_at < 3 * 1.5
            await other.close()

        run(scenario)
