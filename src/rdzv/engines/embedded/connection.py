"""The client's end of one connection over asyncio: futures, a timer and a socket around `ClientProtocol`."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from ...system.dial import DialFailed, show_address
from ...system.node import LocalNode, Node
from .frames import Frame, Hello, RunsWanted, Welcome
from .stream import FramedProtocol
from .thread_calls import CalledByThreads
from .tls import TlsTransport
from .trust import Trust

TLS_PATIENCE = 10
"""How many times longer a server may take to greet under TLS. Ten thousand handshakes at once keep it busy for half a minute:
800 clients that gave up after 3 s made it begin again and again."""
RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER by which closing a socket resets its connection."""


class ClientConnection(CalledByThreads, FramedProtocol):
    """A connection that coroutines, and other threads, can wait on, by a node's clock."""

    def __init__(
        self, endpoint: str, read_timeout_s: float, trust: Trust | None = None, host: str = "", node: Node | None = None
    ) -> None:
        """`host`: the name that the server's certificate must be for."""
        self._node = node or LocalNode()
        self._host = host
        self.is_encrypted = trust is not None and trust.certificates is not None
        new_waiter = asyncio.get_running_loop().create_future
        super().__init__(endpoint, read_timeout_s, trust or Trust(), self._node.now, new_waiter)

    def carrier(self) -> asyncio.BufferedProtocol:
        """Return the protocol to connect the socket to."""
        certificates = self._trust.certificates
        return self if certificates is None else TlsTransport(self, certificates, self._host)

    async def greet(self, hello: Hello | RunsWanted, timeout_s: float) -> Welcome:
        """Greet the server. Raise DialFailed if it does not welcome us; the connection is closed then.

        The answer to `RunsWanted` is `RunsListed`, in place of the welcome.
        """
        self.say_hello(hello)
        timer = self._node.call_later(timeout_s, lambda: self.not_greeted(timeout_s))
        try:
            welcome = await cast("asyncio.Future[Welcome]", self._welcome)
        except BaseException:
            self.lose("it was given up")
            raise
        finally:
            timer.cancel()
        if self.is_open:
            self._check()
        return welcome

    async def call(self, kind: Callable[..., Frame], *fields: object) -> Any:
        """Ask and wait for the answer. Raise as `ask` says."""
        number, waiter = self.ask(kind, *fields)
        try:
            return await cast("asyncio.Future[Any]", waiter)
        finally:
            self.forget(number)

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            with suppress(OSError):  # The other side has ended it already.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        super().reset()

    def _check(self) -> None:
        wait_s = self.check()
        if self.is_open:
            self.alarm = self._node.call_later(wait_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed(exc)
        self.wait_for_reader()  # asyncio closes the socket next.


async def greet(sock: socket.socket, hello: Hello | RunsWanted, link: ClientConnection, timeout_s: float) -> Welcome:
    """Say hello on a fresh connection. Raise DialFailed if that fails; the connection is closed then."""
    if link.is_encrypted:
        timeout_s *= TLS_PATIENCE
    await asyncio.get_running_loop().create_connection(link.carrier, sock=sock)
    try:
        return await link.greet(hello, timeout_s)
    except DialFailed as failed:
        failed.problem = f"{show_address(link.transport.get_extra_info('peername'))}: {failed.problem}"
        raise
