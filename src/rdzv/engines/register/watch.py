"""A register's watch: what changed between the state it saw last and the one its session knows now."""

from __future__ import annotations

from collections.abc import Sequence

from ..port import Batch, Event, Gap
from ..watch_queue import WatchQueue
from .document import Document, read_log


class RegisterWatch(WatchQueue):
    """A watch of a session's state."""

    def __init__(self, targets: Sequence[str], since: int, *lists: dict[RegisterWatch, None]) -> None:
        """`lists` are those who keep the watches that have not ended."""
        super().__init__(since)
        self._prefixes = tuple(target for target in targets if target.endswith("/"))
        self._keys = frozenset(targets)
        self._lists = lists
        for watches in lists:
            watches[self] = None

    def show(self, document: Document) -> None:
        """This is the state now."""
        if self.seen < document.forgotten:
            self.end(Gap(f"changes after revision {document.forgotten} are known, not those after {self.seen}"))
            return
        if self.seen >= document.revision:
            return  # Its revision may come from a session that has seen more than ours.
        events = tuple(
            event for batch in read_log(document, self.seen) for event in batch.events if self._wants(event)
        )
        self.seen = document.revision
        if not events:
            return
        self.deliver(Batch(document.revision, events))

    def _wants(self, event: Event) -> bool:
        return event.key in self._keys or event.key.startswith(self._prefixes)

    def ended(self) -> None:
        """Nobody need show us anything any more."""
        for watches in self._lists:
            watches.pop(self, None)
