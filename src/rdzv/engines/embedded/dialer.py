"""How a client gets a connection: it resolves the name of the endpoint, connects, and is greeted.

All addresses of a server are tried: the next one as soon as the one before has failed or has taken too long.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from ...config.endpoint import Endpoint
from ...errors import Unreachable, Untrusted
from ...system.dial import CONNECT_TIMEOUT_S, Address, DialFailed, Resolver, connect, show_address
from ...system.node import LocalNode, Node
from . import features, frames
from .connection import ClientConnection, greet
from .frames import Hello, RunsWanted, Welcome
from .trust import Trust

if TYPE_CHECKING:
    from .client import RemoteLife

logger = logging.getLogger("rdzv.remote")

STAGGER_S = 0.25
"""How long to wait for one address before the next one is tried, too."""
STILL_THERE_S = 2.0
"""How long a former server has to answer before the next one of its name is followed. A second packet is sent after a second.
Shorter than the time that members have to come back to an empty engine (BACK_S)."""


@dataclass
class Greeting:
    """The part of a session's greetings that is its own. Each greeting has another number."""

    session: str
    attempts: count[int]
    instance: str = ""
    leases: Iterable[int] = ()
    """Presences that it brings back."""
    said_at: float = 0.0
    """When it was said last. Not before the name was resolved, which may take long."""


class Dialer:
    """Dials the server that an endpoint names, on behalf of one run."""

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
        self.own_address: tuple[str, int] | None = None
        """Where to dial in place of what the endpoint names: a server of this process."""
        self._resolver = Resolver()
        self._warned = ""
        self._warned_at = -math.inf

    async def dial(self, greeting: Greeting) -> tuple[ClientConnection, Welcome]:
        """Try once to get a connection. Raise Unreachable or Untrusted."""
        try:
            link, welcome = await self.dial_named(greeting)
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
        link = self.new_link()
        welcome = await greet(sock, hello, link, timeout_s)
        link.close()
        return welcome

    async def dial_named(self, greeting: Greeting | RunsWanted) -> tuple[ClientConnection, Welcome]:
        """Try all addresses of the endpoint. Raise DialFailed."""
        addresses = await self.addresses()
        try:
            return await dial(addresses, lambda: self.hello(greeting), self.new_link, self.connect_timeout_s)
        except DialFailed as failed:
            if not failed.answered:
                self.failed_at = dict.fromkeys(addresses, self.node.now())
            raise

    async def addresses(self) -> list[Address]:
        """Resolve the endpoint's name. Raise DialFailed."""
        if self.own_address is None and not self.named.hosts:
            raise DialFailed("it names no host, and no server was started for it here", answered=False)
        host, port = self.own_address or self.named.hosts[0]
        return await self._resolver.resolve(host, port, self.connect_timeout_s)

    def hello(self, greeting: Greeting | RunsWanted) -> Hello | RunsWanted:
        """Return the next greeting, to be said now."""
        if isinstance(greeting, RunsWanted):
            return greeting
        now = greeting.said_at = self.node.now()
        follows = () if self.follows is None else (False, self.follows.server, now - self.follows.began_at)
        brought, session = tuple(greeting.leases)[-frames.LEASES_MAX :], features.mark(greeting.session)
        return Hello(self.run_id, session, next(greeting.attempts), greeting.instance, brought, self.linger_s, *follows)

    def new_link(self) -> ClientConnection:
        host = self.named.hosts[0][0] if self.named.hosts else "127.0.0.1"
        return ClientConnection(self.endpoint, self.read_timeout_s, self.trust, host, self.node)

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


async def dial(
    addresses: Sequence[Address], hello: Callable[[], Hello | RunsWanted], new_link: Callable[[], ClientConnection],
    timeout_s: float,
) -> tuple[ClientConnection, Welcome]:
    """Return a connection to the first address where a server welcomes us. Raise DialFailed with the problem at each.

    Only one connection is greeted at a time, because a greeting moves the session's leases to its connection.
    """
    loop = asyncio.get_running_loop()
    connecting: list[asyncio.Task[socket.socket]] = []
    for address in addresses:
        former = connecting[-1] if connecting else None
        connecting.append(loop.create_task(_connect(address, former, timeout_s), name="rdzv dials"))
    problems: dict[str, None] = {}
    remedies: dict[str, None] = {}
    answered, passing, untrusted, other_run = False, True, True, True
    taken: socket.socket | None = None
    try:
        for connected in asyncio.as_completed(connecting):
            try:
                taken = await connected
                link = new_link()
                return link, await greet(taken, hello(), link, timeout_s)
            except DialFailed as failed:
                problems[failed.problem] = None
                if failed.remedy:
                    remedies[failed.remedy] = None
                answered = answered or failed.answered
                passing = passing and (failed.passing or not failed.answered)
                untrusted = untrusted and (failed.untrusted or not failed.answered)
                other_run = other_run and (failed.other_run or not failed.answered)
    finally:
        for task in connecting:
            if task.done():
                _let_go(task, taken)
            else:
                # A connection that comes about at this very moment wins over its cancellation: `wait_for` returns it.
                task.cancel()
                task.add_done_callback(_let_go)
    problem = "; ".join(problems) or "its name has no address"
    how = {"untrusted": answered and untrusted, "other_run": answered and other_run}
    raise DialFailed(problem, answered=answered, passing=passing, remedy="; ".join(remedies), **how)


def _let_go(task: asyncio.Task[socket.socket], taken: socket.socket | None = None) -> None:
    """Close the socket of an attempt to connect that nobody waits for any more, unless it was taken."""
    if not task.cancelled() and task.exception() is None and task.result() is not taken:
        task.result().close()


async def _connect(address: Address, former: asyncio.Task[socket.socket] | None, timeout_s: float) -> socket.socket:
    if former is not None:
        await asyncio.wait([former], timeout=STAGGER_S)
    return await connect(address, timeout_s)
