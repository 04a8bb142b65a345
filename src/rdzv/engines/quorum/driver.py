"""The driver for `quorum://`: the etcd driver, and on a listed host the voter that runs etcd there.

A member's session also checks that the cluster is the one of its run: another run may have the same ports.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from ...config.endpoint import Endpoint
from ...errors import RdzvError, SettingsError, Unreachable
from ...system.addresses import is_here, is_loopback
from ...system.dial import DialFailed, Resolver, connect
from ...system.timers import in_time
from ..etcd.client.credentials import Credentials
from ..etcd.driver import EtcdDriver, EtcdSession, SharedClient
from ..port import EngineReset, List, MemberHealth, Put, Session
from .agreement import Offer, VoterState, quorum_name
from .etcd_program import PeerTls, find_program, peers_of, shown
from .exchange import Asker, NoOffer
from .health import look_at_members
from .state import StateFolder, default_base, prepare
from .voter import Contexts, Quorum, Voter, waiting_for

logger = logging.getLogger("rdzv.quorum")

RESOLVE_S = 2.0
PROBE_EVERY_S = 0.1  # Pause between two attempts to find an etcd that has a client port.
LOOK_EVERY_S = 0.2  # Pause between two looks whether the others have gone.
TOLD_S = 5.0
"""How long a host that has seen the end of the run keeps its etcd for hosts that have none: they may be back soon."""
ENDS = "rdzv-quorum/ends/"  # The keys of the hosts that have seen the end of the run.
ALL_LOST = (
    "bring the hosts back that have their data; if a majority has lost it, end all agents of the run, remove its folders in "
    "state_dir on the listed hosts, and start it again"
)
ALL_NEEDED = "start an agent of the run on each host of the list, with the same list and run id on all"
SILENT_S = 5.0  # A quorum that does not answer a host that leaves for so long has gone.


class Remaining(msgspec.Struct, frozen=True):
    """The members that are left in a run, and whether it is over."""

    members: int
    closed: bool


class Security(msgspec.Struct, frozen=True):
    """How the traffic of a quorum is protected: for clients, for the exchange, and for etcd's own arguments."""

    credentials: Credentials
    contexts: Contexts
    tls: PeerTls | None
    knows_members: bool


_voters: dict[tuple[int, str], tuple[Voter, set[QuorumDriver]]] = {}
"""The voters of this process, by event loop and folder, and the drivers that use them."""


class QuorumSession(EtcdSession):
    """A session on a quorum."""

    quorum: Quorum
    asker: Asker

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        """Grant a lease. Only members ask for a presence, and they must be in the quorum of their own run."""
        if presence:
            await self._call(self._check_run())
        return await super().grant(ttl_s, presence=presence)

    async def _check_run(self) -> None:
        names = [member.name for member in await self.client.members()]
        if any(name and not name.startswith(f"{self.quorum.name}-") for name in names):
            raise Unreachable(
                self._driver.endpoint, "the etcd there belongs to another run, or was started with another list of hosts",
                applied=False, other_run=True, remedy="give each run its own ports, and all its nodes the same list",
            )  # fmt: skip

    async def health(self) -> list[MemberHealth]:
        """Return how each host's etcd is, in the order of the list."""
        return await look_at_members(self.quorum.hosts, self._driver.credentials, self.asker)


class QuorumDriver(EtcdDriver):
    """Connects to the quorum of a run, and votes in it where this host is listed."""

    def __init__(
        self, endpoint: Endpoint, security: Security, *, run_id: str, is_host: bool | None, state_dir: str, stay_s: float,
        remaining: Callable[[Session], Awaitable[Remaining]], **options: Any,
    ) -> None:  # fmt: skip
        """`remaining`: reads what is left of the run. `stay_s`: how long `close` waits for the others."""
        super().__init__(endpoint, security.credentials, **options)
        hosts = tuple(shown(*host) for host in endpoint.hosts)
        self.quorum = Quorum(quorum_name(run_id, hosts), run_id, endpoint.hosts)
        self._security = security
        self._is_host = is_host
        self._base = Path(state_dir) if state_dir else default_base()
        self._stay_s = stay_s
        self._remaining = remaining
        self._resolver = Resolver()
        self._asker = Asker(peers_of(self.quorum.hosts), security.contexts.client)
        self._voters: list[Voter] = []
        self._closed = False

    async def connect(self) -> EtcdSession:
        """Vote if this host is listed, and open a session. Raises Unreachable (with who is missing), or SettingsError."""
        if not self._voters and self._is_host is not False and not self._closed:
            await self._begin()
        await self._wait_for_etcd()
        session = await super().connect()
        for voter in self._voters:
            voter.formed = True
        return session

    def make_session(self, shared: SharedClient) -> EtcdSession:
        session = QuorumSession(self, shared)
        session.quorum = self.quorum
        session.asker = self._asker
        return session

    async def close(self) -> None:
        """Stop voting, but not before the others have gone, or `stay_s` have passed. Remove the data of a run that is over."""
        self._closed = True
        last = [voter for voter in self._voters if self._is_last_user(voter)]
        self._voters.clear()
        if last:
            forget = False
            try:
                forget = any(voter.votes for voter in last) and await self._stay(last)
            finally:  # Also if the caller waits no longer: nobody else ends these etcds.
                await asyncio.gather(*(voter.stop(forget=forget) for voter in last))

    async def program(self) -> str:
        """Return the etcd of this machine if it is one of the hosts. Raises SettingsError with what to install."""
        if not await self._here():
            return ""
        found = await asyncio.to_thread(find_program)
        return f"etcd {found.version} ({found.path})"

    # ---- voting

    async def _here(self) -> list[tuple[int, str]]:
        """Return the entries of the list that are this machine, and where each listens ("": at all interfaces)."""
        found = await asyncio.gather(*(self._own_address(*host) for host in self.quorum.hosts))
        return [(index, address) for index, address in enumerate(found) if address is not None]

    async def _begin(self) -> None:
        """Start the voters of this host: one for each entry of the list that is here."""
        here = await self._here()
        if self._is_host and not here:
            raise SettingsError(f"is_host is true, and no host of {self.endpoint} has an address of this machine")
        if not here or self._voters or self._closed:
            return
        if self.credentials.tls and self._security.tls is None:
            raise SettingsError(f"this host is one of {self.endpoint} and TLS is on: give it tls_cert and tls_key")
        await asyncio.to_thread(prepare, self._base)
        program = await asyncio.to_thread(find_program)
        if program.loses_data:
            logger.warning(
                "etcd %s (%s) can lose writes in a crash: here it rebuilds its database from its log at each start, which is "
                "safe and slower; etcd 3.5.16 or later needs no such help", program.version, program.path,
            )  # fmt: skip
        if not self._security.knows_members and not self.parsed_endpoint.is_loopback:
            ports = ", ".join(f"{self.quorum.hosts[index][1]} and {self.quorum.hosts[index][1] + 1}" for index, _ in here)
            logger.warning(
                "anybody who reaches ports %s of this machine can take part in its runs: give all nodes certificates "
                "(tls_cert, tls_key, tls_ca) or a secret (RDZV_TOKEN or token_file)", ports,
            )  # fmt: skip
        for index, address in here:
            host, port = self.quorum.hosts[index]
            folder = StateFolder(self._base, f"{self.quorum.name}-{host.replace(':', '_')}-{port}")
            key = (id(asyncio.get_running_loop()), str(folder.path))
            if key not in _voters:
                security = self._security
                voter = Voter(self.quorum, index, address, folder, program, security.contexts, security.tls)
                _voters[key] = (voter, set())
                voter.start()
            voter, users = _voters[key]
            users.add(self)
            self._voters.append(voter)

    async def _own_address(self, host: str, port: int) -> str | None:
        """Return where to listen if the host is this one ("": at all interfaces), or None."""
        try:
            addresses = await self._resolver.resolve(host, port, RESOLVE_S)
        except DialFailed:
            return None
        own = [str(where[0]) for family, where in addresses if is_here(family, str(where[0]))]
        if not own:
            return None
        # A node's own name may mean loopback to itself, and a real address to the others.
        return next((one for one in own if self.parsed_endpoint.is_loopback or not is_loopback(one)), "")

    def _is_last_user(self, voter: Voter) -> bool:
        for key, (one, users) in tuple(_voters.items()):
            if one is voter:
                users.discard(self)
                if not users:
                    del _voters[key]
                    return True
        return False

    # ---- connecting

    async def _wait_for_etcd(self) -> None:
        """Wait until some host has an etcd to talk to. Raises Unreachable with what the hosts are waiting for."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.connect_timeout_s
        while True:
            if await self._running(self.quorum.hosts):
                return
            if loop.time() >= deadline:
                lost = any(voter.standing is VoterState.CLIENT for voter in self._voters)
                here = any(voter.reason == voter.problem for voter in self._voters)
                raise Unreachable(
                    self.endpoint, await self._why_not(), self.connect_timeout_s, applied=False,
                    remedy=ALL_LOST if lost else "" if here else ALL_NEEDED,
                )  # fmt: skip
            await asyncio.sleep(PROBE_EVERY_S)

    async def _has_port(self, host: str, port: int) -> bool:
        with suppress(DialFailed):
            for address in await self._resolver.resolve(host, port, RESOLVE_S):
                with suppress(DialFailed):
                    (await connect(address, RESOLVE_S)).close()
                    return True
        return False

    async def _why_not(self) -> str:
        """Return what the hosts wait for: as the voter here knows it, or as the hosts tell everyone."""
        if self._voters:
            return "; ".join(dict.fromkeys(voter.reason for voter in self._voters))
        questions = (self._asker.ask(index) for index in range(len(self.quorum.hosts)))
        answers = await asyncio.gather(*questions, return_exceptions=True)
        heard = {index: answer for index, answer in enumerate(answers) if isinstance(answer, Offer)}
        silent = {index: str(answer) for index, answer in enumerate(answers) if isinstance(answer, NoOffer)}
        return waiting_for(self.quorum, heard, silent)

    # ---- leaving

    async def _stay(self, voters: list[Voter]) -> bool:
        """Serve the others until they have gone, and return whether the run is over and its data can be removed.

        A host that sees the end of the run writes that down. It goes when all hosts that run etcd have: otherwise the others
        could lose their majority before they have seen the end, and would keep their data. If too few run etcd to answer, the
        others have gone. If enough do and there is no answer, they elect, as they must when the first that goes was the leader.
        """
        loop = asyncio.get_running_loop()
        answered_at, ended_at, closed = loop.time(), math.inf, False
        deadline = loop.time() + self._stay_s
        session: EtcdSession | None = None
        try:
            while True:
                answered = False
                with suppress(RdzvError, EngineReset, asyncio.TimeoutError):
                    if session is None:
                        session = await in_time(SILENT_S, super().connect())
                    left = await in_time(SILENT_S, self._remaining(session))
                    closed = left.closed
                    if not left.members and not closed:
                        return False
                    if not left.members:
                        ended_at = min(ended_at, loop.time())
                        unaware = await in_time(SILENT_S, self._write_end(session, voters))
                        if not unaware or (loop.time() > ended_at + TOLD_S and not await self._running(unaware)):
                            return True
                    answered, answered_at = True, loop.time()
                if not answered and await self._running(self.quorum.hosts) <= len(self.quorum.hosts) // 2:
                    if ended_at < math.inf:
                        return True
                    if loop.time() > answered_at + SILENT_S:
                        return closed
                if loop.time() >= deadline:
                    if ended_at < math.inf:
                        return True
                    text = "stopped its etcd for run %r after %g s, although members are left"
                    logger.warning(text, self.quorum.run_id, self._stay_s)
                    return False
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            if session is not None:
                await session.close()

    async def _write_end(self, session: EtcdSession, voters: list[Voter]) -> list[tuple[str, int]]:
        """Write that this host has seen the end of the run, and return the hosts that have not written it."""
        writes = [Put(f"{ENDS}{voter.me}", b"") for voter in voters]
        written = {item.key for item in (await session.txn(then=[*writes, List(ENDS)])).reads[-1]}
        return [host for index, host in enumerate(self.quorum.hosts) if f"{ENDS}{index}" not in written]

    async def _running(self, hosts: Sequence[tuple[str, int]]) -> int:
        """Return how many of these hosts have an etcd to talk to."""
        return sum(await asyncio.gather(*(self._has_port(*host) for host in hosts)))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_voters.clear)
