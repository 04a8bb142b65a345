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
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, TypeAlias, cast

from ...config.endpoint import Endpoint
from ...errors import Unreachable, Untrusted
from ...system.addresses import can_be_told, outward_address, plain
from ...system.dial import CONNECT_TIMEOUT_S, Address, DialFailed, Resolver, connect, show_address
from ...system.node import LocalNode, Node
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
from ..watch_queue import WatchesAfterwards
from . import features, frames
from .connection import ClientConnection, dial, greet
from .features import WATCH
from .frames import Frame, Hello, RunsListed, RunsWanted, Welcome
from .remote_watch import RemoteWatch
from .trust import Trust

logger = logging.getLogger("rdzv.remote")

BACKOFF_S = (0.02, 0.5)
"""First and longest wait between two attempts to reconnect.

The first is short because the nodes of a job start together: those quicker than the one that serves lost half a second each.
The longest is well below the usual linger: a member that can be back must be back before it is taken for lost."""

STILL_THERE_S = 2.0
"""How long a former server has to answer before the next one of its name is followed. A second packet is sent after a second.
Shorter than the time that members have to come back to an empty engine (BACK_S)."""

ASKED_AFTER_S = 1.0
"""An attempt to connect that failed so long after the next server was started has sent a packet after that start."""

Greeter: TypeAlias = Callable[[], Hello | RunsWanted]
"""Makes a greeting: each has a number of its own."""


class RemoteSession(WatchesAfterwards):
    """A client's session with the embedded server. Used from the loop it was made on."""

    durable = False
    stars = True

    def __init__(
        self, driver: RemoteDriver, name: str, attempts: count[int], link: ClientConnection, welcome: Welcome, asked_at: float,
    ) -> None:  # fmt: skip
        self.instance = welcome.instance
        self.place = welcome.place
        self.life: ServerLife | None = RemoteLife(driver, link, welcome, asked_at) if driver.place else None
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
        self._name = name
        self._attempts = attempts
        self._loop = asyncio.get_running_loop()
        self._link: ClientConnection | None = None
        self._redialing: asyncio.Task[None] | None = None
        self._waiters: dict[asyncio.Future[ClientConnection], None] = {}
        self._watches: dict[int, RemoteWatch] = {}
        self._watch_numbers = count(1)
        self._ended: type[Exception] | None = None
        self._leases: dict[int, None] = {}
        self._unborn: dict[int, frames.LeaseGrant] = {}
        if not self._use(link):
            self._lost("")

    # ---- the port

    async def txn(
        self, compares: Compares = (), then: Operations = (), otherwise: Operations = (), instead: Sequence[Case] = ()
    ) -> Outcome:
        given = tuple(compares), tuple(then), tuple(otherwise), tuple(instead)
        outcome: Outcome = await self._call(lambda number: frames.Txn(number, *given, self._born(*given[1:])))
        return outcome

    def txn_now(self, compares: Compares, then: Operations, otherwise: Operations, limit_s: float) -> Outcome:
        """Transact in the calling thread, which is not the loop's. A lease can only begin in the loop."""
        link, given = self._link, (tuple(compares), tuple(then), tuple(otherwise))
        if link is None or self._unborn:
            raise NotNow
        try:
            outcome: Outcome = link.call_now(lambda number: frames.Txn(number, *given), limit_s)
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
            await self._call(lambda number: frames.Renew(number, lease))
        except LeaseGone:
            self._leases.pop(lease, None)
            raise

    async def revoke(self, lease: int) -> None:
        if self._unborn.pop(lease, None) is not None and self._ended is None:
            return
        await self._call(lambda number: frames.Revoke(number, lease))
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
            outcome: Outcome = await self._call(
                lambda number: features.TxnThenWatch(number, *given, self._born(*given[1:]), *words)
            )
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

    async def _call(self, frame: Callable[[int], Frame]) -> Any:
        return await (self._link or await self._connected()).call(frame)

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
                link, welcome = await self._driver.dial(
                    lambda: self._driver.hello(self._name, next(self._attempts), self.instance, self._leases)
                )
            except (Unreachable, Untrusted) as error:
                if isinstance(error, Untrusted):
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


class RemoteDriver:
    """Reaches the server that an endpoint names, on behalf of one run."""

    session_type: type[Any] = RemoteSession

    def __init__(
        self, endpoint: Endpoint, *, run_id: str, linger_s: float = 1.0, read_timeout_s: float = 10.0,
        connect_timeout_s: float = CONNECT_TIMEOUT_S, trust: Trust | None = None, node: Node | None = None, place: str = "",
    ) -> None:  # fmt: skip
        """`node`: the clock and the source of chance to go by. `place`: the declared place of the server (T16.4)."""
        self.endpoint = str(endpoint)
        self.run_id = run_id
        self.linger_s = linger_s
        self.read_timeout_s = read_timeout_s
        # With a declared place, members that lost their server must be back at the next one within BACK_S.
        self.connect_timeout_s = min(connect_timeout_s, STILL_THERE_S) if place else connect_timeout_s
        self.named = endpoint
        self.trust = trust or Trust()
        self.node = node or LocalNode()
        self.place = place
        self.failed_at: dict[Address, float] = {}
        """When no connection came about to these addresses: those of the last attempt that failed."""
        self.follows: RemoteLife | None = None
        """The life of the server at the declared place that the member follows, or followed last."""
        self._resolver = Resolver()
        self._warned = ""
        self._warned_at = -math.inf

    async def connect(self) -> RemoteSession:
        name, attempts, asked_at = self.node.token(), count(1), self.node.now()

        def hello() -> Hello:
            nonlocal asked_at
            asked_at = self.node.now()  # Not before the name was resolved, which may take long.
            return self.hello(name, next(attempts))

        link, welcome = await self.dial(hello)
        session: RemoteSession = self.session_type(self, name, attempts, link, welcome, asked_at)
        return session

    async def list_runs(self, after: str = "") -> RunsListed:
        """Ask the server for a page of its runs. Raise Unreachable or Untrusted."""
        try:
            link, answer = await self.dial_named(lambda: RunsWanted(after))
        except DialFailed as failed:
            if "cannot be read" in failed.problem:
                failed.problem = "this server is older than this rdzv and cannot list its runs: name the run (--run-id)"
            raise self.unreachable(failed) from None
        link.close()
        return cast("RunsListed", answer)  # The connection takes no other answer to that frame.

    async def close(self) -> None:
        """Do nothing: the server belongs to another process."""

    def hello(self, session: str, attempt: int, instance: str = "", leases: Iterable[int] = ()) -> Hello:
        """Return the greeting of a session, with the presences it brings back."""
        follows = () if self.follows is None else (False, self.follows.server, self.node.now() - self.follows.began_at)
        brought = tuple(leases)[-frames.LEASES_MAX :]
        return Hello(self.run_id, features.mark(session), attempt, instance, brought, self.linger_s, *follows)

    async def dial(self, hello: Greeter) -> tuple[ClientConnection, Welcome]:
        """Try once to get a connection. Raise Unreachable or Untrusted."""
        try:
            link, welcome = await self.dial_named(hello)
            self.check_place(link, welcome)
        except DialFailed as failed:
            raise self.unreachable(failed) from None
        return link, welcome

    def check_place(self, link: ClientConnection, welcome: Welcome) -> None:
        """Raise DialFailed, and hang up, if a place was declared and the server there has not that name."""
        if self.place and welcome.promised != self.place:
            link.close()
            where = show_address(link.transport.get_extra_info("peername"))
            named = repr(welcome.promised) if welcome.promised else "none"
            problem = f"place is {self.place!r} here and {named} of the server there: start both with the same place"
            raise DialFailed(f"{where}: {problem}", answered=True)

    async def probe(self, address: Address, timeout_s: float) -> Welcome:
        """Ask the server at that address who it is. Raise DialFailed."""
        sock = await connect(address, timeout_s)
        hello = Hello(self.run_id, secrets.token_hex(8), 1, probe=True)
        link, welcome = await greet(sock, hello, self.new_link, timeout_s)
        link.close()
        return welcome

    async def dial_named(self, hello: Greeter) -> tuple[ClientConnection, Welcome]:
        """Try all addresses of the endpoint. Raise DialFailed."""
        addresses = await self.addresses()
        try:
            return await dial(addresses, hello, self.new_link, self.connect_timeout_s)
        except DialFailed as failed:
            if not failed.answered:
                self.failed_at = dict.fromkeys(addresses, self.node.now())
            raise

    async def addresses(self) -> list[Address]:
        """Resolve the endpoint's name. Raise DialFailed."""
        if not self.named.hosts:
            raise DialFailed("it names no host, and no server was started for it here", answered=False)
        (host, port), *_ = self.named.hosts
        return await self._resolver.resolve(host, port, self.connect_timeout_s)

    def new_link(self) -> ClientConnection:
        host = self.named.hosts[0][0] if self.named.hosts else "127.0.0.1"
        return ClientConnection(self.endpoint, self.read_timeout_s, self.trust, host, self.node)

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

    def unreachable(self, failed: DialFailed) -> Unreachable | Untrusted:
        """Return the error for an attempt that failed. A program that answers in a server's place is logged."""
        if failed.untrusted:
            return Untrusted(self.endpoint, failed.problem)
        if failed.answered and not failed.passing:
            self.warn(failed.problem)
        problem, remedy, other_run = failed.problem, failed.remedy, failed.other_run
        return Unreachable(self.endpoint, problem, applied=False, remedy=remedy, other_run=other_run)

    def warn(self, problem: str) -> None:
        """Log a problem unless it is the last one again, at most once per second: rubbish must not fill the log as well."""
        now = self.node.now()
        if problem != self._warned and now - self._warned_at >= 1.0:
            self._warned, self._warned_at = problem, now
            logger.warning("engine %s: %s", self.endpoint, problem)
