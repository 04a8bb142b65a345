"""The machine a member runs on: the bell misses no ring, and time is the loop's."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable

import pytest

from rdzv.system.node import LocalNode
from rdzv.system.timers import CoalescingTimer, Wakeup, sleep, with_timeout

LONG_S = 60.0
"""A wait that is never waited out: a test that gets there has failed."""


class HandTimer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class HandMachine(LocalNode):
    """A machine whose time passes only when the test says so."""

    def __init__(self) -> None:
        super().__init__("hand")
        self.time = 100.0
        self.timers: list[tuple[float, Callable[[], object], HandTimer]] = []

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> HandTimer:
        timer = HandTimer()
        self.timers.append((self.time + delay_s, callback, timer))
        return timer

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        for due in [entry for entry in self.timers if entry[0] <= self.time]:
            self.timers.remove(due)
            if not due[2].cancelled:
                due[1]()


async def asleep(*tasks: asyncio.Task) -> None:
    """Until each of them has come to its wait: a few turns of the loop."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


def run(scenario) -> None:
    asyncio.run(asyncio.wait_for(scenario(), LONG_S / 2))


# ---- the bell


def test_a_ring_wakes_who_waits():
    async def scenario():
        bell = Wakeup(LocalNode())
        waiter = asyncio.create_task(bell.wait(LONG_S))
        await asleep(waiter)
        bell.ring()
        assert await waiter is True

    run(scenario)


def test_a_ring_wakes_everybody_who_waits():
    async def scenario():
        bell = Wakeup(LocalNode())
        waiters = [asyncio.create_task(bell.wait()) for _ in range(3)]
        await asleep(*waiters)
        bell.ring()
        assert await asyncio.gather(*waiters) == [True, True, True]
        assert await bell.wait(0) is False, "a ring that somebody heard is not kept"

    run(scenario)


def test_a_ring_that_nobody_hears_is_kept_for_the_next_wait_and_only_for_that():
    async def scenario():
        bell = Wakeup(LocalNode())
        bell.ring()
        bell.ring()
        assert await bell.wait(0) is True
        assert await bell.wait(0) is False

    run(scenario)


def test_a_wait_ends_when_its_time_is_over_and_not_before():
    async def scenario():
        node = HandMachine()
        waiter = asyncio.create_task(Wakeup(node).wait(10.0))
        await asleep(waiter)
        node.pass_time(9.9)
        await asleep(waiter)
        node.pass_time(0.1)
        assert await waiter is False

    run(scenario)


@pytest.mark.parametrize("timeout_s", [0, -1.0])
def test_a_wait_without_time_does_not_wait(timeout_s):
    async def scenario():
        node = HandMachine()
        assert await Wakeup(node).wait(timeout_s) is False
        assert node.timers == []

    run(scenario)


def test_a_wait_without_limit_sets_no_timer():
    async def scenario():
        node = HandMachine()
        bell = Wakeup(node)
        waiter = asyncio.create_task(bell.wait())
        await asleep(waiter)
        assert node.timers == []
        bell.ring()
        assert await waiter is True

    run(scenario)


def test_a_ring_takes_back_the_timer():
    async def scenario():
        node = HandMachine()
        bell = Wakeup(node)
        waiter = asyncio.create_task(bell.wait(10.0))
        await asleep(waiter)
        bell.ring()
        assert await waiter is True
        assert [timer.cancelled for _, _, timer in node.timers] == [True]

    run(scenario)


def test_a_timer_that_comes_with_the_ring_changes_nothing():
    async def scenario():
        node = HandMachine()
        bell = Wakeup(node)
        waiter = asyncio.create_task(bell.wait(10.0))
        await asleep(waiter)
        bell.ring()
        node.pass_time(10.0)
        assert await waiter is True

    run(scenario)


def test_a_ring_just_after_the_time_ran_out_is_kept():
    async def scenario():
        node = HandMachine()
        bell = Wakeup(node)
        waiter = asyncio.create_task(bell.wait(10.0))
        await asleep(waiter)
        node.pass_time(10.0)
        bell.ring()
        assert await waiter is False
        assert await bell.wait(0) is True

    run(scenario)


def test_a_ring_just_after_the_waiter_was_cancelled_is_kept():
    async def scenario():
        bell = Wakeup(LocalNode())
        waiter = asyncio.create_task(bell.wait(LONG_S))
        await asleep(waiter)
        waiter.cancel()
        bell.ring()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert await bell.wait(0) is True

    run(scenario)


def test_a_cancelled_wait_leaves_nothing_behind():
    async def scenario():
        node = HandMachine()
        bell = Wakeup(node)
        waiter = asyncio.create_task(bell.wait(10.0))
        await asleep(waiter)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert [timer.cancelled for _, _, timer in node.timers] == [True]
        bell.ring()
        assert await bell.wait(0) is True, "a ring is kept: nobody waits any more"

    run(scenario)


# ---- sleep


def test_an_alarm_that_is_set_later_and_later_has_one_timer_and_goes_off_once():
    node, rings = HandMachine(), []
    alarm = CoalescingTimer(node, lambda: rings.append(node.now()))
    for delay_s in (10.0, 11.0, 12.0):
        alarm.be_set(delay_s)
    assert len(node.timers) == 1
    node.pass_time(10.0)
    node.pass_time(10.0)
    assert rings == [110.0], "at the earliest of the times it was set to; who hears it looks whether it is time"
    alarm.be_set(5.0)
    alarm.be_set(1.0)
    node.pass_time(1.0)
    alarm.be_set(1.0)
    alarm.cancel()
    node.pass_time(10.0)
    assert rings == [110.0, 121.0]


def test_what_takes_too_long_is_cancelled_and_gives_nothing():
    async def scenario():
        node = HandMachine()
        for work, passes_s, expected in ((asyncio.sleep(0, "done"), 0.0, "done"), (asyncio.sleep(LONG_S, "late"), 5.0, None)):
            task = asyncio.create_task(with_timeout(node, 5.0, work, "work"))
            await asyncio.sleep(0)
            node.pass_time(passes_s)
            assert await task == expected
        with pytest.raises(asyncio.TimeoutError):
            await with_timeout(node, 5.0, asyncio.wait_for(asyncio.sleep(LONG_S), 0.001), "work")
        assert all(timer.cancelled for _, _, timer in node.timers)

    run(scenario)


def test_sleep_lasts_as_long_as_the_machines_clock_says():
    async def scenario():
        node = HandMachine()
        sleeper = asyncio.create_task(sleep(node, 5.0))
        await asleep(sleeper)
        node.pass_time(4.0)
        await asleep(sleeper)
        node.pass_time(1.0)
        await sleeper

    run(scenario)


def test_sleep_on_a_real_machine_is_not_shorter_than_asked():
    async def scenario():
        node = LocalNode()
        before = node.now()
        await sleep(node, 0.05)
        # A loop fires timers up to its clock's resolution early.
        assert node.now() - before >= 0.05 - 0.001

    run(scenario)


# ---- the real machine


def test_the_real_machine_is_this_process_on_this_host():
    node = LocalNode()
    assert (node.host, node.pid) == (socket.gethostname(), os.getpid())
    assert LocalNode("other").host == "other"


def test_time_is_that_of_the_running_loop():
    async def scenario():
        node = LocalNode()
        loop = asyncio.get_running_loop()
        before, now, after = loop.time(), node.now(), loop.time()
        assert before <= now <= after
        called = asyncio.Event()
        node.call_later(0.0, called.set)
        await called.wait()
        node.call_later(0.0, lambda: pytest.fail("it was cancelled")).cancel()
        await asleep()

    run(scenario)


def test_ids_are_random_and_fit_in_a_key():
    tokens = [LocalNode().token() for _ in range(1000)]
    assert len(set(tokens)) == 1000
    assert all(re.fullmatch("[0-9a-f]{16}", token) for token in tokens)


def test_jitter_is_spread_over_its_range():
    drawn = [LocalNode().jitter() for _ in range(1000)]
    assert all(0 <= value < 1 for value in drawn)
    # 1,000 draws leave a tenth of the range empty once in 10^45 runs.
    assert {int(value * 10) for value in drawn} == set(range(10))


def test_a_real_machine_binds_real_sockets():
    bootstrap = LocalNode().bind("127.0.0.1", (0, 0))
    try:
        assert bootstrap.held
        socket.create_connection(("127.0.0.1", bootstrap.port), timeout=10).close()
    finally:
        bootstrap.release()
