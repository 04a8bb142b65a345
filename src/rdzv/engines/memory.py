"""The in-process driver: `memory://name` is an engine shared by all threads and event loops of this process.

It serves tests, examples, and thousands of members in one process. A lock serializes access to the engine. The event
loops of its sessions pass time for it. A forked child does not share its parent's engines: it starts with new ones.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ..errors import Unreachable
from .port import Batch, Case, Compares, Gap, Operations, Outcome, ServerLife
from .reference import Engine
from .watch_queue import WatchesAfterwards, WatchQueue

TICK_S = 0.25
"""Time between two checks for ended leases."""
STEP_MAX_S = 2 * TICK_S
"""Longest step of time: the rest of a longer pause was a stall of this process and is credited to all leases."""
TXN_MAX = 100_000
"""A number for callers that split their transactions; the engine itself has no limit."""


class _SharedEngine:
    """An engine of this process with its lock and its timers. It is dropped when it has no session, key or lease."""

    by_name: ClassVar[dict[str, _SharedEngine]] = {}
    registry_lock: ClassVar = threading.Lock()
    """Guards `by_name` and the counts of sessions."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engine = Engine(secrets.token_hex(8))
        self.lock = threading.Lock()
        self.forked = False
        self._sessions: dict[asyncio.AbstractEventLoop, int] = {}
        self._timers: dict[asyncio.AbstractEventLoop, asyncio.TimerHandle] = {}
        self._passed = time.monotonic()

    @classmethod
    def enter(cls, name: str, loop: asyncio.AbstractEventLoop) -> _SharedEngine:
        """Return the engine of that name, made if necessary, with one more session on that loop."""
        with cls.registry_lock:
            self = cls.by_name.get(name)
            if self is None:
                self = cls.by_name[name] = cls(name)
            # Every loop with a session ticks, so that leases end as long as any of the loops runs.
            if loop not in self._sessions:
                self._timers[loop] = loop.call_later(TICK_S, self._tick, loop)
            self._sessions[loop] = self._sessions.get(loop, 0) + 1
            return self

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Uncount a session. Sessions on a closed loop do not count."""
        with self.registry_lock:
            if loop in self._sessions:
                self._sessions[loop] -= 1
            for other, count in tuple(self._sessions.items()):
                if not count or other.is_closed():
                    del self._sessions[other]
                    self._timers.pop(other).cancel()
            is_empty = not (self._sessions or len(self.engine) or len(self.engine.leases))
            if is_empty and self.by_name.get(self.name) is self:
                del self.by_name[self.name]

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.forked:
            return
        self._timers[loop] = loop.call_later(TICK_S, self._tick, loop)
        self.pass_time()

    def pass_time(self) -> None:
        """Pass the time since the last call from any loop, at most `STEP_MAX_S`."""
        with self.lock:
            now = time.monotonic()
            elapsed_s = min(now - self._passed, STEP_MAX_S)
            self._passed = now
            self.engine.pass_time(elapsed_s)


def _after_fork_in_child() -> None:
    # Other threads of the parent may have held the locks, and no loop passes these engines' time here.
    for shared in _SharedEngine.by_name.values():
        shared.forked = True
    _SharedEngine.by_name = {}
    _SharedEngine.registry_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


class MemoryDriver:
    """Reaches the engine of that name in this process. The first connection makes it."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.endpoint = f"memory://{name}"

    async def connect(self) -> MemorySession:
        loop = asyncio.get_running_loop()
        return MemorySession(_SharedEngine.enter(self.name, loop), loop)

    async def close(self) -> None:
        """Do nothing: the engine belongs to the process."""


class MemorySession(WatchesAfterwards):
    """A session for the loop it was made on. Its calls return at once, without switching to other tasks."""

    durable = True
    life: ServerLife | None = None
    fence_floor: int | None = 0
    compares_max = TXN_MAX
    writes_max = TXN_MAX
    stars = True
    sees_ends = False
    local_host = "127.0.0.1"

    def __init__(self, shared: _SharedEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = shared.engine
        self.instance = shared.engine.instance
        self.place = f"memory:{shared.name}"
        self.shared = shared
        self.loop = loop
        self.watches: set[MemoryWatch] = set()
        self._closed = False

    async def txn(
        self, compares: Compares = (), then: Operations = (), otherwise: Operations = (), instead: Sequence[Case] = ()
    ) -> Outcome:
        with self._lock():
            return self.engine.txn(compares, then, otherwise, instead)

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:  # noqa: ARG002
        with self._lock():
            return self.engine.grant(ttl_s + STEP_MAX_S)  # The longest step may follow at once.

    async def renew(self, lease: int) -> None:
        with self._lock():
            self.engine.renew(lease)

    async def revoke(self, lease: int) -> None:
        with self._lock():
            self.engine.revoke(lease)

    def watch(self, targets: Sequence[str], since: int, ends: Sequence[str] = ()) -> MemoryWatch:
        """Start a watch. Its reader gets the error if it cannot start, as with a remote engine."""
        watch = MemoryWatch(self)
        try:
            with self._lock():
                watch.stop = self.engine.subscribe(targets, since, watch.deliver, ends)
                self.watches.add(watch)
        except (Gap, Unreachable) as problem:
            watch.problem = problem
        return watch

    async def close(self) -> None:
        """End the session and its watches. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self.shared.forked:
            return
        with self.shared.lock:
            for watch in tuple(self.watches):
                watch.end(self.unreachable())
        self.shared.leave(self.loop)

    def unreachable(self) -> Unreachable:
        problem = "the session is closed"
        if self.shared.forked:
            problem = "it belongs to the process that this one was forked from; connect anew for one of this process"
        return Unreachable(f"memory://{self.shared.name}", problem, applied=False)

    def _lock(self) -> threading.Lock:
        if self._closed or self.shared.forked:
            raise self.unreachable()
        return self.shared.lock


class MemoryWatch(WatchQueue):
    """A watch of one session, for one reader. Other threads deliver to it, hence the lock."""

    def __init__(self, session: MemorySession) -> None:
        super().__init__(0)
        self.stop: Callable[[], None] = lambda: None
        self._session = session
        self._shared = session.shared

    async def __anext__(self) -> Batch:
        while True:
            self.before_waiting()
            with self._shared.lock:
                news = super().take()
                if isinstance(news, Batch):
                    return news
                if news is not None:
                    raise news
                reader = self._reader = self._session.loop.create_future()
            await reader

    def take(self) -> Batch | Exception | None:
        with self._shared.lock:
            return super().take()

    def before_waiting(self) -> None:
        if self._shared.forked:
            raise self._session.unreachable()

    async def aclose(self) -> None:
        """End the watch. Closing twice is harmless."""
        self._listener = None
        if not self._shared.forked:
            with self._shared.lock:
                self.end(StopAsyncIteration())

    def end(self, problem: Exception) -> None:
        """End the watch; the lock is held. Called by `deliver`, too, in the thread that made the change.

        The first delivery may come before `stop` is set. It cannot exceed the backlog: the engine's history is smaller.
        """
        self.stop()
        self._session.watches.discard(self)
        super().end(problem)

    def wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is None:
            return
        if self._is_here():
            _wake_reader(reader)
        else:
            self._schedule(_wake_reader, reader)

    def call(self, listener: Callable[[Batch | Exception], None], news: Batch | Exception) -> None:
        if self._is_here():
            super().call(listener, news)
        else:
            self._schedule(listener, news)

    def _is_here(self) -> bool:
        """Whether this is the thread of the reader's loop."""
        try:
            return asyncio.get_running_loop() is self._session.loop
        except RuntimeError:  # This thread has no loop.
            return False

    def _schedule(self, callback: Callable[[Any], None], given: Any) -> None:
        try:
            self._session.loop.call_soon_threadsafe(callback, given)
        except RuntimeError:
            self.stop()  # The reader's loop is closed.


def _wake_reader(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)
