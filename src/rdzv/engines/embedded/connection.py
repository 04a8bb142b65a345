"""The client's end of one connection over asyncio: futures, a timer and a socket around `ClientProtocol`; and dialling.

To dial is to connect and to be greeted. All addresses of a server are tried: the next one as soon as the one before has failed
or has taken too long.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from ...system.dial import Address, DialFailed, connect, show_address
from ...system.node import LocalNode, Node
from ...system.timers import Timer
from ..port import NotNow
from .client_protocol import ClientProtocol, Waiter
from .frames import Frame, Hello, RunsWanted, Welcome
from .stream import FramedProtocol
from .tls import TlsTransport
from .trust import Trust

TLS_PATIENCE = 10
"""How many times longer a server may take to greet under TLS. Ten thousand handshakes at once keep it busy for half a minute:
800 clients that gave up after 3 s made it begin again and again."""
RESET = struct.pack("ii", 1, 0)
"""The value of SO_LINGER by which closing a socket resets its connection."""
SLICE_S = 1.0
"""Longest single wait on a lock: where a signal does not interrupt it, KeyboardInterrupt is raised after the slice."""
STAGGER_S = 0.25
"""How long to wait for one address before the next one is tried, too."""


class ThreadWaiter:
    """The answer to a request that another thread than the loop's waits for."""

    __slots__ = ("_answered", "_problem", "_result")

    def __init__(self) -> None:
        self._answered = threading.Lock()
        self._answered.acquire()
        self._result: Any = None
        self._problem: Exception | None = None

    def done(self) -> bool:
        return not self._answered.locked()

    def set_result(self, result: Any) -> None:
        self._result = result
        self._answered.release()

    def set_exception(self, exception: Exception) -> None:
        self._problem = exception
        self._answered.release()

    def wait(self, limit_s: float) -> Any:
        """Return the answer, or raise its problem; TimeoutError when the time is up."""
        deadline = time.monotonic() + limit_s
        while not self._answered.acquire(timeout=min(limit_s, SLICE_S)):
            limit_s = deadline - time.monotonic()
            if limit_s <= 0:
                raise TimeoutError
        if self._problem is not None:
            raise self._problem
        return self._result


class ClientConnection(ClientProtocol, FramedProtocol):
    """A connection that coroutines can wait on, by a node's clock.

    Other threads may ask by it, too: they write to the socket themselves, and the loop, which reads all answers, gives each its
    own. `_lock` keeps the bytes of two requests apart, and the list of those that wait complete when the connection ends. No
    thread writes past bytes that asyncio still keeps for the socket.
    """

    def __init__(
        self, endpoint: str, read_timeout_s: float, trust: Trust | None = None, host: str = "", node: Node | None = None
    ) -> None:
        """`host`: the name that the server's certificate must be for."""
        self._node = node or LocalNode()
        self._host = host
        self.is_encrypted = trust is not None and trust.certificates is not None
        self._alarm: Timer | None = None
        self._lock = threading.RLock()
        self._descriptor = -1
        """The socket, while other threads may write to it."""
        self._unsent = b""
        """The end of a request of another thread, for which the socket had no room."""
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

    def ask(self, frame: Callable[[int], Frame]) -> tuple[int, Waiter]:
        with self._lock:
            return super().ask(frame)

    def send(self, data: bytes | memoryview) -> None:
        with self._lock:
            if self._unsent:
                unsent, self._unsent = self._unsent, b""
                super().send(unsent)
            super().send(data)

    def close(self) -> None:
        with self._lock:
            super().close()

    # ---- other threads

    def admit_threads(self) -> None:
        """Let other threads ask from now on. What they send under TLS would have to be encrypted in the loop first."""
        if not self.is_encrypted:
            self._loop = asyncio.get_running_loop()
            self._descriptor = self.fileno()

    def call_now(self, frame: Callable[[int], Frame], limit_s: float) -> Any:
        """Ask in the calling thread, not the loop's, and wait for the answer. Raise as `ask` says, NotNow and TimeoutError."""
        waiter = ThreadWaiter()
        number = self._ask_now(frame, waiter)
        try:
            return waiter.wait(limit_s)
        except BaseException:
            with self._lock:
                self.forget(number)
            raise

    def _ask_now(self, frame: Callable[[int], Frame], waiter: ThreadWaiter) -> int:
        with self._lock:
            if self._descriptor < 0 or self._unsent or self.transport.get_write_buffer_size():
                raise NotNow
            number, data = self._register(frame, waiter)
            try:
                sent = _write(self._descriptor, data)
                if sent < len(data):
                    self._unsent = data[sent:]
                    self._loop.call_soon_threadsafe(self.send, b"")
            except OSError:  # The loop will find the connection lost.
                self.forget(number)
                raise NotNow from None
            except BaseException:
                # A signal in between: how much was written is not known any more.
                self._descriptor = -1
                self._loop.call_soon_threadsafe(self.lose, "a request was interrupted")
                raise
            return number

    def reset(self) -> None:
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:
            with suppress(OSError):  # The other side has ended it already.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        super().reset()

    def _end(self, problem: str, waited_s: float = 0.0) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        with self._lock:
            self._descriptor = -1
            super()._end(problem, waited_s)

    def _check(self) -> None:
        with self._lock:
            wait_s = self.check()
        if self.is_open:
            self._alarm = self._node.call_later(wait_s, self._check)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed(exc)


def _write(descriptor: int, data: bytes) -> int:
    """Write as much as there is room for, and return how much that was."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0


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
