"""What a member needs of the machine it runs on: a clock, random ids, sockets, its name.

It is one small object that is passed in, so that the simulator can run the real member on a machine whose clock drifts, which
is paused for a minute, or which dies. Every timed wait of the member goes through `call_later`; nothing below `member` may ask
the event loop or the `time` module instead.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from .bootstrap import Bootstrap, bind
from .timers import Timer

T = TypeVar("T")


class Node(Protocol):
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


class LocalNode:
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
