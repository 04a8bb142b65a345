"""Rigs, one per driver, and tools for the contract suite `test_contract.py` and `test_contract_watches.py`.

To run a driver through the contract, add its rig to `RIGS`. The tests know only the port and the rig. They use keys below
`rig.root` and relative revisions, so nobody else may write to the engine meanwhile.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import ClassVar, TypeVar, cast

import pytest

from rdzv.config.endpoint import Endpoint
from rdzv.engines.embedded.client import RemoteDriver
from rdzv.engines.embedded.server import Server
from rdzv.engines.embedded.trust import Trust
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.driver import EtcdDriver, EtcdSession
from rdzv.engines.etcd.server import EtcdServer
from rdzv.engines.memory import MemoryDriver, MemorySession
from rdzv.engines.port import (
    Batch,
    Delete,
    DeletePrefix,
    Event,
    Get,
    Item,
    List,
    Operation,
    Order,
    Outcome,
    Put,
    Session,
    Watch,
)
from rdzv.engines.register.backend import Backend, BlockingRegister
from rdzv.engines.register.driver import RegisterDriver, RegisterSession
from rdzv.engines.register.file import FileBackend
from rdzv.system.node import LocalNode
from support.certificates import full
from support.register_backends import AbleBackend, CellBackend

DEADLINE_S = 30.0
"""Longest wait of a test. Only a broken engine makes a test wait so long."""

T = TypeVar("T")


class Rig:
    """One engine, with the handles that the tests need."""

    ttl_s = 1.0
    """A lease time short enough for a test and long enough to be renewed in time on a busy node."""

    def __init__(self) -> None:
        self.root = f"test-{secrets.token_hex(4)}/"
        self._sessions: list[Session] = []

    async def open(self) -> Session:
        raise NotImplementedError

    async def forget(self) -> None:
        """Make the engine forget all changes up to now, so that a watch from before meets a gap."""
        raise NotImplementedError

    async def restart_empty(self) -> None:
        """Bring another instance up in the engine's place, with nothing in it."""
        raise NotImplementedError

    async def connect(self) -> Session:
        """Connect a session that is closed with the rig."""
        session = await self.open()
        self._sessions.append(session)
        return session

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


Opener = Callable[[], AbstractAsyncContextManager[Rig]]


class MemoryRig(Rig):
    """An engine of this process."""

    async def open(self) -> Session:
        return await MemoryDriver(self.root).connect()

    async def forget(self) -> None:
        session = cast(MemorySession, await self.connect())
        with session.shared.lock:
            session.engine.compact(session.engine.revision)


@asynccontextmanager
async def _memory() -> AsyncIterator[Rig]:
    rig = MemoryRig()
    try:
        yield rig
    finally:
        await rig.close()


class RemoteRig(Rig):
    """A server in this process, behind real sockets."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        endpoint = Endpoint.parse(f"127.0.0.1:{server.port}")
        self._driver = RemoteDriver(endpoint, run_id="contract", trust=server.trust)

    async def open(self) -> Session:
        return await self._driver.connect()

    async def forget(self) -> None:
        engine = self.server.runs["contract"].engine
        engine.compact(engine.revision)

    async def restart_empty(self) -> None:
        await self.server.stop()
        self.server = Server(("127.0.0.1", self.server.port), trust=self.server.trust)
        await self.server.start()


@asynccontextmanager
async def _remote(trust: Trust | None = None) -> AsyncIterator[Rig]:
    server = Server(("127.0.0.1", 0), trust=trust)
    await server.start()
    rig = RemoteRig(server)
    try:
        yield rig
    finally:
        await rig.close()
        await rig.server.stop()


class EtcdRig(Rig):
    """A real etcd, one for all tests of this process."""

    _servers: ClassVar[dict[str, EtcdServer]] = {}

    def __init__(self, binary: str) -> None:
        super().__init__()
        if binary not in self._servers:
            server = self._servers[binary] = EtcdServer(binary=binary)
            server.start()
            atexit.register(server.stop)
        self._driver = EtcdDriver(Endpoint.parse(f"{self._servers[binary].url}/contract"), Credentials())

    async def open(self) -> Session:
        return await self._driver.connect()

    async def forget(self) -> None:
        session = cast(EtcdSession, await self.connect())
        await session.client.compact((await session.txn()).revision)

    async def close(self) -> None:
        # A key left behind would go with its lease in the middle of another test, and count as a write there.
        session = await self.connect()
        await session.txn(then=[DeletePrefix(self.root)])
        await super().close()


def _etcd(binary: str) -> Opener:
    @asynccontextmanager
    async def opener() -> AsyncIterator[Rig]:
        rig = EtcdRig(binary)
        try:
            yield rig
        finally:
            await rig.close()

    return opener


class RegisterRig(Rig):
    """A register in memory, or one in a file. Every session has a driver of its own, as if it were in another process."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self._drivers: list[RegisterDriver] = []

    async def open(self) -> Session:
        register = BlockingRegister(self.backend, "register://contract", timeout_s=10.0)
        node = LocalNode()
        node.pid = -len(self._drivers)
        self._drivers.append(RegisterDriver(register, node, timeout_s=10.0))
        return await self._drivers[-1].connect()

    async def forget(self) -> None:
        await cast(RegisterSession, await self.connect()).compact()
        for session in self._sessions:
            await session.txn()  # A session remembers what it has seen until it sees something newer.

    async def restart_empty(self) -> None:
        self.backend.clear()  # type: ignore[attr-defined]

    async def close(self) -> None:
        await super().close()
        for driver in self._drivers:
            await driver.close()


class ErasableFile(FileBackend):
    """A file that the test can take away."""

    def clear(self) -> None:
        self._path.unlink()


def _register(backend: Callable[[str], Backend]) -> Opener:
    @asynccontextmanager
    async def opener() -> AsyncIterator[Rig]:
        with tempfile.TemporaryDirectory() as directory:
            rig = RegisterRig(backend(directory))
            try:
                yield rig
            finally:
                await rig.close()

    return opener


MORE_ETCDS = [path for path in os.environ.get("RDZV_TEST_ETCD", "").split(":") if path]
"""etcd programs of other versions to test as well."""

RIGS: dict[str, Opener] = {
    "memory": _memory,
    "remote": _remote,
    "secured": lambda: _remote(full()),
    "register": _register(lambda _: CellBackend()),
    "able-register": _register(lambda _: AbleBackend()),
    "file": _register(lambda directory: ErasableFile(f"{directory}/state")),
    "etcd": _etcd(""),
    **{f"etcd{n}": _etcd(path) for n, path in enumerate(MORE_ETCDS, 2)},
}
"""`secured` is the server again, with a secret and TLS on both sides."""


# ---- tools


def contract(test: Callable[[Rig], Awaitable[None]]) -> Callable[[Opener], None]:
    """Run the test for every driver, in a loop of its own and with a rig of its own."""

    @pytest.mark.parametrize("opener", [pytest.param(opener, id=name) for name, opener in RIGS.items()])
    def run(opener: Opener) -> None:
        async def main() -> None:
            async with opener() as rig:
                await soon(test(rig))

        asyncio.run(main())

    run.__doc__ = test.__doc__
    return run


async def soon(awaited: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaited, DEADLINE_S)


async def write(session: Session, *operations: Operation) -> Outcome:
    return await session.txn(then=operations)


async def put(session: Session, key: str, value: bytes = b"", lease: int = 0) -> int:
    """Put one key and return its revision."""
    return (await write(session, Put(key, value, lease))).revision


async def get(session: Session, key: str) -> Item | None:
    return (await write(session, Get(key))).item(0)


async def delete(session: Session, key: str) -> int:
    """Delete one key and return the engine's revision."""
    return (await write(session, Delete(key))).revision


async def keys(
    session: Session, prefix: str, order: Order = Order.KEY, limit: int = 0, created_below: int = 0, after: str = ""
) -> list[str]:
    """List keys, without the prefix."""
    outcome = await write(session, List(prefix, order, limit, created_below, after))
    return [item.key[len(prefix) :] for item in outcome.reads[0]]


async def revision(session: Session) -> int:
    return (await session.txn()).revision


class Reader:
    """Reads a watch event by event, and checks what must hold for every watch."""

    def __init__(
        self, session: Session, *targets: str, since: int, ends: Sequence[str] = (), watch: Watch | None = None
    ) -> None:
        """`watch`: one that has begun at that revision."""
        self.revision = since
        self._watch = watch or session.watch(targets, since, ends)
        self._batches = aiter(self._watch)
        self._events: list[Event] = []

    async def batch(self) -> Batch:
        batch = await soon(anext(self._batches))
        revisions = [event.revision for event in batch.events]
        assert batch.events, "a batch without events tells nobody anything"
        assert revisions == sorted(revisions), "events come in the order of revisions"
        assert revisions[0] > self.revision, "a batch holds all events up to its revision, so none comes later or twice"
        assert revisions[-1] <= batch.revision
        for event in batch.events:
            assert event.item is None or (event.item.key, event.item.modified) == (event.key, event.revision)
        self.revision = batch.revision
        return batch

    async def event(self) -> Event:
        if not self._events:
            self._events.extend((await self.batch()).events)
        return self._events.pop(0)

    async def events(self, count: int) -> list[tuple[str, bytes | None]]:
        """Read `count` events, as key and value (None: deleted)."""
        found = [await self.event() for _ in range(count)]
        return [(event.key, event.item.value if event.item else None) for event in found]

    async def close(self) -> None:
        await self._watch.aclose()
