"""Notices: one frozen value per thing that happened, handed to whoever observes, and logged.

They are derived from what a member sees anyway: no notice costs the engine anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec

from ..core.model import Cause, CauseKind, Head, Phase

logger = logging.getLogger("rdzv.notices")

_LOUD = frozenset({"engine away", "engine back", "evicted"})
"""What somebody should hear of who configured nothing. All else is either raised to the caller or in the order of things."""
_ABOUT_OTHERS = {
    CauseKind.LOST: "lost",
    CauseKind.BANNED: "banned",
    CauseKind.DRAINED: "drained",
    CauseKind.GAVE_UP: "gave up",
    CauseKind.LEFT: "left",
}


class Notice(msgspec.Struct, frozen=True):
    """Something happened in a run, as one member saw it."""

    kind: str
    run_id: str
    round: int
    member: str
    """Whom it is about: who tells it, unless the kind is about others (lost, left, drained, banned, gave up)."""
    reason: str


Observer = Callable[[Notice], None]


def hand_over(observer: Observer, notice: Notice) -> None:
    """What goes wrong in an observer is logged and goes no further: who only looks on must not end a membership."""
    try:
        observer(notice)
    except Exception:
        logging.getLogger(__name__).exception("the observer failed with %s", notice)


class Log:
    """The sink that is always there: `rdzv.notices`, with the fields of the notice as `extra`. A reason is said once."""

    def __init__(self) -> None:
        self._said: tuple[str, int, str, str] | None = None

    def __call__(self, notice: Notice) -> None:
        """Of what repeats itself, only the first time."""
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
    """What a new head means: derived from the two heads, so at most once per round and phase however many were missed."""
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
    """Each of those who caused it, by name; at most CAUSE_MEMBERS_MAX are told of."""
    kind = _ABOUT_OTHERS.get(cause.kind)
    if kind is not None:
        for name in cause.members:
            yield Notice(kind, run_id, number, name, cause.text)
