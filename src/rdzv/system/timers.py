"""Timers on a node's own clock: wake-ups, sleeps, time limits and back-off.

Every timed wait goes through `Node.call_later`, so that the simulator controls time. Nothing here asks the event loop or the
`time` module how late it is.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from .node import Node

T = TypeVar("T")


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Do not call."""


class Wakeup:
    """Wakes whoever waits. A ring while nobody waits is kept for the next wait, so that none is missed."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._rung = False
        self.rings = 0
        """How often it rang: see `wait`."""
        self._waiters: dict[asyncio.Future[bool], None] = {}

    def ring(self) -> None:
        """Wake all who wait now, or else the next one to wait."""
        self.rings += 1
        waiting = [waiter for waiter in self._waiters if not waiter.done()]
        for waiter in waiting:
            waiter.set_result(True)
        self._rung = self._rung or not waiting

    async def wait(self, timeout_s: float | None = None, since: int | None = None) -> bool:
        """True when the bell rang, False when the time ran out first. None: no limit.

        Those who share a bell pass the `rings` they knew before they looked around: the first to wait uses up a kept ring.
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
            timer = self._node.call_later(timeout_s, lambda: _late(waiter))
        self._waiters[waiter] = None
        try:
            return await waiter
        finally:
            self._waiters.pop(waiter, None)
            if timer is not None:
                timer.cancel()


class CoalescingTimer:
    """Goes off at the latest when it was last set to. Who sets it later and later pays for one timer and not for each."""

    def __init__(self, node: Node, call: Callable[[], object]) -> None:
        self._node = node
        self._call = call
        self._due_at = math.inf
        self._timer: Timer | None = None

    def be_set(self, delay_s: float) -> None:
        """It may go off earlier: whoever hears it looks whether it is time."""
        due_at = self._node.now() + delay_s
        if due_at < self._due_at:
            self.cancel()
            self._due_at = due_at
            self._timer = self._node.call_later(delay_s, self._go_off)

    def cancel(self) -> None:
        """It is no longer needed."""
        if self._timer is not None:
            self._timer.cancel()

    def _go_off(self) -> None:
        self._due_at = math.inf
        self._call()


def _late(waiter: asyncio.Future[bool]) -> None:
    if not waiter.done():
        waiter.set_result(False)


def backoff_s(attempt: int, bounds_s: tuple[float, float], jitter: float) -> float:
    """How long to wait after so many attempts in vain: twice as long each time, within the bounds, by chance down to half."""
    first_s, longest_s = bounds_s
    return min(first_s * 2.0 ** min(attempt, 30), longest_s) * (1 - jitter / 2)


async def sleep(node: Node, delay_s: float) -> None:
    """Sleep by this machine's clock."""
    await Wakeup(node).wait(delay_s)


async def with_timeout(node: Node, limit_s: float, work: Coroutine[Any, Any, T], name: str) -> T | None:
    """What it gives, or None if it takes longer by this machine's clock: it is cancelled then. Raises what it raises."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    timer = node.call_later(limit_s, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        timer.cancel()
        task.cancel()
    return None if task.cancelled() else task.result()
