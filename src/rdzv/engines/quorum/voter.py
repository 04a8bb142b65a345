"""One listed host's part in the quorum: it agrees with the others, runs etcd, and starts it again when it ends.

Every agent of the host has a `Voter`, and the one that has the lock of the state folder acts. etcd ends with the agent that
started it, however that ends (`etcd/supervisor.py`). Then another agent of the host gets the lock, and starts etcd on the same
data.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import secrets
import signal
import ssl
from collections.abc import Callable
from functools import partial

import msgspec

from ...errors import SettingsError
from ...system.addresses import listen
from ..etcd.server import SupervisedProcess
from .agreement import NUMBER_BYTES, HostRecord, Offer, VoterState, counted, decide, offer_of
from .etcd_program import EtcdProgram, PeerTls, environment, peers_of, shown
from .exchange import Answering, Asker, NoOffer
from .state import StateFolder

logger = logging.getLogger("rdzv.quorum")

ASK_EVERY_S = 0.1  # Pause between two questions while the hosts agree.
FIRST_S = 1.0  # Longest wait for the host whose etcd starts first: as long as it would cost to start without it.
FIRST_EVERY_S = 0.03  # Pause between two looks whether it runs.
LOCK_EVERY_S = 0.3  # Pause before another agent of this host looks whether the one that runs etcd is gone.
LOOK_EVERY_S = 0.2  # Pause between two looks whether etcd still runs.
AGAIN_S = (0.2, 2.0)  # First and longest pause before etcd is started again. The port of a former one may be in use still.
STEADY_S = 10.0  # An etcd that ran for so long did start.
GRACE_S = 2.0
"""Time for etcd to hand its leadership over when its agent leaves. Then it is killed: nothing is lost by that."""


class Quorum(msgspec.Struct, frozen=True):
    """The quorum as all its hosts know it."""

    name: str
    run_id: str
    hosts: tuple[tuple[str, int], ...]

    @property
    def shown(self) -> list[str]:
        return [shown(*host) for host in self.hosts]


class Contexts(msgspec.Struct, frozen=True):
    """TLS of the exchange, by the same files as etcd's."""

    client: Callable[[], ssl.SSLContext | None]
    server: Callable[[], ssl.SSLContext | None]


class Voter:
    """The part of one host, as far as this process looks after it."""

    def __init__(
        self, quorum: Quorum, me: int, address: str, folder: StateFolder, program: EtcdProgram, contexts: Contexts,
        tls: PeerTls | None,
    ) -> None:  # fmt: skip
        """`address`: where to listen; empty: at all interfaces."""
        self.quorum = quorum
        self.me = me
        self.folder = folder
        self.reason = "it has just started"
        """A sentence for people about what this host does or waits for."""
        self.problem = ""
        """The last thing that went wrong here, and not at another host."""
        self.standing = VoterState.OPEN
        self.formed = False
        """Whether this process has seen the cluster at work."""
        self._may_bind = True  # Until this process has drawn the number itself.
        self._address = address
        self._program = program
        self._contexts = contexts
        self._tls = tls
        self._asker = Asker(peers_of(quorum.hosts), contexts.client)
        self._starting: asyncio.Future[SupervisedProcess] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id of etcd; 0: this process runs none."""
        starting = self._starting
        return starting.result().pid if starting is not None and starting.done() and not starting.exception() else 0

    @property
    def votes(self) -> bool:
        """Whether this process looks after a vote of this host. Its etcd may be down for a moment."""
        return self.standing is VoterState.VOTER and self.folder.is_locked

    def start(self) -> None:
        """Begin in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="rdzv quorum")

    @property
    def is_worthless(self) -> bool:
        """Whether the record binds nobody: no other host can have chosen a number that was never in a complete offer."""
        return self.standing is VoterState.CLIENT or (self.standing is VoterState.OPEN and not self._may_bind)

    async def stop(self, *, forget: bool) -> None:
        """End etcd and what is done here. `forget`: the run is over, so remove the data too, if this process has the lock."""
        forget = forget or self.is_worthless
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        try:
            await self._stop_etcd(at_once=forget)
            if forget and self.folder.is_locked:
                await asyncio.to_thread(self.folder.remove)
        finally:
            self.folder.unlock()

    async def _run(self) -> None:
        while True:
            try:
                # Not in a thread, which would go on if this task is ended, and take the lock when nobody unlocks it any more.
                while not self.folder.is_locked and not self.folder.lock():
                    self.reason = "another process of this host looks after its etcd"
                    await asyncio.sleep(LOCK_EVERY_S)
                await self._take_part()
            except Exception as error:  # noqa: BLE001  Whatever it is, a host that gives up without a word loses its vote.
                self._report(self._problem(error))
                await asyncio.sleep(AGAIN_S[1])

    def _problem(self, error: Exception) -> str:
        """Say what is wrong with this host. Often the system refuses it something: its port, or a file of its folder."""
        if isinstance(error, SettingsError):
            return error.sentence
        if not isinstance(error, OSError):
            return f"this host cannot vote ({type(error).__name__}: {error})"
        why = (error.strerror or str(error)).lower()
        if error.errno == errno.EADDRINUSE:
            where = shown(self._address or "*", self._peer_port)
            return f"this host's etcd needs {where} for the other hosts ({why}): free that port, or give all nodes another one"
        if error.filename is not None:
            return f"this host cannot keep its data in state_dir ({error.filename}: {why})"
        return f"{shown(self._address or '*', self._peer_port)} or {self.folder.path}: {why}"

    def _report(self, problem: str) -> None:
        """Tell people what is wrong here. What has not changed since is not logged again."""
        if problem != self.problem:
            logger.warning("quorum of run %r: %s", self.quorum.run_id, problem)
        self.reason = self.problem = problem

    async def _take_part(self) -> None:
        """Go on from the record on the disk. Returns when the record is no longer worth anything."""
        record = self.folder.load()
        if record is None or record.quorum != self.quorum.name:
            self.folder.clear()
            record = HostRecord(self.quorum.name, self.me, secrets.token_hex(NUMBER_BYTES))
            self.folder.save(record)
            self._may_bind = False
        if record.standing is VoterState.OPEN:
            record = await self._agree(record)
        self.standing = record.standing
        if record.standing is VoterState.CLIENT:
            await self._be_client(record)
        else:
            await self._keep_etcd(record)

    # ---- agreeing

    @property
    def _peer_port(self) -> int:
        return self.quorum.hosts[self.me][1] + 1

    async def _agree(self, record: HostRecord) -> HostRecord:
        """Exchange offers until this host has chosen, and return its record then."""
        heard: dict[int, Offer] = {}
        size = len(self.quorum.hosts)
        others = [index for index in range(size) if index != self.me]

        def offer() -> Offer:
            made = offer_of(record, counted(heard, formed=self.formed), size)
            self._may_bind = self._may_bind or all(made.numbers)
            return made

        answering = Answering(offer, self._contexts.server())
        answering.start(listen(self._address, self._peer_port))
        try:
            while True:
                found = await asyncio.gather(*(self._asker.ask(index) for index in others), return_exceptions=True)
                silent = {}
                for index, answer in zip(others, found, strict=True):
                    if isinstance(answer, Offer):
                        heard[index] = answer
                    elif isinstance(answer, NoOffer):
                        silent[index] = str(answer)
                    else:
                        raise answer
                decided = decide(record, counted(heard, formed=self.formed), size)
                if decided.standing is VoterState.VOTER:
                    self.folder.save(decided)
                # A client is not kept on disk: if all agents are started anew and all hosts are empty, a new cluster is right.
                if decided is not record:
                    record = decided
                    if record.standing is VoterState.VOTER:
                        await self._wait_for_first()
                    return record
                self.reason = waiting_for(self.quorum, heard, silent)
                await asyncio.sleep(ASK_EVERY_S)
        finally:
            await answering.close()

    async def _wait_for_first(self) -> None:
        """Answer until the host runs etcd that the others' etcds ask first.

        A new etcd asks the others whether they know it, in the order of their addresses as text. One that has just bound its
        port, and waits for others itself, lets it wait for a second. An agent that answers replies at once, and so does an etcd
        that runs. So the one that all ask first starts alone, and then all others together: elections are slow with fewer.
        """
        peers = [shown(*peer) for peer in peers_of(self.quorum.hosts)]
        first = peers.index(min(peers))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + FIRST_S
        while self.me != first and loop.time() < deadline:
            if await self._asker.runs_etcd(first):
                return
            await asyncio.sleep(FIRST_EVERY_S)

    async def _be_client(self, record: HostRecord) -> None:
        """Answer the others, and do nothing else, for as long as this process lives."""
        self.reason = (
            f"{self.quorum.shown[self.me]} came back without its data ({self.folder.path}): no vote until the run is over"
        )
        logger.warning("quorum of run %r: %s; the other hosts carry it", self.quorum.run_id, self.reason)
        answering = Answering(lambda: offer_of(record, {}, len(self.quorum.hosts)), self._contexts.server())
        answering.start(listen(self._address, self._peer_port))
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await answering.close()

    # ---- etcd

    async def _keep_etcd(self, record: HostRecord) -> None:
        """Run etcd, and again when it ends. Returns if its data is gone."""
        loop = asyncio.get_running_loop()
        pause_s = AGAIN_S[0]
        while self.folder.load() is not None:
            if problem := self._program.prepare(self.folder):
                self._report(problem)
                await asyncio.sleep(AGAIN_S[1])
                continue
            self.folder.save(msgspec.structs.replace(record, started=True))
            address = self._address or "0.0.0.0"  # noqa: S104  Its own name means loopback here, and others use another address.
            command = self._program.command(self.folder, record, self.quorum.hosts, address, self._tls)
            began_at = loop.time()
            self._starting = loop.run_in_executor(None, partial(SupervisedProcess, command, environ=environment()))
            process = await asyncio.shield(self._starting)
            self.reason = f"etcd {self._program.version} runs here (pid {process.pid})"
            while not process.ended:  # noqa: ASYNC110  A process has no event.
                await asyncio.sleep(LOOK_EVERY_S)
            problem = process.last_error() or "it said nothing"
            await self._stop_etcd(at_once=True)
            if not self.folder.has_voted:
                self.folder.save(record)  # It ended before it had a log, so it has told nobody anything.
            self._report(f"etcd ended here and is started again: {problem}")
            pause_s = AGAIN_S[0] if loop.time() - began_at > STEADY_S else min(2 * pause_s, AGAIN_S[1])
            await asyncio.sleep(pause_s)

    async def _stop_etcd(self, *, at_once: bool) -> None:
        starting, self._starting = self._starting, None
        if starting is None:
            return
        try:
            process = await starting  # A start that was cancelled goes on in its thread.
        except (OSError, RuntimeError):  # RuntimeError: the system has no thread left.
            return  # It was never started, and `_run` has told why.
        if not at_once:
            process.kill(signal.SIGTERM)
            deadline = asyncio.get_running_loop().time() + GRACE_S
            while not process.ended and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(LOOK_EVERY_S / 4)
        process.kill()
        await asyncio.to_thread(process.stop)


def waiting_for(quorum: Quorum, heard: dict[int, Offer], silent: dict[int, str]) -> str:
    """Say which hosts the first start waits for, and why each of them is not there."""
    missing = [f"{quorum.shown[index]} ({problem})" for index, problem in silent.items()]
    for index, offer in heard.items():
        if offer.quorum != quorum.name:
            missing.append(f"{quorum.shown[index]} (it was started for another run, or with another list of hosts)")
    if not missing:
        return "all hosts of the quorum are there and agree on the cluster"
    return f"the first start of the quorum needs all {len(quorum.hosts)} hosts, and waits for {', '.join(missing)}"
