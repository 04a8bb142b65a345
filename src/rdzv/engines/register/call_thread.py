"""Blocking calls from an event loop: one at a time, in a thread of their own, each with a deadline.

A backend's call may hang for as long as a dead network lets it. The loop must not, so it stops waiting; the thread is left
to its call, and whoever asks next waits for it, no longer than his own deadline. The thread is a daemon: a process that ends
does not wait for a call that nobody waits for.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

_Job = tuple["concurrent.futures.Future[Any]", Callable[[], Any]]


class CallThread:
    """Started by its first call, and again after `close`. A forked child has none of its threads, so it starts its own."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._last: concurrent.futures.Future[Any] | None = None

    async def call(self, work: Callable[..., T], *args: object, timeout_s: float) -> T:
        """What `work(*args)` returns or raises; TimeoutError when the time is over first: it may still happen then."""
        if self._thread is None or self._pid != os.getpid():
            self._jobs = queue.SimpleQueue()
            self._pid = os.getpid()
            self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
        promise: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._last = promise
        self._jobs.put((promise, partial(work, *args)))
        waiting = asyncio.wrap_future(promise)
        try:
            # Not `wait_for`, which before 3.12 loses a cancellation that comes together with the result.
            await asyncio.wait([waiting], timeout=timeout_s)
            if not waiting.done():
                raise TimeoutError
            return waiting.result()
        finally:
            waiting.cancel()

    @property
    def busy(self) -> bool:
        """A call is under way, whether or not somebody waits for it."""
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        """Let the thread end after the call it is at."""
        if self._thread is not None and self._pid == os.getpid():
            self._jobs.put(None)
        self._thread = None


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        promise, work = job
        if not promise.set_running_or_notify_cancel():
            continue  # Given up before it began, so it must not happen any more.
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  Its caller's to judge.
            promise.set_exception(error)
        else:
            promise.set_result(result)
        del job, promise, work
