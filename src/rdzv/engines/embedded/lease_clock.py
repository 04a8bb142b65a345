"""The server's clock for leases: passes time in steps, and never more of it than the server itself was awake for.

A server that was stopped for a minute has heard no client for a minute, which says nothing about the clients. So a step is cut
at `STEP_MAX_S`, and the rest is credited to all leases. Bytes that waited in the sockets are read before the step is taken. An
event loop needs a few passes for that: a connection that waits to be accepted is read only in the third.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.1
STEP_MAX_S = 2 * TICK_S
"""Longest step: a busy host is late by this much without having missed anything. It is added to every lease that is granted."""
PASSES = 5
STALL_S = 1.0
"""No client gives a connection up sooner than this for want of an answer. After a longer stop, many may have."""


class LeaseClock:
    """Calls `pass_time` about every `TICK_S`, with the seconds that have passed."""

    def __init__(self, pass_time: Callable[[float], None], loop: asyncio.AbstractEventLoop, tick_s: float = TICK_S) -> None:
        self._pass_time = pass_time
        self._tick_s = tick_s
        self._loop = loop
        self._stepped_at = self._loop.time()
        self._stopped = False
        self._timer: asyncio.Handle = self._loop.call_later(self._tick_s, self._tick)

    @property
    def stalled(self) -> bool:
        """Whether the process has just woken up from a long stop and is reading what waited."""
        return self._loop.time() - self._stepped_at > STALL_S

    def stop(self) -> None:
        self._stopped = True
        self._timer.cancel()

    def _tick(self) -> None:
        now = self._loop.time()
        if now - self._stepped_at > STEP_MAX_S:
            self._catch_up(PASSES)
        else:
            self._step(now)

    def _catch_up(self, passes: int) -> None:
        if self._stopped:
            return
        if passes:
            self._timer = self._loop.call_soon(self._catch_up, passes - 1)
        else:
            self._step(self._loop.time())

    def _step(self, now: float) -> None:
        elapsed_s = min(now - self._stepped_at, STEP_MAX_S)
        self._stepped_at = now
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        self._pass_time(elapsed_s)
