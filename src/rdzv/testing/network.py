"""A simulated network between nodes and servers, as bad as a real one.

A connection is two channels. Each keeps its order and delays every message by a time of its own, so that connections
overtake each other. A connection may break at any message, before or after the request took effect. A direction that
is *cut* loses nothing at once: as with TCP, messages wait for the healing, and may then arrive long after their sender
gave them up; that is how a request takes effect late. Or they are lost with the connection, never from its middle.

`server.py` holds one end of a connection, `driver.py` the other. Both are the product's own code, which writes bytes to a
`SimTransport` as it would to a socket.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ..engines.embedded.frames import PREAMBLE, WatchGap, WatchNews
from ..engines.embedded.trust import Trust
from ..system.dial import DialFailed
from .nodes import SimNode
from .virtual_loop import Process, VirtualLoop

if TYPE_CHECKING:
    from ..engines.embedded.session import ServerSession
    from .server import SimServer

DELAYS_S = (0.0002, 0.005, 0.05)
"""Least, most of the usual, and most of all delays of a message."""
TAIL = 0.02
"""Share of the messages that take longer than usual."""
RETRANSMIT_S = 0.5
"""A direction that healed moves again within this time: senders back off meanwhile."""

NEWS_TAGS = (WatchNews.__struct_config__.tag, WatchGap.__struct_config__.tag)
Way = Literal["requests", "answers"]
BOTH: tuple[Way, Way] = ("requests", "answers")


class SimChannel:
    """One direction of a connection."""

    def __init__(self, network: SimNetwork, node: SimNode, server: SimServer, way: Way) -> None:
        self._network = network
        self._loop = network.loop
        self._server = server
        self._receiver: Process = server if way == "requests" else node
        self.route = (node.name, server.name, way)
        self._free_at = 0.0
        self.stuck: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        """Messages that wait for a healing."""
        self.broken = False
        """All messages under way are lost, and all that are sent."""

    def send(self, deliver: Callable[..., None], *args: Any) -> None:
        """Call `deliver` in the receiver's process, after all messages sent before."""
        if self.broken:
            return
        if self.stuck or self.route in self._network.cuts:
            self.stuck.append((deliver, args))
        else:
            self._transmit(deliver, args, 0.0)

    def heal(self) -> None:
        """Transmit the messages that were waiting."""
        stuck, self.stuck = self.stuck, []
        again_s = self._network.rng.uniform(0, RETRANSMIT_S)
        for deliver, args in stuck:
            self._transmit(deliver, args, again_s)

    def _transmit(self, deliver: Callable[..., None], args: tuple[Any, ...], extra_s: float) -> None:
        at = self._loop.now + self._network.delay_s() + self._server.slow_s + extra_s
        at = max(at, self._free_at)
        self._free_at = at
        self._loop.call_at(at, self._arrive, deliver, args, context=self._receiver.context, stream=self)

    def _arrive(self, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.broken:
            deliver(*args)


class SimConnection:
    """A stream of bytes between a client and a server. The server does not know of it until the first bytes arrive."""

    def __init__(self, network: SimNetwork, node: SimNode, server: SimServer) -> None:
        self.node = node
        self.server = server
        self.open = True
        """Whether the client thinks so."""
        self.accepted = False
        self.session: ServerSession | None = None
        """The server's end, while it lives."""
        self.deliver: Callable[[memoryview], None] = lambda _data: None
        """The client's reader."""
        self.lose: Callable[[str], None] = lambda _problem: None
        """Tells the client that the connection is over."""
        self.requests = SimChannel(network, node, server, "requests")
        self.answers = SimChannel(network, node, server, "answers")
        self.client_end = SimTransport(self, server.name, self._request, self.hang_up, self._give_up)
        self.server_end = SimTransport(self, node.host, self._answer, self._closed_by_server, self._closed_by_server)
        self.server_end.resume_reading = self._read_on
        self._network = network
        self._unread_max = server.limits.unanswered

    # ---- the client's end

    def _request(self, data: bytes | memoryview) -> None:
        network = self._network
        if (network.loss or network.doomed) and network.breaks(self.requests.route):
            self.reset()
        else:
            self.requests.send(self.server.receive, self, data)

    def _arrived(self, data: bytes) -> None:
        self.server_end.unread -= len(data)
        if self.server_end.unread <= self._unread_max // 4 and self.session is not None and self.session.is_held:
            self._network.loop.call_soon(self._quick_again, context=self.server.context)
        if self.open:
            self.deliver(memoryview(data))

    def hang_up(self, *, in_order: bool = True) -> None:
        """The client, or its kernel, closes its end. Requests that were sent may still take effect."""
        if self.open:
            self.open = False
            self.requests.send(self.server.hung_up, self, in_order)

    def _give_up(self) -> None:
        self.hang_up(in_order=False)

    def client_lost(self, problem: str) -> None:
        if self.open:
            self.lose(problem)

    # ---- the server's end

    def read(self, data: bytes) -> None:
        """Pass bytes on to the session, or keep them while it holds its client back."""
        if self.server_end.waiting is not None:
            self.server_end.waiting.append(data)
        elif self.session is not None:
            self.session.received(memoryview(data))

    def _read_on(self) -> None:
        waiting, self.server_end.waiting = self.server_end.waiting, None
        for data in waiting or ():
            self.read(data)

    def _answer(self, written: bytes | memoryview) -> None:
        data = bytes(written)
        self.server_end.unread += len(data)
        network = self._network
        if (network.loss or network.doomed) and _has_answer(data) and network.breaks(self.answers.route):
            self.reset()
        else:
            self.answers.send(self._arrived, data)
        if self.server_end.unread > self._unread_max and self.session is not None and not self.session.is_held:
            self.session.pause_writing()

    def _quick_again(self) -> None:
        if self.session is not None and self.session.is_held:
            self.session.resume_writing()

    def _closed_by_server(self) -> None:
        if self.session is not None:
            self.answers.send(self.client_lost, "the connection was closed by the other side")
            self._network.loop.call_soon(self.server.hung_up, self, context=self.server.context)

    # ---- faults

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
            loop.call_later(notice_s, self.server.hung_up, self, context=self.server.context, stream=self)
        lost = "the connection is lost"
        loop.call_later(network.delay_s(), self.client_lost, lost, context=self.node.context, stream=self)

    def node_crashed(self, silent: bool) -> None:
        """The kernel closes a killed process's sockets. After a power cut nothing does."""
        self.answers.broken = True
        if not silent:
            self.hang_up()
        self.open = False


def _has_answer(data: bytes) -> bool:
    """Whether any frame in these bytes is more than news: the connection can break at it."""
    at = len(PREAMBLE) if data.startswith(PREAMBLE) else 0
    while at < len(data):
        if data[at + 5] not in NEWS_TAGS:  # After the length and the header of the array.
            return True
        at += 4 + int.from_bytes(data[at : at + 4], "big")
    return False


class SimTransport:
    """One end of a simulated stream, with the methods of asyncio's transports that the product uses."""

    def __init__(
        self, connection: SimConnection, address: str, send: Callable[[bytes | memoryview], None], close: Callable[[], None],
        abort: Callable[[], None],
    ) -> None:
        self.connection = connection
        self._address = address
        self.write = send
        self._close = close
        self._abort = abort
        self._closing = False
        self.waiting: list[bytes] | None = None
        """Bytes that arrived while this end does not read; None: it reads."""
        self.unread = 0
        """Bytes that the other end has not read yet."""
        self.resume_reading: Callable[[], None] = lambda: None

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._close()

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            self._abort()

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return self.waiting is None

    def pause_reading(self) -> None:
        if self.waiting is None:
            self.waiting = []

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._address, 0) if name == "peername" else default


class SimNetwork:
    """All connections of a run. All chance is drawn from one seed, so a run is repeatable as a whole."""

    def __init__(self, loop: VirtualLoop, seed: int | str = 0, *, loss: float = 0.0) -> None:
        self.loop = loop
        self.rng = random.Random(f"{seed}/network")  # noqa: S311
        self.loss = loss
        """The chance of each request and answer that its connection breaks instead of carrying it."""
        self.route: Callable[[SimNode], SimServer | None] = lambda _node: None
        """The server that the endpoint's name means to that node at this moment; None: it means nothing."""
        self.trust = Trust()
        """The secret that servers and drivers prove to each other."""
        self.cuts: set[tuple[str, str, Way]] = set()
        self.doomed: list[tuple[str, str, Way]] = []
        """Directions that break at their next message."""
        self.on_loss: Callable[[str, Way], None] = lambda _node, _way: None
        """Is told of each message that was lost with its connection."""
        self._connections: dict[SimConnection, None] = {}

    def connect(self, node: SimNode, server: SimServer | None = None) -> SimConnection:
        """Connect to that server; None: to the one that the endpoint's name means."""
        server = server or self.route(node)
        if server is None:
            raise DialFailed("the name is not known", answered=False)
        connection = SimConnection(self, node, server)
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
        """Begin a partition, in one direction or (none given) in both. Messages under way still arrive."""
        self.cuts.update((node.name, server.name, way) for way in ways or BOTH)

    def heal(self, node: SimNode, server: SimServer, *ways: Way) -> None:
        """End the partition. A connection that has messages waiting either goes on with them or breaks."""
        self.cuts.difference_update((node.name, server.name, way) for way in ways or BOTH)
        for connection in self._between(node, server):
            for channel in (connection.requests, connection.answers):
                if channel.stuck and channel.route not in self.cuts:
                    (channel.heal if self.rng.random() < 0.5 else connection.reset)()

    def reset(self, node: SimNode | None = None, server: SimServer | None = None) -> None:
        """Break the connections between the two; None: any node, any server."""
        for connection in self._between(node, server):
            connection.reset()

    def break_next(self, node: SimNode, server: SimServer, way: Way) -> None:
        """Lose the next request or answer between the two with its connection: before or after it took effect."""
        self.doomed.append((node.name, server.name, way))

    def _between(self, node: SimNode | None, server: SimServer | None) -> list[SimConnection]:
        return [one for one in self._connections if node in (None, one.node) and server in (None, one.server)]

    # ---- chance

    def delay_s(self) -> float:
        """Draw a delay: most messages are quick, some are not."""
        least, usual, most = DELAYS_S
        drawn = self.rng.random()
        return least + (usual - least) * drawn * drawn if drawn >= TAIL else usual + (most - usual) * drawn / TAIL

    def breaks(self, route: tuple[str, str, Way]) -> bool:
        """Whether the connection breaks at this message."""
        if route in self.doomed:
            self.doomed.remove(route)
        elif not (self.loss > 0 and self.rng.random() < self.loss):
            return False
        node, _, way = route
        self.on_loss(node, way)
        return True
