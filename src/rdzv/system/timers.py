"""Timers on a node's own clock: wake-ups, sleeps, time limits and back-off.

Every timed wait of a member goes through `Node.call_later`, so that the simulator controls time. Nothing here but `in_time`,
which is for code that the simulator does not run, reads the event loop's clock.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from .node import Node

T = TypeVar("T")


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None: ...


class Wakeup:
    """A wake-up signal for waiting tasks. A ring without a waiter is kept for the next wait, so that none is missed."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._rung = False
        self.rings = 0  # Number of rings so far, for `since` of `wait`.
        self._waiters: dict[asyncio.Future[bool], None] = {}

    def ring(self) -> None:
        """Wake all waiting tasks, or, if there are none, the next task to wait."""
        self.rings += 1
        woken = False
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(True)
                woken = True
        self._rung = self._rung or not woken

    async def wait(self, timeout_s: float | None = None, since: int | None = None) -> bool:
        """Wait for a ring. Return False if `timeout_s` passed first; None: no limit.

        The first task to wait uses up a kept ring. Tasks that share a `Wakeup` therefore pass as `since` the `rings`
        that they read before they looked for work.
        """
        if since is None:
            rung, self._rung = self._rung, False
        else:
            rung = self.rings != since
        if rung:
            return True
        if timeout_s is not None and timeout_s <= 0:
            return False
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        timer = None
        if timeout_s is not None:
            timer = self._node.call_later(timeout_s, partial(_expire, waiter))
        self._waiters[waiter] = None
        try:
            return await waiter
        finally:
            self._waiters.pop(waiter, None)
            if timer is not None:
                timer.cancel()


def _expire(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


EARLIER_S = 0.001
"""A timer that is due so little too late stays: two ways to count up to one instant differ by less."""


class CoalescingTimer:
    """A timer that is cheap to move later, at every renewal: it stays, fires early, and the callback checks the time."""

    def __init__(self, node: Node, call: Callable[[], object]) -> None:
        self._node = node
        self._call = call
        self._due_at = math.inf
        self._timer: Timer | None = None

    def be_set(self, delay_s: float) -> None:
        """Fire after `delay_s` at the latest, and `EARLIER_S`."""
        due_at = self._node.now() + delay_s
        if due_at < self._due_at - EARLIER_S:
            self.cancel()
            self._due_at = due_at
            self._timer = self._node.call_later(delay_s, self._go_off)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _go_off(self) -> None:
        self._due_at = math.inf
        self._call()


class TimerGroup:
    """Timers that hardly ever fire, on one timer of the node: setting and cancelling one costs next to nothing."""

    def __init__(self, node: Node, on_fire: Callable[[], object] = lambda: None) -> None:
        """`on_fire`: called whenever the node's timer fires, for whatever reason."""
        self._node = node
        self._on_fire = on_fire
        self._due_at: dict[_GroupTimer, float] = {}
        self._timer = CoalescingTimer(node, self._fire)
        self.be_set = self._timer.be_set

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        timer = _GroupTimer(self._due_at, callback)
        self._due_at[timer] = self._node.now() + delay_s
        self._timer.be_set(delay_s)
        return timer

    def close(self) -> None:
        """Cancel all of them."""
        self._due_at.clear()
        self._timer.cancel()

    def _fire(self) -> None:
        self._on_fire()
        now = self._node.now()
        for timer in [timer for timer, due_at in self._due_at.items() if due_at <= now]:
            timer.cancel()
            timer.callback()
        if self._due_at:
            self._timer.be_set(min(self._due_at.values()) - now)


class _GroupTimer:
    """A timer of a group."""

    def __init__(self, group: dict[_GroupTimer, float], callback: Callable[[], object]) -> None:
        self._group = group
        self.callback = callback

    def cancel(self) -> None:
        self._group.pop(self, None)


def backoff_s(attempt: int, bounds_s: tuple[float, float], jitter: float) -> float:
    """Return the pause after so many failures: doubled each time within the bounds, less up to half of it at random."""
    first_s, longest_s = bounds_s
    return min(first_s * 2.0 ** min(attempt, 30), longest_s) * (1 - jitter / 2)


async def sleep(node: Node, delay_s: float) -> None:
    if delay_s <= 0:
        return
    waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    timer = node.call_later(delay_s, partial(_expire, waiter))
    try:
        await waiter
    finally:
        timer.cancel()


async def with_timeout(node: Node, limit_s: float, work: Coroutine[Any, Any, T], name: str) -> T | None:
    """Run `work` and return its result, or cancel it after `limit_s` on this node's clock and return None."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    timer = node.call_later(limit_s, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        timer.cancel()
        task.cancel()
    return None if task.cancelled() else task.result()


class OutOfTime(Exception):
    """The block of a `TimeLimit` did not end in time."""


class TimeLimit:
    """A block of the running task that is cancelled, and raises OutOfTime, after `limit_s` on this node's clock.

    Cheaper than `with_timeout`, which needs a task: nearly every limited call ends in time.
    """

    def __init__(self, timers: Node | TimerGroup | asyncio.AbstractEventLoop, limit_s: float) -> None:
        self._timers = timers
        self._limit_s = limit_s
        self._is_over = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "only a task can be limited"
        self._task = task
        self._timer = self._timers.call_later(self._limit_s, self._expire)

    def _expire(self) -> None:
        self._is_over = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timer.cancel()
        if not self._is_over:
            return
        # Python 3.10 cannot tell whether another caller has cancelled the task, too.
        cancelled_by_others = sys.version_info >= (3, 11) and self._task.uncancel() > 0
        if not cancelled_by_others and kind is asyncio.CancelledError:
            raise OutOfTime from None


async def in_time(limit_s: float, work: Awaitable[T]) -> T:
    """Await the work. Raise asyncio.TimeoutError, and cancel it, after `limit_s` on the event loop's clock.

    `asyncio.wait_for` does the same since Python 3.12. Before, it drops a cancellation that comes just after the result: a loop
    around it would go on, and the caller that has cancelled it would wait for ever.
    """
    try:
        with TimeLimit(asyncio.get_running_loop(), limit_s):
            return await work
    except OutOfTime:
        raise asyncio.TimeoutError from None
