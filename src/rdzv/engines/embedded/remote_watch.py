"""A watch of the embedded server, as its client keeps it."""

from __future__ import annotations

from collections.abc import Callable

from ..watch_queue import WatchQueue, only_ends
from . import features, frames
from .connection import ClientConnection
from .features import WATCH


class RemoteWatch(WatchQueue):
    """A watch that a new connection can go on with."""

    def __init__(
        self, forget: Callable[[RemoteWatch], None], number: int, targets: tuple[str, ...], since: int,
        ends: tuple[str, ...] = (), *, begun: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(since)
        self.number = number
        self.targets = targets
        self.ends = ends
        self.begun = begun
        """Whether it has begun. One that begins with a transaction has not before the answer to that."""
        self.at_engine = True
        """Whether the engine still has it, and must be told of its end."""
        self._forget = forget

    def begin(self, revision: int, found: tuple[str, ...]) -> None:
        """Note that the transaction which begins the watch was done at that revision, and found that key."""
        self.ends += found
        self.seen = max(self.seen, revision)  # News that came with the answer may be there already.
        self.begun = True

    def start(self, link: ClientConnection) -> None:
        """Let the engine watch, from where the reader is."""
        if not self.ends:
            link.tell(frames.WatchStart(self.number, self.targets, self.seen))
        elif WATCH in link.features:
            link.tell(features.EndsWatchStart(self.number, self.targets, self.seen, self.ends))
        else:
            self._ends = frozenset(only_ends(self.targets, self.ends))
            link.tell(frames.WatchStart(self.number, self.targets + self.ends, self.seen))

    def ended(self) -> None:
        self._forget(self)
