"""The event loop in a background thread through which blocking code calls asyncio code.

A process has one portal. Its first user starts it and its last user stops it, so that a program that has left all its
runs has no thread and no open descriptor of rdzv.

*Fork.* A child has the parent's memory but not this thread. The loop's descriptors are shared with the parent, down to
the kernel's epoll list. Closing the loop in the child would remove the parent's sockets from that list. Keeping a
connection open in the child would hide the parent's death from its peer. So the child replaces each of these
descriptors by /dev/null, and never runs or frees anything of the loop.

*Signals.* A signal handler may make a call at any moment of the main thread, and waits for this thread then. So this thread
never waits for something that the main thread may hold, and the main thread changes the state in steps that are each complete.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

from .fork import replace_by_empty

T = TypeVar("T")

SLICE_S = 1.0
"""Longest single wait on a lock: where a signal does not interrupt it, KeyboardInterrupt is raised after the slice."""
STOP_S = 2.0  # How long the last user waits for the thread to end. Nothing depends on the end.


class PortalCall(Generic[T]):
    """A coroutine that the loop runs for another thread.

    That thread waits on a raw lock. It would hold the condition of a `concurrent.futures.Future` for moments of its wait. A
    signal handler that strikes in such a moment and makes a call waits for the loop, and the loop would wait for the condition.
    """

    __slots__ = ("_coroutine", "_task", "_under_way")

    _task: asyncio.Task[T]

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def begin(self) -> None:
        """Start the coroutine. Runs in the loop's thread, as does `cancel`."""
        self._task = asyncio.get_running_loop().create_task(self._coroutine)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        self._task.cancel()

    def _end(self, task: asyncio.Task[T]) -> None:
        if not task.cancelled():
            task.exception()  # Nobody may ask for the result. asyncio would complain of an exception that nobody saw.
        self._under_way.release()

    def wait(self, limit_s: float) -> bool:
        """Wait for the end and return whether it has come. Not to be called again after it has."""
        return self._under_way.acquire(timeout=limit_s)

    def result(self) -> T:
        """Return the result, or raise the exception, of a coroutine that has ended."""
        if self._task.cancelled():  # With the portal. asyncio's error would look as if the caller's own task were cancelled.
            raise concurrent.futures.CancelledError
        return self._task.result()


class Portal:
    """The background thread and its loop. Get it with `open`, and `close` it for the same user."""

    _gate: ClassVar = threading.RLock()
    """Held by a thread that opens the portal, so that it does not stop meanwhile. The loop's thread only tries to get it."""
    _current: ClassVar[dict[int, Portal]] = {}
    """The portal of this process, by its pid. A dict, because `setdefault` is one step."""
    _running: ClassVar[set[Portal]] = set()
    """All portals with a thread, also those that are stopping: a fork must find them."""

    def __init__(self) -> None:
        self.forked = False  # This process is a child of the process that the portal belongs to.
        self._users: set[object] = set()
        self._kept: set[asyncio.Task[Any]] = set()
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="rdzv", daemon=True)
        Portal._running.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # The system has no more threads, or the interpreter is shutting down.
            Portal._running.discard(self)
            self._loop.close()
            raise

    @classmethod
    def open(cls, user: object) -> Portal:
        """Return the process's portal, started if necessary, and keep it for this user. Opening twice is harmless."""
        with cls._gate:
            portal = cls._current.get(os.getpid())
            if portal is None:
                made = Portal()
                portal = cls._current.setdefault(os.getpid(), made)
                if portal is not made:  # A signal handler that struck meanwhile made one.
                    made.stop()
            portal._users.add(user)  # noqa: SLF001  Its own.
            return portal

    @classmethod
    def kept_by(cls, user: object) -> Portal | None:
        """Return the portal that this user has opened and not closed."""
        portal = cls._current.get(os.getpid())
        return portal if portal is not None and user in portal._users else None  # noqa: SLF001  Its own.

    @classmethod
    def is_current_thread(cls) -> bool:
        """Whether the caller runs in a portal's thread, where nothing may wait for that thread."""
        portal = cls._current.get(os.getpid())
        return portal is not None and portal._thread.ident == threading.get_ident()  # noqa: SLF001  Its own.

    def close(self, user: object) -> None:
        """End this user's use. The last one stops the portal and, unless called in its thread, waits for that."""
        self._users.discard(user)
        if self._users or self.forked:
            return
        with suppress(RuntimeError):  # The loop has ended: of two last users, the other was quicker.
            retiring = self.start(self._retire())
            if threading.current_thread() is not self._thread:
                retiring.wait(STOP_S)
                if self._stopping.is_set():
                    self._thread.join(STOP_S)

    @classmethod
    def close_soon(cls, user: object) -> None:
        """End this user's use, if there is one, in the loop's thread. The collector may call this anywhere."""
        portal = cls.kept_by(user)
        if portal is not None:
            portal._loop.call_soon_threadsafe(portal.close, user)  # noqa: SLF001  Its own.

    async def _retire(self) -> None:
        """Stop if there is no user."""
        if not Portal._gate.acquire(blocking=False):
            return  # Its holder is going to use this portal, and comes here again when it closes it.
        try:
            if self._users or Portal._current.get(os.getpid()) is not self:
                return
            del Portal._current[os.getpid()]
        finally:
            Portal._gate.release()
        self._stopping.set()

    def stop(self) -> None:
        """End the thread and, unless called in it, wait for that. With users left, only the process's end calls it."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)

    def _serve(self) -> None:
        try:
            self._loop.run_until_complete(self._main())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
            Portal._running.discard(self)

    async def _main(self) -> None:
        await self._stopping.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> PortalCall[T]:
        """Have the loop run the coroutine."""
        call = PortalCall(coroutine)
        try:
            self._loop.call_soon_threadsafe(call.begin)
        except RuntimeError:  # The loop has ended.
            coroutine.close()
            raise
        return call

    def run(self, coroutine: Coroutine[Any, Any, T], lasts: Callable[[], object] | None = None, *, cancel: bool = True) -> T:
        """Run the coroutine in the loop and wait for it, calling `lasts` after every slice of waiting.

        An exception in the waiting thread, such as KeyboardInterrupt, cancels the coroutine unless `cancel` is false.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("an observer must not call a Rendezvous: it runs in the thread that would answer")
        call = self.start(coroutine)
        try:
            while not call.wait(SLICE_S):
                if lasts is not None:
                    lasts()
        except BaseException:
            if cancel:
                with suppress(RuntimeError):  # The loop has ended.
                    self._loop.call_soon_threadsafe(call.cancel)
            raise
        return call.result()

    def disown(self) -> None:
        """Let go of the parent's descriptors, in a forked child. Tasks are kept: freeing them runs their `finally`."""
        self.forked = True
        if self._loop.is_closed():
            return
        self._kept = asyncio.all_tasks(self._loop)
        # Replaced, not closed: the objects that own these numbers close them later, and must not hit another file then.
        shared = {self._selector.fileno(), *(key.fd for key in self._selector.get_map().values())}
        waker = getattr(self._loop, "_csock", None)  # The write end of the loop's own pipe: not in the selector.
        if waker is not None:
            shared.add(waker.fileno())
        replace_by_empty(shared)


def _after_fork_in_child() -> None:
    Portal._gate = threading.RLock()  # noqa: SLF001  Another thread of the parent may have held it.
    Portal._current = {}  # noqa: SLF001
    portals, Portal._running = Portal._running, set()  # noqa: SLF001
    for portal in portals:
        portal.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
