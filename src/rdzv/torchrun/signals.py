"""Notices signals at once, although torch owns the handlers and the main thread may be busy.

torch's agent does not tell the rendezvous about a signal until its workers are gone. That takes 30 s if they do not stop by
themselves. A handler of ours would not help, because torch installs its own later. But the interpreter can write the number of
each signal to a descriptor (`signal.set_wakeup_fd`) as it arrives. A thread reads it there, and the member tells the others
that it is about to leave.

In the first rendezvous torch has not installed its handlers yet. SIGTERM then ends the process by itself, except for the first
process of a container, for which the kernel ignores it. So SIGTERM gets a handler while a member waits.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import api as torch_api
from torch.distributed.elastic.multiprocessing.api import SignalException

from ..system.fork import replace_by_empty

FATAL = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals that end torch's agent, unless TORCHELASTIC_SIGNALS_TO_HANDLE names others."""
IMPATIENT_S = 1.0
"""A signal that comes sooner after the first one is the same signal again, sent by a wrapper."""


_TORCHS_HANDLER: Any = getattr(torch_api, "_terminate_process_handler", None)
"""The function by which torch's agent handles signals while workers run; None: this torch has another."""


class SignalListener:
    """Calls a callback, in a thread of its own, with the name of each fatal signal. Works in the main thread only."""

    def __init__(self, callback: Callable[[], Callable[[str], None] | None]) -> None:
        """`callback` is a weak reference, so that the listener does not keep the owner alive."""
        self._callback = callback
        self._previous_fd = -1
        self._writer: socket.socket | None = None

    def listen(self) -> None:
        """Take the wakeup descriptor. Called in every round, because other code may have taken it since."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._writer is None:
            reader, self._writer = socket.socketpair()
            self._writer.setblocking(False)
            _listeners.add(self)
            threading.Thread(target=self._read, args=(reader,), name="rdzv signals", daemon=True).start()
        self._step_out(self._writer.fileno())
        previous = _set_wakeup_fd(self._writer.fileno())
        if previous != self._writer.fileno():
            self._previous_fd = previous

    def close(self) -> None:
        """Give the descriptor back to its previous owner, and end the thread."""
        writer, self._writer = self._writer, None
        _listeners.discard(self)
        if writer is None:
            return
        number = writer.detach()
        self._step_out(number)
        if threading.current_thread() is not threading.main_thread():
            # The collector may free a handler in any thread, but only the main thread can stop the interpreter from writing to
            # this number. Until then no other file may get the number, or the next signal would write into that file.
            _parked[number] = self._previous_fd
            replace_by_empty([number])  # This also ends our thread.
            return
        current = _set_wakeup_fd(-1)
        # Code that took the descriptor after us keeps it. The previous owner may have closed its own by now.
        with suppress(OSError, ValueError):
            signal.set_wakeup_fd(self._previous_fd if current == number else current)
        os.close(number)

    def _step_out(self, number: int) -> None:
        """Have a listener that passes signals on to this one's number pass them on to the one before.

        Otherwise the number may be another file's by then, or signals go round in circles if this one becomes the last again.
        """
        for later in tuple(_listeners):
            if later._previous_fd == number:  # noqa: SLF001
                later._previous_fd = self._previous_fd  # noqa: SLF001

    def _read(self, reader: socket.socket) -> None:
        with reader:
            while numbers := reader.recv(64):
                if self._previous_fd >= 0:
                    with suppress(OSError):
                        os.write(self._previous_fd, numbers)
                names = _fatal_numbers()
                for number in numbers:
                    callback = self._callback()
                    if callback is not None and number in names:
                        callback(names[number])

    def forget(self) -> None:
        """Give up the descriptor in a forked worker: its signals are not the agent's."""
        if self._writer is not None:
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)
            self._writer.close()
            self._writer = None


class SignalHold:
    """Holds a fatal signal back from torch's agent while the workers are saving, because it would stop them at once.

    torch installs its handlers anew whenever it starts workers, so the agent's regular look (`poll`, in the main thread) puts
    this one in their place. Another signal after a second is not held back.
    """

    def __init__(self) -> None:
        self._taken: set[int] = set()
        """Signals whose handler was torch's."""
        self._held = 0
        self._held_at = 0.0

    @property
    def is_holding(self) -> bool:
        """Whether a signal is held back now."""
        return self._held != 0

    def poll(self, may_go: bool) -> None:
        """Take the place of torch's handlers. If a signal was held back and `may_go` now, handle it as torch does."""
        if threading.current_thread() is not threading.main_thread() or _TORCHS_HANDLER is None:
            return
        if self._held:
            if may_go:
                self.release()
            return
        for number in _fatal_numbers():
            if signal.getsignal(number) is _TORCHS_HANDLER:
                self._taken.add(number)
                signal.signal(number, self._hold)

    def release(self) -> None:
        """Give the handlers back, and handle a signal that was held back as torch does: that raises SignalException."""
        self.give_back()  # First: until then another signal may come and be held back.
        held, self._held = self._held, 0
        if held:
            _TORCHS_HANDLER(held, None)

    def close(self) -> None:
        """Give the handlers back, and forget a signal that was held back."""
        self.give_back()
        self._held = 0

    def give_back(self) -> None:
        """Let torch handle the signals that come from now on. One that was held back stays so until `release`."""
        for number in self._taken:
            if signal.getsignal(number) == self._hold:
                signal.signal(number, _TORCHS_HANDLER)
        self._taken.clear()

    def _hold(self, number: int, frame: FrameType | None) -> Any:  # noqa: ARG002
        if not self._held:
            self._held, self._held_at = number, time.monotonic()
        elif time.monotonic() - self._held_at > IMPATIENT_S:
            self.release()


def fatal_signals() -> tuple[str, ...]:
    given = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    return tuple(name.strip() for name in given.split(",") if name.strip()) or FATAL


def _fatal_numbers() -> dict[int, str]:
    """Return number and name of each fatal signal that this system has."""
    known = signal.Signals.__members__
    return {known[name]: name for name in fatal_signals() if name in known}


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM raise torch's SignalException, as it does later, unless SIGTERM has a handler already."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _raise:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _raise(number: int, frame: FrameType | None) -> Any:  # noqa: ARG001
    raise SignalException(f"process {os.getpid()} got {signal.Signals(number).name} while waiting", signal.Signals(number))


_listeners: set[SignalListener] = set()
_parked: dict[int, int] = {}
"""Descriptors of listeners that were closed outside the main thread, each with the previous one. They lead to /dev/null."""


def _set_wakeup_fd(number: int) -> int:
    """Set the wakeup descriptor, free those that are parked, and return the previous one that is not parked. Main thread."""
    previous = signal.set_wakeup_fd(number, warn_on_full_buffer=False)
    while previous in _parked:
        previous = _parked[previous]
    while _parked:
        os.close(_parked.popitem()[0])
    return previous


def _forget_in_child() -> None:
    for listener in tuple(_listeners):
        listener.forget()
    _listeners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
