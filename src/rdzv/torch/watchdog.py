"""A thread that ends the collectives of a round that is over.

The main thread of a training process is often inside a collective. It cannot look whether the round still stands, and gloo
does not end the collective by itself if the lost or paused peer is not a direct partner.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..blocking import Rendezvous
from ..core.member_rules import ChangeKind
from ..errors import RdzvError
from .agent import AgentRendezvous

AnyRendezvous = Rendezvous | AgentRendezvous
"""The member itself, or the link to the agent that is the member."""

AGAIN_S = 0.1
"""Time between two aborts of one round: a connection that is being made now is found by the next."""


class Watchdog:
    """Calls `abort` of the round that is guarded, in its own thread, from the moment the round is over."""

    def __init__(self, rendezvous: AnyRendezvous) -> None:
        self._rendezvous = rendezvous
        self._lock = threading.Lock()
        self._abort: Callable[[], object] | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rdzv watchdog", daemon=True)

    def guard(self, abort: Callable[[], object]) -> None:
        """Guard a round that begins."""
        with self._lock:
            self._abort = abort
        if not self._thread.is_alive():
            self._thread.start()

    def rest(self) -> None:
        """Stop guarding. No abort runs when this returns."""
        with self._lock:
            self._abort = None

    def abort(self) -> None:
        """Abort the round that is guarded, if there is one."""
        with self._lock:
            if self._abort is not None:
                self._abort()

    def close(self) -> None:
        """End the thread. It is woken when the member leaves."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.is_set():
            try:
                change = self._rendezvous.wait_changed()
            except RdzvError:  # The member has left.
                return
            if change is not None and change.kind is not ChangeKind.LEFT:
                self.abort()
            self._closed.wait(AGAIN_S)
