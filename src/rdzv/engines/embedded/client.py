"""The driver for the embedded server: the port over TCP.

A session outlives its connections. It is bound to one engine instance: when another one answers, the session is over
(EngineReset) and nothing of it is ever sent again. Calls made while there is no connection wait for one. A call that was under
way when the connection was lost fails with an unknown outcome and is not repeated. Watches go on by the next connection from
where they were.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

from ...errors import SettingsError, Unreachable, Untrusted
from ...system.addresses import can_be_told, outward_address, plain
from ...system.dial import Address, DialFailed, show_address
from ...system.timers import backoff_s, sleep
from ..port import (
    Batch,
    Case,
    Compares,
    EngineReset,
    Gap,
    LeaseGone,
    NotNow,
    Operation,
    Operations,
    Outcome,
    ServerLife,
    Watch,
    WatchPlan,
    leases_of,
)
from ..watch_queue import WatchesAfterwards, WatchQueue, only_ends
from . import features, frames
from .connection import ClientConnection
from .dialer import STILL_THERE_S, Dialer, Greeting
from .features import WATCH
from .frames import Frame, RunsListed, RunsWanted, Welcome

logger = logging.getLogger("rdzv.remote")

BACKOFF_S = (0.02, 0.5)
"""First and longest wait between two attempts to reconnect.

The first is short because the nodes of a job start together: those quicker than the one that serves lost half a second each.
The longest is well below the usual linger: a member that can be back must be back before it is taken for lost."""

ASKED_AFTER_S = 1.0
"""An attempt to connect that failed so long after the next server was started has sent a packet after that start."""


class RemoteSession(WatchesAfterwards):
    """A client's session with the embedded server. Used from the loop it was made on."""

    durable = False
    stars = True

    def __init__(self, driver: RemoteDriver, greeting: Greeting, link: ClientConnection, welcome: Welcome) -> None:
        self.instance = welcome.instance
        self.place = welcome.place
        self.life: ServerLife | None = RemoteLife(driver, link, welcome, greeting.said_at) if driver.place else None
        self.fence_floor: int | None = welcome.fence_floor
        self.compares_max = welcome.compares_max
        self.writes_max = welcome.writes_max
        self.sees_ends = welcome.sees_ends
        self.local_host = driver.local_host(link, welcome)
        self.is_hosted = bool(welcome.only_run)
        """Whether an agent of the run hosts the server, and not `rdzv serve`."""
        self.server_address = show_address(link.transport.get_extra_info("peername"))
        self._driver = driver
        self._node = driver.node
        self._loop = asyncio.get_running_loop()
        self._link: ClientConnection | None = None
        self._redialing: asyncio.Task[None] | None = None
        self._waiters: dict[asyncio.Future[ClientConnection], None] = {}
        self._watches: dict[int, RemoteWatch] = {}
        self._watch_numbers = count(1)
        self._ended: type[Exception] | None = None
        self._leases: dict[int, None] = {}
        self._greeting = greeting
        greeting.instance, greeting.leases = self.instance, self._leases
        self._unborn: dict[int, frames.LeaseGrant] = {}
        if not self._use(link):
            self._lost("")

    # ---- the port

    async def txn(
        self, compares: Compares = (), then: Operations = (), otherwise: Operations = (), instead: Sequence[Case] = ()
    ) -> Outcome:
        given = tuple(compares), tuple(then), tuple(otherwise), tuple(instead)
        while self._link is None:  # A lease is said to begin when it can be said, and once.
            await self._connected()
        outcome: Outcome = await self._call(frames.Txn, *given, self._born(*given[1:]))
        return outcome

    def txn_now(self, compares: Compares, then: Operations, otherwise: Operations, limit_s: float) -> Outcome:
        """Transact in the calling thread, which is not the loop's. A lease can only begin in the loop."""
        link = self._link
        if link is None or self._unborn:
            raise NotNow
        try:
            outcome: Outcome = link.call_now(limit_s, frames.Txn, tuple(compares), tuple(then), tuple(otherwise))
        except TimeoutError:
            raise Unreachable(self._driver.endpoint, "no answer", limit_s) from None
        return outcome

    def _born(
        self, then: Sequence[Operation], otherwise: Sequence[Operation], instead: Sequence[Case]
    ) -> tuple[frames.LeaseGrant, ...]:
        """Return the leases that begin with a transaction.

        Each is sent once. After an unknown outcome it is not sent again, so that a key that was there and is gone cannot come
        back under its old id.
        """
        if not self._unborn:
            return ()
        leases = leases_of((then, otherwise, *(case.then for case in instead)))
        grants = [self._unborn.pop(lease) for lease in leases & self._unborn.keys()]
        self._leases.update({granting.lease: None for granting in grants if granting.presence})
        return tuple(grants)

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """Draw a lease. It begins with the first transaction that puts something under it, which saves an exchange per join."""
        if self._ended is not None:
            raise self._end_of_session()
        lease = (int(self._node.token(), 16) >> 2) + 1
        self._unborn[lease] = frames.LeaseGrant(lease, ttl_s, presence)
        return lease

    async def renew(self, lease: int) -> None:
        if lease in self._unborn and self._ended is None:
            return
        try:
            await self._call(frames.Renew, lease)
        except LeaseGone:
            self._leases.pop(lease, None)
            raise

    async def revoke(self, lease: int) -> None:
        if self._unborn.pop(lease, None) is not None and self._ended is None:
            return
        await self._call(frames.Revoke, lease)
        self._leases.pop(lease, None)

    def watch(self, targets: Sequence[str], since: int, ends: Sequence[str] = ()) -> RemoteWatch:
        watch = RemoteWatch(self._forget, next(self._watch_numbers), tuple(targets), since, tuple(ends))
        if self._ended is not None:
            watch.end(self._end_of_session())
        else:
            self._watches[watch.number] = watch
            if self._link is not None:
                watch.start(self._link)
        return watch

    async def txn_then_watch(
        self, plan: WatchPlan, compares: Compares = (), then: Operations = (), otherwise: Operations = (),
        instead: Sequence[Case] = (),
    ) -> tuple[Outcome, Watch | None]:  # fmt: skip
        if self._link is None or WATCH not in self._link.features:
            return await super().txn_then_watch(plan, compares, then, otherwise, instead)
        given = tuple(compares), tuple(then), tuple(otherwise), tuple(instead)
        link, number = self._link, next(self._watch_numbers)
        watch = self._watches[number] = RemoteWatch(self._forget, number, plan.targets, 0, plan.ends, begun=False)
        words = number, plan.targets, plan.ends, plan.first_of
        try:
            outcome: Outcome = await self._call(features.TxnThenWatch, *given, self._born(*given[1:]), *words)
        except BaseException:
            await watch.aclose()
            raise
        if not outcome.succeeded:
            watch.at_engine = False
            await watch.aclose()
            return outcome, None
        watch.begin(outcome.revision, plan.found(outcome))
        if self._link is not link and self._link is not None:
            watch.start(self._link)  # Another connection has come about between the answer and this.
        return outcome, watch

    async def close(self) -> None:
        """End the session. The goodbye leaves its leases alone; a connection that breaks does not."""
        if self._ended is not None:
            return
        link, redialing = self._link, self._redialing
        self._end(Unreachable)
        if link is not None:
            link.close()
        if redialing is not None:
            await asyncio.wait([redialing])

    # ---- connections

    async def _call(self, kind: Callable[..., Frame], *fields: object) -> Any:
        while (link := self._link) is None:  # The one that was waited for may be lost before this task goes on.
            await self._connected()
        return await link.call(kind, *fields)

    async def _connected(self) -> ClientConnection:
        """Wait for the connection to be restored."""
        if self._ended is not None:
            raise self._end_of_session()
        waiter: asyncio.Future[ClientConnection] = self._loop.create_future()
        self._waiters[waiter] = None
        endpoint, limit_s = self._driver.endpoint, self._driver.read_timeout_s
        problem = Unreachable(endpoint, "the connection was lost and is not back", limit_s, applied=False)
        timer = self._node.call_later(limit_s, lambda: None if waiter.done() else waiter.set_exception(problem))
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.pop(waiter, None)

    def _use(self, link: ClientConnection) -> bool:
        """Go on with this connection. Return False if it was lost before the session could be told."""
        link.on_lost = self._lost
        link.on_news = self._told
        if not link.is_open:
            return False
        self._link = link
        link.admit_threads(link.fileno())
        for watch in self._watches.values():
            if watch.begun:
                watch.start(link)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(link)
        return True

    def _lost(self, _problem: str) -> None:
        """Look for another connection."""
        if self._link is not None and self._link.violation:
            self._driver.warn(self._link.violation)
        self._link = None
        if self._ended is None:
            self._redialing = self._loop.create_task(self._redial(), name=f"rdzv reconnects to {self._driver.endpoint}")

    async def _redial(self) -> None:
        """Dial until a server answers, however many attempts it takes."""
        first_s, longest_s = BACKOFF_S
        longest_s = max(first_s, min(longest_s, self._driver.linger_s / 2))
        for attempt in count():
            try:
                link, welcome = await self._driver.dial(self._greeting)
            except (Unreachable, Untrusted, SettingsError) as error:
                if not isinstance(error, Unreachable):
                    # Final for a newcomer, but an outage for a member that is in: the mistake may be undone before it matters.
                    self._driver.warn(error.problem)
                await sleep(self._node, backoff_s(attempt, (first_s, longest_s), self._node.jitter()))
            else:
                break
        self._redialing = None
        if welcome.instance != self.instance:
            link.close()
            self._end(EngineReset)
        elif not self._use(link):
            self._lost("")

    def _end(self, how: type[Exception]) -> None:
        """End for good: every call and watch fails from now on."""
        self._ended = how
        self._link = None
        if self._redialing is not None:
            self._redialing.cancel()
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(self._end_of_session())
        for watch in tuple(self._watches.values()):
            watch.end(self._end_of_session())

    def _end_of_session(self) -> Exception:
        if self._ended is EngineReset:
            return EngineReset(f"instance {self.instance} at {self.place} is gone")
        return Unreachable(self._driver.endpoint, "the session is closed", applied=False)

    # ---- watches

    def _told(self, number: int, news: Batch | Gap) -> None:
        watch = self._watches.get(number)
        if watch is None:
            return  # Closed while this was under way.
        if isinstance(news, Batch):
            watch.deliver(news)
        else:
            watch.at_engine = False
            watch.end(news)

    def _forget(self, watch: RemoteWatch) -> None:
        """The watch ended, from whichever side."""
        if self._watches.pop(watch.number, None) is not None and self._link is not None and watch.at_engine:
            self._link.tell(frames.WatchStop(watch.number))


class RemoteWatch(WatchQueue):
    """A watch that a new connection can go on with."""

    def __init__(
        self, forget: Callable[[RemoteWatch], None], number: int, targets: tuple[str, ...], since: int,
        ends: tuple[str, ...] = (), *, begun: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(since)
        self.number = number
        self.targets = targets
        self.ends = ends
        self.begun = begun
        """Whether it has begun. One that begins with a transaction has not before the answer to that."""
        self.at_engine = True
        """Whether the engine still has it, and must be told of its end."""
        self._forget = forget

    def begin(self, revision: int, found: tuple[str, ...]) -> None:
        """Note that the transaction which begins the watch was done at that revision, and found that key."""
        self.ends += found
        self.seen = max(self.seen, revision)  # News that came with the answer may be there already.
        self.begun = True

    def start(self, link: ClientConnection) -> None:
        """Let the engine watch, from where the reader is."""
        if not self.ends:
            link.tell(frames.WatchStart(self.number, self.targets, self.seen))
        elif WATCH in link.features:
            link.tell(features.EndsWatchStart(self.number, self.targets, self.seen, self.ends))
        else:
            self._ends = frozenset(only_ends(self.targets, self.ends))
            link.tell(frames.WatchStart(self.number, self.targets + self.ends, self.seen))

    def ended(self) -> None:
        self._forget(self)


class RemoteLife:
    """One life of the server at the declared place (T16.4)."""

    def __init__(self, driver: RemoteDriver, link: ClientConnection, welcome: Welcome, asked_at: float) -> None:
        """`asked_at`: when the welcome was asked for, by the client's clock."""
        where = link.transport.get_extra_info("peername")
        self.name = welcome.promised
        self.server = welcome.server
        self.began_at = asked_at - welcome.age_s
        self.address = show_address(where)
        self._where: Address = (int(socket.AF_INET6 if ":" in str(where[0]) else socket.AF_INET), tuple(where))
        self._driver = driver

    async def answers(self, since: float) -> bool:
        if self._driver.failed_at.get(self._where, -math.inf) > since + ASKED_AFTER_S:
            return False
        try:
            return (await self._driver.probe(self._where, STILL_THERE_S)).server == self.server
        except DialFailed as failed:
            # A process that was stopped or frozen is not gone: the kernel accepts connections for it.
            return failed.is_server and not (failed.untrusted or failed.other_run)

    def follow(self) -> None:
        self._driver.follows = self


class RemoteDriver(Dialer):
    """Reaches the server that an endpoint names, on behalf of one run."""

    session_type: type[Any] = RemoteSession

    async def connect(self) -> RemoteSession:
        greeting = Greeting(self.node.token(), count(1))
        link, welcome = await self.dial(greeting)
        session: RemoteSession = self.session_type(self, greeting, link, welcome)
        return session

    async def list_runs(self, after: str = "") -> RunsListed:
        """Ask the server for a page of its runs. Raise Unreachable or Untrusted."""
        try:
            link, answer = await self.dial_named(RunsWanted(after))
        except DialFailed as failed:
            if "cannot be read" in failed.problem:
                failed.problem = "this server is older than this rdzv and cannot list its runs: name the run (--run-id)"
            raise self.unreachable(failed) from None
        link.close()
        return cast("RunsListed", answer)  # The connection takes no other answer to that frame.

    async def close(self) -> None:
        """Do nothing: the server belongs to another process."""

    def local_host(self, link: ClientConnection, welcome: Welcome) -> str:
        """Return the address at which others reach this process: that of its own connection, which really works.

        A connection to a server on this node may be loopback, because a node's own name often means that to itself. Then it is
        the address at which others have reached the server; before any has, the one from which we would reach others.
        """
        own = plain(link.transport.get_extra_info("sockname")[0])
        if can_be_told(own) or self.named.is_loopback or self.named.is_one_machine:
            return own
        if not own.startswith("127.") and own != "::1":
            return ""  # Link-local: it means something else on every host.
        return welcome.reached_at or outward_address() or own

