"""The parts of a small world: an event loop, nodes, a network and servers that leave nothing to chance.

Time passes, and requests arrive, only when the world decides for it. Clocks, ids, revisions and ports begin at numbers by which
`fingerprint.py` recognises them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from ..engines.embedded.features import request_decoder
from ..engines.embedded.frames import PREAMBLE, Revoke, Txn, answer_decoder
from ..engines.port import Delete, DeletePrefix, Put
from ..system.bootstrap import Bootstrap
from .fingerprint import CLOCK_STEP, PORT, REVISION
from .network import SimChannel, SimConnection, SimNetwork, Way
from .nodes import SimNode
from .server import SimServer
from .virtual_loop import VirtualLoop


class ChosenLoop(VirtualLoop):
    """Time passes only when the world decides for it."""

    def __init__(self, decide: Callable[[], bool]) -> None:
        super().__init__()
        self.now = 5 * CLOCK_STEP
        self._decide = decide

    def _advance(self) -> None:
        if self.unwinding or not self._decide():
            super()._advance()

    @property
    def is_busy(self) -> bool:
        return bool(self._ready)

    @property
    def tasks(self) -> dict[Any, str]:
        return self._tasks

    def pending_timers(self) -> list[tuple[float, Any]]:
        """Return the timers that were not cancelled, in the order in which they fire."""
        return [(entry[0], entry[2]) for entry in sorted(self._timers, key=lambda entry: entry[:2]) if not entry[2].void]

    def next_timer_in_s(self) -> float:
        return min((at for at, _, call in self._timers if not call.void), default=float("inf")) - self.now


class ChosenNode(SimNode):
    """A node whose ids tell whose they are, and in which order they were drawn."""

    def __init__(self, loop: VirtualLoop, name: str, index: int, host: str) -> None:
        super().__init__(loop, name, 0, rate=1.0, offset_s=(30 - index) * CLOCK_STEP, host=host)
        self.pid = index
        self._index = index
        self._drawn = self._bound = 0

    def token(self) -> str:
        self._drawn += 1
        return f"e{self._index:x}{4 * self._drawn:014x}"  # In fours, because leases are made of all but two bits.

    def jitter(self) -> float:
        return 0.5

    def wall_s(self) -> int:
        return 1

    def bind(self, host: str, ports: tuple[int, int], former: int = 0) -> Bootstrap:
        """Return an address without a socket. Without a range it is always new."""
        if ports[0]:
            return super().bind(host, ports, former)
        self._bound += 1
        return Bootstrap(host, PORT + 1000 * self._index + self._bound)


class ChosenServer(SimServer):
    """A server whose clocks and revisions begin at numbers by which they are recognised."""

    _drawn = 0

    def start(self) -> None:
        super().start()
        core, engine = self.core, self.engine
        # One floor for each start: with one for each instant no two states would be alike.
        floor = 1000 * (self._drawn + 1)
        core.fence_floor = lambda: floor  # type: ignore[method-assign]
        core.awake_s = core._swept_s = core._emptied_s = 3 * CLOCK_STEP
        engine.instance = self._token()
        engine.revision = REVISION
        engine.leases._now = 2 * CLOCK_STEP

    def clocks(self) -> list[tuple[int, float]]:
        return [(2, self.engine.leases._now), (3, self.core.awake_s)]

    def _token(self) -> str:
        self._drawn += 1
        return f"e{15 if self.name == 'engine' else 14:x}{4 * self._drawn:014x}"


class ChosenChannel(SimChannel):
    """One direction of a connection. Messages wait until they are delivered by choice."""

    def __init__(self, network: ChosenNetwork, node: SimNode, server: SimServer, way: Way) -> None:
        super().__init__(network, node, server, way)
        self.queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()

    def _transmit(self, deliver: Callable[..., None], args: tuple[Any, ...], extra_s: float) -> None:  # noqa: ARG002
        self.queue.append((deliver, args))

    def deliver(self) -> None:
        """Let the first message arrive."""
        deliver, args = self.queue.popleft()
        self._network.loop.call_soon(self._arrive, deliver, args, context=self._receiver.context)


class ChosenNetwork(SimNetwork):
    """A network without delays and chance: messages wait until they are delivered."""

    def __init__(self, loop: VirtualLoop, *, chooses_reads: bool) -> None:
        """`chooses_reads`: a request that only reads is a matter of choice, too."""
        super().__init__(loop)
        self._chooses_reads = chooses_reads

    def connect(self, node: SimNode, server: SimServer | None = None) -> SimConnection:
        connection = super().connect(node, server)
        connection.requests = ChosenChannel(self, node, connection.server, "requests")
        connection.answers = ChosenChannel(self, node, connection.server, "answers")
        return connection

    def delay_s(self) -> float:
        return 0.0

    def of(self, name: str) -> list[SimConnection]:
        """Return the connections of that node that have not broken."""
        return [one for one in self._connections if one.node.name == name and not one.requests.broken]

    def channels(self) -> Iterator[tuple[SimConnection, ChosenChannel]]:
        """Yield the channels in which something waits."""
        for connection in list(self._connections):
            for channel in (connection.requests, connection.answers):
                assert isinstance(channel, ChosenChannel)
                if channel.broken:
                    channel.queue.clear()
                elif channel.queue:
                    yield connection, channel

    def waiting(self, held: list[ChosenChannel]) -> dict[str, ChosenChannel]:
        """Return the nodes whose next request is a matter of choice, and the channel it waits in."""
        found: dict[str, ChosenChannel] = {}
        for connection, channel in self.channels():
            if channel is connection.requests and self._is_chosen(channel) and channel not in held:
                found.setdefault(connection.node.name, channel)
        return dict(sorted(found.items()))

    def deliver_plain(self, paused: set[str], held: list[ChosenChannel]) -> None:
        """Deliver everything that is not a matter of choice."""
        for connection, channel in self.channels():
            is_answer = channel is connection.answers
            if connection.node.name not in paused if is_answer else not self._is_chosen(channel) and channel not in held:
                channel.deliver()

    def _is_chosen(self, channel: ChosenChannel) -> bool:
        deliver, args = channel.queue[0]
        if deliver.__name__ != "receive":  # The client hangs up.
            return False
        return any(isinstance(one, Revoke) or (isinstance(one, Txn) and self._matters(one)) for one in decode_frames(args[1]))

    def _matters(self, txn: Txn) -> bool:
        branches = (txn.then, txn.otherwise, *(case.then for case in txn.instead))
        writes = any(isinstance(one, Put | Delete | DeletePrefix) for branch in branches for one in branch)
        return writes or self._chooses_reads


@lru_cache(maxsize=10_000)
def decode_frames(data: bytes) -> list[object]:
    """Return the frames in bytes that one end has sent; greetings stay bytes."""
    found: list[object] = []
    at = len(PREAMBLE) if data.startswith(PREAMBLE) else 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        payload = data[at + 4 : at + 4 + size]
        at += 4 + size
        frame: object = payload
        for decoder in (request_decoder, answer_decoder):
            try:
                frame = decoder.decode(payload)
                break
            except msgspec.ValidationError:
                continue
        found.append(frame)
    return found
