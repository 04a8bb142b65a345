"""The event loop in a background thread through which blocking code calls asyncio code.

A process has one portal. Its first user starts it and its last user stops it, so that a program that has left all its
runs has no thread and no open descriptor of rdzv.

*Fork.* A child has the parent's memory but not this thread. The loop's descriptors are shared with the parent, down to
the kernel's epoll list. Closing the loop in the child would remove the parent's sockets from that list. Keeping a
connection open in the child would hide the parent's death from its peer. So the child replaces each of these
descriptors by /dev/null, and never runs or frees anything of the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from .fork import replace_by_empty

T = TypeVar("T")

SLICE_S = 1.0
"""Longest single wait on a lock: where a signal does not interrupt it, KeyboardInterrupt is raised after the slice."""
STOP_S = 2.0  # How long the last user waits for the thread to end. Nothing depends on the end.


class Portal:
    """The background thread and its loop. Get it with `open`, and `close` it once for each `open`."""

    lock: ClassVar = threading.Lock()
    """Users guard their own state with it too, so that their state and the number of users change together."""
    _current: ClassVar[Portal | None] = None
    _running: ClassVar[set[Portal]] = set()
    """All portals with a thread, also those that are stopping: a fork must find them."""

    def __init__(self) -> None:
        self.forked = False  # This process is a child of the process that the portal belongs to.
        self._users = 0
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
    def open(cls) -> Portal:
        """Return the process's portal, started if necessary. The caller holds the lock."""
        portal = cls._current = cls._current or Portal()
        portal._users += 1  # noqa: SLF001  Its own.
        return portal

    @classmethod
    def is_current_thread(cls) -> bool:
        """Whether the caller runs in a portal's thread, where nothing may wait for that thread."""
        portal = cls._current
        return portal is not None and portal._thread.ident == threading.get_ident()  # noqa: SLF001  Its own.

    def close(self) -> None:
        """Give up one use. The last one stops the portal."""
        with Portal.lock:
            self._users -= 1
            last = not self._users
            if last:
                Portal._current = None
        if last:
            self.stop()

    def close_soon(self) -> None:
        """Give up one use, in the loop's thread: the collector may run a finalizer in a thread that holds the lock."""
        if not self.forked:
            self._loop.call_soon_threadsafe(self.close)

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

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], lasts: Callable[[], object] | None = None, *, cancel: bool = True) -> T:
        """Run the coroutine in the loop and wait for it, calling `lasts` after every slice of waiting.

        An exception in the waiting thread, such as KeyboardInterrupt, cancels the coroutine unless `cancel` is false.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("an observer must not call a Rendezvous: it runs in the thread that would answer")
        future = self.start(coroutine)
        try:
            while not concurrent.futures.wait([future], SLICE_S).done:
                if lasts is not None:
                    lasts()
        except BaseException:
            if cancel:
                future.cancel()
            raise
        return future.result()

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
    Portal.lock = threading.Lock()
    Portal._current = None  # noqa: SLF001
    portals, Portal._running = Portal._running, set()  # noqa: SLF001
    for portal in portals:
        portal.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
