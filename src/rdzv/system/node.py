"""The node that a member runs on: its clock, random ids, sockets and name.

A member gets one `Node` object, so that the simulator can run the real member on a node whose clock drifts, which is
paused for a minute, or which dies. Every timed wait of the member goes through `call_later`, never through the event
loop or the `time` module.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Protocol

from .bootstrap import Bootstrap, bind
from .check_command import run_check
from .timers import Timer

YEAR_2020_S = 1_577_836_800
POD_NAME_ENV = "RDZV_POD_NAME"
"""The variable for the name of a pod whose host name is that of its machine. The platform must fill it in for each pod."""
FENCES_PER_S = 64
"""A server may seal so many rounds per second of its life before its successor could start below its last fence."""


class Node(Protocol):
    """The interface that members, and drivers with timers, need of their node."""

    host: str
    pid: int

    def now(self) -> float:
        """Seconds on this node's monotonic clock, which cannot be compared with another node's."""

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        """Call back once that much time has passed on this node's clock."""

    def token(self) -> str:
        """A unique random id."""

    def jitter(self) -> float:
        """A random number in [0, 1), so that many members do not all retry at the same moment."""

    def stamp(self) -> str:
        """The wall clock as text for people. Nothing may depend on it: it differs between nodes and may be stepped."""

    def wall_s(self) -> int:
        """The wall clock in seconds since 2020. Only fences are made of it: it differs between nodes and may be stepped."""

    async def check(self, command: str, timeout_s: float) -> str:
        """Run the command that checks this node; return why it failed, or nothing."""

    def bind(self, host: str, ports: tuple[int, int], former: int = 0) -> Bootstrap:
        """Bind a listening socket, to be announced as `host`, on a free port of the range; (0, 0): any.

        The round before used port `former`: the next one after it is tried first, and itself last.
        """


class LocalNode:
    """This process, on this host."""

    def __init__(self, host: str = "") -> None:
        self.host = host or socket.gethostname()
        self.pid = os.getpid()

    now = staticmethod(time.monotonic)
    """The clock of asyncio's own loops. No method around it, because it is read dozens of times in a join."""

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def check(self, command: str, timeout_s: float) -> str:
        return await run_check(command, timeout_s)

    def token(self) -> str:
        return os.urandom(8).hex()  # 64 bits: two equal ones within a run's life are out of reach.

    def jitter(self) -> float:
        return secrets.randbelow(1 << 20) / (1 << 20)  # Not `random`, whose state forked members would share.

    def stamp(self) -> str:
        return stamp()

    def wall_s(self) -> int:
        return max(0, int(time.time()) - YEAR_2020_S)

    def bind(self, host: str, ports: tuple[int, int], former: int = 0) -> Bootstrap:
        return bind(host, ports, former)


def platform_name() -> str:
    """Return the name that the platform gave this pod or machine. No setting changes it: all pods have the same settings."""
    return os.environ.get(POD_NAME_ENV, "") or socket.gethostname()


def stamp() -> str:
    """Return UTC to the second, to be shown beside a record and never compared."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def fence_floor() -> int:
    """Return a number that only grows on this machine until it is booted again, faster than any run seals rounds."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return int(time.clock_gettime(clock) * FENCES_PER_S) + 1


def http_date() -> str:
    """Return the time as HTTP writes it. A server tells it to HTTP clients, among them `rdzv doctor`."""
    from email.utils import formatdate  # noqa: PLC0415  A large import that few processes need.

    return formatdate(usegmt=True)
