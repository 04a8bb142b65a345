"""The client's end of one connection over asyncio: futures, a timer and a socket around `ClientProtocol`; and dialling.

To dial is to connect and to be greeted. All addresses of a server are tried: the next one as soon as the one before has failed
or has taken too long.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from ...system.dial import Address, DialFailed, connect, show_address
from ...system.node import LocalNode, Node
from ...system.timers import Timer
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
STAGGER_S = 0.25
"""How long to wait for one address before the next one is tried, too."""


class ClientConnection(CalledByThreads, FramedProtocol):
    """A connection that coroutines, and other threads, can wait on, by a node's clock."""

    def __init__(
        self, endpoint: str, read_timeout_s: float, trust: Trust | None = None, host: str = "", node: Node | None = None
    ) -> None:
        """`host`: the name that the server's certificate must be for."""
        self._node = node or LocalNode()
        self._host = host
        self.is_encrypted = trust is not None and trust.certificates is not None
        self._alarm: Timer | None = None
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

    async def call(self, frame: Callable[[int], Frame]) -> Any:
        """Ask and wait for the answer. Raise as `ask` says."""
        number, waiter = self.ask(frame)
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

    def _end(self, problem: str, waited_s: float = 0.0) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        super()._end(problem, waited_s)

    def _check(self) -> None:
        wait_s = self.check()
        if self.is_open:
            self._alarm = self._node.call_later(wait_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed(exc)
        self.wait_for_reader()  # asyncio closes the socket next.


async def dial(
    addresses: Sequence[Address], hello: Callable[[], Hello | RunsWanted], new_link: Callable[[], ClientConnection],
    timeout_s: float,
) -> tuple[ClientConnection, Welcome]:
    """Return a connection to the first address where a server welcomes us. Raise DialFailed with the problem at each.

    Only one connection is greeted at a time, because a greeting moves the session's leases to its connection.
    """
    loop = asyncio.get_running_loop()
    connecting: list[asyncio.Task[socket.socket]] = []
    for address in addresses:
        former = connecting[-1] if connecting else None
        connecting.append(loop.create_task(_connect(address, former, timeout_s), name="rdzv dials"))
    problems: dict[str, None] = {}
    remedies: dict[str, None] = {}
    answered, passing, untrusted, other_run = False, True, True, True
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
                other_run = other_run and (failed.other_run or not failed.answered)
    finally:
        for task in connecting:
            if task.done():
                _let_go(task, taken)
            else:
                # A connection that comes about at this very moment wins over its cancellation: `wait_for` returns it.
                task.cancel()
                task.add_done_callback(_let_go)
    problem = "; ".join(problems) or "its name has no address"
    how = {"untrusted": answered and untrusted, "other_run": answered and other_run}
    raise DialFailed(problem, answered=answered, passing=passing, remedy="; ".join(remedies), **how)


async def greet(
    sock: socket.socket, hello: Hello | RunsWanted, new_link: Callable[[], ClientConnection], timeout_s: float
) -> tuple[ClientConnection, Welcome]:
    """Say hello on a fresh connection. Raise DialFailed if that fails; the connection is closed then."""
    link = new_link()
    if link.is_encrypted:
        timeout_s *= TLS_PATIENCE
    await asyncio.get_running_loop().create_connection(link.carrier, sock=sock)
    try:
        return link, await link.greet(hello, timeout_s)
    except DialFailed as failed:
        failed.problem = f"{show_address(link.transport.get_extra_info('peername'))}: {failed.problem}"
        raise


def _let_go(task: asyncio.Task[socket.socket], taken: socket.socket | None = None) -> None:
    """Close the socket of an attempt to connect that nobody waits for any more, unless it was taken."""
    if not task.cancelled() and task.exception() is None and task.result() is not taken:
        task.result().close()


async def _connect(address: Address, former: asyncio.Task[socket.socket] | None, timeout_s: float) -> socket.socket:
    if former is not None:
        await asyncio.wait([former], timeout=STAGGER_S)
    return await connect(address, timeout_s)
