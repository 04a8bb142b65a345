"""An asyncio event loop on virtual time: five minutes of a run take milliseconds, and happen the same way every time.

Time stands still while anything can run and jumps to the next timer when nothing can. There are no threads, no sockets
and no real sleeping: whatever happens follows from the code and the seeds given to it, as long as that code does not
iterate over sets of objects or strings, whose order differs from one process to the next.

The loop also knows *processes*: every callback belongs to the process in whose context it was made, and a process can
be held back as a whole, in the way SIGSTOP holds back a real one. Nothing needs to cooperate for that, which is the
point: the code under test cannot tell.

A run that cannot end says why: `OutOfTime`, `Livelock`, `Stuck`. A task that failed unnoticed fails the run.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, TypeVar, cast

T = TypeVar("T")

INSTANT_CALLBACKS_MAX = 1_000_000
"""More callbacks than this without any passing of time is a loop that waits for nothing."""
UNWIND_S = 3600.0
"""Virtual time that cancelled tasks are given to clean up after the run's end."""


class RunError(AssertionError):
    """The run did not come to a good end."""


class OutOfTime(RunError):
    """The run's limit of virtual time was reached."""


class Livelock(RunError):
    """Callbacks go on without end."""


class Stuck(RunError):
    """Nothing can run and no timer is set, so nothing will ever happen again."""


class TaskFailed(RunError):
    """A task or callback raised, and nobody was there to see it."""


class VirtualTimer(asyncio.TimerHandle):
    """A callback to come. asyncio's own handle by type only, and leaner: one run makes a hundred thousand of them."""

    __slots__ = ("args", "at", "callback", "context", "stream", "void", "waits")

    def __init__(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None, at: float
    ) -> None:
        self.callback = callback
        self.args = args
        self.context = context if context is not None else contextvars.copy_context()
        self.at = at
        """When it is due; -1: at once, in the order of asking."""
        self.void = False
        self.waits: VirtualLoop | None = None
        """The loop in whose heap it is."""
        self.stream: object = None
        """What it must stay in order with when its process was held back; None: timers, by their time."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"<Call {self.callback!r} at {self.at}>"

    def when(self) -> float:
        """In the loop's time."""
        return self.at

    def cancel(self) -> None:
        """Do not call."""
        if not self.void:
            self.void = True
            self.callback, self.args = _nothing, ()
            if self.waits is not None:
                self.waits.sweep()

    def cancelled(self) -> bool:
        """It will not be called."""
        return self.void


def _nothing() -> None:
    """Stands for a callback that was cancelled, so that what it referred to can go."""


class Process:
    """All that runs in one context, and can be held back together."""

    def __init__(self, loop: VirtualLoop, name: str, rng: random.Random) -> None:
        self.loop = loop
        self.name = name
        self.rng = rng
        self.held: list[VirtualTimer] | None = None
        """Calls whose moment came while the process was held back; None: it runs."""
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        self.serial = count(1)
        loop.processes.append(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def pause(self) -> None:
        """Hold back every callback from now on, those already due included. Time goes on."""
        if self.held is None:
            self.held = []

    def resume(self) -> None:
        """Go on with what was held back: first what could run already, then timers and deliveries in any order.

        The order is drawn, but timers stay sorted and the deliveries of one stream stay in their order, as in a process
        that finds many sockets readable and many timers over at once.
        """
        if self.held is None:
            return
        held, self.held = self.held, None
        self.loop.make_ready(call for call in held if call.at < 0)
        streams: dict[object, deque[VirtualTimer]] = {}
        turns = []
        for call in held:
            if call.at >= 0:
                streams.setdefault(call.stream, deque()).append(call)
                turns.append(call.stream)
        self.rng.shuffle(turns)
        self.loop.make_ready(streams[stream].popleft() for stream in turns)


_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("rdzv.testing.process", default=None)


def current_process() -> Process | None:
    """The process that the running code belongs to; None: the scenario itself."""
    return _process.get()


class VirtualLoop(asyncio.BaseEventLoop):
    """For one run: `run()` closes it. See the module's docstring."""

    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self.set_debug(False)  # PYTHONASYNCIODEBUG would change what is measured and nothing else.
        self.unwinding = False
        """The run is over; what runs now only cleans up, and must not be taken for a part of it."""
        self.callbacks = 0
        self.serial = count(1)
        """Numbers that are unique within the run."""
        self.processes: list[Process] = []
        self._now = 0.0
        self._limit_s = float("inf")
        self._callbacks_max = 0
        self._ready: deque[VirtualTimer] = deque()
        self._timers: list[tuple[float, int, VirtualTimer]] = []
        """A heap. Void ones stay until their time comes, or until they are the majority."""
        self._timers_made = 0
        self._timers_void = 0
        self._tasks: dict[asyncio.Future[Any], str] = {}
        self._failed: list[tuple[str, asyncio.Future[Any]]] = []
        self._raised: list[tuple[str, BaseException | None]] = []
        self.outside = contextvars.Context()
        """Of no process: what runs in it is never held back."""

    def __del__(self) -> None:
        """A loop that was never run holds nothing that had to be closed."""

    # ---- running

    def run(
        self, main: Coroutine[Any, Any, T], limit_s: float = 3600.0, callbacks_max: int = 10_000_000
    ) -> T:
        """Run `main` to its end, then cancel whatever is left and close the loop. Both limits are on the whole run."""
        self._limit_s, self._callbacks_max = limit_s, callbacks_max
        try:
            result: T = self.run_until_complete(self.create_task(main, name="main"))
        except BaseException:
            self._raise_unseen()
            raise
        else:
            self._raise_unseen()
            return result
        finally:
            self._unwind()

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Run the callback at this instant, after those asked for before."""
        call = VirtualTimer(callback, args, context, -1.0)
        self._ready.append(call)
        return call

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualTimer:
        """Run the callback at that time; those of one instant run in the order they were asked for."""
        return self._set_timer(when, callback, args, context)

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> VirtualTimer:
        """Run the callback after so many virtual seconds."""
        return self._set_timer(self._now + delay, callback, args, context)

    def _set_timer(
        self, at: float, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> VirtualTimer:
        at = max(at, self._now)
        call = VirtualTimer(callback, args, context, at)
        call.waits = self
        self._timers_made = made = self._timers_made + 1
        heappush(self._timers, (at, made, call))
        return call

    def make_ready(self, calls: Generator[VirtualTimer, None, None]) -> None:
        """Run these at this instant, in this order."""
        self._ready.extend(calls)

    def _run_once(self) -> None:
        """Instant after instant until the loop is stopped: whatever can run, then the jump to the next."""
        ready = self._ready
        while not self._stopping:
            ran = 0
            for ran in range(INSTANT_CALLBACKS_MAX):  # noqa: B007
                if not ready:
                    break
                call = ready.popleft()
                if call.void:
                    continue
                context = call.context
                process = context.get(_process)
                if process is not None and process.held is not None:
                    process.held.append(call)
                    continue
                try:
                    context.run(call.callback, *call.args)
                except (SystemExit, KeyboardInterrupt):
                    raise
                except BaseException as error:  # noqa: BLE001
                    self._raised.append((f"callback {call.callback!r}", error))
                    self.stop()
            else:
                raise Livelock(f"{ran + 1} callbacks at {self._now:.6f} s and time does not pass; {self._state()}")
            self.callbacks += ran
            if not self._stopping:
                self._advance()

    def _advance(self) -> None:
        """Jump to the next timer; all those set to the same instant become ready together."""
        timers, ready = self._timers, self._ready
        while timers:
            now, _, call = heappop(timers)
            call.waits = None
            if not call.void:
                break
            self._timers_void -= 1
        else:
            raise Stuck(f"at {self._now:.6f} s nothing can run and no timer is set; {self._state()}")
        if now > self._limit_s:
            raise OutOfTime(f"not at its end after {self._limit_s} s of virtual time; {self._state()}")
        if self.callbacks > self._callbacks_max:
            raise Livelock(f"not at its end after {self.callbacks} callbacks, at {now:.6f} s; {self._state()}")
        self._now = now
        ready.append(call)
        while timers and timers[0][0] == now:
            call = heappop(timers)[2]
            call.waits = None
            if call.void:
                self._timers_void -= 1
            else:
                ready.append(call)

    def sweep(self) -> None:
        """A timer was cancelled. Timeouts nearly always are, so the heap would else hold little but void ones."""
        self._timers_void += 1
        if self._timers_void > 64 and self._timers_void * 2 > len(self._timers):
            self._timers = [entry for entry in self._timers if not entry[2].void]
            heapify(self._timers)
            self._timers_void = 0

    def run_in_executor(self, *args: Any) -> Any:  # type: ignore[override]
        """There are no threads in a simulation."""
        raise RuntimeError(f"run_in_executor{args!r} in a simulation, which has neither threads nor real input")

    # ---- tasks, and how they end

    def create_task(self, coro: Any, *, name: object = None, context: Any = None, **_: Any) -> asyncio.Task[Any]:
        """A task of the running process, with a name that is the same in every run."""
        process = context.get(_process) if context is not None else _process.get()
        serial, prefix = (self.serial, "") if process is None else (process.serial, f"{process.name}/")
        label = f"{prefix}{next(serial) if name is None else name}"
        make: Callable[[], asyncio.Task[Any]] = lambda: asyncio.Task(coro, loop=self, name=label)  # noqa: E731
        task = make() if context is None else context.copy().run(make)
        self.watch_over(task, label)
        return task

    def watch_over(self, future: asyncio.Future[Any], label: str) -> None:
        """Cancel the future at the run's end if it is pending then; fail the run if nobody looked at its exception."""
        self._tasks[future] = label

        def ended(future: asyncio.Future[Any]) -> None:
            del self._tasks[future]
            if not self.unwinding and not future.cancelled() and _error(future) is not None:
                self._failed.append((label, future))

        future.add_done_callback(ended, context=self.outside)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Called by asyncio with what it can report to nobody else."""
        if self.unwinding or self.is_closed():
            return
        self._raised.append((str(context.get("message")), context.get("exception")))
        self.stop()

    def _raise_unseen(self) -> None:
        """What failed first is the likely cause of whatever else is wrong, so it goes before main's own error."""
        unseen = [(label, _error(future)) for label, future in self._failed if getattr(future, "_log_traceback", False)]
        for _, future in self._failed:
            future.exception()
        unseen += self._raised
        if unseen:
            label, error = unseen[0]
            more = f", and {len(unseen) - 1} more failed" if len(unseen) > 1 else ""
            raise TaskFailed(f"{label} failed and nobody looked{more}: {error!r}") from error

    def _unwind(self) -> None:
        """Let every task see its cancellation, those of dead processes too, so that no coroutine is left half-run."""
        self.unwinding = True
        self._limit_s = self._callbacks_max = 1 << 60
        for process in self.processes:
            process.resume()
        try:
            self.run_until_complete(asyncio.Task(self._outlast(self._now + UNWIND_S), loop=self, name="unwinding"))
            if self._tasks:
                raise RunError(f"tasks that ignore their cancellation: {self._state()}")
        finally:
            self.close()

    async def _outlast(self, until: float) -> None:
        """Cancel each task once, those that others make while cleaning up included, and wait for them."""
        cancelled: set[asyncio.Future[Any]] = set()
        while self._tasks and self._now < until:
            for future in self._tasks.keys() - cancelled:
                future.cancel()
                cancelled.add(future)
            await asyncio.wait(list(self._tasks), timeout=1.0)

    def _state(self) -> str:
        names = list(self._tasks.values())
        shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
        return f"pending: {shown or 'no task'}"


def _error(future: asyncio.Future[Any]) -> BaseException | None:
    """Like `future.exception()`, which would count as having looked."""
    return cast("BaseException | None", getattr(future, "_exception", None))
