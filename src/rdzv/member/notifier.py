"""The one place that turns what a member experiences into notices, and passes them to all listeners."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ..core.model import Head, RoundReport
from .log import Log, is_logged
from .notices import Notice, Observer, Timeline, about_head


class Notifier:
    """Tells the listeners and the log what happens to one member, and to its run as that member sees it."""

    def __init__(self, run_id: str, member: str, now: Callable[[], float], listeners: Sequence[Observer] = ()) -> None:
        self._run_id = run_id
        self._member = member
        self._now = now
        self._listeners = listeners
        self._timeline = Timeline()
        self._log = Log()

    def tell(
        self, kind: str, head: Head | None, reason: str, *,
        cause: str = "", holds: RoundReport | None = None, seconds: float | None = None,
    ) -> None:  # fmt: skip
        """Tell what happened to the member. `holds` is the round that it was just given."""
        if not self.hears(kind):
            return
        rank, size = (-1, 0 if head is None else head.size) if holds is None else (holds.rank, holds.size)
        number, incarnation = (0, "") if head is None else (head.number, head.run)
        members: tuple[str, ...] = ()
        came = head.came if holds is not None and head is not None else ()
        if holds is not None and head is not None and head.cause is not None:
            cause, members = head.cause.kind.value, head.cause.members
        self._tell(Notice(
            kind, self._run_id, number, self._member, reason, incarnation, rank, size,
            cause=cause, members=members, came=came, seconds=seconds,
        ))  # fmt: skip

    def tell_of_head(self, old: Head | None, new: Head) -> None:
        """Tell what follows from a new head."""
        if self.hears(new.phase):
            for notice in about_head(self._run_id, self._member, old, new):
                self._tell(notice)

    def hears(self, kind: str) -> bool:
        """Whether anybody wants a notice of this kind."""
        # Most members have no listener and log warnings only. Then nearly no notice needs to be made.
        return bool(self._listeners) or is_logged(kind)

    def _tell(self, plain: Notice) -> None:
        notice = self._timeline.timed(plain, self._now())
        try:
            self._log(notice)
        except Exception:  # The log may have filters and handlers of the program. They must not end a membership.
            logging.getLogger(__name__).exception("the log failed with %s", notice)
        for listener in self._listeners:
            try:
                listener(notice)
            except Exception:  # Nor must a listener.
                logging.getLogger(__name__).exception("an observer failed with %s", notice)

    def close(self) -> None:
        """Let listeners that keep something finish it. There is no further notice."""
        for listener in self._listeners:
            finish = getattr(listener, "close", None)
            if finish is not None:
                try:
                    finish()
                except Exception:  # It must not keep the member from leaving.
                    logging.getLogger(__name__).exception("an observer failed as it was closed")
