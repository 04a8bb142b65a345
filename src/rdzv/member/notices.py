"""Notices: one frozen value per thing that happened, passed to the observer, and logged.

A member derives them from what it sees anyway: no notice costs the engine anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec

from ..core.model import Cause, CauseKind, Head, Phase

logger = logging.getLogger("rdzv.notices")

_LOUD = frozenset({"engine away", "engine back", "evicted"})
"""Logged as warnings, which are seen without any configuration. All others are expected, or raised to the caller."""
_ABOUT_OTHERS = {
    CauseKind.LOST: "lost",
    CauseKind.BANNED: "banned",
    CauseKind.DRAINED: "drained",
    CauseKind.GAVE_UP: "gave up",
    CauseKind.LEFT: "left",
}


class Notice(msgspec.Struct, frozen=True):
    """Something that happened in a run, as one member saw it."""

    kind: str
    run_id: str
    round: int
    member: str
    """The member concerned: the observer's own, or another one (lost, left, drained, banned, gave up)."""
    reason: str


Observer = Callable[[Notice], None]


def hand_over(observer: Observer, notice: Notice) -> None:
    """Call the observer. Its errors are logged and go no further: an observer must not end a membership."""
    try:
        observer(notice)
    except Exception:
        logging.getLogger(__name__).exception("the observer failed with %s", notice)


class Log:
    """Write notices to the logger `rdzv.notices`, with the fields of the notice as `extra`."""

    def __init__(self) -> None:
        self._said: tuple[str, int, str, str] | None = None

    def __call__(self, notice: Notice) -> None:
        """Log a notice, unless it is the same as the one before."""
        level = logging.WARNING if notice.kind in _LOUD else logging.INFO
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
        if new.cause is not None and new.phase is Phase.BROKEN:
            yield from _about_others(run_id, new.number, new.cause)


def _about_others(run_id: str, number: int, cause: Cause) -> Iterator[Notice]:
    """One notice per member that caused the change; at most CAUSE_MEMBERS_MAX."""
    kind = _ABOUT_OTHERS.get(cause.kind)
    if kind is not None:
        for name in cause.members:
            yield Notice(kind, run_id, number, name, cause.text)
