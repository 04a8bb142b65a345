"""The in-process driver: `memory://name` is an engine shared by all threads and event loops of this process.

For tests, for examples, and for thousands of members in one process. A lock makes the engine one-threaded, and the
event loops of its sessions pass time for it. A forked child has none of these engines: it starts with its own.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ..errors import Unreachable
from .port import Batch, Case, Compare, Gap, Operation, Outcome
from .reference import Engine
from .watch_queue import BACKLOG_MAX

__all__ = ["Engine", "MemoryDriver", "MemorySession", "MemoryWatch"]

TICK_S = 0.25
"""How often an event loop looks whether leases have ended."""
STEP_MAX_S = 2 * TICK_S
"""The most that may pass at once: the rest of a longer pause was a stall of ours, and is credited to all leases."""
TXN_MAX = 100_000
"""Nothing in here limits a transaction; this is for those who split theirs."""


class _SharedEngine:
    """An engine with what it takes to share it."""

    def __init__(self) -> None:
        self.engine = Engine(secrets.token_hex(8))
        self.lock = threading.Lock()
        self.forked = False
        self._sessions: dict[asyncio.AbstractEventLoop, int] = {}
        self._timers: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}
        self._passed = time.monotonic()

    def enter(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count a session. Every loop that has one ticks, so that leases end as long as any of them runs."""
        if loop not in self._sessions:
            self._timers[loop] = loop.call_later(TICK_S, self._tick, loop)
        self._sessions[loop] = self._sessions.get(loop, 0) + 1

    def leave(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Uncount it; True if nobody is left and nothing is kept. Sessions on a closed loop do not count."""
        if loop in self._sessions:
            self._sessions[loop] -= 1
        for other, count in tuple(self._sessions.items()):
            if not count or other.is_closed():
                del self._sessions[other]
                self._timers.pop(other).cancel()
        return not (self._sessions or len(self.engine) or len(self.engine.leases))

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.forked:
            return
        self._timers[loop] = loop.call_later(TICK_S, self._tick, loop)
        self.pass_time()

    def pass_time(self) -> None:
        """Pass what no other loop has passed yet, or as much of it as is no stall."""
        with self.lock:
            now = time.monotonic()
            elapsed_s = min(now - self._passed, STEP_MAX_S)
            self._passed = now
            self.engine.pass_time(elapsed_s)


class _Registry:
    """The engines of this process. Every open session's engine is in it."""

    def __init__(self) -> None:
        self._engines: dict[str, _SharedEngine] = {}
        self._lock = threading.Lock()

    def enter(self, name: str, loop: asyncio.AbstractEventLoop) -> _SharedEngine:
        """The engine of that name, new and empty if there is none."""
        with self._lock:
            shared = self._engines.get(name)
            if shared is None:
                shared = self._engines[name] = _SharedEngine()
            shared.enter(loop)
            return shared

    def leave(self, name: str, shared: _SharedEngine, loop: asyncio.AbstractEventLoop) -> None:
        """Drop the engine with its last session, unless it keeps something for the next one."""
        with self._lock:
            if shared.leave(loop) and self._engines.get(name) is shared:
                del self._engines[name]

    def start_anew(self) -> None:
        """In a forked child: other threads of the parent may have held the locks, and its loops pass no time here."""
        for shared in self._engines.values():
            shared.forked = True
        self._engines = {}
        self._lock = threading.Lock()


_registry = _Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry.start_anew)


class MemoryDriver:
    """Reaches the engine of that name in this process. The first to connect makes it, empty."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.endpoint = f"memory://{name}"

    async def connect(self) -> MemorySession:
        """Always possible."""
        loop = asyncio.get_running_loop()
        return MemorySession(self.name, _registry.enter(self.name, loop), loop)

    async def close(self) -> None:
        """Nothing to give up: the engine belongs to the process."""


class MemorySession:
    """Used from the loop it was made on. Its calls answer at once, without giving way to other tasks."""

    durable = True
    compares_max = TXN_MAX
    writes_max = TXN_MAX
    stars = True
    local_host = "127.0.0.1"

    def __init__(self, name: str, shared: _SharedEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = shared.engine
        self.instance = shared.engine.instance
        self.place = f"memory:{name}"
        self.name = name
        self.shared = shared
        self.loop = loop
        self.watches: set[MemoryWatch] = set()
        self._closed = False

    async def txn(
        self,
        compares: Iterable[Compare] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
        instead: Sequence[Case] = (),
    ) -> Outcome:
        """See the port."""
        with self._lock():
            return self.engine.txn(compares, then, otherwise, instead)

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:  # noqa: ARG002
        """The longest step is added, because one may be due right after this. There is no connection to lose."""
        with self._lock():
            return self.engine.grant(ttl_s + STEP_MAX_S)

    async def renew(self, lease: int) -> None:
        """See the port."""
        with self._lock():
            self.engine.renew(lease)

    async def revoke(self, lease: int) -> None:
        """See the port."""
        with self._lock():
            self.engine.revoke(lease)

    def watch(self, targets: Sequence[str], since: int) -> MemoryWatch:
        """Whatever is wrong is said by the watch, as a remote engine could not say it earlier."""
        watch = MemoryWatch(self)
        try:
            with self._lock():
                watch.stop = self.engine.subscribe(targets, since, watch.deliver)
                self.watches.add(watch)
        except (Gap, Unreachable) as problem:
            watch.problem = problem
        return watch

    async def close(self) -> None:
        """Its watches end, too. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self.shared.forked:
            return
        with self.shared.lock:
            for watch in tuple(self.watches):
                watch.end(self.unreachable())
        _registry.leave(self.name, self.shared, self.loop)

    def unreachable(self) -> Unreachable:
        """Why nothing can be asked of it any more."""
        problem = "the session is closed"
        if self.shared.forked:
            problem = "it belongs to the process that this one was forked from; connect anew for one of this process"
        return Unreachable(f"memory://{self.name}", problem, applied=False)

    def _lock(self) -> threading.Lock:
        if self._closed or self.shared.forked:
            raise self.unreachable()
        return self.shared.lock


class MemoryWatch:
    """What a session's `watch` gives. For one reader."""

    def __init__(self, session: MemorySession) -> None:
        self.stop: Callable[[], None] = lambda: None
        self.problem: Exception | None = None
        self._session = session
        self._shared = session.shared
        self._batches: deque[Batch] = deque()
        self._events = 0
        self._reader: asyncio.Future[None] | None = None

    def __aiter__(self) -> MemoryWatch:
        return self

    async def __anext__(self) -> Batch:
        while True:
            if self._shared.forked:
                raise self._session.unreachable()
            with self._shared.lock:
                if self.problem is not None:
                    raise self.problem
                if self._batches:
                    batch = self._batches.popleft()
                    self._events -= len(batch.events)
                    return batch
                reader = self._reader = self._session.loop.create_future()
            await reader

    async def aclose(self) -> None:
        """No more batches. Closing twice is harmless."""
        if not self._shared.forked:
            with self._shared.lock:
                self.end(StopAsyncIteration())

    def deliver(self, batch: Batch) -> None:
        """Called by the engine, so with the lock held, in the thread of whoever made the change.

        The first call may come before `stop` is known. It cannot be too large: the engine remembers less than that.
        """
        self._events += len(batch.events)
        if self._events > BACKLOG_MAX:
            self.end(Gap(f"{self._events} events were not read in time"))
            return
        self._batches.append(batch)
        self._wake()

    def end(self, problem: Exception) -> None:
        """Let the reader find the problem at once: batches before a gap are of no use to it. The lock is held."""
        self.stop()
        self._session.watches.discard(self)
        self._batches.clear()
        if self.problem is None:
            self.problem = problem
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is None:
            return
        if _running_loop() is self._session.loop:
            _wake_reader(reader)
            return
        try:
            self._session.loop.call_soon_threadsafe(_wake_reader, reader)
        except RuntimeError:
            self.stop()  # The loop was closed around it: nobody will ever read this.


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _wake_reader(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)
