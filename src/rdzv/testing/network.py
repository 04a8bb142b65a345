"""A simulated network between machines and servers, as bad as a real one.

A connection is two channels. Each keeps its order and delays every message by a time of its own, so that connections
overtake each other. A connection may break at any message, before or after the request took effect. A direction that
is *cut* loses nothing at once: as with TCP, messages wait for the healing, and may then arrive long after their sender
gave them up; that is how a request takes effect late. Or they are lost with the connection, never from its middle.

`server.py` holds what is at one end, `driver.py` what is at the other.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..engines.port import (
    AllCreated,
    Batch,
    Case,
    Created,
    Delete,
    DeletePrefix,
    Empty,
    Equals,
    Event,
    Get,
    Item,
    List,
    Modified,
    Outcome,
    Put,
)
from ..errors import Unreachable
from ..system.timers import Timer
from .nodes import SimNode
from .virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from .server import SimServer

DELAYS_S = (0.0002, 0.005, 0.05)
"""Least, most of the usual, and most of all delays of a message."""
TAIL = 0.02
"""Share of the messages that take longer than usual."""
RETRANSMIT_S = 0.5
"""A direction that healed moves again within this time: senders back off meanwhile."""

Way = Literal["requests", "answers"]
BOTH: tuple[Way, Way] = ("requests", "answers")


@dataclass
class Counters:
    """What one machine cost the network. Bytes are those of keys and values, in both directions."""

    operations: int = 0
    events: int = 0
    bytes: int = 0


class SimChannel:
    """One direction of a connection."""

    def __init__(self, network: SimNetwork, node: SimNode, server: SimServer, way: Way) -> None:
        self._network = network
        self._server = server
        self._receiver: Process = server if way == "requests" else node
        self.route = (node.name, server.name, way)
        self._free_at = 0.0
        self._stuck: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.broken = False
        """Whatever is under way is lost, and whatever is sent."""

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        """Call that in the receiver's process, after what was sent before."""
        if self.broken:
            return
        if self._stuck or self.route in self._network.cuts:
            self._stuck.append((deliver, args))
            return
        self._transmit(deliver, args, 0.0)

    def heal(self) -> None:
        """Transmit what was waiting."""
        stuck, self._stuck = self._stuck, []
        again_s = self._network.rng.uniform(0, RETRANSMIT_S)
        for deliver, args in stuck:
            self._transmit(deliver, args, again_s)

    @property
    def stuck(self) -> bool:
        """Messages are waiting for a healing."""
        return bool(self._stuck)

    def _transmit(self, deliver: Callable[..., None], args: tuple[Any, ...], extra_s: float) -> None:
        loop = self._network.loop
        at = loop.time() + self._network.delay_s() + self._server.slow_s + extra_s
        self._free_at = at = max(at, self._free_at)
        call = loop.call_at(at, self._arrive, deliver, args, context=self._receiver.context)
        call.stream = self

    def _arrive(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.broken:
            deliver(*args)


class SimConnection:
    """A connection with its client's end. The server keeps its own end by this object."""

    def __init__(
        self, network: SimNetwork, node: SimNode, server: SimServer, endpoint: str, timeout_s: float
    ) -> None:
        self.node = node
        self.server = server
        self.number = next(network.loop.serial)
        """Later ones have higher numbers, in whatever order their messages arrive."""
        self.open = True
        """As far as the client knows."""
        self.on_lost: Callable[[], None] = lambda: None
        self.on_push: Callable[[int, Batch | Exception], None] = lambda _number, _news: None
        self.requests = SimChannel(network, node, server, "requests")
        self.answers = SimChannel(network, node, server, "answers")
        self._network = network
        self._endpoint = endpoint
        self._counters = network.counters.setdefault(node.name, Counters())
        self.timeout_s = timeout_s
        """How long an answer may take."""
        self._alarm: Timer | None = None
        self._waiters: dict[int, tuple[float, asyncio.Future[Any]]] = {}
        self._asked = 0

    # ---- the client's end

    async def call(self, verb: str, *args: Any) -> Any:
        """Ask and wait. No answer in time: the connection is given up, as nothing more can be expected of it."""
        if not self.open or self._network.loop.unwinding:
            raise Unreachable(self._endpoint, "the connection is lost", applied=False)
        self._asked = number = self._asked + 1
        waiter: asyncio.Future[Any] = self._network.loop.create_future()
        self._waiters[number] = (self.node.now(), waiter)
        if self._alarm is None:
            self._alarm = self.node.call_later(self.timeout_s, self._check)
        self._ask(number, verb, args)
        try:
            return await waiter
        finally:
            self._waiters.pop(number, None)

    def _check(self) -> None:
        """One alarm for all calls, not set anew for each: nearly all are answered in time."""
        self._alarm = None
        if not self.open or not self._waiters:
            return
        oldest_at, _ = next(iter(self._waiters.values()))
        left_s = self.timeout_s - (self.node.now() - oldest_at)
        if left_s > 0:
            self._alarm = self.node.call_later(left_s, self._check)
        else:
            self.lose("no answer", self.timeout_s)

    def tell(self, verb: str, *args: Any) -> None:
        """Ask without waiting."""
        if self.open:
            self._ask(0, verb, args)

    def lose(self, problem: str = "the connection is lost", waited_s: float = 0.0) -> None:
        """The client sees or decides that it is over. What was sent may still take effect."""
        if not self.open:
            return
        self.open = False
        self.requests.send(self.server.hung_up, self)
        for _, waiter in self._waiters.values():
            if not waiter.done():
                waiter.set_exception(Unreachable(self._endpoint, problem, waited_s))
        self.on_lost()

    def _ask(self, number: int, verb: str, args: tuple[Any, ...]) -> None:
        self._counters.operations += 1
        self._counters.bytes += weigh(args)
        if self._network.breaks(self, "requests"):
            self.reset()
        else:
            self.requests.send(self.server.receive, self, number, verb, args)

    # ---- the server's end

    def answer(self, number: int, answer: object) -> None:
        """To `call`."""
        self._counters.bytes += weigh(answer)
        if self._network.breaks(self, "answers"):
            self.reset()
        else:
            self.answers.send(self._answered, number, answer)

    def push(self, watch: int, news: Batch | Exception) -> None:
        """To a watch."""
        if isinstance(news, Batch):
            self._counters.events += len(news.events)
            self._counters.bytes += weigh(news)
        self.answers.send(self._pushed, watch, news)

    def refuse(self) -> None:
        """There is no such connection here: the server was restarted, or never listened."""
        self.answers.send(self.lose, "the connection was refused")

    def _answered(self, number: int, answer: object) -> None:
        _, waiter = self._waiters.get(number, (0.0, None))
        if not self.open or waiter is None or waiter.done():
            return
        if isinstance(answer, Exception):
            waiter.set_exception(answer)
        else:
            waiter.set_result(answer)

    def _pushed(self, watch: int, news: Batch | Exception) -> None:
        if self.open:
            self.on_push(watch, news)

    # ---- the network's doing

    def reset(self) -> None:
        """Break it, with all that is under way in either direction. Both ends notice, each in its time.

        Behind a cut the server does not: nothing reaches it, so to it the connection is half open.
        """
        if self.requests.broken and self.answers.broken:
            return
        self.requests.broken = self.answers.broken = True
        loop, network = self._network.loop, self._network
        notice_s = network.delay_s()
        if self.requests.route not in network.cuts:
            loop.call_later(notice_s, self.server.hung_up, self, context=self.server.context).stream = self
        loop.call_later(network.delay_s(), self.lose, context=self.node.context).stream = self

    def node_crashed(self, silent: bool) -> None:
        """The kernel closes a killed process's sockets; after a power cut nobody does."""
        self.answers.broken = True
        if not silent and self.open:
            self.requests.send(self.server.hung_up, self)
        self.open = False


class SimNetwork:
    """All connections of a run. Everything random is drawn from one seed, so a run is repeatable as a whole."""

    def __init__(self, loop: VirtualLoop, seed: int | str = 0, *, loss: float = 0.0) -> None:
        self.loop = loop
        self.rng = random.Random(f"{seed}/network")  # noqa: S311
        self.loss = loss
        """Chance of each request and each answer that its connection breaks instead of carrying it."""
        self.route: Callable[[SimNode], SimServer | None] = lambda _node: None
        """Which server the endpoint's name means to that machine at this moment; None: it means nothing."""
        self.counters: dict[str, Counters] = {}
        self.cuts: set[tuple[str, str, Way]] = set()
        self._doomed: list[tuple[str, str, Way]] = []
        self._connections: dict[SimConnection, None] = {}

    def connect(self, node: SimNode, endpoint: str, timeout_s: float) -> SimConnection:
        """A new connection, of which the server does not know until the first message arrives."""
        server = self.route(node)
        if server is None:
            raise Unreachable(endpoint, "the name is not known", applied=False)
        connection = SimConnection(self, node, server, endpoint, timeout_s)
        self._connections[connection] = None
        node.on_crash.append(connection.node_crashed)
        return connection

    def forget(self, connection: SimConnection) -> None:
        """Both ends know that it is over."""
        if connection in self._connections:
            del self._connections[connection]
            connection.node.on_crash.remove(connection.node_crashed)

    # ---- faults

    def cut(self, node: SimNode, server: SimServer, *ways: Way) -> None:
        """A partition between the two, in one direction or (none given) in both. What is in the air still arrives."""
        self.cuts.update((node.name, server.name, way) for way in ways or BOTH)

    def heal(self, node: SimNode, server: SimServer, *ways: Way) -> None:
        """The partition ends. A connection that has messages waiting either goes on with them or breaks."""
        self.cuts.difference_update((node.name, server.name, way) for way in ways or BOTH)
        for connection in self._between(node, server):
            for channel in (connection.requests, connection.answers):
                if not channel.stuck or channel.route in self.cuts:
                    continue
                if self.rng.random() < 0.5:
                    channel.heal()
                else:
                    connection.reset()

    def reset(self, node: SimNode | None = None, server: SimServer | None = None) -> None:
        """Break the connections between the two; None: whichever."""
        for connection in self._between(node, server):
            connection.reset()

    def break_next(self, node: SimNode, server: SimServer, way: Way) -> None:
        """The next request or answer between the two is lost with its connection: before or after it took effect."""
        self._doomed.append((node.name, server.name, way))

    def _between(self, node: SimNode | None, server: SimServer | None) -> list[SimConnection]:
        return [
            connection
            for connection in self._connections
            if node in (None, connection.node) and server in (None, connection.server)
        ]

    # ---- chance

    def delay_s(self) -> float:
        """Most messages are quick, some are not."""
        least, usual, most = DELAYS_S
        drawn = self.rng.random()
        if drawn >= TAIL:
            return least + (usual - least) * drawn * drawn
        return usual + (most - usual) * drawn / TAIL

    def breaks(self, connection: SimConnection, way: Way) -> bool:
        """This message is the connection's last."""
        if self._doomed:
            route = (connection.requests if way == "requests" else connection.answers).route
            if route in self._doomed:
                self._doomed.remove(route)
                return True
        return self.loss > 0 and self.rng.random() < self.loss


def weigh(value: object) -> int:
    """Bytes of the keys and values in what is sent. The rest of a message is of constant size and not counted."""
    weigher = _WEIGHERS.get(type(value))
    return weigher(value) if weigher else 0


_WEIGHERS: dict[type, Callable[[Any], int]] = {
    str: len,
    tuple: lambda values: sum(map(weigh, values)),
    Created: lambda compare: len(compare.key),
    Modified: lambda compare: len(compare.key),
    Equals: lambda compare: len(compare.key) + len(compare.value),
    AllCreated: lambda compare: sum(map(len, compare.revisions)),
    Empty: lambda compare: len(compare.prefix),
    Case: lambda case: weigh(case.compares) + weigh(case.then),
    Put: lambda put: len(put.key) + len(put.value),
    Delete: lambda delete: len(delete.key),
    DeletePrefix: lambda delete: len(delete.prefix),
    Get: lambda get: len(get.key),
    List: lambda listing: len(listing.prefix) + len(listing.after),
    Item: lambda item: len(item.key) + len(item.value),
    Outcome: lambda outcome: weigh(outcome.reads),
    Event: lambda event: len(event.key) + (len(event.item.value) if event.item else 0),
    Batch: lambda batch: weigh(batch.events),
}
