"""Registers with blocking calls: the interface of a backend, and its calls in threads for the driver.

`Backend` has the methods of torch's `RendezvousBackend`, so a backend written for torch works here. Further methods are
optional: `wait_state` spares polling, and `beat` with `read_beats` spares a swap of the whole state for every renewal.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

from ...errors import Incompatible, Unreachable

T = TypeVar("T")

Version = tuple[bytes, Any]
"""A state, and the token that stands for it."""

WAIT_S = 6 * 3600.0
"""Longest `wait_state`. A wait without a change costs nothing: members also read by themselves."""
STOP_S = 0.02
STOPS_MAX = 50
"""Interval and number of calls that tell a waiting backend to stop."""
CLOSE_S = 2.0


class Backend(Protocol):
    """A compare-and-set register. Any exception means that it could not be reached.

    A token stands for one write. It must never come again, not even after the state was lost: a writer that had read the
    former state would win with it.
    """

    def get_state(self) -> Version | None:
        """Return the state and its token, or None: there is none."""

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state of that token (None: if there is none). Return the state now and whether the swap won."""


class WaitingBackend(Protocol):
    """A backend that can wait for a change. A thread of its own calls `wait_state`. None in its place: it cannot."""

    def wait_state(self, token: Any, timeout_s: float) -> None:
        """Wait until the state may differ from the one that the token stands for, or the time is over."""

    def stop_waiting(self) -> None:
        """Let a running wait return."""


@runtime_checkable
class HeartbeatBackend(Protocol):
    """A backend with counters beside the state."""

    def beat(self, name: str) -> None:
        """Add one to a counter, which starts at 0."""

    def read_beats(self, names: Sequence[str]) -> Sequence[int]: ...

    def drop_beat(self, name: str) -> None:
        """Delete a counter."""


class Register(Protocol):
    """A register for the driver: a backend's calls as coroutines that raise Unreachable."""

    endpoint: str
    place: str
    durable: bool
    local_host: str
    waits: bool
    """Whether `wait` may be called."""
    beats: bool
    """Whether `beat`, `read_beats` and `drop_beat` may be called."""

    async def read(self) -> Version | None: ...

    async def swap(self, state: bytes, token: Any) -> tuple[bytes, Any, bool] | None: ...

    async def wait(self, token: Any) -> None: ...

    async def beat(self, name: str) -> None: ...

    async def read_beats(self, names: Sequence[str]) -> Sequence[int]: ...

    async def drop_beat(self, name: str) -> None: ...

    async def close(self) -> None: ...


class BlockingRegister:
    """A `Register` over a backend. One thread makes its calls, another one waits. The caller keeps the backend."""

    def __init__(
        self,
        backend: Backend,
        endpoint: str,
        *,
        timeout_s: float,
        local_host: str = "",
        corrupt: tuple[type[Exception], ...] = (),
    ) -> None:
        """`timeout_s`: longest wait for one answer. `corrupt`: exceptions of the backend that mean a damaged state."""
        self.endpoint = endpoint
        self.place = f"register {endpoint}"
        self.durable = bool(getattr(backend, "durable", False))
        self.local_host = local_host
        self.waits = callable(getattr(backend, "wait_state", None))
        self.beats = isinstance(backend, HeartbeatBackend)
        self._backend: Any = backend
        self._corrupt = corrupt
        self._timeout_s = timeout_s
        self._calls = _CallThread(f"rdzv register {endpoint}")
        self._waits = _CallThread(f"rdzv waits for {endpoint}")

    async def read(self) -> Version | None:
        version: Version | None = await self._call(self._backend.get_state, applied=False)  # Reads have no effect.
        return version

    async def swap(self, state: bytes, token: Any) -> tuple[bytes, Any, bool] | None:
        answer: tuple[bytes, Any, bool] | None = await self._call(self._backend.set_state, state, token)
        return answer

    async def wait(self, token: Any) -> None:
        await self._call(self._backend.wait_state, token, WAIT_S, waits=True)

    async def beat(self, name: str) -> None:
        await self._call(self._backend.beat, name)

    async def read_beats(self, names: Sequence[str]) -> Sequence[int]:
        counts: Sequence[int] = await self._call(self._backend.read_beats, names)
        return counts

    async def drop_beat(self, name: str) -> None:
        await self._call(self._backend.drop_beat, name)

    async def close(self) -> None:
        """Let both threads end after their current calls. Waits for CLOSE_S at most: a backend may hang."""
        self._waits.close()
        stopping = asyncio.ensure_future(self._stop_waiting())
        await asyncio.wait([stopping], timeout=CLOSE_S)
        stopping.cancel()
        self._calls.close()

    async def _stop_waiting(self) -> None:
        # Told to stop more than once: the thread may have been just about to wait.
        for _ in range(STOPS_MAX):
            if not self._waits.busy:
                break
            with suppress(Unreachable):
                await self._call(self._backend.stop_waiting)
            await asyncio.sleep(STOP_S)

    async def _call(self, work: Callable[..., T], *args: object, waits: bool = False, applied: bool | None = None) -> T:
        thread, timeout_s = (self._waits, 2 * WAIT_S) if waits else (self._calls, self._timeout_s)
        began_at = time.monotonic()
        try:
            return await thread.call(work, *args, timeout_s=timeout_s)
        except TimeoutError:
            raise Unreachable(self.endpoint, "no answer", time.monotonic() - began_at, applied=applied) from None
        except self._corrupt as error:
            raise Incompatible("the state in the register", str(error)) from error
        except Exception as error:
            text = " ".join(str(error).split())
            problem = f"{type(error).__name__}: {text}" if text else type(error).__name__
            raise Unreachable(self.endpoint, problem, time.monotonic() - began_at, applied=applied) from error


_Job = tuple["concurrent.futures.Future[Any]", Callable[[], Any]]


class _CallThread:
    """Blocking calls from an event loop: one at a time, in a daemon thread, each with a timeout.

    A backend's call may hang for as long as a dead network lets it. The loop stops waiting after the timeout; the
    thread stays in its call, and the next call waits for it, at most for its own timeout. A process that ends does not
    wait for the thread. The first call starts the thread, also after `close`, and in a forked child, which has none of
    its parent's threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._last: concurrent.futures.Future[Any] | None = None

    async def call(self, work: Callable[..., T], *args: object, timeout_s: float) -> T:
        """Return or raise what `work(*args)` does, or raise TimeoutError: the call may still take effect then."""
        if self._thread is None or self._pid != os.getpid():
            jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_serve, args=(jobs,), name=self._name, daemon=True)
            thread.start()  # It raises if the system has no thread left. Then the next call tries again.
            self._jobs, self._pid, self._thread = jobs, os.getpid(), thread
        promise: concurrent.futures.Future[T] = concurrent.futures.Future()
        self._last = promise
        self._jobs.put((promise, partial(work, *args)))
        waiting = asyncio.wrap_future(promise)
        try:
            # Not `wait_for`, which before Python 3.12 loses a cancellation that comes together with the result.
            await asyncio.wait([waiting], timeout=timeout_s)
            if not waiting.done():
                raise TimeoutError
            return waiting.result()
        finally:
            waiting.cancel()

    @property
    def busy(self) -> bool:
        """Whether a call is under way, also one that nobody waits for any more."""
        return self._last is not None and not self._last.done()

    def close(self) -> None:
        """Let the thread end after its current call."""
        if self._thread is not None and self._pid == os.getpid():
            self._jobs.put(None)
        self._thread = None


def _serve(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        promise, work = job
        if not promise.set_running_or_notify_cancel():
            continue  # Given up before it began, so it must not take effect any more.
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  The caller judges it.
            promise.set_exception(error)
        else:
            promise.set_result(result)
        del job, promise, work  # Do not keep the last result alive while idle.
