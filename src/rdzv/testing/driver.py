"""The embedded engine's driver over the simulated network: the one that ships, but for how it gets a connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config.endpoint import Endpoint
from ..engines.embedded import frames
from ..engines.embedded.client import RemoteDriver, RemoteSession
from ..engines.embedded.connection import ClientConnection
from ..engines.embedded.dialer import Greeting
from ..engines.embedded.frames import Frame, Hello, RunsWanted, Welcome
from ..engines.port import Outcome, Watch
from ..engines.watch_queue import WatchesAfterwards
from ..errors import Unreachable
from ..system.dial import Address, DialFailed
from ..system.timers import sleep
from .network import BOTH, SimConnection, SimNetwork
from .nodes import SimNode
from .server import RUN, SimServer

READ_TIMEOUT_S = 10.0
ENDPOINT = Endpoint.parse("engine:29400")


class SimSession(RemoteSession):
    """The shipping session in a process that can crash, with what its engine says of itself."""

    _driver: SimDriver

    def __init__(self, driver: SimDriver, *given: Any) -> None:
        super().__init__(driver, *given)
        server = driver.reached
        self.stars, self.durable, self.writes_max = server.stars, server.durable, server.writes_max
        self.sees_ends = server.stars

    async def _call(self, kind: Callable[..., Frame], *fields: object) -> Any:
        self._check_over()
        return await super()._call(kind, *fields)

    async def _connected(self) -> ClientConnection:
        self._check_over()
        return await super()._connected()

    def _check_over(self) -> None:
        if self._driver.node.loop.unwinding:
            raise Unreachable(self._driver.endpoint, "the run is over", applied=False)

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """Begin the lease by an exchange of its own if this session stands for etcd (without stars)."""
        lease = await super().grant(ttl_s, presence=presence)
        if not self.stars:
            grant = self._unborn.pop(lease)
            if presence:
                self._leases[lease] = None
            await self._call(frames.Txn, (), (), (), (), (grant,))
        return lease

    async def txn_then_watch(self, *given: Any) -> tuple[Outcome, Watch | None]:
        """Watch by a request of its own if this session stands for etcd."""
        kind = RemoteSession if self.stars else WatchesAfterwards
        return await kind.txn_then_watch(self, *given)

    def _lost(self, problem: str) -> None:
        if self._driver.node.loop.unwinding:
            self._link = None
        else:
            super()._lost(problem)


class SimDriver(RemoteDriver):
    """A node's way to whatever server the network's route names."""

    node: SimNode
    session_type = SimSession
    reached: SimServer
    """The server that answered last."""

    def __init__(
        self, network: SimNetwork, node: SimNode, read_timeout_s: float = READ_TIMEOUT_S, *, place: str = ""
    ) -> None:
        # Attempts to connect are shorter than any lease: one that went nowhere must leave time for the next.
        times = {"read_timeout_s": read_timeout_s, "connect_timeout_s": 3.0}
        super().__init__(ENDPOINT, run_id=RUN, trust=network.trust, node=node, place=place, **times)
        self.network = network
        self._known: dict[str, SimServer] = {}

    async def dial_named(self, greeting: Greeting | RunsWanted) -> tuple[ClientConnection, Welcome]:
        connection = self.network.connect(self.node)
        self.reached = self._known[connection.server.name] = connection.server
        try:
            return await self._greet(connection, self.hello(greeting), self.connect_timeout_s)
        except DialFailed as failed:
            # The network loses and delays greetings here. That is no reason to warn of a stranger at the port.
            raise DialFailed(failed.problem, answered=False) from None

    async def probe(self, address: Address, timeout_s: float) -> Welcome:
        server = self._known[str(address[1][0])]
        if any((self.node.name, server.name, way) in self.network.cuts for way in BOTH):
            await sleep(self.node, timeout_s)
            raise DialFailed("no answer", answered=False)
        connection = self.network.connect(self.node, server)
        link, welcome = await self._greet(connection, Hello(RUN, self.node.token(), 1, probe=True), timeout_s)
        link.close()
        return welcome

    async def _greet(
        self, connection: SimConnection, hello: Hello | RunsWanted, timeout_s: float
    ) -> tuple[ClientConnection, Welcome]:
        link = self.new_link()
        link.transport = connection.client_end
        connection.deliver, connection.lose = link.received, link.lose
        return link, await link.greet(hello, timeout_s)

    def local_host(self, link: ClientConnection, welcome: Welcome) -> str:  # noqa: ARG002
        return self.node.host
