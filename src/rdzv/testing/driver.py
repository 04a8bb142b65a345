"""The port over the simulated network: what a member holds in the simulation instead of a real driver."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import count

from ..drivers.base import Batch, Case, Compare, EngineReset, Operation, Outcome
from ..drivers.inbox import Inbox
from ..errors import Unreachable
from ..machine import sleep
from .machines import SimMachine
from .network import Connection, Network
from .server import Welcome

CONNECT_TIMEOUT_S = 3.0
"""Shorter than any lease: an attempt that went nowhere must leave time for the next one."""
READ_TIMEOUT_S = 10.0
BACKOFF_S = (0.05, 1.0)
"""First and longest wait between two attempts to reconnect; each is jittered down to its half."""


class SimDriver:
    """One machine's way to whatever server the network's route names."""

    def __init__(
        self,
        network: Network,
        machine: SimMachine,
        endpoint: str = "sim://engine",
        read_timeout_s: float = READ_TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
    ) -> None:
        self.network = network
        self.machine = machine
        self.endpoint = endpoint
        self.read_timeout_s = read_timeout_s
        self.connect_timeout_s = connect_timeout_s

    async def connect(self) -> SimSession:
        """See the port."""
        connection, welcome = await self.dial()
        return SimSession(self, connection, welcome)

    async def close(self) -> None:
        """Nothing to give up: servers are the scenario's."""

    async def dial(self, leases: Iterable[int] = (), instance: str = "") -> tuple[Connection, Welcome]:
        """Connect and say hello; `leases` are those of a session that comes back to `instance`."""
        connection = self.network.connect(self.machine, self.endpoint, self.connect_timeout_s)
        try:
            welcome = await connection.call("hello", tuple(leases), instance)
        except Unreachable as error:
            raise Unreachable(self.endpoint, error.problem, error.waited_s, applied=False) from None
        except asyncio.CancelledError:
            connection.lose()
            raise
        connection.timeout_s = self.read_timeout_s
        return connection, welcome


class SimSession:
    """Bound to one instance. Restores its connection by itself, in a task of its machine."""

    def __init__(self, driver: SimDriver, connection: Connection, welcome: Welcome) -> None:
        self.instance = welcome.instance
        self.place = welcome.place
        self.durable = welcome.durable
        self.compares_max = welcome.compares_max
        self.writes_max = welcome.writes_max
        self.local_host = driver.machine.host
        self._driver = driver
        self._machine = driver.machine
        self._loop = driver.machine.loop
        self._connection: Connection | None = None
        self._redialing: asyncio.Task[None] | None = None
        self._waiters: dict[asyncio.Future[Connection], None] = {}
        self._leases: dict[int, None] = {}
        self._watches: dict[int, SimWatch] = {}
        self._watch_numbers = count(1)
        self._ended: type[Exception] | None = None
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
        connection = self._connection or await self._connected()
        args = tuple(compares), tuple(then), tuple(otherwise), tuple(instead)
        outcome: Outcome = await connection.call("txn", *args)
        return outcome

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """See the port."""
        connection = self._connection or await self._connected()
        lease: int = await connection.call("grant", ttl_s, presence)
        self._leases[lease] = None
        return lease

    async def renew(self, lease: int) -> None:
        """See the port."""
        connection = self._connection or await self._connected()
        await connection.call("renew", lease)

    async def revoke(self, lease: int) -> None:
        """See the port."""
        connection = self._connection or await self._connected()
        await connection.call("revoke", lease)
        self._leases.pop(lease, None)

    def watch(self, targets: Sequence[str], since: int) -> SimWatch:
        """Whatever is wrong is said by the watch."""
        watch = SimWatch(self, next(self._watch_numbers), tuple(targets), since)
        if self._ended is not None:
            watch.end(self._end_of_session())
        else:
            self._watches[watch.number] = watch
            if self._connection is not None:
                self._connection.tell("watch", watch.number, watch.targets, since)
        return watch

    async def close(self) -> None:
        """A connection that says goodbye leaves its leases alone; one that breaks does not."""
        if self._ended is not None:
            return
        connection = self._connection
        self._end(Unreachable)
        if connection is not None:
            connection.tell("bye")
            connection.lose()

    # ---- connections

    async def _connected(self) -> Connection:
        """Wait for the connection to be restored."""
        if self._ended is not None:
            raise self._end_of_session()
        if self._loop.unwinding:
            raise Unreachable(self._driver.endpoint, "the run is over", applied=False)
        waiter: asyncio.Future[Connection] = self._loop.create_future()
        self._waiters[waiter] = None
        limit_s = self._driver.read_timeout_s
        problem = Unreachable(self._driver.endpoint, "the connection was lost and is not back", limit_s, applied=False)
        timer = self._machine.call_later(limit_s, lambda: None if waiter.done() else waiter.set_exception(problem))
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)

    def _use(self, connection: Connection) -> bool:
        """Go on with this connection; False if it is lost already, before anybody here could be told."""
        if not connection.open:
            return False
        self._connection = connection
        connection.on_lost = self._lost
        connection.on_push = self._pushed
        for watch in self._watches.values():
            connection.tell("watch", watch.number, watch.targets, watch.seen)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(connection)
        return True

    def _lost(self) -> None:
        self._connection = None
        if self._ended is None and not self._loop.unwinding:
            self._redialing = self._loop.create_task(self._redial())

    async def _redial(self) -> None:
        first_s, longest_s = BACKOFF_S
        for attempt in count():
            try:
                connection, welcome = await self._driver.dial(self._leases, self.instance)
            except Unreachable:
                wait_s = min(first_s * 2 ** min(attempt, 10), longest_s)
                await sleep(self._machine, wait_s * (1 - self._machine.jitter() / 2))
                continue
            if welcome.instance != self.instance:
                connection.lose()
                self._redialing = None
                self._end(EngineReset)
                return
            if self._use(connection):
                return

    def _end(self, how: type[Exception]) -> None:
        """For good: every call and watch fails from now on."""
        self._ended = how
        self._connection = None
        if self._redialing is not None:
            self._redialing.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._end_of_session())
        for watch in list(self._watches.values()):
            watch.end(self._end_of_session())

    def _end_of_session(self) -> Exception:
        if self._ended is EngineReset:
            return EngineReset(f"instance {self.instance} at {self.place} is gone")
        return Unreachable(self._driver.endpoint, "the session is closed", applied=False)

    def _pushed(self, number: int, news: Batch | Exception) -> None:
        watch = self._watches.get(number)
        if watch is None:
            return  # Closed while this was under way.
        if isinstance(news, Batch):
            watch.deliver(news)
        else:
            watch.end(news)

    def forget(self, watch: SimWatch) -> None:
        """The watch ended, from whichever side."""
        if self._watches.pop(watch.number, None) is not None and self._connection is not None:
            self._connection.tell("unwatch", watch.number)


class SimWatch(Inbox):
    """A watch that a new connection can be told to go on with."""

    def __init__(self, session: SimSession, number: int, targets: tuple[str, ...], since: int) -> None:
        super().__init__(since)
        self.number = number
        self.targets = targets
        self._session = session

    def ended(self) -> None:
        """The server must hear of it."""
        self._session.forget(self)
