"""A compare-and-set register in the simulation: it keeps a value and, in some runs, counters; it knows of nothing else.

What the members commit is read from the values that win, so that the same checkers judge it. The server's engine is a copy of
the value, for those who look at the run from outside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engines.port import Operation, Put
from ..engines.reference import Engine
from ..engines.register.backend import Version
from ..engines.register.document import Document, Draft, decode, encode, read_log
from ..errors import Unreachable
from .driver import SimDriver
from .network import SimConnection, SimNetwork
from .nodes import SimNode
from .server import SimServer


class RegisterServer(SimServer):
    """One value with a version."""

    _copy: Engine | None

    @property
    def engine(self) -> Engine:
        """What the value says, or an empty one."""
        copy = self._copy
        if copy is None:
            copy = self._copy = Engine(self.instance)
            if self._document is not None:
                copy.load(self._document.items, self._document.revision)
        return copy

    @engine.setter
    def engine(self, engine: Engine) -> None:
        self._copy = engine

    @property
    def instance(self) -> str:
        """That of the value."""
        return self._document.instance if self._document is not None else ""

    def _start(self) -> None:
        super()._start()
        self._value: bytes | None = None
        self._document: Document | None = None
        self._version = 0
        self._counters: dict[str, int] = {}
        self._verbs = {
            "read": self._read,
            "swap": self._swap,
            "beat": self._beat,
            "read_beats": self._read_beats,
            "drop_beat": self._drop_beat,
        }

    def _hear(self) -> None:
        """It has no leases to judge."""

    def _tick(self, engine: Engine) -> None:
        """Time is the members' affair."""

    # ---- requests

    def _read(self, _connection: SimConnection) -> Version | None:
        return None if self._value is None else (self._value, self._version)

    def _swap(self, connection: SimConnection, state: bytes, token: int | None) -> tuple[bytes, int, bool] | None:
        if (self._version if self._value is not None else None) == token:
            self._write(state, connection.node.name, "then")
            return state, self._version, True
        return None if self._value is None else (self._value, self._version, False)

    def _beat(self, _connection: SimConnection, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1

    def _read_beats(self, _connection: SimConnection, names: Sequence[str]) -> list[int]:
        return [self._counters.get(name, 0) for name in names]

    def _drop_beat(self, _connection: SimConnection, name: str) -> None:
        self._counters.pop(name, None)

    def _write(self, state: bytes, actor: str, kind: str) -> None:
        document = decode(state)
        since = self._document.revision if self._document is not None else document.revision
        self._value, self._document = state, document
        self._version += 1
        self._copy = None
        self._committed = list(read_log(document, since))
        self._publish(actor, kind)

    # ---- for faults

    def describe(self, verb: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """A swap, as the transaction it stands for."""
        if verb != "swap" or self._document is None:
            return verb, args
        document = decode(args[0])
        puts: list[Operation] = [
            Put(event.key, event.item.value)
            for batch in read_log(document, self._document.revision)
            for event in batch.events
            if event.item is not None
        ]
        return "txn", ((), tuple(puts), ())

    def expire(self, lease: int) -> None:
        """Some observer ends the lease at this very moment."""
        self._change(lambda draft: draft.end(lease))

    def drop_watches(self) -> None:
        """The log is lost, so that everybody who has not read all of it meets a gap."""
        self._change(Draft.compact)

    forget = drop_watches

    def _change(self, act: Any) -> None:
        if self._document is not None:
            draft = Draft(self._document)
            act(draft)
            self._write(encode(draft.finish(f"{self.rng.getrandbits(64):016x}")), "", "expired")


class SimRegister:
    """One machine's way to the register; implements `Register`. A lost connection is made again by the next call."""

    durable = False
    waits = False

    def __init__(self, network: SimNetwork, node: SimNode, *, beats: bool) -> None:
        self.beats = beats
        self.place = ""
        self.local_host = node.host
        self._driver = SimDriver(network, node)
        self.endpoint = self._driver.endpoint
        self._connection: SimConnection | None = None

    async def read(self) -> Version | None:
        """See `Register`."""
        try:
            version: Version | None = await self._call("read")
        except Unreachable as error:
            raise Unreachable(error.endpoint, error.problem, error.waited_s, applied=False) from None
        return version

    async def swap(self, state: bytes, token: Any) -> tuple[bytes, Any, bool] | None:
        """See `Register`."""
        answer: tuple[bytes, Any, bool] | None = await self._call("swap", state, token)
        return answer

    async def wait(self, token: Any) -> None:  # noqa: ARG002
        """It cannot, and says so (`waits`)."""
        raise AssertionError("a register that cannot wait was asked to")

    async def beat(self, name: str) -> None:
        """See `Register`."""
        await self._call("beat", name)

    async def read_beats(self, names: Sequence[str]) -> Sequence[int]:
        """See `Register`."""
        counts: Sequence[int] = await self._call("read_beats", tuple(names))
        return counts

    async def drop_beat(self, name: str) -> None:
        """See `Register`."""
        await self._call("drop_beat", name)

    async def close(self) -> None:
        """Say goodbye."""
        if self._connection is not None and self._connection.open:
            self._connection.tell("bye")
            self._connection.lose()

    async def _call(self, verb: str, *args: Any) -> Any:
        connection = self._connection
        if connection is None or not connection.open:
            connection, welcome = await self._driver.dial()
            self._connection, self.place = connection, welcome.place
        return await connection.call(verb, *args)
