"""What a member needs of the machine it runs on: a clock, random ids, sockets, its name.

It is one small object that is passed in, so that the simulator can run the real member on a machine whose clock drifts, which
is paused for a minute, or which dies. Every timed wait of the member goes through `call_later`; nothing below `member` may ask
the event loop or the `time` module instead.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from .bootstrap import Bootstrap, bind

T = TypeVar("T")


class Timer(Protocol):
    """A pending call."""

    def cancel(self) -> None:
        """Do not call."""


class Machine(Protocol):
    """The surroundings of a member."""

    host: str
    pid: int

    def now(self) -> float:
        """Seconds on this machine's monotonic clock. Means nothing on another machine."""

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Call back once that much time has passed on this machine's clock."""

    def token(self) -> str:
        """A random id that nobody else has."""

    def jitter(self) -> float:
        """A random number in [0, 1): so that many members do not all retry at the same moment."""

    def stamp(self) -> str:
        """The wall clock, as a text for people: it differs from others' and may be stepped, so nothing may depend on it."""

    def bind(self, host: str, ports: tuple[int, int]) -> Bootstrap:
        """Bind a listening socket that others reach at `host`, on the first free port of the range (0, 0: any)."""


class RealMachine:
    """This process, on this host."""

    def __init__(self, host: str = "") -> None:
        self.host = host or socket.gethostname()
        self.pid = os.getpid()

    def now(self) -> float:
        """The clock of asyncio's own loops."""
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """On the running loop."""
        return asyncio.get_running_loop().call_later(delay_s, callback)

    def token(self) -> str:
        """64 random bits: two equal ones within a run's life are out of reach."""
        return secrets.token_hex(8)

    def jitter(self) -> float:
        """From the system's source, so that forked members differ."""
        return secrets.randbelow(1 << 20) / (1 << 20)

    def stamp(self) -> str:
        """See `stamp`."""
        return stamp()

    def bind(self, host: str, ports: tuple[int, int]) -> Bootstrap:
        """A real socket."""
        return bind(host, ports)


def stamp() -> str:
    """UTC to the second. Shown beside what was written, never compared."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def http_date() -> str:
    """The same as HTTP writes it: what a server tells whoever takes it for a web server, and `rdzv doctor`."""
    from email.utils import formatdate  # noqa: PLC0415  A large import for what few processes ever say.

    return formatdate(usegmt=True)


class Bell:
    """Wakes whoever waits. A ring while nobody waits is kept for the next wait, so that none is missed."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
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
            timer = self._machine.call_later(timeout_s, lambda: _late(waiter))
        self._waiters[waiter] = None
        try:
            return await waiter
        finally:
            self._waiters.pop(waiter, None)
            if timer is not None:
                timer.cancel()


class Alarm:
    """Goes off at the latest when it was last set to. Who sets it later and later pays for one timer and not for each."""

    def __init__(self, machine: Machine, call: Callable[[], object]) -> None:
        self._machine = machine
        self._call = call
        self._due_at = math.inf
        self._timer: Timer | None = None

    def be_set(self, delay_s: float) -> None:
        """It may go off earlier: whoever hears it looks whether it is time."""
        due_at = self._machine.now() + delay_s
        if due_at < self._due_at:
            self.cancel()
            self._due_at = due_at
            self._timer = self._machine.call_later(delay_s, self._go_off)

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


async def sleep(machine: Machine, delay_s: float) -> None:
    """Sleep by this machine's clock."""
    await Bell(machine).wait(delay_s)


async def within(machine: Machine, limit_s: float, work: Coroutine[Any, Any, T], name: str) -> T | None:
    """What it gives, or None if it takes longer by this machine's clock: it is cancelled then. Raises what it raises."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    timer = machine.call_later(limit_s, task.cancel)
    try:
        await asyncio.wait([task])
    finally:
        timer.cancel()
        task.cancel()
    return None if task.cancelled() else task.result()
