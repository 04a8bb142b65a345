"""The HTTP port: uvicorn in a running event loop, with bounds on what strangers can take."""

from __future__ import annotations

import asyncio
import logging
import socket
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..config.secret import Secret
from ..system.addresses import is_loopback, listen
from ..system.dial import in_daemon_thread
from ..system.fork import let_go_in_children
from .app import HEADERS_MAX, Web
from .observer import RunsObserver
from .sources import Source

logger = logging.getLogger("rdzv.web")

CONNECTIONS_MAX = 96
"""Connections, with those that are still in the TLS handshake. Above, new ones are closed at once."""
REQUEST_S = 10.0
"""Time for the TLS handshake, and then for a connection to have sent a whole request, the body included."""
STUCK_S = 30.0
"""A browser that has not read for this long is dropped."""
KEEP_ALIVE_S = 5
"""How long a connection stays open without a request, after one."""
STOP_S = 2


class _BoundedListener(socket.socket):
    """A listening socket that asyncio drives. It closes connections that are too many.

    They are counted here, because asyncio makes a connection known to its protocol only after the TLS handshake. Before that it
    keeps 256 KiB for each (3.11).
    """

    def __init__(self, listening: socket.socket, accepted: weakref.WeakSet[socket.socket]) -> None:
        """`accepted`: the connections of all listeners of one port."""
        super().__init__(listening.family, listening.type, listening.proto, fileno=listening.detach())
        self._accepted = accepted

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection. BlockingIOError ends asyncio's turn of accepting."""
        connection, address = super().accept()
        if sum(one.fileno() >= 0 for one in self._accepted) >= CONNECTIONS_MAX:  # Without those that were closed.
            connection.close()
            raise BlockingIOError
        self._accepted.add(connection)
        return connection, address


class _BoundedProtocol(H11Protocol):
    """A connection that is dropped if it says nothing, or does not read."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._timer = self.loop.call_later(REQUEST_S, transport.abort)

    def handle_events(self) -> None:
        # Not in data_received: a request may have come together with the one before, and begins when that is answered.
        super().handle_events()
        if self.flow.write_paused:  # The timer is that of a browser that does not read, whatever it says.
            return
        is_busy = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if is_busy:
            self._cancel()
        elif self._timer is None:  # Half a request. Uvicorn closes connections that are idle between two.
            self._timer = self.loop.call_later(REQUEST_S, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel()
        self._timer = self.loop.call_later(STUCK_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Uvicorn(uvicorn.Server):
    """Uvicorn that leaves signals to the process it runs in, and bounds the TLS handshake."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve the sockets. Uvicorn's own way to do it leaves the handshake 60 s."""
        await super().startup(sockets=[])
        config, loop = self.config, asyncio.get_running_loop()
        protocol = partial(_BoundedProtocol, config, self.server_state, self.lifespan.state)
        handshake_s = REQUEST_S if config.ssl else None
        for one in sockets or ():
            server = await loop.create_server(
                protocol, sock=one, ssl=config.ssl, ssl_handshake_timeout=handshake_s, backlog=config.backlog
            )
            self.servers.append(server)


class WebServer:
    """The HTTP port of one source. It belongs to the loop in which it was started."""

    def __init__(
        self, source: Source, bind: tuple[str, int], *, secret: Secret | None = None, hosts: Iterable[str] = (),
        tls_cert: str = "", tls_key: str = "",
    ) -> None:  # fmt: skip
        """`secret`: actions are allowed to browsers that give it; None: the page only shows."""
        self.bind = bind
        self.port = 0
        self._source = source
        self._secret = secret
        self._hosts = [*hosts, bind[0]]
        self._tls: dict[str, Any] = {"ssl_certfile": tls_cert, "ssl_keyfile": tls_key} if tls_cert else {}
        self._server: _Uvicorn | None = None

    @property
    def url(self) -> str:
        host = self.bind[0] or "*"
        return f"{'https' if self._tls else 'http'}://{f'[{host}]' if ':' in host else host}:{self.port}"

    async def start(self) -> None:
        """Listen and begin to observe. Raise OSError if the port cannot be had, or the certificate not be used."""
        # A resolver that does not answer would hold the event loop of the agent.
        listening = await in_daemon_thread(partial(listen, *self.bind), "rdzv http name")
        accepted: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        sockets: list[socket.socket] = [_BoundedListener(one, accepted) for one in listening]
        for one in sockets:
            let_go_in_children(one)
        self.port = sockets[0].getsockname()[1]
        if not all(is_loopback(one.getsockname()[0]) for one in sockets):
            logger.warning("anybody who reaches port %s of this machine can read the runs shown there", self.port)
            if self._secret is not None and not self._tls:
                logger.warning("the secret that people give at %s crosses the network unencrypted", self.url)
        self.observer = RunsObserver(self._source)
        self.web = Web(self.observer, self._secret, self._hosts)
        config = uvicorn.Config(
            self.web.app, http=_BoundedProtocol, ws="none", lifespan="off", loop="none",
            log_config=None, log_level="error", access_log=False,  # Strangers must not fill the log.
            server_header=False, proxy_headers=False, timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=STOP_S,
            h11_max_incomplete_event_size=HEADERS_MAX, **self._tls,
        )  # fmt: skip
        try:
            config.load()  # Reads the certificate.
        except BaseException:
            await self.web.stop()
            for one in sockets:
                one.close()
            raise
        self._server = _Uvicorn(config)
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets), name="rdzv http")
        self.observer.start()

    async def stop(self) -> None:
        """Close the port and end all watches."""
        if self._server is None:
            return
        self._server.should_exit = True
        await self.web.stop()
        await asyncio.wait([self._task])
        await self.observer.stop()
        self._server = None
