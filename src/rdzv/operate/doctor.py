"""Checks each step from this machine to a run: names, routes, ports, the server, trust, rights, clock, torch.

The doctor writes nothing, serves nothing and joins nothing. Every finding is *ok*, a *warning* (it may fail) or a *problem* (it
will fail). Warnings and problems have a remedy. docs/errors.md has an entry for every problem's code.
"""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import ipaddress
import re
import socket
import ssl
import statistics
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from email.utils import parsedate_to_datetime

import msgspec

from .._version import __version__
from ..config.settings import Settings
from ..core.keys import Keys
from ..drivers import etcd_user, open_driver
from ..engines.embedded.session import DOCTOR
from ..engines.embedded.trust import Certificates, Trust
from ..engines.port import Created, Driver, EngineReset, Get, MemberHealth, Put, Replicated, RunsProgram, Session
from ..errors import RdzvError, SettingsError, Unreachable, Untrusted
from ..system.addresses import can_be_told, interfaces, is_here, is_loopback, listen, plain, source_of
from ..system.dial import CONNECT_TIMEOUT_S, Address, DialFailed, Resolver, connect
from ..system.node import http_date
from .runs import RunList, list_runs

OK, WARNING, PROBLEM = "ok", "warning", "problem"
PROBLEMS = {
    "RDZV-P01": "The name does not resolve",
    "RDZV-P02": "There is no route to the address",
    "RDZV-P03": "The connection is refused",
    "RDZV-P04": "The packets are dropped",
    "RDZV-P05": "The port is taken by another program here",
    "RDZV-P06": "Another program answers",
    "RDZV-P07": "The two sides do not trust each other",
    "RDZV-P08": "The engine answers, but does not do what is asked",
    "RDZV-P09": "torchrun does not find rdzv",
    "RDZV-P10": "This host cannot run etcd",
}  # All problems, by code. A code is never reused.
NO_RUN = "doctor"  # The run id of a user who named none.
SLOW_S = 0.5  # Replies that take longer make the engine look dead now and then.
CLOCK_S = 2.0
"""The smallest difference that can be seen: both clocks are read in whole seconds, and the reply takes time."""
ANSWER_MAX = 16 * 1024
TRIES = 5
TORCH_MIN = (2, 6)  # The first version with the entry point group `torchrun.handlers`.
_NEVER = 2**62  # A revision that no key has.


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor's output."""

    level: str
    topic: str
    text: str
    remedy: str = ""
    code: str = ""


def problem(code: str, topic: str, text: str, remedy: str) -> Finding:
    """Make a finding whose code has an entry in docs/errors.md."""
    assert code in PROBLEMS, code
    return Finding(PROBLEM, topic, text, remedy, code)


class Doctor:
    """Examines the connection from here to one endpoint."""

    def __init__(self, settings: Settings, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        self._settings = settings
        self._endpoint = settings.endpoint
        self._timeout_s = connect_timeout_s
        self._resolver = Resolver()
        self._is_etcd = self._endpoint.scheme in ("etcd", "etcds", "quorum")
        self._reached = False

    async def examine(self) -> AsyncIterator[Finding]:
        """Yield the findings step by step. A problem ends the steps that depend on it. Raises SettingsError."""
        driver = open_driver(self._settings)
        try:
            yield await self._own_name()
            if not self._endpoint.hosts:
                yield Finding(OK, "endpoint", f"{self._endpoint} names no host, so there is no network to check")
            elif self._endpoint.is_loopback:
                text = f"{self._endpoint} is reachable on this machine only"
                yield Finding(WARNING, "endpoint", text, "if nodes are on several machines, name the host that serves")
            for host, port in self._endpoint.hosts:
                async for finding in self._host(host, port):
                    yield finding
                if self._endpoint.scheme == "quorum":  # The voters talk to each other at the next port.
                    async for finding in self._host(host, port + 1):
                        yield finding
            if isinstance(driver, RunsProgram):
                for finding in await program_findings(driver):
                    yield finding
            if self._reached or not self._endpoint.hosts:
                async for finding in self._engine(driver):
                    yield finding
            for finding in torch_findings():
                yield finding
        finally:
            await driver.close()

    async def _own_name(self) -> Finding:
        """Check the machine's own name. It may resolve to loopback (Debian's 127.0.1.1): harmless here, but not everywhere."""
        name = socket.gethostname()
        try:
            addresses = await self._resolver.resolve(name, 0, self._timeout_s)
        except DialFailed:
            text = f"this machine is {name!r}, which it cannot resolve"
            remedy = "rdzv does not need it; other programs may: add it to the hosts file"
            return Finding(WARNING, "own name", text, remedy)
        found = [plain(str(where[0])) for _, where in addresses]
        text = f"this machine is {name!r}, which resolves to {', '.join(found)}"
        if not all(map(is_loopback, found)):
            return Finding(OK, "own name", text)
        remedy = "for other programs let the hosts file name a real address, or give local_addr"
        remedy = f"rdzv tells others the address of its connection instead; {remedy}"
        return Finding(WARNING, "own name", f"{text} here: others cannot use that", remedy)

    async def _host(self, host: str, port: int) -> AsyncIterator[Finding]:
        try:
            addresses = await self._resolver.resolve(host, port, self._timeout_s)
        except DialFailed as failed:
            remedy = "check the spelling; fix DNS or the hosts file, or give an address; members wait for the name"
            yield problem("RDZV-P01", "name", failed.problem, remedy)
            return
        found = [plain(str(where[0])) for _, where in addresses]
        families = " and ".join(sorted({f"IPv{ipaddress.ip_address(one).version}" for one in found}))
        yield Finding(OK, "name", f"{host} resolves to {', '.join(dict.fromkeys(found))} ({families})")
        if not self._endpoint.is_loopback and any(map(is_loopback, found)):
            text = f"{host} resolves to this machine here; on other machines it may resolve to another address"
            yield Finding(WARNING, "name", text, "make it resolve to the same host everywhere, or give an address")
        tried = await asyncio.gather(*(self._address(address, port) for address in addresses))
        findings = [finding for some in tried for finding in some]
        works = any(finding.level == OK and finding.topic in ("port", "serving") for finding in findings)
        for finding in findings:
            if works and finding.level == PROBLEM:
                remedy = "other addresses of the name work; this one costs time"
                yield Finding(WARNING, finding.topic, finding.text, remedy)
            else:
                yield finding

    async def _address(self, address: Address, port: int) -> list[Finding]:
        family, where = address
        shown = f"[{where[0]}]:{port}" if ":" in str(where[0]) else f"{where[0]}:{port}"
        source = source_of(family, where)
        if not source:
            remedy = "this machine has no route or no address of that family: use the other family, or fix the routes"
            return [problem("RDZV-P02", "route", f"there is no route from here to {where[0]}", remedy)]
        here = is_here(family, str(where[0]))
        names = dict(interfaces())
        through = f"through {names[source]} ({source})" if source in names else f"from {source}"
        findings = [Finding(OK, "route", f"{where[0]} is {'this node' if here else 'reached ' + through}")]
        try:
            sock = await connect(address, self._timeout_s)
        except DialFailed as failed:
            return [*findings, self._not_connected(failed, shown, port, here=here)]
        sock.close()
        self._reached = True
        return [*findings, Finding(OK, "port", f"a program accepts connections at {shown}")]

    def _not_connected(self, failed: DialFailed, shown: str, port: int, *, here: bool) -> Finding:
        if here and self._endpoint.scheme in ("rdzv", "quorum"):
            return self._could_serve(port, shown)
        if "no answer" in failed.problem:
            remedy = "a firewall drops the packets, or the host is off: open the port between the nodes, or choose another one"
            return problem("RDZV-P04", "port", failed.problem, remedy)
        if "refused" in failed.problem:
            remedy = "start the node or service that serves there, or correct the port: the host is up, and nothing listens"
            return problem("RDZV-P03", "port", failed.problem, remedy)
        remedy = "the network has no route to it: check the address and this machine's routes"
        return problem("RDZV-P02", "route", failed.problem, remedy)

    def _could_serve(self, port: int, shown: str) -> Finding:
        try:
            for listener in listen("" if not self._endpoint.is_loopback else self._endpoint.hosts[0][0], port):
                listener.close()
        except OSError as error:
            text = f"nothing answers at {shown}, and port {port} cannot be bound here: {(error.strerror or str(error)).lower()}"
            remedy = "end the program that has the port (ss -ltnp shows it), or choose another port for all nodes"
            if error.errno != errno.EADDRINUSE:
                remedy = "choose another port for all nodes, above 1023, or give this user the right to bind this one"
            return problem("RDZV-P05", "serving", text, remedy)
        return Finding(OK, "serving", f"nothing serves at {shown} yet; this machine can bind it, so a member here would serve")

    async def _engine(self, driver: Driver) -> AsyncIterator[Finding]:
        yield self._trust()
        try:
            session = await driver.connect()
        except (Untrusted, SettingsError, Unreachable) as error:
            if isinstance(error, Unreachable) and error.other_run:
                async for finding in self._other_run(error):
                    yield finding
            else:
                yield self._not_welcome(error)
            return
        try:
            kept = "keeps its records through a restart" if session.durable else "keeps its records in memory"
            yield Finding(OK, "engine", f"an engine answers; it {kept} (place {session.place})")
            async for finding in self._use(session):
                yield finding
            if isinstance(session, Replicated):
                for voter in await session.health():
                    yield voter_finding(voter)
            for host, port in self._endpoint.hosts:
                date = await self._date(host, port)
                if date:
                    yield clock_finding(f"{host}:{port}", date, http_date())
        finally:
            with suppress(RdzvError):
                await session.close()

    def _not_welcome(self, error: Untrusted | SettingsError | Unreachable) -> Finding:
        """Return the problem with an engine that answers. Its remedy must be one for that very problem."""
        if isinstance(error, Untrusted):
            remedy = "give all nodes the same token_file (or RDZV_TOKEN) and tls settings"
            if "certificate" in error.problem:
                remedy = "replace the certificate, or correct tls_ca, tls_cert or tls_server_name; see docs/security.md"
            return problem("RDZV-P07", "trust", error.problem, remedy)
        if isinstance(error, SettingsError):
            remedy = "name the run that you will join with --run-id"
            if self._is_etcd:  # The user lacks rights.
                remedy = "give this node the name, password and rights that it needs there; see docs/etcd.md"
            return problem("RDZV-P08", "engine", error.problem, remedy)
        if self._is_etcd:
            remedy = error.remedy or "make sure that a majority of the cluster's members is up (etcdctl endpoint status)"
            return problem("RDZV-P08", "engine", error.problem, remedy)
        if "just started" in error.problem:
            return Finding(WARNING, "engine", error.problem, "ask again in a few seconds")
        remedy = error.remedy or "another program has that port: correct the endpoint, or choose another port for all nodes"
        return problem("RDZV-P06", "engine", error.problem, remedy)

    async def _other_run(self, error: Unreachable) -> AsyncIterator[Finding]:
        """Examine the one run of an agent's server, unless another run was asked for."""
        listed = RunList(())
        if self._settings.run_id == NO_RUN:
            with suppress(RdzvError):
                listed = await list_runs(self._settings, limit=1)
        if not listed.runs:
            remedy = "check --run-id; two runs need a port each, or one server for both (`rdzv serve`)"
            yield problem("RDZV-P08", "run", error.problem, remedy)
            return
        run_id = listed.runs[0].run_id
        yield Finding(OK, "run", f"an agent of run {run_id!r} serves there, and keeps that run only")
        self._settings = msgspec.structs.replace(self._settings, run_id=run_id)
        driver = open_driver(self._settings)
        try:
            async for finding in self._engine(driver):
                yield finding
        finally:
            await driver.close()

    async def _date(self, host: str, port: int) -> str:
        """Return the server's HTTP date, or "". Our server answers plain HTTP with it, and etcd is a web server."""
        scheme, given, answer = self._endpoint.scheme, self._settings, b""
        if scheme not in ("rdzv", "etcd", "etcds"):
            return ""
        context = Certificates(given.tls_ca, given.tls_cert, given.tls_key).client() if scheme == "etcds" else None
        with suppress(OSError, asyncio.TimeoutError):
            answer = await asyncio.wait_for(_ask_http(host, port, context), self._timeout_s)
        found = re.search(rb"\r\ndate: *([^\r]{1,40})\r\n", answer, re.IGNORECASE)
        return found[1].decode("latin-1") if found else ""

    def _trust(self) -> Finding:
        if self._endpoint.scheme in ("etcd", "etcds"):
            tls = "with TLS" if self._endpoint.scheme == "etcds" else "without TLS"
            user = etcd_user(self._endpoint)
            return Finding(OK, "trust", f"this node connects {tls} and {f'as {user!r}' if user else 'without a name'}")
        trust = Trust.of(self._settings)
        by_secret = self._endpoint.scheme == "quorum" and trust.secret is not None
        tls = "with TLS" if trust.certificates is not None or by_secret else "without TLS"
        if trust.secret is None and not self._endpoint.is_loopback and self._endpoint.scheme in ("rdzv", "quorum"):
            text = f"this node connects {tls} and without a secret: any program that reaches the port can join"
            return Finding(WARNING, "trust", text, "give all nodes a token_file; see docs/security.md")
        secret = "with" if trust.secret is not None else "without"
        return Finding(OK, "trust", f"this node connects {tls} and {secret} a secret")

    async def _use(self, session: Session) -> AsyncIterator[Finding]:
        """Check that the engine may be read and written, by a write whose condition never holds."""
        keys = Keys(self._settings.run_id)
        own = keys.run + "doctor"
        took: list[float] = []
        loop = asyncio.get_running_loop()
        try:
            for _ in range(TRIES):
                began_at = loop.time()
                seen = await session.txn([Created(own, _NEVER)], [Put(own, b"")], [Get(keys.settings)])
                took.append(loop.time() - began_at)
        except (RdzvError, EngineReset, ValueError) as error:
            reason = error.sentence if isinstance(error, RdzvError) else str(error)
            text = f"a read and a write that would change nothing are refused: {reason}"
            yield problem("RDZV-P08", "engine", text, "give this user the right to read and write the keys of rdzv")
            return
        usual_s = statistics.median(took)
        if usual_s > SLOW_S:
            text = f"it takes {usual_s:.1f} s to answer"
            yield Finding(WARNING, "engine", text, "look for load or a slow disk there; a short lease will not hold")
        else:
            yield Finding(OK, "engine", f"it may be read and written, and answers in {usual_s * 1000:.1f} ms")
        if self._settings.run_id != NO_RUN:
            there = "is kept there" if seen.item(0) is not None else "is not kept there yet: nobody has joined it"
            yield Finding(OK, "run", f"run {self._settings.run_id!r} {there}")
        told = self._settings.local_addr or session.local_host
        if told and can_be_told(told):
            yield Finding(OK, "address", f"others would be told to reach this node at {told}")
        elif not self._endpoint.is_loopback and self._endpoint.hosts:
            text = f"others would be told to reach this node at {told or 'its name'}, which works only here"
            yield Finding(WARNING, "address", text, "give local_addr, an address of this node that others can reach")


async def _ask_http(host: str, port: int, context: ssl.SSLContext | None) -> bytes:
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(DOCTOR)
        return await reader.read(ANSWER_MAX)
    finally:
        writer.close()


async def program_findings(driver: RunsProgram) -> list[Finding]:
    """Return whether this machine has the program that it must run, if it must run one."""
    try:
        program = await driver.program()
    except SettingsError as error:
        remedy = "install etcd 3.5.16 or later, or `pip install 'rdzv[quorum]'`; RDZV_ETCD_BIN can name the program"
        return [problem("RDZV-P10", "program", error.problem, remedy)]
    return [Finding(OK, "program", f"this host would run {program}")] if program else []


def voter_finding(voter: MemberHealth) -> Finding:
    """Return how one voter of a quorum is. One that is away is a warning: the others carry the run."""
    if not voter.problem:
        return Finding(OK, "voter", str(voter))
    return Finding(WARNING, "voter", str(voter), "start an agent of the run there, or read its log; the others carry the run")


def clock_finding(where: str, remote: str, local: str) -> Finding:
    """Compare the server's clock with this one, for information only: nothing else compares clocks (G10)."""
    try:
        ahead_s = (parsedate_to_datetime(remote) - parsedate_to_datetime(local)).total_seconds()
    except (TypeError, ValueError):
        return Finding(OK, "clock", f"{where} sends no readable time")
    if abs(ahead_s) <= CLOCK_S:
        return Finding(OK, "clock", f"the clock of {where} and this machine's agree to about {CLOCK_S:g} s")
    way = "ahead of" if ahead_s > 0 else "behind"
    text = f"the clock of {where} is {abs(ahead_s):.0f} s {way} this machine's"
    return Finding(OK, "clock", f"{text}; rdzv depends on neither clock, but logs and certificates do")


def torch_findings() -> Iterable[Finding]:
    """Check whether torchrun would find rdzv, without an import of torch."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return [Finding(OK, "torch", "torch is not installed here, and only torchrun needs it")]
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < TORCH_MIN:
        text = f"torch {version} is too old to find rendezvous plug-ins"
        return [problem("RDZV-P09", "torch", text, f"use torch {'.'.join(map(str, TORCH_MIN))} or newer, or `rdzv run`")]
    found = {one.name for one in importlib.metadata.entry_points(group="torchrun.handlers")}
    if "rdzv" not in found:
        text = f"torch {version} is here, but rdzv {__version__} is not installed as its plug-in"
        return [problem("RDZV-P09", "torch", text, "install rdzv with pip where torch is: a path to its source is not enough")]
    return [Finding(OK, "torch", f"torch {version} finds the backends {', '.join(sorted(found))} (rdzv {__version__})")]
