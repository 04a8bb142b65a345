"""Signals, heard at once: whoever has the handlers, and whatever the main thread is doing.

torch's agent tells a rendezvous nothing of a signal until its workers are gone, which takes 30 s if they do not stop by
themselves. But the interpreter can write the number of each signal to a descriptor as it arrives. A thread reads it there and
says to the others that we are about to go.

That leaves the time before torch has installed its handlers, in the first rendezvous. There SIGTERM would end the process by
itself, except in a container's first process, for which the kernel ignores it; so while waiting it gets a handler.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException

DEADLY = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""What torch's agent ends by, unless TORCHELASTIC_SIGNALS_TO_HANDLE says otherwise."""


class SignalListener:
    """Tells whoever listens the name of each deadly signal, in a thread of its own. It works in the main thread only."""

    def __init__(self, heard: Callable[[], Callable[[str], None] | None]) -> None:
        """`heard` is a weak reference: whoever listens may be dropped."""
        self._heard = heard
        self._former = -1
        self._mouth: socket.socket | None = None

    def listen(self) -> None:
        """From now on. Again in every round: others may have taken the descriptor since."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._mouth is None:
            ear, self._mouth = socket.socketpair()
            self._mouth.setblocking(False)
            _ears.add(self)
            threading.Thread(target=self._hear, args=(ear,), name="rdzv signals", daemon=True).start()
        former = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        if former != self._mouth.fileno():
            self._former = former

    def close(self) -> None:
        """Give the descriptor back to whoever had it, and end the thread."""
        mouth, self._mouth = self._mouth, None
        _ears.discard(self)
        if mouth is None:
            return
        if threading.current_thread() is threading.main_thread():
            present = signal.set_wakeup_fd(-1)
            # If somebody took it over from us, it is theirs to keep. Whoever had it before us may be gone by now.
            with suppress(OSError, ValueError):
                signal.set_wakeup_fd(self._former if present == mouth.fileno() else present)
        mouth.close()

    def _hear(self, ear: socket.socket) -> None:
        with ear:
            while True:
                numbers = ear.recv(64)
                if not numbers:
                    return
                if self._former >= 0:
                    with suppress(OSError):
                        os.write(self._former, numbers)
                for number in numbers:
                    self._tell(signal.Signals(number).name)

    def _tell(self, name: str) -> None:
        listener = self._heard()
        if listener is not None and name in deadly():
            listener(name)

    def forget(self) -> None:
        """In a forked child: its signals are not the agent's."""
        if self._mouth is not None:
            with suppress(ValueError):
                signal.set_wakeup_fd(-1)
            self._mouth.close()
            self._mouth = None


def deadly() -> tuple[str, ...]:
    """The signals that mean that the agent goes."""
    given = os.environ.get("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    return tuple(name.strip() for name in given.split(",") if name.strip()) or DEADLY


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises torch's SignalException, as it does later, if nobody has decided about it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> Any:  # noqa: ARG001
    raise SignalException(f"process {os.getpid()} got {signal.Signals(number).name} while waiting", signal.Signals(number))


_ears: set[SignalListener] = set()


def _forget_in_child() -> None:
    for ear in tuple(_ears):
        ear.forget()
    _ears.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
