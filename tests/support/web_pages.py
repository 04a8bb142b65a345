"""A server with its HTTP port and members of its runs, and an HTTP client that says what it likes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from rdzv.config.settings import Settings
from rdzv.engines.embedded.server import Server
from rdzv.errors import RdzvError
from rdzv.member.member import Member
from rdzv.system.node import LocalNode
from rdzv.web.observer import RunFollower
from rdzv.web.serving import WebServer
from rdzv.web.sources import ServerSource
from support.embedded_server import driver_to, serving

LONG_S = 20.0
QUICK = {"last_call": 0.3, "settle": 0.2, "drain_settle": 0.1, "grow_every": 0, "lease": 2}

Answer = tuple[int, dict[str, str], bytes]


async def fetch(
    port: int, path: str, method: str = "GET", body: bytes = b"", tls: ssl.SSLContext | None = None, **headers: str
) -> Answer:
    """Send a request and return status, headers and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    sent = {"host": f"127.0.0.1:{port}", "connection": "close", "content-length": str(len(body))}
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in sent.items()), "", ""]
    writer.write("\r\n".join(lines).encode() + body)
    try:
        return await asyncio.wait_for(_answer(reader), LONG_S)
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = b""
    if "chunked" not in headers.get("transfer-encoding", ""):
        with suppress(ConnectionError):  # A server that refuses a request does not read the rest of it.
            body = await reader.read()
    return int(head[0].split()[1]), headers, body


class Listener:
    """A browser's stream of events, without the browser."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    @classmethod
    async def open(cls, port: int, path: str) -> Listener:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 26)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: localhost:{port}\r\n\r\n".encode())
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), LONG_S)
        assert head.startswith(b"HTTP/1.1 200"), head
        return cls(reader, writer)

    async def next(self) -> tuple[str, Any]:
        """Return the next event. One chunk is one event."""
        while True:
            size = int(await asyncio.wait_for(self._reader.readline(), LONG_S), 16)
            chunk = (await asyncio.wait_for(self._reader.readexactly(size + 2), LONG_S)).decode()
            if chunk.startswith("event: "):
                kind, data = chunk.rstrip().split("\n", 1)
                return kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))


class Scene:
    """A server, its HTTP port, and members that join every round."""

    def __init__(self, server: Server, page: WebServer) -> None:
        self.server = server
        self.page = page
        self.port = page.port
        self.members: dict[str, tuple[Member, asyncio.Task[None]]] = {}
        self.killed: list[Member] = []

    def go(
        self, *hosts: str, run_id: str = "job", nodes: tuple[int, int] = (2, 4), stop_s: float = 0.0, **options: Any
    ) -> None:
        """Let members come. `stop_s`: how long their workers take to stop."""
        for host in hosts:
            endpoint = f"127.0.0.1:{self.server.port}"
            settings = Settings.make(
                endpoint, run_id=run_id, min_nodes=nodes[0], max_nodes=nodes[1], is_host=False, **{**QUICK, **options}
            )
            member = Member(driver_to(self.server.port, run_id), settings, LocalNode(host))
            self.members[host] = (member, asyncio.create_task(_take_part(member, stop_s)))

    async def kill(self, host: str) -> None:
        """Stop a member as a power cut would."""
        member, task = self.members.pop(host)
        for one in (task, member.task):
            assert one is not None
            one.cancel()
            await asyncio.wait([one])
        self.killed.append(member)

    async def leave(self, host: str) -> None:
        member, task = self.members.pop(host)
        task.cancel()
        await asyncio.wait([task])
        await member.leave()

    def run(self, run_id: str = "job") -> RunFollower:
        return self.page.observer.runs[run_id]

    async def until_round(self, number: int, size: int, run_id: str = "job") -> RunFollower:
        """Wait until the observer has seen that round."""

        def holds() -> bool:
            follower = self.page.observer.runs.get(run_id)
            status = follower.model.status if follower is not None else None
            return status is not None and (status.round, status.phase, status.size) == (number, "sealed", size)

        await until(holds, f"round {number} of {run_id}")
        return self.run(run_id)


async def _take_part(member: Member, stop_s: float) -> None:
    with suppress(RdzvError):
        while True:
            await member.join()
            await member.wait_changed()
            await asyncio.sleep(stop_s)


async def until(holds: Any, what: str = "it") -> None:
    for _ in range(int(LONG_S / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {LONG_S:g} s: {what}")


@asynccontextmanager
async def scene(**options: Any) -> AsyncIterator[Scene]:
    """Start a server with its HTTP port."""
    async with serving() as server:
        page = WebServer(ServerSource(server, "node1:29400"), ("127.0.0.1", 0), **options)
        await page.start()
        made = Scene(server, page)
        try:
            yield made
        finally:
            await asyncio.gather(*(made.leave(host) for host in tuple(made.members)))
            await asyncio.gather(*(member.leave() for member in made.killed))  # For their sockets.
            await page.stop()
