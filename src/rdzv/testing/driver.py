"""The port over the simulated network: what a member holds in the simulation instead of a real driver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import count

from ..engines.embedded.reconnecting import ReconnectingSession, ReconnectingWatch
from ..engines.port import Case, Compare, Operation, Outcome
from ..errors import Unreachable
from ..system.timers import sleep
from .network import SimConnection, SimNetwork
from .nodes import SimNode
from .server import SimWelcome

CONNECT_TIMEOUT_S = 3.0
"""Shorter than any lease: an attempt that went nowhere must leave time for the next one."""
READ_TIMEOUT_S = 10.0
BACKOFF_S = (0.05, 1.0)
"""First and longest wait between two attempts to reconnect; each is jittered down to its half."""


class SimDriver:
    """One machine's way to whatever server the network's route names."""

    def __init__(
        self,
        network: SimNetwork,
        node: SimNode,
        endpoint: str = "sim://engine",
        read_timeout_s: float = READ_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.network = network
        self.node = node
        self.endpoint = endpoint
        self.read_timeout_s = read_timeout_s
        self.connect_timeout_s = connect_timeout_s

    async def connect(self) -> SimSession:
        """See the port."""
        connection, welcome = await self.dial()
        return SimSession(self, connection, welcome)

    async def close(self) -> None:
        """Nothing to give up: servers are the scenario's."""

    async def dial(self, leases: Iterable[int] = (), instance: str = "") -> tuple[SimConnection, SimWelcome]:
        """Connect and say hello; `leases` are those of a session that comes back to `instance`."""
        connection = self.network.connect(self.node, self.endpoint, self.connect_timeout_s)
        try:
            welcome = await connection.call("hello", tuple(leases), instance)
        except Unreachable as error:
            raise Unreachable(self.endpoint, error.problem, error.waited_s, applied=False) from None
        except asyncio.CancelledError:
            connection.lose()
            raise
        connection.timeout_s = self.read_timeout_s
        return connection, welcome


class SimSession(ReconnectingSession[SimConnection]):
    """A real session but for its connections, in tasks of its machine."""

    def __init__(self, driver: SimDriver, connection: SimConnection, welcome: SimWelcome) -> None:
        node, patience_s = driver.node, driver.read_timeout_s
        super().__init__(driver.endpoint, welcome.instance, welcome.place, node.loop, node.call_later, patience_s)
        self.durable = welcome.durable
        self.compares_max = welcome.compares_max
        self.writes_max = welcome.writes_max
        self.stars = welcome.stars
        self.local_host = driver.node.host
        self._driver = driver
        self._node = driver.node
        self._leases: dict[int, None] = {}
        if not self._use(connection):
            self._lost()

    # ---- the port

    async def txn(
        self,
        compares: Iterable[Compare] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
        instead: Sequence[Case] = (),
    ) -> Outcome:
        """See the port."""
        connection = self._link or await self._connected()
        args = tuple(compares), tuple(then), tuple(otherwise), tuple(instead)
        outcome: Outcome = await connection.call("txn", *args)
        return outcome

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """See the port."""
        connection = self._link or await self._connected()
        lease: int = await connection.call("grant", ttl_s, presence)
        self._leases[lease] = None
        return lease

    async def renew(self, lease: int) -> None:
        """See the port."""
        connection = self._link or await self._connected()
        await connection.call("renew", lease)

    async def revoke(self, lease: int) -> None:
        """See the port."""
        connection = self._link or await self._connected()
        await connection.call("revoke", lease)
        self._leases.pop(lease, None)

    async def close(self) -> None:
        """A connection that says goodbye leaves its leases alone; one that breaks does not."""
        if self._ended is not None:
            return
        connection = self._link
        self._end(Unreachable)
        if connection is not None:
            connection.tell("bye")
            connection.lose()

    # ---- connections

    async def _connected(self) -> SimConnection:
        if self._node.loop.unwinding:
            raise Unreachable(self._endpoint, "the run is over", applied=False)
        return await super()._connected()

    def _take_on(self, link: SimConnection) -> bool:
        link.on_lost = self._lost
        link.on_push = self._told
        return link.open

    def _hang_up(self, link: SimConnection) -> None:
        link.lose()

    def _lost(self) -> None:
        if self._node.loop.unwinding:
            self._link = None
        else:
            super()._lost()

    async def _dial_again(self) -> tuple[SimConnection, str]:
        first_s, longest_s = BACKOFF_S
        for attempt in count():
            try:
                connection, welcome = await self._driver.dial(self._leases, self.instance)
            except Unreachable:
                wait_s = min(first_s * 2 ** min(attempt, 10), longest_s)
                await sleep(self._node, wait_s * (1 - self._node.jitter() / 2))
            else:
                return connection, welcome.instance
        raise AssertionError  # It counts without end.

    def _begin_watch(self, link: SimConnection, watch: ReconnectingWatch, since: int) -> None:
        link.tell("watch", watch.number, watch.targets, since)

    def _end_watch(self, link: SimConnection, watch: ReconnectingWatch) -> None:
        link.tell("unwatch", watch.number)
