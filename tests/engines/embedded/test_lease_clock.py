"""Time as the server passes it: a stop of the server is nobody's fault but its own."""

from __future__ import annotations

import asyncio
import socket
import time

from rdzv.engines.embedded.lease_clock import STEP_MAX_S, TICK_S, LeaseClock
from support.embedded_server import until


async def test_time_passes_in_steps_of_about_a_tick():
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


async def test_of_a_stop_only_one_step_counts():
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


async def test_what_waited_during_a_stop_is_read_before_the_step_is_judged():
    """Even what was sent over a connection that had not been accepted yet."""

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
