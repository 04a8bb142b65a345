"""Counts what members and server say to each other, on the wire: a relay between them that reads the frames and changes none.

It knows nothing of either side's code, so the counts hold for whatever that code becomes.
"""

from __future__ import annotations

import asyncio
import collections

from rdzv.server import frames

ASKS = {kind.__struct_config__.tag: kind.__name__ for kind in (frames.Hello, *frames.Request.__args__)}
TELLS = {kind.__struct_config__.tag: kind.__name__ for kind in (frames.Welcome, *frames.Answer.__args__)}


class Tap:
    """Listens at `address`. `asked` and `told` count frames by kind, `sent` and `received` the members' bytes."""

    def __init__(self, server: str) -> None:
        self._host, port = server.rsplit(":", 1)
        self._port = int(port)
        self.address = ""
        self.reset()

    def reset(self) -> None:
        self.asked: collections.Counter[str] = collections.Counter()
        self.told: collections.Counter[str] = collections.Counter()
        self.sent = 0
        self.received = 0

    @property
    def requests(self) -> int:
        """What the engine has to do: answered or, as a watch, kept."""
        return sum(self.asked[name] for name in ("Txn", "Grant", "Renew", "Revoke", "Watch"))

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _Side(self, is_member=True), "127.0.0.1", 0, backlog=4096)
        port = self._listener.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()

    async def dial(self, member: _Side) -> None:
        loop = asyncio.get_running_loop()
        _, server = await loop.create_connection(lambda: _Side(self, is_member=False), self._host, self._port)
        member.join(server)
        server.join(member)

    def count(self, is_member: bool, frame: bytes, size: int) -> None:
        """A frame's second byte is its tag: they are short arrays with a small number first."""
        if is_member:
            self.asked[ASKS.get(frame[1], "?")] += 1
            self.sent += size
        else:
            self.told[TELLS.get(frame[1], "?")] += 1
            self.received += size


class _Side(asyncio.Protocol):
    """One of the two connections."""

    def __init__(self, tap: Tap, *, is_member: bool) -> None:
        self._tap = tap
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
            self._tap.count(self._is_member, data[at + 4 : at + 8], size)
            at += size
        self._rest = data[at:]

    def connection_lost(self, _exc: Exception | None) -> None:
        if self._other is not None:
            self._other._transport.close()
