"""The embedded server: `ServerCore` behind TCP.

It serves many runs (`rdzv serve`) or, hosted by an agent, that agent's run only.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from ...config.endpoint import PORT
from ...system.addresses import BACKLOG, is_loopback, listen, place_of
from ...system.fork import let_go_in_children
from ...system.node import fence_floor
from .lease_clock import TICK_S, LeaseClock
from .limits import DESCRIPTORS_SPARED, logger, raise_nofile
from .server_core import ServerCore
from .session import ServerSession
from .stream import FramedProtocol
from .tls import TlsTransport

STOP_S = 1.0
"""How long a stopping server waits until all clients have read its last word."""
TURNS_OF_ACCEPT = 3
"""Turns of the loop from when asyncio has accepted a connection until it tells of it.

If the listener is closed in between, asyncio (3.11) forgets the connection without closing it."""
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
"""Reasons why the kernel does not hand out a connection that waits."""


class ServerConnection(ServerSession, FramedProtocol):
    """A session over TCP."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        cast("asyncio.Transport", transport).set_write_buffer_limits(high=self._core.limits.unanswered)
        self.opened(self.transport)

    def eof_received(self) -> None:
        self.end_of_file()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.closed()


class _Listener(socket.socket):
    """A listening socket that asyncio drives. It accepts a few connections in each turn, and none without a descriptor.

    asyncio would accept as many as wait, and log a line for each that finds no descriptor: a burst of connections stopped the
    server and filled the disk.
    """

    def __init__(self, core: ServerCore, listening: socket.socket) -> None:
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._core = core
        self._accepted = 0
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. BlockingIOError ends asyncio's turn of accepting."""
        if self._accepted >= self._core.limits.accepts:
            self._accepted = 0
            raise BlockingIOError
        try:
            accepted = super().accept()
        except OSError as error:
            self._accepted = 0
            if error.errno in _NO_ROOM:
                self._make_room(error)
                raise BlockingIOError from None
            raise
        self._accepted += 1
        return accepted

    def _make_room(self, error: OSError) -> None:
        """Free a descriptor for the connection that waits, or let it go: otherwise the loop would be woken for it for ever."""
        self._core.complain("unknown", f"its connection cannot be accepted: {error.strerror}")
        if self._core.drop_oldest_stranger():
            return
        if self._spare >= 0:
            os.close(self._spare)
            with suppress(OSError):
                super().accept()[0].close()
        self._spare = -1
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        super().close()
        if self._spare >= 0:
            os.close(self._spare)
        self._spare = -1


class Server(ServerCore):
    """A server made with `start` and ended by `stop`. It belongs to the loop in which it was started."""

    def __init__(self, bind: tuple[str, int] = ("127.0.0.1", PORT), **options: Any) -> None:
        """Take the options of `ServerCore`.

        `bind`: host ('' for all interfaces) and port (0 for any). `run_id`: serve that run only ('' for all). A server that is
        not open answers probes only, until `admit`. `trust`: what members must prove; None: nothing.
        """
        super().__init__(**options)
        self.bind = bind
        self.port = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self.retired = asyncio.Event()
        """Set once a later server of its name is there; the server stops then by itself."""
        self._stopping: asyncio.Task[None] | None = None
        self._listeners: list[asyncio.Server] = []
        self._moved = asyncio.Event()
        self.moved = self._moved.set

    # ---- its life

    async def start(self) -> None:
        """Listen. Raise OSError, with errno EADDRINUSE if the port is taken."""
        host, port = self.bind
        sockets = [_Listener(self, one) for one in listen(host, port)]
        for one in sockets:
            let_go_in_children(one)
        self.port = sockets[0].getsockname()[1]
        self.place = place_of(sockets, host)
        files = raise_nofile()
        self.connections_max = max(1, min(self.limits.connections, files - DESCRIPTORS_SPARED))
        if self.connections_max < self.limits.connections:
            logger.info(
                "%s connections at most, because this process may have %s open files; raise the limit (ulimit -Hn) for more",
                self.connections_max, files,
            )  # fmt: skip
        loop = self.loop = asyncio.get_running_loop()
        self._clock = LeaseClock(self.pass_time, loop)
        self.now = loop.time  # type: ignore[method-assign]  # Read at every frame.
        try:
            for one in sockets:
                self._listeners.append(await loop.create_server(self._accept, sock=one, backlog=BACKLOG))
        except BaseException:
            self._clock.stop()
            self._listeners.clear()
            for one in sockets:  # The listener that was being started serves already, unknown to this server.
                loop.remove_reader(one)
                one.close()
            raise
        shown = f"run {self.only_run!r}" if self.only_run else "all runs"
        logger.debug("serving %s at %s:%s (server %s)", shown, host or "*", self.port, self.id)
        self._is_reachable = not all(is_loopback(one.getsockname()[0]) for one in sockets)
        if self.is_open:
            self.admit()

    def _accept(self) -> asyncio.BufferedProtocol:
        peer, certificates = ServerConnection(self), self.trust.certificates
        return peer if certificates is None else TlsTransport(peer, certificates)

    def admit(self) -> None:
        """Begin to serve all; before, only probes were answered."""
        self.is_open = True
        if self._is_reachable and not self.trust.knows_members:
            logger.warning(
                "anybody who reaches port %s of this machine can take part in its runs: give server and members a secret "
                "(RDZV_TOKEN or token_file)",
                self.port,
            )

    async def stop(self) -> None:
        """Tell all clients and end. The contents of all engines are lost. Stopping twice is harmless."""
        if not self._listeners:
            return
        assert self.loop is not None, "it was started"
        listeners, self._listeners = self._listeners, []
        for one in (one for listener in listeners for one in listener.sockets):
            self.loop.remove_reader(one)
        try:
            for _ in range(TURNS_OF_ACCEPT):
                await asyncio.sleep(0)
        finally:
            for listener in listeners:
                listener.close()
            self._clock.stop()
        for peer in tuple(self.peers):
            where = f" at {self.place}" if peer.run is not None else ""  # No stranger is told where.
            peer.reject(f"the server{where} has been stopped", passing=True)
        deadline = self.now() + STOP_S
        while self.peers and await self._moves(deadline - self.now()):
            pass
        for peer in tuple(self.peers):
            peer.transport.abort()
        while self.peers and await self._moves(STOP_S):
            pass
        logger.debug("stopped serving at port %s", self.port)

    def retire(self) -> None:
        if self.is_retired:
            return
        super().retire()
        logger.error(
            "members follow a later server of place %r, so this one at %s stops: the platform started it before this one had "
            "ended; end this process",
            self.promised, self.place,
        )  # fmt: skip
        assert self.loop is not None, "there are clients"
        self._stopping = self.loop.create_task(self.stop(), name="rdzv retires")
        self.retired.set()

    async def drained(self, timeout_s: float) -> bool:
        """Wait until no client is connected or may come back. Return False when the time is up."""
        deadline = self.now() + timeout_s
        while True:
            left_s = deadline - self.now()
            if any(peer.may_be_there for peer in self.peers):
                if left_s <= 0:
                    return False
                # In slices, because the end of a lease wakes nobody. Leases end at ticks.
                await self._moves(min(left_s, max(self.linger_s, TICK_S)))
            elif not any(run.presences for run in self.runs.values()) or not await self._moves(min(left_s, self.linger_s)):
                return True

    async def _moves(self, timeout_s: float) -> bool:
        """Wait until a client comes or goes. Return False when the time is up."""
        self._moved.clear()
        try:
            await asyncio.wait_for(self._moved.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    # ---- what the core needs

    def now(self) -> float:
        return time.monotonic()

    def fence_floor(self) -> int:
        return fence_floor()

    def call_soon(self, callback: Callable[[], object]) -> None:
        assert self.loop is not None, "there are clients"
        self.loop.call_soon(callback)

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> None:
        assert self.loop is not None, "there are clients"
        if delay_s:
            self.loop.call_later(delay_s, callback)
        else:
            self.loop.call_soon(callback)

    @property
    def stalled(self) -> bool:
        return self._clock.stalled
