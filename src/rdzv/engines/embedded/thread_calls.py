"""Requests that other threads than the loop's make by a connection.

A call that goes through the event loop wakes two threads, one after the other, and takes a task: six times what the exchange
itself costs. So a thread writes its request to the socket by itself, and the loop, which reads all that comes, hands it the
answer. `_lock` keeps the bytes of two requests apart, and the list of requests that wait complete when the connection ends. No
thread writes past bytes that asyncio still keeps for the socket.

A thread that makes one call after the other also reads the answers by itself: the loop *lends* it the reading, so that no other
thread is woken at all. The loop gets the reading back as soon as anything else comes than answers to threads, an answer takes
long, the loop has something to send, or no call was made for a moment. So all that is not a thread's answer is still read, and
acted on, in the loop alone.
"""

from __future__ import annotations

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...errors import Incompatible
from ..port import NotNow
from . import frames
from .client_protocol import ClientProtocol, Waiter
from .frames import SIZE_BYTES, Frame, TxnDone

SLICE_S = 1.0
"""Longest single wait on a lock: where a signal does not interrupt it, KeyboardInterrupt is raised after the slice."""
PATIENCE_S = 0.02
"""How long a thread that reads by itself waits for an answer. Then the loop reads on, and the thread waits for the loop."""
LENT_S = 0.01
"""The loop looks in this interval whether the reading that it has lent is still used. News may come so much later."""
BURST_S = 0.05
"""Calls that follow each other within this time are worth lending for."""
BURST_CALLS = 3
REFUSED_CALLS = 100
"""Calls without another question after the loop has not lent the reading: several threads may be calling at once."""
READ_MAX = 16 * 1024


class ThreadWaiter:
    """The answer to a request that another thread than the loop's waits for."""

    __slots__ = ("_answered", "_is_done", "_problem", "_result")

    def __init__(self) -> None:
        self._answered = threading.Lock()
        self._answered.acquire()
        self._is_done = False
        self._result: Any = None
        self._problem: Exception | None = None

    def done(self) -> bool:
        return self._is_done

    def set_result(self, result: Any) -> None:
        self._result = result
        self._is_done = True
        self._answered.release()

    def set_exception(self, exception: Exception) -> None:
        self._problem = exception
        self._is_done = True
        self._answered.release()

    def wait(self, deadline: float) -> Any:
        """Return the answer, or raise its problem; TimeoutError when the time is up."""
        while not self._is_done:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._answered.acquire(timeout=min(left_s, SLICE_S))
        if self._problem is not None:
            raise self._problem
        return self._result


class CalledByThreads(ClientProtocol):
    """A connection that any thread may ask by. All methods but `call_now` belong to the loop."""

    _loop: asyncio.AbstractEventLoop

    def __init__(self, *given: Any) -> None:
        self._descriptor = -1
        """The socket, while other threads may use it."""
        self._unsent = b""
        """The end of a request of another thread, for which the socket had no room."""
        self._reading = threading.RLock()
        """Held by a thread that reads in place of the loop, and by the loop while it takes the reading back."""
        self._is_taking = False
        """A thread has taken bytes from the socket and not handed all of them on."""
        self._is_lent = False
        """Whether threads read. Changed by the loop while no request waits, and by the holder of `_reading`."""
        self._called_at = 0.0
        self._calls = 0
        """Calls of threads that followed each other quickly; since the last look of the loop, if the reading is lent."""
        self._looks = False
        """Whether the loop is going to look if the reading that it has lent is still used."""
        super().__init__(*given)
        self._lock = threading.RLock()

    def admit_threads(self, descriptor: int) -> None:
        """Let other threads use the socket from now on. Under TLS they cannot: only the loop encrypts."""
        if self._trust.certificates is None and hasattr(select, "poll"):
            self._loop = asyncio.get_running_loop()
            self._descriptor = descriptor

    # ---- in the thread that calls

    def call_now(self, limit_s: float, kind: Callable[..., Frame], *fields: object) -> Any:
        """Ask, and block for the answer. Raise as `ask` says, NotNow if nothing was sent, and TimeoutError."""
        began_at = time.monotonic()
        if not self._is_lent:
            self._calls = self._calls + 1 if began_at - self._called_at < BURST_S else 0
            if self._calls >= BURST_CALLS:
                self._borrow()
        self._called_at = began_at
        waiter = ThreadWaiter()
        number = self._ask_now(waiter, kind, *fields)
        try:
            if self._is_lent:
                self._calls += 1
                self._read_for(waiter)
            return waiter.wait(began_at + limit_s)
        except BaseException:
            with self._lock:
                self.forget(number)
            raise

    def _ask_now(self, waiter: Waiter, kind: Callable[..., Frame], *fields: object) -> int:
        with self._lock:
            if not self.is_open or self._descriptor < 0 or self._unsent or self.transport.get_write_buffer_size():
                raise NotNow
            number, data = self._register(waiter, kind, *fields)
            try:
                sent = _write(self._descriptor, data)
                if sent < len(data):
                    self._unsent = data[sent:]
                    self._tell_loop(self.send, b"")
            except OSError:  # The loop will find the connection lost.
                self.forget(number)
                raise NotNow from None
            except BaseException:
                self._interrupted()
                raise
            return number

    def _interrupted(self) -> None:
        """Give the connection up: a signal came in between, and how much was written or read is not known any more."""
        self._descriptor = -1
        self._tell_loop(self.lose, "a call was interrupted")

    def _tell_loop(self, callback: Callable[..., object], *given: object) -> None:
        with suppress(RuntimeError):  # The loop is closed, and so is the connection.
            self._loop.call_soon_threadsafe(callback, *given)

    def _borrow(self) -> None:
        """Ask the loop to lend the reading, and wait until it has answered."""
        asked = threading.Lock()
        asked.acquire()
        self._tell_loop(self._lend, asked)
        asked.acquire(timeout=PATIENCE_S)
        if not self._is_lent:
            self._calls = -REFUSED_CALLS

    def _read_for(self, waiter: ThreadWaiter) -> None:
        """Read until the answer has come or the loop reads again. One thread reads for all that wait.

        A thread that waits for bytes holds no lock. The handler of a signal may make a call in this thread meanwhile, for which
        the loop has to take the reading back.
        """
        poll = select.poll()
        with suppress(ValueError):  # The descriptor is gone.
            poll.register(self._descriptor, select.POLLIN)
        while self._is_lent and not waiter.done():
            is_readable = bool(poll.poll(PATIENCE_S * 1000))
            with self._reading:
                if waiter.done() or not self._is_lent or not self.is_open or self._descriptor < 0 or self._is_taking:
                    return
                if not is_readable:
                    self._give_back(b"")
                    return
                self._is_taking = True
                try:
                    self._read_answers()
                except BaseException:
                    self._interrupted()
                    raise
                finally:
                    self._is_taking = False

    def _read_answers(self) -> None:
        """Read answers to threads. Give the reading back with the first bytes that are anything else."""
        try:
            data = os.read(self._descriptor, READ_MAX)
        except BlockingIOError:
            return
        except OSError:
            data = b""  # The loop will read the same error.
        at, end = 0, len(data)
        while end - at >= SIZE_BYTES:
            start = at + SIZE_BYTES
            at_next = start + int.from_bytes(data[at:start], "big")
            if at_next > end or not self._is_for_thread(memoryview(data)[start:at_next]):
                break
            at = at_next
        if at < end or not data:
            self._give_back(data[at:])
        else:
            self._heard_at = self._now()

    def _is_for_thread(self, payload: memoryview) -> bool:
        """Hand out the answer to a transaction of a thread. Return False, and do nothing, if the frame is another."""
        try:
            answer = frames.decode(frames.answer_decoder, payload)
            if type(answer) is not TxnDone:
                return False
            with self._lock:
                if not isinstance(self._waiters.get(answer.number, (0, 0))[1], ThreadWaiter):
                    return False
                self._replied(answer)
        except Incompatible:
            return False
        return True

    def _give_back(self, rest: bytes) -> None:
        """Let the loop read again, and these bytes first. `_reading` is held."""
        if self._is_lent:
            self._is_lent = False
            self._tell_loop(self._read_on, rest)

    # ---- in the loop

    def _lend(self, asked: threading.Lock) -> None:
        """Let threads read, if the loop does, no request waits and no part of a frame is kept."""
        with self._lock:
            is_idle = not (self._waiters or self._rest or self._is_lent or self._unsent)
            # The loop does not read while a thread gives the reading back: both would read, once that is done.
            if self.is_open and self._descriptor >= 0 and is_idle and self.transport.is_reading():
                self.transport.pause_reading()
                self._is_lent, self._calls = True, 1
                if not self._looks:
                    self._looks = True
                    self._loop.call_later(LENT_S, self._look)
        asked.release()

    def _look(self) -> None:
        """Take the reading back if it is not used any more. If a thread still waits for a slow answer, the next look does."""
        if self._is_lent and not self._calls:
            self._take_back()
        self._looks = self._is_lent
        if self._looks:
            self._calls = 0
            self._loop.call_later(LENT_S, self._look)

    def _take_back(self) -> None:
        """Read again, unless a thread reads right now: that one will give the reading back with what is the loop's."""
        if self._reading.acquire(blocking=False):
            try:
                if self._is_lent:
                    self._is_lent = False
                    self.transport.resume_reading()
            finally:
                self._reading.release()

    def _read_on(self, rest: bytes) -> None:
        if self.is_open and rest:
            self.received(memoryview(rest))
        if self.is_open:
            self.transport.resume_reading()

    def wait_for_reader(self) -> None:
        """Wait until no thread reads from the socket, which is about to be closed: at most `SLICE_S`."""
        # That takes microseconds, unless the handler of a signal keeps the thread from going on. It may wait for this loop.
        if self._reading.acquire(timeout=SLICE_S):
            self._reading.release()
        self._descriptor = -1

    def ask(self, kind: Callable[..., Frame], *fields: object) -> tuple[int, Waiter]:
        waiter = self._new_waiter()
        with self._lock:
            number, data = self._register(waiter, kind, *fields)
            self.send(data)
        return number, waiter

    def send(self, data: bytes) -> None:
        with self._lock:
            data, self._unsent = self._unsent + data, b""
            if data and not self.transport.is_closing():
                self.transport.write(data)
        if self._is_lent and data:
            self._take_back()


def _write(descriptor: int, data: bytes) -> int:
    """Write as much as there is room for, and return how much that was."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        return 0
