"""The newest head a member has seen on one engine instance, and how old it is by the member's own clock.

A timer of the protocol starts with a head write. Every member measures its age from the moment it received that write,
so a new leader goes on from its own measure and no instant ever travels between nodes.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core import wire
from ..core.model import Head
from ..engines.port import Item


class HeadTracker:
    """Heads in the order in which they were written, whatever the order in which they are shown."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.head: Head | None = None
        self.modified = 0
        self._revision = 0
        self._call_at = self._sealed_at = self._grown_at = now()
        self._looked = False
        self._head_at: float | None = None
        self.late = False
        """The present timer had begun before the first look, so its age is more than can be known."""

    def show(self, item: Item | None, revision: int) -> bool:
        """Note that the head was this at that revision; None: there was none. Return whether that is news.

        A head that cannot be read counts as none (T11.12).
        """
        modified = 0 if item is None else item.modified
        looked, self._looked = self._looked, True
        if revision <= self._revision or modified == self.modified:
            self._revision = max(revision, self._revision)
            return False
        self._revision = revision
        old, self.head = self.head, None if item is None else wire.read_head(item.value)
        self.modified = modified
        new, now = self.head, self.now()
        self._head_at = now if looked else None
        if old is None or new is None or old.run != new.run or old.call_seq != new.call_seq:
            self._call_at, self.late = now, not looked
        if old is None or new is None or old.table != new.table:
            self._sealed_at = now
        if old is None or new is None or old.grown != new.grown:
            self._grown_at = now
        return old is not None or new is not None

    def lasted_s(self) -> float | None:
        """How long the present head has stood; None: it was there before the first look, or there is none."""
        return None if self.head is None or self._head_at is None else self.now() - self._head_at

    def ages(self) -> tuple[float, float, float]:
        """Seconds since the present call was set, since the round was sealed, and since the run last grew."""
        now = self.now()
        return now - self._call_at, now - self._sealed_at, now - self._grown_at
