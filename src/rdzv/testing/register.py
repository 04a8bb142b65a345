"""A compare-and-set register in the simulation: it keeps a value and, in some runs, counters, and knows of nothing else.

It is a key of the simulated server, reached by the shipping session like any other. The checkers read what the members commit
from the values that win, and judge it like any other run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

from ..engines.embedded.features import Request
from ..engines.embedded.frames import Txn
from ..engines.port import Batch, Compare, Created, Delete, EngineReset, Get, Modified, Operation, Outcome, Put, Session
from ..engines.reference import Engine
from ..engines.register.backend import Version
from ..engines.register.document import Document, Draft, decode, encode, read_log
from ..errors import Unreachable
from .driver import SimDriver
from .network import SimNetwork
from .nodes import SimNode
from .server import RUN, SimServer

STATE, BEATS = "state", "beats/"


class RegisterServer(SimServer):
    """A server with one value, whose `engine` is what the value says."""

    _copy: Engine | None
    _lives = 0

    def start(self) -> None:
        super().start()
        self.core.clock.stop()  # The server has no leases to judge: time is the members' affair.
        # A register's token never comes again, not even after the register was emptied: torch's stores compare the value
        # itself. Revisions that began at 1 again once let a member of the former life win its swap (register seed 1003289).
        self._lives += 1
        self.core.open_run(RUN).engine.load((), self._lives << 32)
        self._document: Document | None = None
        self._copy = None

    @property
    def engine(self) -> Engine:
        copy = self._copy
        if copy is None:
            copy = self._copy = Engine(self.instance)
            if self._document is not None:
                copy.load(self._document.items, self._document.revision)
        return copy

    @property
    def instance(self) -> str:
        return self._document.instance if self._document is not None else ""

    def publish(self, actor: str, kind: str) -> None:
        """Tell the checkers what the members committed by a new value."""
        values = [
            event.item.value for batch in self.committed for event in batch.events if event.key == STATE and event.item
        ]
        self.committed.clear()
        for value in values:
            document = decode(value)
            since = self._document.revision if self._document is not None else document.revision
            self._document, self._copy = document, None
            changes = groupby(read_log(document, since), key=lambda event: event.revision)
            self.committed += [Batch(revision, tuple(events)) for revision, events in changes]
        super().publish(actor, kind)

    # ---- for faults

    def describe(self, request: Request) -> Request:
        """Describe a swap as the transaction it stands for."""
        then = request.then if isinstance(request, Txn) else ()
        states = [one.value for one in then if isinstance(one, Put) and one.key == STATE]
        if not states or self._document is None:
            return request
        log = read_log(decode(states[0]), self._document.revision)
        puts = [Put(event.key, event.item.value) for event in log if event.item is not None]
        return Txn(0, (), tuple(puts), ())

    def expire(self, lease: int) -> None:
        """End the lease at this very moment, as some observer would."""
        self._change(lambda draft: draft.end(lease))

    def drop_watches(self) -> None:
        """Lose the log, so that all who have not read to its end meet a gap."""
        self._change(Draft.compact)

    forget = drop_watches

    def _change(self, act: Callable[[Draft], object]) -> None:
        if self._document is not None:
            draft = Draft(self._document)
            act(draft)
            value = encode(draft.finish(f"{self.rng.getrandbits(64):016x}"))
            self.core.open_run(RUN).txn((), (Put(STATE, value),), ())
            self.publish("", "expired")


class SimRegister:
    """A node's way to the register; implements `Register`."""

    durable = False
    waits = False

    def __init__(self, network: SimNetwork, node: SimNode, *, beats: bool) -> None:
        self.beats = beats
        self.place = ""
        self.local_host = node.host
        self._driver = SimDriver(network, node)
        self.endpoint = self._driver.endpoint
        self._session: Session | None = None

    async def read(self) -> Version | None:
        try:
            return _version((await self._txn(Get(STATE))).item(0))
        except Unreachable as error:
            raise Unreachable(error.endpoint, error.problem, error.waited_s, applied=False) from None

    async def swap(self, state: bytes, token: Any) -> tuple[bytes, Any, bool] | None:
        compare = Created(STATE, 0) if token is None else Modified(STATE, token)
        outcome = await self._txn(Put(STATE, state), compares=(compare,), otherwise=(Get(STATE),))
        if outcome.succeeded:
            return state, outcome.revision, True
        version = _version(outcome.item(0))
        return None if version is None else (*version, False)

    async def wait(self, token: Any) -> None:  # noqa: ARG002
        raise AssertionError("a register that cannot wait was asked to")

    async def beat(self, name: str) -> None:
        await self._txn(Put(BEATS + name, b""))

    async def read_beats(self, names: Sequence[str]) -> Sequence[int]:
        """Return the revision of each counter: it grows with every beat."""
        outcome = await self._txn(*(Get(BEATS + name) for name in names))
        found = [outcome.item(index) for index in range(len(names))]
        return [0 if item is None else item.modified for item in found]

    async def drop_beat(self, name: str) -> None:
        await self._txn(Delete(BEATS + name))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _txn(
        self, *then: Operation, compares: tuple[Compare, ...] = (), otherwise: tuple[Operation, ...] = ()
    ) -> Outcome:
        """Ask the register. A register has no instances: one that came back empty is the same, with no value."""
        while True:
            session = self._session
            if session is None:
                session = self._session = await self._driver.connect()
                self.place = session.place
            try:
                return await session.txn(compares, then, otherwise)
            except EngineReset:
                if self._session is session:
                    self._session = None


def _version(item: Any) -> Version | None:
    return None if item is None else (item.value, item.modified)
