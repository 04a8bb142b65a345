"""How a driver gets to a server: resolve the name, connect to whichever of its addresses answers, greet.

Names are resolved anew at every attempt, since they may mean another address by then, or mean anything at all only then.
All addresses are tried: the next one as soon as the one before has failed, or has kept us waiting.
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
from typing import TypeAlias, cast

from ..server.frames import Hello, Welcome
from .link import DialFailed, Link

CONNECT_TIMEOUT_S = 3.0
"""Shorter than any lease: an attempt that went nowhere must leave time for the next one."""
TLS_PATIENCE = 10
"""How many times longer a server may take to greet under TLS: ten thousand handshakes at once keep it busy for half a
minute, and whoever gives up meanwhile only makes it begin again."""
STAGGER_S = 0.25
"""How long an address may keep the next one waiting."""
ADDRESSES_MAX = 16
NO_NAME = "check the name, DNS and the hosts file, or give an address"
NOBODY = "start the node that serves there, or correct the port"
SILENCE = "a firewall drops the packets or the host is off: open the port between the nodes"
_REMEDIES = {errno.ECONNREFUSED: NOBODY, errno.EHOSTUNREACH: "the host is off, or the network between is cut"}

Where: TypeAlias = "tuple[str, int] | tuple[str, int, int, int]"
Address: TypeAlias = "tuple[int, Where]"
"""Family, and what `connect` takes."""


class Resolver:
    """Resolves names without holding anything up: a resolver that hangs is asked once, not once per attempt."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, int], asyncio.Future[list[Address]]] = {}

    async def resolve(self, host: str, port: int, timeout_s: float) -> list[Address]:
        """The addresses, in the system's order of preference. Raises DialFailed."""
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
            found = asked.result()
        except OSError as error:
            problem = f"host {host!r} does not resolve: {_reason(error)}"
            raise DialFailed(problem, answered=False, remedy=NO_NAME) from None
        return found

    def _ask(self, host: str, port: int) -> asyncio.Future[list[Address]]:
        """In a thread that nobody waits for when the program ends; asyncio's own would be waited for."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Address]] = loop.create_future()

        def settle(found: list[Address] | OSError) -> None:
            if future.done():
                return
            if isinstance(found, OSError):
                future.set_exception(found)
                future.exception()  # It is no defect if nobody waits for it any more.
            else:
                future.set_result(found)

        def ask() -> None:
            answer: list[Address] | OSError
            try:
                entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                found = dict.fromkeys((int(entry[0]), cast("Where", entry[4])) for entry in entries)
                answer = list(found)[:ADDRESSES_MAX]
            except OSError as error:
                answer = error
            except UnicodeError as error:
                answer = OSError(str(error))
            with suppress(RuntimeError):  # The loop is closed: nobody wants to know.
                loop.call_soon_threadsafe(settle, answer)

        try:
            threading.Thread(target=ask, name=f"rdzv resolves {host}", daemon=True).start()
        except RuntimeError as error:  # The system has no room for a thread.
            settle(OSError(str(error)))
        return future


async def dial(
    addresses: Sequence[Address], hello: Callable[[], Hello], new_link: Callable[[], Link], timeout_s: float
) -> tuple[Link, Welcome]:
    """The first of the addresses where we are welcome. Raises DialFailed with what was wrong at each.

    Only one connection is greeted at a time: a greeting moves the session's leases to its connection.
    """
    loop = asyncio.get_running_loop()
    connecting: list[asyncio.Task[socket.socket]] = []
    for address in addresses:
        former = connecting[-1] if connecting else None
        connecting.append(loop.create_task(_connect(address, former, timeout_s), name="rdzv dials"))
    problems: dict[str, None] = {}
    remedies: dict[str, None] = {}
    answered, passing, untrusted = False, True, True
    taken: socket.socket | None = None
    try:
        for connected in asyncio.as_completed(connecting):
            try:
                taken = await connected
                return await greet(taken, hello(), new_link, timeout_s)
            except DialFailed as failed:
                problems[failed.problem] = None
                if failed.remedy:
                    remedies[failed.remedy] = None
                answered = answered or failed.answered
                passing = passing and (failed.passing or not failed.answered)
                untrusted = untrusted and (failed.untrusted or not failed.answered)
    finally:
        for task in connecting:
            if not task.done():
                task.cancel()
            elif not task.cancelled() and task.exception() is None and task.result() is not taken:
                task.result().close()
    problem = "; ".join(problems) or "its name has no address"
    remedy = "; ".join(remedies)
    raise DialFailed(problem, answered=answered, passing=passing, untrusted=answered and untrusted, remedy=remedy)


async def greet(
    sock: socket.socket, hello: Hello, new_link: Callable[[], Link], timeout_s: float
) -> tuple[Link, Welcome]:
    """Say hello on a fresh connection. Raises DialFailed; the connection is closed then."""
    link = new_link()
    if link.is_encrypted:
        timeout_s *= TLS_PATIENCE
    await asyncio.get_running_loop().create_connection(link.carrier, sock=sock)
    try:
        return link, await link.greet(hello, timeout_s)
    except DialFailed as failed:
        peer = link.transport.get_extra_info("peername")
        problem = f"{_show(peer)}: {failed.problem}"
        raise DialFailed(
            problem, answered=failed.answered, passing=failed.passing, untrusted=failed.untrusted, remedy=failed.remedy
        ) from None


async def connect(address: Address, timeout_s: float) -> socket.socket:
    """A connected socket. Raises DialFailed."""
    family, where = address
    try:
        # The protocol is named so that asyncio sets TCP_NODELAY (see `listen`).
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise DialFailed(f"{_show(where)}: {_reason(error)}", answered=False) from None
    try:
        sock.setblocking(False)
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, where), timeout_s)
        _refuse_ourselves(sock)
    except asyncio.TimeoutError:
        sock.close()
        problem = f"{_show(where)}: no answer within {timeout_s:g} s"
        raise DialFailed(problem, answered=False, remedy=SILENCE) from None
    except OSError as error:
        sock.close()
        remedy = _REMEDIES.get(error.errno or 0, "")
        raise DialFailed(f"{_show(where)}: {_reason(error)}", answered=False, remedy=remedy) from None
    except BaseException:
        sock.close()
        raise
    return sock


def _refuse_ourselves(sock: socket.socket) -> None:
    """With nobody there, a connection from a port that happens to be the same can meet itself."""
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(0, "nobody is there")


async def _connect(address: Address, former: asyncio.Task[socket.socket] | None, timeout_s: float) -> socket.socket:
    if former is not None:
        await asyncio.wait([former], timeout=STAGGER_S)
    return await connect(address, timeout_s)


def _reason(error: OSError) -> str:
    """As part of a sentence. The system's own words: asyncio's and the resolver's differ from them."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return (error.strerror or str(error) or type(error).__name__).lower()


def _show(address: Sequence[object] | None) -> str:
    if not address:
        return "unknown address"
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
