"""The driver that connects to the endpoint and, where the endpoint means this node, hosts the server.

A process that can bind the endpoint's address may serve there: a successful bind proves that the address is ours, which no host
name does. `is_host` says so where it cannot be proven (a service address that no process can bind), or forbids it. In order:

1. Connect to every address of the endpoint. If any program answers, do not serve.
2. Bind the port on all interfaces, since a node's own name may mean loopback to itself. It can be bound once.
3. Dial the endpoint. Serve only if our own server answers, and no other: many nodes can bind "localhost", and a name may have
   many addresses. Until then our server turns all clients away. Of two servers that see each other, both step back and retry.

Where a place is declared (T16.4), only a process to which the platform gave that name may serve. All pods have one command
line, so the name is not taken from it. A pod that got the former address of another one could otherwise serve in its place.

When an agent's server is gone, another process of that node takes the address over by the same steps. It starts empty, and the
members tell it what they know. A standalone server (`rdzv serve`) is not replaced: it will be restarted, and needs its address.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from ...config.endpoint import Endpoint
from ...config.settings import UNNAMED
from ...errors import SettingsError
from ...system.addresses import is_here
from ...system.dial import Address, DialFailed
from ...system.node import POD_NAME_ENV, platform_name
from .client import RemoteDriver
from .connection import ClientConnection
from .dialer import Greeting, logger
from .frames import Welcome
from .limits import Limits
from .server import Server

STAY_S = 60.0
"""How long a process that serves stays for the others when it could go."""
AT_ONCE_S = 2.0
"""Processes that end together are gone by then. A longer wait is logged, with its reason."""

_users: dict[Server, set[HostingDriver]] = {}
"""The servers of this process, and the drivers here that use them. All drivers of one server are in one loop."""
Closer: TypeAlias = Callable[[], Awaitable[None]]
_closers: dict[Server, Closer] = {}
"""How to end what was started beside each server."""


def check_name(place: str) -> None:
    """Raise SettingsError unless the platform gave this process that name: the declared place is no other's to serve at."""
    name = platform_name()
    if name != place:
        raise SettingsError(
            f"place is {place!r}, and the platform named this node {name!r}: only a node of that name may serve there; in a "
            f"pod that shares the network of its machine, set {POD_NAME_ENV} from the pod's own name"
        )


class HostingDriver(RemoteDriver):
    """A driver that may host the server."""

    def __init__(
        self, endpoint: Endpoint, *, is_host: bool | None = None, max_nodes: int = 1, stay_s: float = STAY_S,
        limits: Limits | None = None, on_serve: Callable[[Server], Awaitable[Closer]] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        """Take the options of `RemoteDriver`, too.

        `stay_s`: how long `close` waits for others that are connected. `on_serve`: called once this process serves; the
        result is called before the server stops.
        """
        super().__init__(endpoint, **options)
        self.server: Server | None = None
        """The server hosted here, once there is one."""
        self._is_host = is_host
        self._max_nodes = max_nodes
        self._stay_s = stay_s
        self._limits = limits
        self._on_serve = on_serve
        self._stands_alone = False
        self._closed = False
        self._hosting = asyncio.Lock()

    async def close(self) -> None:
        """Stop serving, but not before the others have gone, or `stay_s` have passed.

        Others in this loop that use the same server need not be waited for: the last of them stops it.
        """
        self._closed = True
        async with self._hosting:
            server, self.server, self.own_address = self.server, None, None
            # All changes of the table come before the first wait: others leave during it, and change the table too.
            used = [shared for shared, users in tuple(_users.items()) if self in users]
            for shared in used:
                _users[shared].discard(self)
            unused = [shared for shared in used if not _users[shared]]
            for shared in unused:
                del _users[shared]
            for shared in unused:
                await self._stop(shared)
            if server is not None and not server.is_open:
                await server.stop()

    async def _stop(self, server: Server) -> None:
        telling = asyncio.get_running_loop().call_later(AT_ONCE_S, self._tell_why_it_stays, server)
        try:
            if not await server.drained(self._stay_s):
                logger.warning(
                    "stopped serving run %r at %s after %g s, although %s connections were left",
                    self.run_id, self.endpoint, self._stay_s, len(server.peers),
                )  # fmt: skip
        finally:
            telling.cancel()
            if server in _closers:
                await _closers.pop(server)()
            await server.stop()

    def _tell_why_it_stays(self, server: Server) -> None:
        logger.warning(
            "this process serves run %r and stays until the others have left (connections: %s), for at most %g s: "
            "whoever ends it now ends the server too",
            self.run_id, len(server.peers), self._stay_s,
        )  # fmt: skip

    # ---- dialling

    async def dial(self, greeting: Greeting) -> tuple[ClientConnection, Welcome]:
        """Connect. If no server is there and this process may serve, serve first."""
        try:
            link, welcome = await self._dial_or_host(greeting)
            self.check_place(link, welcome)
        except DialFailed as failed:
            raise self.unreachable(failed) from None
        try:
            await self._arrived_at(welcome)
        except BaseException:
            link.close()
            raise
        for server, users in tuple(_users.items()) if not self._closed else ():  # No further `close` takes it out again.
            if server.id == welcome.server and server.loop is asyncio.get_running_loop():
                users.add(self)
        return link, welcome

    async def _arrived_at(self, welcome: Welcome) -> None:
        """Note whose server it is. Raise SettingsError if this run may not be there."""
        self._stands_alone = not welcome.only_run
        if self._stands_alone and self.run_id == UNNAMED:
            raise SettingsError(
                f"the run has no id ({UNNAMED!r}), and the server at {self.endpoint} keeps the runs of others too: "
                "all without an id would meet in one; give one, such as --rdzv-id=$SLURM_JOB_ID"
            )
        is_open = self.server is None or self.server.is_open or self.server.is_retired
        if not is_open and self.server is not None and self.server.id != welcome.server:
            await self._give_up_server()  # The endpoint means another server after all.

    async def _dial_or_host(self, greeting: Greeting) -> tuple[ClientConnection, Welcome]:
        try:
            return await self.dial_named(greeting)
        except DialFailed as failed:
            # Our own server may answer before the endpoint has been seen to mean it.
            if failed.answered and (self.server is None or self.server.is_open):
                raise
            nobody = failed
        async with self._hosting:
            await self._host(nobody)
        return await self.dial_named(greeting)

    # ---- hosting

    async def _host(self, nobody: DialFailed) -> None:
        """Serve, or raise DialFailed with the reasons why no other process does and this one does not either."""
        if self.server is not None and self.server.is_open:
            return
        if self._closed or self._is_host is False or self._stands_alone:
            raise nobody
        if self.place and platform_name() != self.place:
            problem = f"only {self.place!r} serves (place), and the platform named this node {platform_name()!r}"
            raise DialFailed(f"{nobody.problem}; {problem}", answered=False, remedy=nobody.remedy)
        if self.server is not None and self.server.is_retired:
            problem = f"this process served place {self.place!r} until a later server of that name was there"
            raise DialFailed(f"{nobody.problem}; {problem}: end it", answered=False)
        if self.trust.certificates is not None and not self.trust.certificates.can_serve:
            raise DialFailed(f"{nobody.problem}; this node cannot serve, because it has no tls_cert", answered=False)
        server = self.server
        if server is None:
            if not self._is_host and not self.named.is_one_machine:
                addresses = await self.addresses()
                if not any(is_here(family, str(where[0])) for family, where in addresses):
                    raise nobody
            server = self.server = await self._start(nobody)
            if self.named.is_one_machine:
                self.own_address = server.bind[0], server.port
        try:
            serves = await self._is_meant(server)
        except BaseException:
            await self._give_up_server()
            raise
        if serves:
            server.admit()
            _users[server] = {self}
            if self._on_serve is not None:
                _closers[server] = await self._on_serve(server)
            logger.info("serving run %r at %s (port %s)", self.run_id, self.endpoint, server.port)
            if self.named.is_loopback and self._max_nodes > 1:
                logger.warning(
                    "endpoint %s means this machine only: members on other machines will not find this server; "
                    "if max_nodes %s are on several, name the host that serves",
                    self.endpoint, self._max_nodes,
                )  # fmt: skip
            return
        if not self._is_host:
            await self._give_up_server()
        raise DialFailed(
            f"{nobody.problem}; a server was started here at port {server.port}, but the endpoint does not lead to it "
            "(yet): check that its name means this machine and that no firewall is between",
            answered=False,
        )

    async def _start(self, nobody: DialFailed) -> Server:
        # All interfaces, unless the endpoint can only mean this node.
        host, port = ("127.0.0.1", 0) if self.named.is_one_machine else self.named.hosts[0]
        if not (self.named.is_one_machine or self.named.is_loopback):
            host = ""
        options = {"run_id": self.run_id, "linger_s": self.linger_s, "limits": self._limits, "trust": self.trust}
        server = Server((host, port), is_open=False, promised=self.place, **options)
        try:
            await server.start()
        except OSError as error:
            remedy = ""
            if error.errno == errno.EADDRINUSE:
                problem = f"{nobody.problem}; port {port} is taken by another process here, which does not answer (yet)"
                remedy = "if it is none of ours, choose another port for all nodes"
            else:
                problem = f"{nobody.problem}; port {port} cannot be bound here ({error.strerror or error})"
            raise DialFailed(problem, answered=False, remedy=remedy) from None
        return server

    async def _is_meant(self, server: Server) -> bool:
        """Whether the endpoint leads to this server and to no other. Raise DialFailed if another one is there."""
        try:
            addresses = await self.addresses()
        except DialFailed:
            return False
        found = set(await asyncio.gather(*(self._server_at(address) for address in addresses)))
        others = found - {"", server.id}
        if others:
            raise DialFailed(f"another server is there: {', '.join(sorted(others))}", answered=False)
        return server.id in found

    async def _server_at(self, address: Address) -> str:
        """Return the id of the server there, or the problem with it; empty if no program is there."""
        try:
            return (await self.probe(address, self.connect_timeout_s)).server
        except DialFailed as failed:
            if failed.untrusted:
                raise  # If it is our own server, no other member would trust it either.
            return failed.problem if failed.answered else ""

    async def _give_up_server(self) -> None:
        server, self.server, self.own_address = self.server, None, None
        if server is not None:
            await server.stop()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_users.clear)
    os.register_at_fork(after_in_child=_closers.clear)
