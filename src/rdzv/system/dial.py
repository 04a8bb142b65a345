"""Connect to a host by name: resolve it, then open a TCP connection to one of its addresses.

Names are resolved anew at every attempt, because a name may mean another address by then.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias, TypeVar, cast

from .timers import in_time

CONNECT_TIMEOUT_S = 3.0  # Shorter than any lease: an attempt that went nowhere must leave time for the next one.
ADDRESSES_MAX = 16
NO_NAME = "check the name, DNS and the hosts file, or give an address"
NOBODY = "start the node that serves there, or correct the port"
SILENCE = "a firewall drops the packets or the host is off: open the port between the nodes"
_REMEDIES = {errno.ECONNREFUSED: NOBODY, errno.EHOSTUNREACH: "the host is off, or the network between is cut"}

T = TypeVar("T")
Where: TypeAlias = "tuple[str, int] | tuple[str, int, int, int]"
Address: TypeAlias = "tuple[int, Where]"  # The family, and the argument of `connect`.


class DialFailed(Exception):
    """An attempt to connect failed.

    `answered`: a program is there, though not the one we want. `passing`: it says that this will soon change. `untrusted`: one
    of the two does not trust the other, which no further attempt can change. `other_run`: the server there keeps another run
    only. `is_server`: it may well be a server of ours, which is silent or turns us away. `remedy`: what people can do.
    """

    def __init__(
        self, problem: str, *, answered: bool, passing: bool = False, untrusted: bool = False, other_run: bool = False,
        is_server: bool = False, remedy: str = "",
    ) -> None:  # fmt: skip
        super().__init__(problem)
        self.problem = problem
        self.answered = answered
        self.passing = passing
        self.untrusted = untrusted
        self.other_run = other_run
        self.is_server = is_server
        self.remedy = remedy


class Resolver:
    """Resolves names in the background: a resolver that hangs is asked once, not once per attempt."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], asyncio.Future[list[Address]]] = {}

    async def resolve(self, host: str, port: int, timeout_s: float) -> list[Address]:
        """Return the addresses, in the system's order of preference. Raise DialFailed."""
        with suppress(ValueError):
            ip = ipaddress.ip_address(host)
            return [(socket.AF_INET, (host, port)) if ip.version == 4 else (socket.AF_INET6, (host, port, 0, 0))]
        asked = self._asked.get((host, port))
        if asked is None:
            asked = self._asked[host, port] = self._ask(host, port)
            asked.add_done_callback(lambda _: self._asked.pop((host, port), None))
        done, _ = await asyncio.wait([asked], timeout=timeout_s)
        if not done:
            raise DialFailed(f"host {host!r} was not resolved within {timeout_s:g} s", answered=False, remedy=NO_NAME)
        try:
            return asked.result()
        except OSError as error:
            problem = f"host {host!r} does not resolve: {_reason(error)}"
            raise DialFailed(problem, answered=False, remedy=NO_NAME) from None

    def _ask(self, host: str, port: int) -> asyncio.Future[list[Address]]:
        def ask() -> list[Address]:
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            except UnicodeError as error:
                raise OSError(str(error)) from None
            found = dict.fromkeys((int(entry[0]), cast("Where", entry[4])) for entry in entries)
            return list(found)[:ADDRESSES_MAX]

        return in_daemon_thread(ask, f"rdzv resolves {host}")


def in_daemon_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Do work that may hang. The end of the program would wait for a thread of asyncio's own."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: Exception | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            future.exception()  # Mark it as seen: the caller may have given up.
        else:
            future.set_result(cast("T", result))

    def run() -> None:
        result: T | None = None
        problem: Exception | None = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001  The caller raises it.
            problem = error
        with suppress(RuntimeError):  # The loop is closed: no caller is left.
            loop.call_soon_threadsafe(settle, result, problem)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError as error:  # The system has no room for a thread.
        settle(None, OSError(str(error)))
    return future


async def connect(address: Address, timeout_s: float) -> socket.socket:
    """Return a connected socket. Raise DialFailed."""
    family, where = address
    try:
        # asyncio sets TCP_NODELAY only on sockets whose protocol is named (as in `listen`). Without it every second small frame
        # waited 40 ms for an acknowledgement: two members took 230 ms to form, and 4 ms since.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise DialFailed(f"{show_address(where)}: {_reason(error)}", answered=False) from None
    try:
        sock.setblocking(False)
        await in_time(timeout_s, asyncio.get_running_loop().sock_connect(sock, where))
        _refuse_ourselves(sock)
    except asyncio.TimeoutError:
        sock.close()
        problem = f"{show_address(where)}: no answer within {timeout_s:g} s"
        raise DialFailed(problem, answered=False, remedy=SILENCE) from None
    except OSError as error:
        sock.close()
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise DialFailed(f"{show_address(where)}: {_reason(error)}", answered=False, remedy=remedy) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _refuse_ourselves(sock: socket.socket) -> None:
    """Refuse a connection to itself: with no listener, a connection from the same port can meet itself."""
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(0, "nobody is there")


def _reason(error: OSError) -> str:
    """Return the system's own words, as part of a sentence: asyncio's and the resolver's differ from them."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error) or type(error).__name__).lower()


def show_address(address: Sequence[object] | None) -> str:
    """Format a socket address as host:port, with brackets around IPv6."""
    if not address:
        return "unknown address"
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
