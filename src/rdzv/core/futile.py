"""T11: rounds in a row that fail without getting further than before: the run is closed, with the first cause."""

from __future__ import annotations

import msgspec

from .acts import because, close_head
from .causes import briefly
from .model import Cause, CauseKind, Head, Reach
from .text import clip
from .view import View

FAILURES = frozenset({CauseKind.LOST, CauseKind.RESTARTED, CauseKind.GAVE_UP, CauseKind.STALLED})
"""Causes of rounds that count. A round that was ended for a newcomer, a drain or an operator has not failed."""


def next_reach(view: View) -> Reach | None:
    """How far the run has got, with the round that is over; None: the run does not count, or no worker ever told a step."""
    head = view.head
    assert head is not None, "asked when the next round is sealed"
    before = head.reach
    if not view.settings.futile_rounds or not head.number:
        return before
    # Members say how far their workers got when they give up the round. Those that are lost cannot.
    told = [live.record.reached for live in view.in_table.values() if live.record.left >= head.round]
    step = max(told, default=-1)
    failed = head.cause is not None and head.cause.kind in FAILURES
    cause = clip(briefly(head.cause.text)) if failed and head.cause is not None else ""
    if step > (-1 if before is None else before.step):
        return Reach(step=step, cause=cause)
    if before is None or not failed:
        return before
    return Reach(step=before.step, rounds=before.rounds + 1, cause=before.cause or cause)


def close_as_futile(view: View, head: Head, reach: Reach | None) -> tuple[Head, Cause] | None:
    """Return the closed head and its cause, if the run has had its rounds without progress."""
    rounds = view.settings.futile_rounds
    if not rounds or reach is None or reach.rounds < rounds:
        return None
    times = "the last round" if rounds == 1 else f"{reach.rounds} rounds in a row"
    cause = because(CauseKind.FUTILE, f"{times} got no further than step {reach.step}; first cause: {reach.cause}")
    return msgspec.structs.replace(close_head(head, cause), reach=reach), cause
