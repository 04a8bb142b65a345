"""One event loop in one background thread, through which the blocking code of a process calls asyncio code.

There is one for the whole process, started when it is first needed and stopped with its last user, so that a program
which has left all its runs is as it was before: no thread, no descriptors.

*Fork.* A child has the parent's memory but not this thread. What the loop has open is shared with the parent, down to
the kernel's list of what it waits for: closing the loop in the child would take the parent's sockets off that list, and
keeping a connection open would hide the parent's death from its peer. So the child replaces each of these descriptors
by an empty one, and never runs or frees anything of the loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

SLICE_S = 1.0
"""Where a signal does not end a wait on a lock, a KeyboardInterrupt gets through between two slices."""
STOP_S = 2.0
"""How long its last user waits for the thread to end; nothing depends on it."""


class Portal:
    """Get it with `open`, and `close` it as often as it was opened."""

    lock: ClassVar = threading.Lock()
    """For the users' own state too, so that what they know of a portal and its count change together."""
    _current: ClassVar[Portal | None] = None
    _running: ClassVar[set[Portal]] = set()
    """Also those that are stopping, because a fork must find them."""

    def __init__(self) -> None:
        self.forked = False
        """We are in a child of the process that it belongs to."""
        self._users = 0
        self._kept: set[asyncio.Task[Any]] = set()
        self._selector = selectors.DefaultSelector()
        self._loop = asyncio.SelectorEventLoop(self._selector)
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, name="rdzv", daemon=True)
        Portal._running.add(self)
        try:
            self._thread.start()
        except RuntimeError:  # The system has no room for a thread, or the interpreter is about to end.
            Portal._running.discard(self)
            self._loop.close()
            raise

    # ---- its life

    @classmethod
    def open(cls) -> Portal:
        """The process's portal. The lock is held by the caller."""
        portal = cls._current = cls._current or Portal()
        portal._users += 1  # noqa: SLF001  Its own.
        return portal

    def close(self) -> None:
        """One user less; the last one stops it."""
        with Portal.lock:
            self._users -= 1
            last = not self._users
            if last:
                Portal._current = None
        if last:
            self.stop()

    def stop(self) -> None:
        """End the thread, and wait for that unless we are it. With users left only at the end of the process."""
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

    # ---- its use

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Run it in the loop; the future is for other threads to wait on."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], lasts: Callable[[], object] | None = None, *, cancel: bool = True) -> T:
        """Run it in the loop and wait, calling `lasts` after every slice of that.

        If the waiting is interrupted, cancel it there, unless `cancel` is false.
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

    # ---- fork

    def disown(self) -> None:
        """In a forked child: let go of what the parent has open. Tasks are kept: freeing them runs their `finally`."""
        self.forked = True
        if self._loop.is_closed():
            return
        self._kept = asyncio.all_tasks(self._loop)
        empty = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        # Replaced, not closed: the objects that own these numbers will close them, and must not hit another file then.
        shared = {self._selector.fileno(), *(key.fd for key in self._selector.get_map().values())}
        waker = getattr(self._loop, "_csock", None)  # The end of the loop's own pipe that it only writes to.
        if waker is not None:
            shared.add(waker.fileno())
        for descriptor in shared:
            os.dup2(empty, descriptor, inheritable=False)
        os.close(empty)


def _after_fork_in_child() -> None:
    Portal.lock = threading.Lock()
    Portal._current = None  # noqa: SLF001
    portals, Portal._running = Portal._running, set()  # noqa: SLF001
    for portal in portals:
        portal.disown()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
