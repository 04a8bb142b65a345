"""Counts the frames and bytes between members and server: a relay that reads the frames and changes none.

It does not depend on the code of either side, so the counts stay comparable when that changes.
"""

from __future__ import annotations

import asyncio
import collections

from rdzv.engines.embedded import features, frames

ASKS = {kind.__struct_config__.tag: kind.__name__ for kind in (frames.Hello, *features.Request.__args__)}
TELLS = {kind.__struct_config__.tag: kind.__name__ for kind in (frames.Welcome, *frames.Answer.__args__)}


class Traffic:
    """The traffic of one member: frames by kind, and bytes without the preamble."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.asked: collections.Counter[str] = collections.Counter()
        self.told: collections.Counter[str] = collections.Counter()
        self.sent = self.received = 0

    @property
    def bytes(self) -> int:
        return self.sent + self.received

    @property
    def frames(self) -> int:
        return sum(self.asked.values()) + sum(self.told.values())

    @property
    def requests(self) -> int:
        """Return the number of requests that the engine answers or keeps as a watch."""
        return self.txns + sum(self.asked[name] for name in ("Renew", "Revoke", "WatchStart", "EndsWatchStart"))

    @property
    def txns(self) -> int:
        return self.asked["Txn"] + self.asked["TxnThenWatch"]


class Tap:
    """A relay that listens at `address` and counts the traffic of each connection."""

    def __init__(self, server: str) -> None:
        self._host, port = server.rsplit(":", 1)
        self._port = int(port)
        self.address = ""
        self.connections: list[Traffic] = []

    def reset(self) -> None:
        for traffic in self.connections:
            traffic.reset()

    def total(self) -> Traffic:
        """Return the traffic of all connections."""
        total = Traffic()
        for traffic in self.connections:
            total.asked += traffic.asked
            total.told += traffic.told
            total.sent += traffic.sent
            total.received += traffic.received
        return total

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._accept, "127.0.0.1", 0, backlog=4096)
        port = self._listener.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> _Side:
        traffic = Traffic()
        self.connections.append(traffic)
        return _Side(self, traffic, is_member=True)

    async def dial(self, member: _Side) -> None:
        loop = asyncio.get_running_loop()
        _, server = await loop.create_connection(
            lambda: _Side(self, member.traffic, is_member=False), self._host, self._port
        )
        member.join(server)
        server.join(member)


class _Side(asyncio.Protocol):
    """One of the two sides of a relayed connection."""

    def __init__(self, tap: Tap, traffic: Traffic, *, is_member: bool) -> None:
        self._tap = tap
        self.traffic = traffic
        self._is_member = is_member
        self._greeted = False
        self._rest = b""
        self._held = b""
        self._other: _Side | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        if self._is_member:
            self._dialing = asyncio.get_running_loop().create_task(self._tap.dial(self))

    def join(self, other: _Side) -> None:
        self._other = other
        other._transport.write(self._held)
        self._held = b""

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._held += data
        else:
            self._other._transport.write(data)
        data = self._rest + data
        at = 0
        if not self._greeted:
            if len(data) < len(frames.PREAMBLE):
                self._rest = data
                return
            self._greeted, at = True, len(frames.PREAMBLE)
        while len(data) - at >= 4:
            size = 4 + int.from_bytes(data[at : at + 4], "big")
            if len(data) - at < size:
                break
            self._count(data[at + 5], size)
            at += size
        self._rest = data[at:]

    def _count(self, tag: int, size: int) -> None:
        """Count a frame. A frame is a short array that begins with a small number, so its second byte is its tag."""
        if self._is_member:
            self.traffic.asked[ASKS.get(tag, "?")] += 1
            self.traffic.sent += size
        else:
            self.traffic.told[TELLS.get(tag, "?")] += 1
            self.traffic.received += size

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._other is not None:
            self._other._transport.close()
