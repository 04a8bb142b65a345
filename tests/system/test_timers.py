"""Timers on a node's clock: a wake-up misses no ring. The real node: its time is the loop's."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Callable

import pytest

from rdzv.system.node import LocalNode
from rdzv.system.timers import CoalescingTimer, OutOfTime, TimeLimit, TimerGroup, Wakeup, in_time, sleep, with_timeout

LONG_S = 60.0
"""A wait that is never waited out: a test that gets there has failed."""


class ManualTimer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualNode(LocalNode):
    """A node whose time passes only when the test says so."""

    def __init__(self) -> None:
        super().__init__("hand")
        self.time = 100.0
        self.timers: list[tuple[float, Callable[[], object], ManualTimer]] = []

    def now(self) -> float:
        return self.time

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> ManualTimer:
        timer = ManualTimer()
        self.timers.append((self.time + delay_s, callback, timer))
        return timer

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        for due in [entry for entry in self.timers if entry[0] <= self.time]:
            self.timers.remove(due)
            if not due[2].cancelled:
                due[1]()


async def asleep(*tasks: asyncio.Task) -> None:
    """Run the loop a few turns, until each of the tasks waits."""
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)


# ---- Wakeup


async def waiting(timeout_s):
    node = ManualNode()
    wakeup = Wakeup(node)
    waiter = asyncio.create_task(wakeup.wait(timeout_s))
    await asleep(waiter)
    return node, wakeup, waiter


async def test_a_ring_wakes_everybody_who_waits():
    wakeup = Wakeup(LocalNode())
    waiters = [asyncio.create_task(wakeup.wait()) for _ in range(3)]
    await asleep(*waiters)
    wakeup.ring()
    assert await asyncio.gather(*waiters) == [True, True, True]
    assert await wakeup.wait(0) is False, "a ring that somebody heard is not kept"


async def test_a_ring_that_nobody_hears_is_kept_for_the_next_wait_and_only_for_that():
    wakeup = Wakeup(LocalNode())
    wakeup.ring()
    wakeup.ring()
    assert await wakeup.wait(0) is True
    assert await wakeup.wait(0) is False


async def test_a_wait_ends_when_its_time_is_over_and_not_before():
    node = ManualNode()
    waiter = asyncio.create_task(Wakeup(node).wait(10.0))
    await asleep(waiter)
    node.pass_time(9.9)
    await asleep(waiter)
    node.pass_time(0.1)
    assert await waiter is False


@pytest.mark.parametrize("timeout_s", [0, -1.0])
async def test_a_wait_without_time_does_not_wait(timeout_s):
    node = ManualNode()
    assert await Wakeup(node).wait(timeout_s) is False
    assert node.timers == []


async def test_a_wait_without_limit_sets_no_timer():
    node, wakeup, waiter = await waiting(None)
    assert node.timers == []
    wakeup.ring()
    assert await waiter is True


async def test_a_timer_that_comes_with_the_ring_changes_nothing():
    node, wakeup, waiter = await waiting(10.0)
    wakeup.ring()
    node.pass_time(10.0)
    assert await waiter is True


async def test_a_ring_just_after_the_time_ran_out_is_kept():
    node, wakeup, waiter = await waiting(10.0)
    node.pass_time(10.0)
    wakeup.ring()
    assert await waiter is False
    assert await wakeup.wait(0) is True


async def test_a_cancelled_wait_leaves_nothing_behind_and_takes_no_ring_with_it():
    node, wakeup, waiter = await waiting(10.0)
    waiter.cancel()
    wakeup.ring()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert [timer.cancelled for _, _, timer in node.timers] == [True]
    assert await wakeup.wait(0) is True, "the ring is kept: nobody waited any more"


# ---- timers


def test_an_timer_that_is_set_later_and_later_has_one_timer_and_goes_off_once():
    node, rings = ManualNode(), []
    timer = CoalescingTimer(node, lambda: rings.append(node.now()))
    for delay_s in (10.0, 11.0, 12.0):
        timer.be_set(delay_s)
    assert len(node.timers) == 1
    node.pass_time(10.0)
    node.pass_time(10.0)
    assert rings == [110.0], "at the earliest of the times it was set to; who hears it looks whether it is time"
    timer.be_set(5.0)
    timer.be_set(1.0)
    node.pass_time(1.0)
    timer.be_set(1.0)
    timer.cancel()
    node.pass_time(10.0)
    assert rings == [110.0, 121.0]


async def test_what_takes_too_long_is_cancelled_and_gives_nothing():
    node = ManualNode()
    for work, passes_s, expected in ((asyncio.sleep(0, "done"), 0.0, "done"), (asyncio.sleep(LONG_S, "late"), 5.0, None)):
        task = asyncio.create_task(with_timeout(node, 5.0, work, "work"))
        await asyncio.sleep(0)
        node.pass_time(passes_s)
        assert await task == expected
    with pytest.raises(asyncio.TimeoutError):
        await with_timeout(node, 5.0, asyncio.wait_for(asyncio.sleep(LONG_S), 0.001), "work")
    assert all(timer.cancelled for _, _, timer in node.timers)


async def limited(node, limit_s, work):
    with TimeLimit(node, limit_s):
        return await work


async def test_a_block_that_takes_too_long_is_cancelled_and_raises():
    node = ManualNode()
    assert await limited(node, 5.0, asyncio.sleep(0, "done")) == "done"
    late = asyncio.create_task(limited(node, 5.0, asyncio.sleep(LONG_S)))
    await asyncio.sleep(0)
    node.pass_time(5.0)
    with pytest.raises(OutOfTime):
        await late
    assert all(timer.cancelled for _, _, timer in node.timers)


def test_timers_of_a_group_share_one_timer_and_fire_in_time():
    node, fired = ManualNode(), []
    group = TimerGroup(node)
    for delay_s in (5.0, 3.0, 9.0):
        group.call_later(delay_s, lambda delay_s=delay_s: fired.append(delay_s))
    group.call_later(4.0, lambda: fired.append("cancelled")).cancel()
    for passes_s in (3.0, 1.0, 1.0):
        node.pass_time(passes_s)
    assert fired == [3.0, 5.0]
    group.close()
    node.pass_time(10.0)
    assert fired == [3.0, 5.0]


def test_a_group_calls_back_whenever_its_timer_fires():
    node, rings = ManualNode(), []
    group = TimerGroup(node, lambda: rings.append(node.now()))
    group.be_set(5.0)
    group.call_later(7.0, lambda: rings.append("limit"))
    for _ in range(2):
        node.pass_time(5.0)
    assert rings == [105.0, 110.0, "limit"]
    assert not node.timers, "one timer of the node serves both"


async def test_a_limited_block_that_another_task_cancels_or_that_fails_says_so():
    node = ManualNode()
    cancelled = asyncio.create_task(limited(node, 5.0, asyncio.sleep(LONG_S)))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(asyncio.TimeoutError):
        await limited(node, 5.0, asyncio.wait_for(asyncio.sleep(LONG_S), 0.001))

    async def stubborn():
        try:
            await asyncio.sleep(LONG_S)
        except asyncio.CancelledError:
            return "ends well all the same"

    ending = asyncio.create_task(limited(node, 5.0, stubborn()))
    await asyncio.sleep(0)
    node.pass_time(5.0)
    assert await ending == "ends well all the same"


async def test_a_cancellation_that_comes_just_after_the_result_is_not_lost():
    result = asyncio.get_running_loop().create_future()
    waiting = asyncio.ensure_future(in_time(LONG_S, result))
    await asleep(waiting)
    result.set_result("here")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()


async def test_work_that_is_not_done_in_time_is_cancelled():
    work = asyncio.get_running_loop().create_future()
    with pytest.raises(asyncio.TimeoutError):
        await in_time(0.001, work)
    assert work.cancelled()
    assert await in_time(LONG_S, asyncio.sleep(0, "done")) == "done"


async def test_sleep_lasts_as_long_as_the_nodes_clock_says():
    node = ManualNode()
    sleeper = asyncio.create_task(sleep(node, 5.0))
    await asleep(sleeper)
    node.pass_time(4.0)
    await asleep(sleeper)
    node.pass_time(1.0)
    await sleeper


async def test_sleep_on_a_real_node_is_not_shorter_than_asked():
    node = LocalNode()
    before = node.now()
    await sleep(node, 0.05)
    # A loop fires timers up to its clock's resolution early.
    assert node.now() - before >= 0.05 - 0.001


# ---- the real node


def test_the_real_node_is_this_process_on_this_host():
    node = LocalNode()
    assert (node.host, node.pid) == (socket.gethostname(), os.getpid())
    assert LocalNode("other").host == "other"


async def test_time_is_that_of_the_running_loop():
    node = LocalNode()
    loop = asyncio.get_running_loop()
    before, now, after = loop.time(), node.now(), loop.time()
    assert before <= now <= after
    called = asyncio.Event()
    node.call_later(0.0, called.set)
    await called.wait()
    node.call_later(0.0, lambda: pytest.fail("it was cancelled")).cancel()
    await asleep()


def test_ids_are_random_and_fit_in_a_key():
    tokens = [LocalNode().token() for _ in range(1000)]
    assert len(set(tokens)) == 1000
    assert all(re.fullmatch("[0-9a-f]{16}", token) for token in tokens)


def test_jitter_is_spread_over_its_range():
    drawn = [LocalNode().jitter() for _ in range(1000)]
    assert all(0 <= value < 1 for value in drawn)
    # 1,000 draws leave a tenth of the range empty once in 10^45 runs.
    assert {int(value * 10) for value in drawn} == set(range(10))


def test_a_real_node_binds_real_sockets():
    bootstrap = LocalNode().bind("127.0.0.1", (0, 0))
    try:
        assert bootstrap.held
        socket.create_connection(("127.0.0.1", bootstrap.port), timeout=10).close()
    finally:
        bootstrap.release()
