"""A server and drivers over real sockets, and the ways to come between them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

from rdzv.config.endpoint import Endpoint
from rdzv.engines.embedded.client import RemoteDriver
from rdzv.engines.embedded.features import welcome_decoder
from rdzv.engines.embedded.frames import PREAMBLE, Frame, Hello, Welcome, encode
from rdzv.engines.embedded.frames import answer_decoder as answers
from rdzv.engines.embedded.server import Server
from rdzv.engines.embedded.stream import FramedProtocol
from rdzv.engines.port import Session

LONG_S = 30.0
"""No wait of a test is longer: one that is has failed."""

T = TypeVar("T")


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(scenario(), LONG_S)

    return asyncio.run(bounded())


async def until(holds: Callable[[], object], what: str = "it") -> None:
    """Look until it is so, where there is nothing to wait on."""
    deadline = time.monotonic() + LONG_S
    while not holds():
        assert time.monotonic() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(host: str = "127.0.0.1", port: int = 0, **options: Any) -> AsyncIterator[Server]:
    server = Server((host, port), **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def driver_to(port: int, run_id: str = "job", host: str = "127.0.0.1", **options: Any) -> RemoteDriver:
    shown = f"[{host}]" if ":" in host else host
    return RemoteDriver(Endpoint.parse(f"{shown}:{port}"), run_id=run_id, **options)


@asynccontextmanager
async def session_to(port: int, run_id: str = "job", **options: Any) -> AsyncIterator[Session]:
    session = await driver_to(port, run_id, **options).connect()
    try:
        yield session
    finally:
        await session.close()


class ServerThread:
    """A server with a thread and loop of its own, so that it can be stopped while the others go on."""

    def __init__(self, **options: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.server = Server(("127.0.0.1", 0), **options)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ServerThread:  # noqa: PYI034  Self came with 3.11.
        self._thread.start()
        self.call(self.server.start())
        return self

    def __exit__(self, *_: object) -> None:
        self.call(self.server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(LONG_S)
        self.loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(LONG_S)

    def stall(self, seconds: float) -> None:
        """Stop reading and judging for that long. Return at once."""
        self.loop.call_soon_threadsafe(time.sleep, seconds)


class Proxy:
    """Between a driver and a server: stops forwarding in either direction, or breaks what there is."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.flows = {"up": asyncio.Event(), "down": asyncio.Event()}
        self.carried = {"up": 0, "down": 0}
        self.connections = 0
        self.accepts = True
        for flow in self.flows.values():
            flow.set()

    async def __aenter__(self) -> Proxy:  # noqa: PYI034
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()

    def freeze(self, *ways: str) -> None:
        for way in ways or ("up", "down"):
            self.flows[way].clear()

    def thaw(self) -> None:
        for flow in self.flows.values():
            flow.set()

    def cut(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if not self.accepts:
            writer.transport.abort()
            return
        try:
            reader_up, writer_up = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, writer_up}
        for way, source, sink in (("up", reader, writer_up), ("down", reader_up, writer)):
            task = asyncio.create_task(self._pump(way, source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, way: str, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                await self.flows[way].wait()
                self.carried[way] += len(data)
                sink.write(data)
                await sink.drain()
        if not self._server.is_serving():
            return
        await self.flows[way].wait()
        sink.close()


class Raw:
    """A peer that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._welcomed = False

    @classmethod
    async def connect(cls, port: int) -> Raw:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=1 << 26))

    @classmethod
    async def member(cls, port: int, run_id: str = "job", session: str = "s", attempt: int = 1, **more: Any) -> Raw:
        """One that has been welcomed."""
        raw = await cls.connect(port)
        raw.write(PREAMBLE, Hello(run_id, session, attempt, **more))
        assert await raw.read(len(PREAMBLE)) == PREAMBLE
        welcome = await raw.frame()
        assert isinstance(welcome, Welcome), welcome
        raw.welcome = welcome
        return raw

    def write(self, *parts: bytes | Frame) -> None:
        self.writer.write(b"".join(part if isinstance(part, bytes) else encode(part) for part in parts))

    async def read(self, size: int) -> bytes:
        return await asyncio.wait_for(self.reader.readexactly(size), LONG_S)

    async def frame(self) -> Any:
        size = int.from_bytes(await self.read(4), "big")
        payload = await self.read(size)
        decoder = answers if self._welcomed else welcome_decoder
        self._welcomed = True
        return decoder.decode(payload)

    async def rest(self) -> bytes:
        """All until the other side hangs up."""
        return await asyncio.wait_for(self.reader.read(), LONG_S)

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()


class FakeTransport(asyncio.Transport):
    """Keeps what is written, and can be as slow as it likes."""

    def __init__(self, host: str = "") -> None:
        """`host`: the other side's address, if it has one."""
        super().__init__({"peername": (host, 1)} if host else {})
        self.sent: list[bytes] = []
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def feed(framed: FramedProtocol, data: bytes, step: int = 1 << 16) -> None:
    """As the event loop would, in pieces of at most that size."""
    for start in range(0, len(data), step):
        if framed.transport.is_closing():
            return
        piece = data[start : start + step]
        buffer = framed.get_buffer(-1)
        buffer[: len(piece)] = piece
        framed.buffer_updated(len(piece))
