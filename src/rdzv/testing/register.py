"""A compare-and-set register in the simulation: it keeps a value and, in some runs, counters, and knows of nothing else.

The checkers read what the members commit from the values that win, and judge it like any other run. The server's engine is a
copy of the value, for those who look at the run from outside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ..engines.port import Operation, Put
from ..engines.reference import Engine
from ..engines.register.backend import Version
from ..engines.register.document import Document, Draft, decode, encode, read_log
from ..errors import Unreachable
from ..system.dial import DialFailed
from .driver import CONNECT_TIMEOUT_S, READ_TIMEOUT_S
from .network import SimConnection, SimNetwork
from .nodes import SimNode
from .server import SimServer

ENDPOINT = "sim://register"


class RegisterConnection(SimConnection):
    """Calls and answers between a node and the register."""

    def __init__(self, network: SimNetwork, node: SimNode, server: SimServer) -> None:
        super().__init__(network, node, server)
        self.timeout_s = CONNECT_TIMEOUT_S
        """How long an answer may take."""
        self._waiters: dict[int, asyncio.Future[Any]] = {}
        self._asked = 0

    async def call(self, verb: str, *args: Any) -> Any:
        """Ask and wait. Without an answer in time the connection is given up: nothing more can be expected of it."""
        if not self.open or self.network.loop.unwinding:
            raise Unreachable(ENDPOINT, "the connection is lost", applied=False)
        self._asked = number = self._asked + 1
        waiter = self._waiters[number] = self.network.loop.create_future()
        timer = self.node.call_later(self.timeout_s, lambda: self.client_lost("no answer", self.timeout_s))
        self.send_request(self.server.receive, self, (number, verb, args))
        try:
            return await waiter
        finally:
            timer.cancel()
            self._waiters.pop(number, None)

    def client_lost(self, problem: str, waited_s: float = 0.0) -> None:
        if not self.open:
            return
        self.hang_up()
        for waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(Unreachable(ENDPOINT, problem, waited_s))

    def answered(self, number: int, answer: object) -> None:
        waiter = self._waiters.get(number)
        if self.open and waiter is not None and not waiter.done():
            waiter.set_result(answer)


class RegisterServer(SimServer):
    """One value with a version."""

    _copy: Engine | None

    @property
    def engine(self) -> Engine:
        """The value as an engine; an empty one if there is none."""
        copy = self._copy
        if copy is None:
            copy = self._copy = Engine(self.instance)
            if self._document is not None:
                copy.load(self._document.items, self._document.revision)
        return copy

    @property
    def instance(self) -> str:
        return self._document.instance if self._document is not None else ""

    def _start(self) -> None:
        self._copy = None
        self._connections: dict[RegisterConnection, None] = {}
        self._value: bytes | None = None
        self._document: Document | None = None
        self._version = 0
        self._counters: dict[str, int] = {}
        self._verbs: dict[str, Callable[..., Any]] = {
            "hello": lambda _connection: self.place,
            "read": self._read,
            "swap": self._swap,
            "beat": self._beat,
            "read_beats": self._read_beats,
            "drop_beat": self._drop_beat,
        }

    def crash(self) -> None:
        """Kill the process: the value is gone and all connections drop."""
        self.dead = True
        connections, self._connections = self._connections, {}
        for connection in connections:
            connection.answers.send(connection.client_lost, "the connection is lost")
        self.resume()  # Requests that waited in its sockets are refused now.

    def receive(self, connection: Any, data: Any) -> None:
        """A call of a client arrived."""
        number, verb, args = data
        if not self.dead and verb == "hello":
            self._connections[connection] = None
        for ambush in list(self.arrivals) if connection in self._connections else ():
            ambush(connection.node.name, *self._described(verb, args))
        if connection not in self._connections:
            connection.refuse()
        else:
            connection.send_answer(connection.answered, number, self._verbs[verb](connection, *args))

    def hung_up(self, connection: Any) -> None:
        self._network.forget(connection)
        self._connections.pop(connection, None)

    # ---- requests

    def _read(self, _connection: RegisterConnection) -> Version | None:
        return None if self._value is None else (self._value, self._version)

    def _swap(self, connection: RegisterConnection, state: bytes, token: int | None) -> tuple[bytes, int, bool] | None:
        if (self._version if self._value is not None else None) == token:
            self._write(state, connection.node.name, "then")
            return state, self._version, True
        return None if self._value is None else (self._value, self._version, False)

    def _beat(self, _connection: RegisterConnection, name: str) -> None:
        self._counters[name] = self._counters.get(name, 0) + 1

    def _read_beats(self, _connection: RegisterConnection, names: Sequence[str]) -> list[int]:
        return [self._counters.get(name, 0) for name in names]

    def _drop_beat(self, _connection: RegisterConnection, name: str) -> None:
        self._counters.pop(name, None)

    def _write(self, state: bytes, actor: str, kind: str) -> None:
        document = decode(state)
        since = self._document.revision if self._document is not None else document.revision
        self._value, self._document = state, document
        self._version += 1
        self._copy = None
        self._committed = list(read_log(document, since))
        self.publish(actor, kind)

    # ---- for faults

    def _described(self, verb: str, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
        """Describe a swap as the transaction it stands for."""
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
        """End the lease at this very moment, as some observer would."""
        self._change(lambda draft: draft.end(lease))

    def drop_watches(self) -> None:
        """Lose the log, so that all who have not read to its end meet a gap."""
        self._change(Draft.compact)

    forget = drop_watches

    def _change(self, act: Any) -> None:
        if self._document is not None:
            draft = Draft(self._document)
            act(draft)
            self._write(encode(draft.finish(f"{self.rng.getrandbits(64):016x}")), "", "expired")


class SimRegister:
    """A node's way to the register; implements `Register`. The next call replaces a lost connection."""

    durable = False
    waits = False

    def __init__(self, network: SimNetwork, node: SimNode, *, beats: bool) -> None:
        self.beats = beats
        self.place = ""
        self.local_host = node.host
        self.endpoint = ENDPOINT
        self._network = network
        self._node = node
        self._connection: RegisterConnection | None = None

    async def read(self) -> Version | None:
        try:
            version: Version | None = await self._call("read")
        except Unreachable as error:
            raise Unreachable(error.endpoint, error.problem, error.waited_s, applied=False) from None
        return version

    async def swap(self, state: bytes, token: Any) -> tuple[bytes, Any, bool] | None:
        answer: tuple[bytes, Any, bool] | None = await self._call("swap", state, token)
        return answer

    async def wait(self, token: Any) -> None:  # noqa: ARG002
        raise AssertionError("a register that cannot wait was asked to")

    async def beat(self, name: str) -> None:
        await self._call("beat", name)

    async def read_beats(self, names: Sequence[str]) -> Sequence[int]:
        counts: Sequence[int] = await self._call("read_beats", tuple(names))
        return counts

    async def drop_beat(self, name: str) -> None:
        await self._call("drop_beat", name)

    async def close(self) -> None:
        if self._connection is not None:
            self._connection.hang_up()

    async def _call(self, verb: str, *args: Any) -> Any:
        connection = self._connection
        if connection is None or not connection.open:
            try:
                connection = self._network.connect(self._node, RegisterConnection)
            except DialFailed as failed:
                raise Unreachable(ENDPOINT, failed.problem, applied=False) from None
            try:
                self.place = await connection.call("hello")
            except Unreachable as error:
                raise Unreachable(ENDPOINT, error.problem, error.waited_s, applied=False) from None
            except asyncio.CancelledError:
                connection.hang_up()
                raise
            connection.timeout_s = READ_TIMEOUT_S
            self._connection = connection
        return await connection.call(verb, *args)
