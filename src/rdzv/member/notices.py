"""Notices: one frozen value per thing that happened, passed to the observer, and logged.

A member derives them from what it sees anyway: no notice costs the engine anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec

from ..core.model import CauseKind, Head, Phase

logger = logging.getLogger("rdzv.notices")

_LOUD = frozenset({"engine away", "engine back", "evicted"})
"""Logged as warnings, which are seen without any configuration. All others are expected, or raised to the caller."""
_ABOUT_OTHERS = {
    CauseKind.LOST: "lost", CauseKind.BANNED: "banned", CauseKind.DRAINED: "drained", CauseKind.GAVE_UP: "gave up",
    CauseKind.LEFT: "left",
}  # fmt: skip


class Notice(msgspec.Struct, frozen=True):
    """Something that happened in a run, as one member saw it."""

    kind: str
    run_id: str
    round: int
    member: str
    """The member concerned: the observer's own, or another one (lost, left, drained, banned, gave up)."""
    reason: str


Observer = Callable[[Notice], None]


class Notifier:
    """Tells the observer and the log what happens to one member, and to its run as that member sees it."""

    def __init__(self, run_id: str, member: str, observer: Observer | None) -> None:
        self._run_id = run_id
        self._member = member
        self._observer = observer
        self._log = Log()

    def tell(self, kind: str, round: int, reason: str) -> None:
        """Tell what happened to the member."""
        if self._is_heard(kind):
            self._tell(Notice(kind, self._run_id, round, self._member, reason))

    def tell_of_head(self, old: Head | None, new: Head) -> None:
        """Tell what follows from a new head."""
        if self._is_heard(new.phase):
            for notice in about_head(self._run_id, self._member, old, new):
                self._tell(notice)

    def _is_heard(self, kind: str) -> bool:
        # Most members have no observer and log warnings only. Then nearly no notice needs to be made.
        return self._observer is not None or logger.isEnabledFor(_level(kind))

    def _tell(self, notice: Notice) -> None:
        self._log(notice)
        if self._observer is not None:
            try:
                self._observer(notice)
            except Exception:  # An observer must not end a membership.
                logging.getLogger(__name__).exception("the observer failed with %s", notice)


def _level(kind: str) -> int:
    return logging.WARNING if kind in _LOUD else logging.INFO


class Log:
    """Write notices to the logger `rdzv.notices`, with the fields of the notice as `extra`."""

    def __init__(self) -> None:
        self._said: tuple[str, int, str, str] | None = None

    def __call__(self, notice: Notice) -> None:
        """Log a notice, unless it is the same as the one before."""
        level = _level(notice.kind)
        said = (notice.kind, notice.round, notice.member, notice.reason)
        if said == self._said or not logger.isEnabledFor(level):
            return
        self._said = said
        fields = {f"rdzv_{name}": getattr(notice, name) for name in Notice.__struct_fields__}
        logger.log(
            level, "run %r, round %s, %s: %s: %s",
            notice.run_id, notice.round, notice.member, notice.kind, notice.reason, extra=fields,
        )  # fmt: skip


def about_head(run_id: str, member: str, old: Head | None, new: Head) -> Iterator[Notice]:
    """Derive notices from two heads: at most one per round and phase, however many heads were missed in between."""
    if old is not None and (old.run, old.round, old.phase) == (new.run, new.round, new.phase):
        return
    if new.phase is Phase.SEALED:
        size = "1 node" if new.size == 1 else f"{new.size} nodes"
        again = "kept after the engine came back" if new.adopted else size
        yield Notice("sealed", run_id, new.number, member, again)
    elif new.phase is not Phase.OPEN:
        yield Notice(new.phase.value, run_id, new.number, member, new.cause.text if new.cause else "")
        if new.cause is not None and new.phase is Phase.BROKEN and new.cause.kind in _ABOUT_OTHERS:
            for name in new.cause.members:
                yield Notice(_ABOUT_OTHERS[new.cause.kind], run_id, new.number, name, new.cause.text)
