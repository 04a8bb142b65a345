"""The embedded engine's driver over the simulated network: the one that ships, but for how it gets a connection."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

from ..config.endpoint import Endpoint
from ..engines.embedded import frames
from ..engines.embedded.client import Greeter, RemoteDriver, RemoteSession
from ..engines.embedded.connection import ClientConnection
from ..engines.embedded.frames import Frame, Welcome
from ..engines.port import Batch, Gap
from ..errors import Unreachable
from ..system.dial import DialFailed
from .network import SimNetwork
from .nodes import SimNode
from .server import RUN, SimServer

CONNECT_TIMEOUT_S = 3.0
"""Shorter than any lease: an attempt that went nowhere must leave time for the next one."""
READ_TIMEOUT_S = 10.0


class SimSession(RemoteSession):
    """The shipping session in a process that can crash, with what its engine says of itself."""

    _driver: SimDriver

    def __init__(self, driver: SimDriver, name: str, attempts: count[int], link: ClientConnection, welcome: Welcome) -> None:
        super().__init__(driver, name, attempts, link, welcome)
        server = driver.reached
        self.stars, self.durable = server.stars, server.durable
        self.compares_max, self.writes_max = server.compares_max, server.writes_max

    async def _call(self, frame: Callable[[int], Frame]) -> Any:
        if self._driver.node.loop.unwinding:
            raise Unreachable(self._driver.endpoint, "the run is over", applied=False)
        return await super()._call(frame)

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """Begin the lease by an exchange of its own if this session stands for etcd (without stars)."""
        lease = await super().grant(ttl_s, presence=presence)
        if not self.stars:
            grant = self._unborn.pop(lease)
            if presence:
                self._leases[lease] = None
            await self._call(lambda number: frames.Txn(number, (), (), (), (), (grant,)))
        return lease

    def _lost(self, problem: str) -> None:
        if self._driver.node.loop.unwinding:
            self._link = None
        else:
            super()._lost(problem)

    def _told(self, number: int, news: Batch | Gap) -> None:
        if isinstance(news, Batch):
            self._driver.network.counters[self._driver.node.name].events += len(news.events)
        super()._told(number, news)


class SimDriver(RemoteDriver):
    """A node's way to whatever server the network's route names."""

    node: SimNode
    session_type = SimSession
    reached: SimServer
    """The server that answered last."""

    def __init__(
        self,
        network: SimNetwork,
        node: SimNode,
        read_timeout_s: float = READ_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        super().__init__(
            Endpoint.parse("engine:29400"),
            run_id=RUN,
            read_timeout_s=read_timeout_s,
            connect_timeout_s=connect_timeout_s,
            trust=network.trust,
            node=node,
        )
        self.network = network

    async def dial_named(self, hello: Greeter) -> tuple[ClientConnection, Welcome]:
        connection = self.network.connect(self.node)
        self.reached = connection.server
        link = self.new_link()
        link.transport = connection.client_end
        connection.deliver, connection.lose = link.received, link.lose
        try:
            return link, await link.greet(hello(), self.connect_timeout_s)
        except DialFailed as failed:
            # The network loses and delays greetings here. That is no reason to warn of a stranger at the port.
            raise DialFailed(failed.problem, answered=False) from None

    def local_host(self, link: ClientConnection, welcome: Welcome) -> str:  # noqa: ARG002
        return self.node.host
