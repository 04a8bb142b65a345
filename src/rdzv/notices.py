"""Notices: one frozen value per thing that happened, handed to whoever observes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import msgspec

from .core.model import Head, Phase


class Notice(msgspec.Struct, frozen=True):
    """Something happened in a run, as one member saw it."""

    kind: str
    run_id: str
    round: int
    member: str
    reason: str


Observer = Callable[[Notice], None]


def hand_over(observer: Observer, notice: Notice) -> None:
    """What goes wrong in an observer is logged and goes no further: who only looks on must not end a membership."""
    try:
        observer(notice)
    except Exception:
        logging.getLogger(__name__).exception("the observer failed with %s", notice)


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
