"""The driver for the embedded server: the port over TCP.

A session restores its connection by itself (see `lasting`).
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, TypeAlias

from ...config.endpoint import Endpoint
from ...errors import Unreachable, Untrusted
from ...system.addresses import can_be_told, outward_address, plain
from ...system.dial import CONNECT_TIMEOUT_S, Address, DialFailed, Resolver
from ...system.timers import backoff_s
from ..port import Case, Compare, LeaseGone, Operation, Outcome, leases_of
from . import frames
from .connection import ClientConnection
from .dial import dial
from .frames import Frame, Hello, Welcome
from .reconnecting import ReconnectingSession, ReconnectingWatch
from .trust import Trust

logger = logging.getLogger("rdzv.remote")

BACKOFF_S = (0.02, 0.5)
"""First and longest wait between two attempts to reconnect.

The longest is well below the usual linger: who can be back must be back before it is taken for lost."""

Greeter: TypeAlias = Callable[[], Hello]
"""Makes a greeting: each has a number of its own."""
Asker: TypeAlias = Callable[[int], Frame]


class RemoteDriver:
    """Reaches the server that an endpoint names, on behalf of one run."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        run_id: str,
        linger_s: float = 1.0,
        read_timeout_s: float = 10.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        trust: Trust | None = None,
    ) -> None:
        self.endpoint = str(endpoint)
        self.run_id = run_id
        self.linger_s = linger_s
        self.read_timeout_s = read_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self.named = endpoint
        self.trust = trust or Trust()
        self._resolver = Resolver()
        self._warned = ""
        self._warned_at = -math.inf

    async def connect(self) -> RemoteSession:
        """See the port."""
        name, attempts = secrets.token_hex(8), count(1)
        link, welcome = await self.dial(lambda: self.hello(name, next(attempts)))
        return RemoteSession(self, name, attempts, link, welcome)

    async def close(self) -> None:
        """Nothing to give up: the server is somebody else's."""

    def hello(self, session: str, attempt: int, instance: str = "", leases: Iterable[int] = ()) -> Hello:
        """What a session greets with."""
        brought = tuple(leases)[-frames.LEASES_MAX :]
        return Hello(self.run_id, session, attempt, instance, brought, self.linger_s)

    async def dial(self, hello: Greeter) -> tuple[ClientConnection, Welcome]:
        """One attempt to get a connection. Raises Unreachable, Untrusted."""
        try:
            return await self.dial_named(hello)
        except DialFailed as failed:
            raise self.unreachable(failed) from None

    async def dial_named(self, hello: Greeter) -> tuple[ClientConnection, Welcome]:
        """Raises DialFailed."""
        addresses = await self.addresses()
        return await dial(addresses, hello, self.new_link, self.connect_timeout_s)

    async def addresses(self) -> list[Address]:
        """What the endpoint's name means now. Raises DialFailed."""
        if not self.named.hosts:
            raise DialFailed("it names no host, and no server was started for it here", answered=False)
        (host, port), *_ = self.named.hosts
        return await self._resolver.resolve(host, port, self.connect_timeout_s)

    def new_link(self) -> ClientConnection:
        """For a new connection."""
        host = self.named.hosts[0][0] if self.named.hosts else "127.0.0.1"
        return ClientConnection(self.endpoint, self.read_timeout_s, self.trust, host)

    def unreachable(self, failed: DialFailed) -> Unreachable | Untrusted:
        """The error for an attempt that failed. Who answers in a server's place is worth a line in the log."""
        if failed.untrusted:
            return Untrusted(self.endpoint, failed.problem)
        if failed.answered and not failed.passing:
            self.warn(failed.problem)
        return Unreachable(self.endpoint, failed.problem, applied=False, remedy=failed.remedy)

    def warn(self, problem: str) -> None:
        """Once, until there is another one, and at most once per second: who sends rubbish must not fill the log as well."""
        now = asyncio.get_running_loop().time()
        if problem != self._warned and now - self._warned_at >= 1.0:
            self._warned, self._warned_at = problem, now
            logger.warning("engine %s: %s", self.endpoint, problem)


class RemoteSession(ReconnectingSession[ClientConnection]):
    """See the module's docstring."""

    durable = False
    stars = True

    def __init__(self, driver: RemoteDriver, name: str, attempts: count[int], link: ClientConnection, welcome: Welcome) -> None:
        loop, patience_s = asyncio.get_running_loop(), driver.read_timeout_s
        super().__init__(driver.endpoint, welcome.instance, welcome.place, loop, loop.call_later, patience_s)
        self.compares_max = welcome.compares_max
        self.writes_max = welcome.writes_max
        self.local_host = local_host(link, welcome, driver.named)
        self._driver = driver
        self._name = name
        self._attempts = attempts
        self._leases: dict[int, None] = {}
        self._unborn: dict[int, frames.LeaseGrant] = {}
        if not self._use(link):
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
        given = tuple(compares), tuple(then), tuple(otherwise), tuple(instead)
        outcome: Outcome = await self._call(lambda number: frames.Txn(number, *given, self._born(*given[1:])))
        return outcome

    def _born(
        self, then: Sequence[Operation], otherwise: Sequence[Operation], instead: Sequence[Case]
    ) -> tuple[frames.LeaseGrant, ...]:
        """The leases that begin with a transaction. Each is sent once: one that was given up must not live again."""
        if not self._unborn:
            return ()
        born = leases_of((then, otherwise, *(case.then for case in instead))) & self._unborn.keys()
        grants = [self._unborn.pop(lease) for lease in born]
        self._leases.update({granting.lease: None for granting in grants if granting.presence})
        return tuple(grants)

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """It costs nothing, and begins with the first transaction that puts something under it."""
        if self._ended is not None:
            raise self._end_of_session()
        lease = secrets.randbits(62) + 1
        self._unborn[lease] = frames.LeaseGrant(lease, ttl_s, presence)
        return lease

    async def renew(self, lease: int) -> None:
        """See the port."""
        if lease in self._unborn and self._ended is None:
            return
        try:
            await self._call(lambda number: frames.Renew(number, lease))
        except LeaseGone:
            self._leases.pop(lease, None)
            raise

    async def revoke(self, lease: int) -> None:
        """See the port."""
        if self._unborn.pop(lease, None) is not None and self._ended is None:
            return
        await self._call(lambda number: frames.Revoke(number, lease))
        self._leases.pop(lease, None)

    async def close(self) -> None:
        """A connection that says goodbye leaves its leases alone; one that breaks does not."""
        if self._ended is not None:
            return
        link = self._link
        redialing = self._redialing
        self._end(Unreachable)
        if link is not None:
            link.close()
        if redialing is not None:
            await asyncio.wait([redialing])

    # ---- connections

    async def _call(self, frame: Asker) -> Any:
        link = self._link or await self._connected()
        return await link.call(frame)

    def _take_on(self, link: ClientConnection) -> bool:
        link.on_lost = self._lost_by
        link.on_news = self._told
        return link.is_open

    def _hang_up(self, link: ClientConnection) -> None:
        link.close()

    def _lost_by(self, _problem: str) -> None:
        if self._link is not None and self._link.violation:
            self._driver.warn(self._link.violation)
        self._lost()

    async def _dial_again(self) -> tuple[ClientConnection, str]:
        first_s, longest_s = BACKOFF_S
        longest_s = max(first_s, min(longest_s, self._driver.linger_s / 2))
        for attempt in count():
            try:
                link, welcome = await self._driver.dial(self._hello_again)
            except (Unreachable, Untrusted) as error:
                if isinstance(error, Untrusted):
                    # Who is in does not go because of another's mistake, which may be undone before it matters.
                    self._driver.warn(error.problem)
                await asyncio.sleep(backoff_s(attempt, (first_s, longest_s), random.random()))  # noqa: S311
            else:
                return link, welcome.instance
        raise AssertionError  # It counts without end.

    def _hello_again(self) -> Hello:
        return self._driver.hello(self._name, next(self._attempts), self.instance, self._leases)

    def _begin_watch(self, link: ClientConnection, watch: ReconnectingWatch, since: int) -> None:
        link.tell(frames.WatchStart(watch.number, watch.targets, since))

    def _end_watch(self, link: ClientConnection, watch: ReconnectingWatch) -> None:
        link.tell(frames.WatchStop(watch.number))


def local_host(link: ClientConnection, welcome: Welcome, endpoint: Endpoint) -> str:
    """The address at which others reach this process: that of its own connection, which really works.

    To a server on this machine the connection may be loopback, because a machine's own name often means that to itself.
    Then it is the address at which others have reached the server; before any has, the one we would reach others from.
    """
    own = plain(link.transport.get_extra_info("sockname")[0])
    if can_be_told(own):
        return own
    if endpoint.is_loopback or endpoint.is_one_machine:
        return own
    if not own.startswith("127.") and own != "::1":
        return ""  # Link-local: it means something else on every host.
    return welcome.reached_at or outward_address() or own
