"""T11.13: rounds in a row that fail and get no further than before close the run, with the first cause."""

from __future__ import annotations

import msgspec
import pytest

from rdzv.core.futile import next_reach
from rdzv.core.model import NO_ROUND, Call, Cause, CauseKind, Phase, Reach
from rdzv.core.rules import lead
from support.verdicts import said
from support.views import broken, opened, seal_of

LOST = Cause(kind=CauseKind.LOST, text="x lost")


def over(*reached, rounds=3, reach=None, cause=LOST, **more):
    """A broken round of three, whose members have got so far; the next round can be sealed."""
    people = [f"{name}:ready" for name, _ in zip("abc", reached, strict=False)]
    records = {name: {"reached": step} for name, step in zip("abc", reached, strict=False)}
    given = {"futile_rounds": rounds, "reach": reach, "cause": cause, "call": Call.REGROUP, "size": 3, **more}
    return broken(" ".join(people), records=records, **given)


@pytest.mark.parametrize(("view", "expected"), [
    (over(7, 9, 8), Reach(step=9, cause="x lost")),
    (over(7, 9, 8, cause=Cause(kind=CauseKind.GROWTH, text="d came to join")), Reach(step=9)),
    (over(-1, -1, -1), None),
    (over(9, 9, 9, reach=Reach(step=8, rounds=2, cause="y lost")), Reach(step=9, cause="x lost")),
    (over(9, 9, 9, reach=Reach(step=9)), Reach(step=9, rounds=1, cause="x lost")),
    (over(-1, -1, -1, reach=Reach(step=9)), Reach(step=9, rounds=1, cause="x lost")),
    (over(3, 3, 3, reach=Reach(step=9, rounds=1, cause="y lost")), Reach(step=9, rounds=2, cause="y lost")),
    (over(9, 9, 9, reach=Reach(step=9, rounds=1, cause="y"), cause=Cause(kind=CauseKind.GROWTH, text="d came to join")),
     Reach(step=9, rounds=1, cause="y")),
    (over(9, 9, 9, reach=Reach(step=9, rounds=1, cause="y"), cause=Cause(kind=CauseKind.DRAINED, text="c draining")),
     Reach(step=9, rounds=1, cause="y")),
    (over(9, 9, reach=Reach(step=9), cause=None), Reach(step=9)),
    (over(9, 9, 9, rounds=0), None),
    (opened("a b", futile_rounds=3), None),
], ids=[
    "T11.13 the furthest worker counts", "for newcomers", "runs that tell no steps do not count", "a step further forgives",
    "no further", "not even as far as the first step", "the first cause stays", "growth is no failure", "nor is a drain",
    "nor a round without a cause", "off", "there was no round yet",
])  # fmt: skip
def test_how_far_a_run_has_got(view, expected):
    assert next_reach(view) == expected


def test_a_member_that_still_runs_workers_has_not_told_yet():
    view = broken("a:ready b:drains c:ready", futile_rounds=3, reach=Reach(step=9), call=Call.REGROUP, cause=LOST,
                  records={"b": {"reached": 99}})  # fmt: skip
    assert next_reach(view) == Reach(step=9, rounds=1, cause="x lost")


def test_the_run_is_closed_with_the_first_cause_and_the_step():
    """T11.13: instead of the seal."""
    view = over(9, 5, 9, reach=Reach(step=9, rounds=2, cause="y lost"))
    text = "3 rounds in a row got no further than step 9; first cause: y lost"
    assert said(view) == f"{text} | phase=closed call=none cause=futile() reach=Reach(step=9, rounds=3, cause='y lost')"
    head = lead(view).act.head
    assert (head.phase, head.cause.kind, head.cause.text) == (Phase.CLOSED, CauseKind.FUTILE, text)


def test_one_round_may_be_enough():
    verdict = said(over(9, 9, 9, rounds=1, reach=Reach(step=9)))
    assert verdict.startswith("the last round got no further than step 9; first cause: x lost")


def test_before_that_the_count_is_part_of_the_sealed_head_and_outlives_its_leader():
    view = over(9, 9, 9, reach=Reach(step=9, rounds=1, cause="y lost"))
    assert seal_of(lead(view)).head.reach == Reach(step=9, rounds=2, cause="y lost")


def test_while_the_next_round_cannot_be_sealed_the_run_is_not_closed():
    """A member that has not told yet may have got further."""
    view = over(9, 9, 9, reach=Reach(step=9, rounds=2, cause="y lost"))
    record = msgspec.structs.replace(view.members["A"].record, left=NO_ROUND)
    behind = msgspec.structs.replace(view.members["A"], record=record)
    waiting = msgspec.structs.replace(view, members={**view.members, "A": behind})
    assert lead(waiting).act is None
