"""The rules of a member about a head: what it does, and what its holder is told (T3, T4, T10, T13, T15)."""

from __future__ import annotations

import pytest

from rdzv.core import member_rules
from rdzv.core.member_rules import Change, ChangeKind, TakeResult, change_for, report, still_ours, take_result
from rdzv.core.model import NO_ROUND, Call, Cause, CauseKind, Era, Head, Phase, RoundId
from support.views import ERA, entry, told

LOST = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))
CAME = Cause(kind=CauseKind.GROWTH, text="d and e came to join", members=("d", "e"))


def head(phase=Phase.SEALED, **fields):
    base = {"run": "r1", "era": ERA, "next_era": ERA, "number": 3, "table": "t3", "size": 2}
    return Head(**{**base, "phase": phase, **fields})


# ---- T3, T4: taking


@pytest.mark.parametrize(
    ("seen", "left", "examined", "expected"),
    [
        (head(), NO_ROUND, "", True),
        (head(Phase.BROKEN), NO_ROUND, "", True),
        (head(), RoundId(ERA, 2), "t2", True),
        (head(number=1, era=Era(2, "e0")), RoundId(ERA, 9), "", True),
        # Nothing to take.
        (head(Phase.OPEN, number=0, table=""), NO_ROUND, "x", False),
        (head(Phase.CLOSED), NO_ROUND, "", False),
        # Kept for those who hold it.
        (head(adopted=True), NO_ROUND, "", False),
        (head(Phase.BROKEN, adopted=True), NO_ROUND, "", False),
        # Asked already.
        (head(), NO_ROUND, "t3", False),
        # G3: at or below what we gave up.
        (head(), RoundId(ERA, 3), "", False),
        (head(), RoundId(ERA, 4), "", False),
        (head(number=9), RoundId(Era(2, "e0"), 1), "", False),
    ],
)
def test_a_table_is_examined_once_and_only_if_its_round_could_be_ours(seen, left, examined, expected):
    """T3.1."""
    assert member_rules.worth_examining(seen, left, examined) is expected


MINE = entry("a", 0, created=11)


def test_h4_a_world_is_given_by_one_read_of_head_and_line():
    """T3.3: whatever we remember of an earlier head counts for nothing."""
    assert take_result(head(), "t3", MINE, 11) is TakeResult.GIVEN


@pytest.mark.parametrize(
    ("seen", "line", "expected"),
    [
        # T3.4
        (None, MINE, TakeResult.LOOK_AGAIN),
        (head(table="t4", number=4), MINE, TakeResult.LOOK_AGAIN),
        (head(table="t4", number=4), None, TakeResult.LOOK_AGAIN),
        (head(Phase.CLOSED), MINE, TakeResult.LOOK_AGAIN),
        # T3.5
        (head(), None, TakeResult.NOT_OURS),
        (head(Phase.BROKEN), None, TakeResult.NOT_OURS),
        (head(adopted=True), MINE, TakeResult.NOT_OURS),
        (head(Phase.BROKEN, adopted=True), MINE, TakeResult.NOT_OURS),
    ],
)
def test_nothing_else_gives_a_world(seen, line, expected):
    """T3.4, T3.5."""
    assert take_result(seen, "t3", line, 11) is expected


@pytest.mark.parametrize("phase", [Phase.SEALED, Phase.BROKEN])
def test_h5_a_line_of_a_former_life_is_not_ours(phase):
    """T3.5: the id is the same, the create revision is not."""
    assert take_result(head(phase), "t3", MINE, 12) is TakeResult.NOT_OURS


def test_h3_a_round_that_was_broken_before_it_was_taken_is_given_up():
    """T4.1: else the others would wait for us to stop workers that we never started."""
    assert take_result(head(Phase.BROKEN, cause=LOST), "t3", MINE, 11) is TakeResult.GIVE_UP


# ---- T10: told

HOLDS = told(rank=0)


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        # T10.1
        (None, None),
        # T10.2
        (head(Phase.CLOSED, cause=Cause(kind=CauseKind.SUCCESS, text="all done")), None),
        # T10.3
        (
            head(Phase.CLOSED, cause=Cause(kind=CauseKind.GAVE_UP, text="b gave up")),
            Change(ChangeKind.CLOSED, "the run was closed: b gave up"),
        ),
        (head(Phase.CLOSED), Change(ChangeKind.CLOSED, "the run was closed: no reason was given")),
        # T10.4
        (head(run="r2"), Change(ChangeKind.EVICTED, "the run id has begun a new life without us")),
        (head(Phase.BROKEN, run="r2"), Change(ChangeKind.EVICTED, "the run id has begun a new life without us")),
        # T10.5
        (head(Phase.BROKEN, cause=LOST), Change(ChangeKind.ROUND, "c lost")),
        (head(Phase.BROKEN, cause=CAME), Change(ChangeKind.ROUND, "d and e came to join", newcomers=2)),
        (head(Phase.BROKEN), Change(ChangeKind.ROUND, "round 3 is broken")),
        # T10.6
        (head(number=4, table="t4"), Change(ChangeKind.ROUND, "round 4 has replaced round 3")),
        (head(Phase.BROKEN, number=4, table="t4", cause=LOST), Change(ChangeKind.ROUND, "round 4 has replaced round 3")),
        (head(era=Era(2, "e2")), Change(ChangeKind.ROUND, "round 3 has replaced round 3")),
        (head(table="other"), Change(ChangeKind.ROUND, "round 3 has replaced round 3")),
        # T10.7
        (head(), None),
        (head(call=Call.SETTLE, call_seq=9, seq=9), None),
        (head(adopted=True, next_era=Era(2, "e2")), None),
    ],
)
def test_h24_what_a_holder_is_told_is_a_function_of_its_round_and_the_head(seen, expected):
    """T10.1, T10.2, T10.3, T10.4, T10.5, T10.6, T10.7."""
    assert change_for(HOLDS, seen) == expected


def test_h15_a_round_of_another_incarnation_is_not_ours_though_its_number_is():
    """T10.4: paused since a former life, it finds the same number and, by accident, even the same table."""
    assert change_for(told(rank=0, run="r0"), head()).kind is ChangeKind.EVICTED


def test_the_success_of_others_ends_a_round_that_they_went_on_from():
    """T10.3: who was cut off and comes back when the rest have finished would train on for nobody."""
    finished = head(Phase.CLOSED, number=4, table="t4", cause=Cause(kind=CauseKind.SUCCESS, text="all 2 members are done"))
    assert change_for(HOLDS, finished) == Change(ChangeKind.CLOSED, "the run was closed: all 2 members are done")


def test_the_kinds_of_change_keep_their_names():
    """T10.3: programs tell them apart by these."""
    assert [kind.value for kind in ChangeKind] == ["round", "evicted", "closed", "outage", "refused", "left"]


# ---- T13, T15: coming back


@pytest.mark.parametrize(
    ("seen", "ours"),
    [
        (None, True),
        (head(), True),
        (head(Phase.BROKEN), True),
        (head(Phase.CLOSED, run="r2", table="t9"), True),
        (head(number=4, table="t4"), False),
        (head(run="r2"), False),
    ],
)
def test_a_holder_that_comes_back_goes_on_or_is_evicted(seen, ours):
    """T15.6."""
    assert still_ours(HOLDS, seen) is ours


def test_what_is_told_is_all_that_makes_the_head_again():
    """T13.2: with the own rank, which the head does not know."""
    seen = head(
        Phase.BROKEN, digest="d", boot="node-a:29500", top=4, grown=2, incarnation=5, next_era=Era(2, "e2"), cause=LOST
    )
    assert report(seen, 1) == told(
        phase=Phase.BROKEN, rank=1, boot="node-a:29500", top=4, grown=2, incarnation=5, next_era=Era(2, "e2"), cause=LOST
    )
