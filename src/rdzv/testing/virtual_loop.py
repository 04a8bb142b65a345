"""An asyncio event loop on virtual time: minutes of a run take milliseconds, and happen the same way every time.

Time stands still while a callback can run, then jumps to the next timer. There are no threads, sockets or real sleeps,
so a run follows from the code and its seeds alone, as long as that code does not iterate over sets of objects or
strings, whose order differs from one process to the next.

Every callback belongs to the *process* in whose context it was made. A process can be paused as a whole, as by SIGSTOP.
The code under test need not cooperate and cannot tell.

A run that cannot end raises `RunError`, and so does one in which a task failed unnoticed (`TaskFailed`).
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeVar, cast

import msgspec

T = TypeVar("T")

INSTANT_CALLBACKS_MAX = 1_000_000
"""A run with more callbacks at one instant is a livelock."""
UNWIND_S = 3600.0
"""Virtual time for cancelled tasks to clean up after the run's end."""


class RunError(AssertionError):
    """The run failed: it does not end, or something in it went wrong unnoticed."""


class TaskFailed(RunError):
    """A task or callback raised, and no code looked at the exception."""


class VirtualTimer(msgspec.Struct, eq=False):
    """A pending callback. Leaner than asyncio's handle, which it replaces: a run makes thousands."""

    callback: Callable[..., object]
    args: tuple[Any, ...]
    context: contextvars.Context
    at: float = -1.0
    """Virtual time when it is due; -1 means at once."""
    loop: VirtualLoop | None = None
    """The loop whose heap holds it."""
    stream: object = None
    """Callbacks of one stream keep their order when a paused process resumes; None is the stream of timers."""
    void: bool = False
    """Cancelled."""

    def cancel(self) -> None:
        if not self.void:
            self.void = True
            self.callback, self.args = object, ()  # Release what the callback refers to.
            if self.loop is not None:
                self.loop.timer_cancelled()


class Process:
    """All callbacks of one context, which can be paused together."""

    def __init__(self, loop: VirtualLoop, name: str, rng: random.Random) -> None:
        self.loop = loop
        self.name = name
        self.rng = rng
        self.held: list[VirtualTimer] | None = None
        """Callbacks that came due while the process is paused; None if it is not."""
        self.context = copy_context()
        self.context.run(current_process.set, self)
        self.serial = count(1)
        loop.processes.append(self)

    def pause(self) -> None:
        """Hold back every callback from now on, including those already due. Time goes on."""
        if self.held is None:
            self.held = []
            self.loop.paused += 1

    def resume(self) -> None:
        """Run what was held back: first callbacks that were due at once, then timers and deliveries in random order.

        Timers stay sorted, and so do the deliveries of one stream: like a real process that finds many sockets readable
        and many timers over at once.
        """
        if self.held is None:
            return
        held, self.held = self.held, None
        self.loop.paused -= 1
        self.loop.make_ready(call for call in held if call.at < 0)
        streams: dict[object, deque[VirtualTimer]] = {}
        turns = []
        for call in held:
            if call.at >= 0:
                streams.setdefault(call.stream, deque()).append(call)
                turns.append(call.stream)
        self.rng.shuffle(turns)
        self.loop.make_ready(streams[stream].popleft() for stream in turns)


current_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("rdzv.testing.process", default=None)
"""The process that the running code belongs to; None is the scenario itself."""


class VirtualLoop(asyncio.BaseEventLoop):
    """The event loop of one run; `run` closes it."""

    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        # Both are called for every future, and quicker than methods. PYTHONASYNCIODEBUG would only make a run slower.
        self.create_future = partial(asyncio.Future, loop=self)  # type: ignore[method-assign]
        self.get_debug = bool  # type: ignore[method-assign]
        self.unwinding = False
        """The run is over and tasks are cleaning up; what they do is not part of the run."""
        self.callbacks = 0
        self.now = 0.0
        """Virtual seconds since the loop was made."""
        self.serial = count(1)
        """Numbers that are unique within the run."""
        self.processes: list[Process] = []
        self.paused = 0
        """Number of paused processes. While it is 0, callbacks run without a look at their process."""
        self._limit_s = float("inf")
        self._callbacks_max = 0
        self._ready: deque[VirtualTimer] = deque()
        self.make_ready = self._ready.extend
        """Run these callbacks at this instant, in this order."""
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        """A heap. Cancelled timers stay until their time comes, or until they are the majority."""
        self._timers_made = 0
        self._timers_void = 0
        self._tasks: dict[asyncio.Future[Any], str] = {}
        self._failed: list[tuple[str, asyncio.Future[Any]]] = []
        self._raised: list[tuple[str, BaseException | None]] = []
        self.outside = contextvars.Context()
        """The context of no process: its callbacks are never held back."""

    def __del__(self) -> None:
        """Override asyncio's warning: a loop that never ran holds nothing to close."""

    # ---- running

    def run(self, main: Coroutine[Any, Any, T], limit_s: float = 3600.0, callbacks_max: int = 10_000_000) -> T:
        """Run `main` to its end, then cancel all other tasks and close the loop. Both limits are for the whole run."""
        self._limit_s, self._callbacks_max = limit_s, callbacks_max
        try:
            try:
                return cast("T", self.run_until_complete(self.create_task(main, name="main")))
            finally:
                self._raise_unseen()
        finally:
            self._unwind()

    def time(self) -> float:
        return self.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualTimer:
        """Run the callback at this instant, after those that are due already."""
        call = VirtualTimer(callback, args, copy_context() if context is None else context)
        self._ready.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any,
        context: contextvars.Context | None = None, stream: object = None,
    ) -> VirtualTimer:  # fmt: skip
        """Run the callback at that time; callbacks of one instant run in the order in which they were set."""
        when = max(when, self.now)
        call = VirtualTimer(callback, args, copy_context() if context is None else context, when, self, stream)
        self._timers_made = made = self._timers_made + 1
        heappush(self._timers, (when, made, call))
        return call

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any,
        context: contextvars.Context | None = None, stream: object = None,
    ) -> VirtualTimer:  # fmt: skip
        return self.call_at(self.now + delay, callback, *args, context=context, stream=stream)

    def _run_once(self) -> None:
        """Run instant after instant until the loop is stopped."""
        ready, take = self._ready, self._ready.popleft
        while not self._stopping:
            ran = 0
            while ready:
                call = take()
                if call.void:
                    continue
                if self.paused:
                    process = call.context.get(current_process)
                    if process is not None and process.held is not None:
                        process.held.append(call)
                        continue
                ran += 1
                try:
                    call.context.run(call.callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001
                    self._raised.append((f"callback {call.callback!r}", error))
                    self.stop()
                if ran > INSTANT_CALLBACKS_MAX:
                    raise RunError(f"{ran} callbacks at {self.now:.6f} s and time does not pass; {self._state()}")
            self.callbacks += ran
            if not self._stopping:
                self._advance()

    def _advance(self) -> None:
        """Jump to the next timer. All timers of that instant become ready together."""
        timers = self._timers
        while timers and timers[0][2].void:
            heappop(timers)
            self._timers_void -= 1
        if not timers:
            raise RunError(f"at {self.now:.6f} s nothing can run and no timer is set; {self._state()}")
        now = timers[0][0]
        if now > self._limit_s:
            raise RunError(f"not at its end after {self._limit_s} s of virtual time; {self._state()}")
        if self.callbacks > self._callbacks_max:
            raise RunError(f"not at its end after {self.callbacks} callbacks, at {now:.6f} s; {self._state()}")
        self.now = now
        while timers and timers[0][0] == now:
            call = heappop(timers)[2]
            call.loop = None
            if call.void:
                self._timers_void -= 1
            else:
                self._ready.append(call)

    def timer_cancelled(self) -> None:
        """Drop cancelled timers when they are the majority: nearly all timeouts are cancelled."""
        self._timers_void += 1
        if self._timers_void > 64 and self._timers_void * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].void]
            heapify(self._timers)
            self._timers_void = 0

    def run_in_executor(self, *args: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(f"run_in_executor{args!r} in a simulation, which has neither threads nor real input")

    # ---- tasks, and how they end

    def create_task(self, coro: Any, *, name: object = None, context: Any = None, **_: Any) -> asyncio.Task[Any]:
        """Make a task of the running process, with a name that is the same in every run."""
        process = context.get(current_process) if context is not None else current_process.get()
        serial, prefix = (self.serial, "") if process is None else (process.serial, f"{process.name}/")
        label = f"{prefix}{next(serial) if name is None else name}"
        make: Callable[[], asyncio.Task[Any]] = lambda: asyncio.Task(coro, loop=self, name=label)  # noqa: E731
        task = make() if context is None else context.copy().run(make)
        self.watch_over(task, label)
        return task

    def watch_over(self, future: asyncio.Future[Any], label: str) -> None:
        """Cancel the future at the run's end if it is pending; fail the run if no code looks at its exception."""
        self._tasks[future] = label

        def ended(future: asyncio.Future[Any]) -> None:
            del self._tasks[future]
            if not self.unwinding and not future.cancelled() and _error(future) is not None:
                self._failed.append((label, future))

        future.add_done_callback(ended, context=self.outside)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Fail the run with an error that asyncio can report to no caller."""
        if not self.unwinding and not self.is_closed():
            self._raised.append((str(context.get("message")), context.get("exception")))
            self.stop()

    def _raise_unseen(self) -> None:
        """Raise the first unseen failure: it is the likely cause of all others, so it goes before main's own error."""
        unseen = [(label, _error(future)) for label, future in self._failed if getattr(future, "_log_traceback", False)]
        for _, future in self._failed:
            future.exception()
        unseen += self._raised
        if unseen:
            label, error = unseen[0]
            more = f", and {len(unseen) - 1} more failed" if len(unseen) > 1 else ""
            raise TaskFailed(f"{label} failed and nobody looked{more}: {error!r}") from error

    def _unwind(self) -> None:
        """Cancel every task, also of dead processes, and let it clean up, so that no coroutine is left half-run."""
        self.unwinding = True
        self._limit_s = self._callbacks_max = 1 << 60
        for process in self.processes:
            process.resume()
        try:
            self.run_until_complete(asyncio.Task(self._outlast(self.now + UNWIND_S), loop=self, name="unwinding"))
            if self._tasks:
                raise RunError(f"tasks that ignore their cancellation: {self._state()}")
        finally:
            self.close()

    async def _outlast(self, until: float) -> None:
        """Cancel each task once, including tasks made while cleaning up, and wait for them."""
        cancelled: set[asyncio.Future[Any]] = set()
        while self._tasks and self.now < until:
            for future in self._tasks.keys() - cancelled:
                future.cancel()
                cancelled.add(future)
            await asyncio.wait(list(self._tasks), timeout=1.0)

    def _state(self) -> str:
        names = list(self._tasks.values())
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        return f"pending: {shown or 'no task'}"


def _error(future: asyncio.Future[Any]) -> BaseException | None:
    """Return the exception without `future.exception()`, which would mark it as seen."""
    return cast("BaseException | None", getattr(future, "_exception", None))
