"""The client's end of one connection over asyncio: futures, a timer and a socket around `ClientProtocol`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from ...system.node import LocalNode, Node
from ...system.timers import Timer
from .client_protocol import ClientProtocol
from .frames import Frame, Hello, Welcome
from .stream import FramedProtocol
from .tls import TlsTransport
from .trust import Trust


class ClientConnection(ClientProtocol, FramedProtocol):
    """A connection that coroutines can wait on, by a node's clock."""

    def __init__(
        self, endpoint: str, read_timeout_s: float, trust: Trust | None = None, host: str = "", node: Node | None = None
    ) -> None:
        """`host`: the name that the server's certificate must be for."""
        self._node = node or LocalNode()
        self._host = host
        self._alarm: Timer | None = None
        new_waiter = asyncio.get_running_loop().create_future
        super().__init__(endpoint, read_timeout_s, trust or Trust(), self._node.now, new_waiter)

    @property
    def is_encrypted(self) -> bool:
        return self._trust.certificates is not None

    def carrier(self) -> asyncio.BufferedProtocol:
        """Return the protocol to connect the socket to."""
        certificates = self._trust.certificates
        return self if certificates is None else TlsTransport(self, certificates, self._host)

    async def greet(self, hello: Hello, timeout_s: float) -> Welcome:
        """Greet the server. Raise DialFailed if it does not welcome us; the connection is closed then."""
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

    async def call(self, frame: Callable[[int], Frame]) -> Any:
        """Ask and wait for the answer. Raise as `ask` says."""
        number, waiter = self.ask(frame)
        try:
            return await cast("asyncio.Future[Any]", waiter)
        finally:
            self.forget(number)

    def lose(self, problem: str, waited_s: float = 0.0) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        super().lose(problem, waited_s)

    def _check(self) -> None:
        wait_s = self.check()
        if self.is_open:
            self._alarm = self._node.call_later(wait_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed(exc)
