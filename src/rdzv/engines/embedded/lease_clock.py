"""Time as the server passes it to leases: in steps, and never more of it than the server itself was awake for.

A server that was stopped for a minute has heard nobody for a minute, which says nothing about the others. So a step is
cut at `STEP_MAX_S`, and the rest is credited to all. What waited in the sockets meanwhile is read before the step is
judged; an event loop needs a few passes for that, since a connection that waits to be accepted is read only in the third.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TICK_S = 0.1
STEP_MAX_S = 2 * TICK_S
"""A busy machine is late by that much without having missed anything. Whoever grants a lease adds it."""
PASSES = 5
STALL_S = 1.0
"""Nobody gives a connection up sooner than that for want of an answer. After a longer stop, many may have."""


class LeaseClock:
    """Calls `judge` with the seconds that have passed, about every `TICK_S`."""

    def __init__(self, judge: Callable[[float], None]) -> None:
        self._judge = judge
        self._loop = asyncio.get_running_loop()
        self._judged_at = self._loop.time()
        self._stopped = False
        self._timer: asyncio.Handle = self._loop.call_later(TICK_S, self._tick)

    def now(self) -> float:
        """The loop's time, with all its stalls."""
        return self._loop.time()

    @property
    def stalled(self) -> bool:
        """We have just woken up from a long stop, and are reading what waited."""
        return self._loop.time() - self._judged_at > STALL_S

    def stop(self) -> None:
        """No more steps."""
        self._stopped = True
        self._timer.cancel()

    def _tick(self) -> None:
        if self._loop.time() - self._judged_at > STEP_MAX_S:
            self._catch_up(PASSES)
        else:
            self._step()

    def _catch_up(self, passes: int) -> None:
        if self._stopped:
            return
        if passes:
            self._timer = self._loop.call_soon(self._catch_up, passes - 1)
        else:
            self._step()

    def _step(self) -> None:
        now = self._loop.time()
        elapsed_s = min(now - self._judged_at, STEP_MAX_S)
        self._judged_at = now
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._judge(elapsed_s)
