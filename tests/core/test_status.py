"""A run as people see it: S1 to S4."""

from __future__ import annotations

import pytest

from rdzv.core.model import Call, Cause, CauseKind, JournalEntry, Phase
from rdzv.core.rules import lead
from rdzv.core.status import MemberStatus, RunChange, RunEvents, describe, describe_events
from support.views import ERA, broken, closed, no_head, opened, sealed

EVERYBODY = (
    "in:in ready:ready drains:drains done:done lost:lost gone:gone new:new spare:new new_drains:new_drains again:again "
    "went:went gave_up:gave_up"
)


GOING = "drains:draining done:done"
LOST = "new_drains:draining again:spare lost:lost gone:done again:lost went:left gave_up:gave up"


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        # One place is left beside the two survivors.
        (sealed(EVERYBODY, max=3), f"in:in ready:ready {GOING} new:waiting spare:spare {LOST}"),
        (broken(EVERYBODY, max=4), f"in:straggling ready:ready {GOING} new:ready spare:ready {LOST}"),
        # Before the first round the first to come have the room.
        (no_head("b a c", max=2), "b:ready a:ready c:spare"),
        (opened("b a c", max=2), "b:ready a:ready c:spare"),
        # Room is counted in whole units. Members that drain or are done leave room; draining newcomers take none.
        (sealed("a b c:new d:new e:new", max=5, unit=2), "a:in b:in c:waiting d:waiting e:spare"),
        (sealed("a:drains b:done c:new d:new e:new", max=2), "a:draining b:done c:waiting d:waiting e:spare"),
        (sealed("a b:new_drains c:new", max=2), "a:in b:draining c:waiting"),
        # A ban goes before all else, and done before draining.
        *[(sealed(people, banned={"node-a": "bad memory"}), "a:banned") for people in ("a", "a:done", "a:drains", "a:new")],
        (sealed("a b", asked={"B": "maintenance"}), "a:in b:draining"),
        (sealed("a:done", asked={"A": "maintenance"}), "a:done"),
        (sealed("a b:lost c:went d:lost", banned={"node-b": "bad memory", "node-c": "old"}),
         "a:in b:banned c:banned d:lost"),
        # Nobody is lost in a closed run.
        (closed("in:in gone:gone lost:lost"), "in:in gone:done lost:left"),
    ],
)  # fmt: skip
def test_every_member_is_shown_as_what_it_is(view, expected):
    """S1, S2, S3, T9.1: a former life is shown beside the present one."""
    assert " ".join(f"{member.name}:{member.state}" for member in describe("job", view).members) == expected


def test_members_are_shown_in_the_order_in_which_they_came():
    """S1: with rank and info, if they have one."""
    view = sealed("c:new a b", records={"a": {"info": {"gpus": "8"}}}, max=3)
    assert describe("job", view).members == (
        MemberStatus("C", "c", "node-c", "waiting", -1, {}),
        MemberStatus("A", "a", "node-a", "in", 0, {"gpus": "8"}),
        MemberStatus("B", "b", "node-b", "in", 1, {}),
    )


def test_a_lost_member_is_shown_with_the_rank_it_had():
    """S3."""
    assert describe("job", broken("a b:lost")).members[1] == MemberStatus("B", "b", "node-b", "lost", 1, here=False)


def test_a_former_life_gives_nobody_a_rank():
    """S1, W1."""
    assert [member.rank for member in describe("job", sealed("a b:again")).members] == [0, -1, 1]


@pytest.mark.parametrize(
    "view",
    [no_head("a"), opened("a b"), sealed("a b"), sealed("a b:lost"), broken("a b:ready"), closed("a")],
)
def test_the_reason_is_the_leaders(view):
    """S4: the same words everywhere."""
    assert describe("job", view).reason == lead(view).reason


def test_the_leader_is_whoever_came_first():
    """S4: not whoever asks."""
    status = describe("job", sealed("b a", me="A"))
    assert (status.leader, status.leader_id) == ("b", "B")
    status = describe("job", sealed(""))
    assert (status.leader, status.leader_id) == ("", "")


def test_members_of_one_name_are_told_apart_by_their_ids():
    status = describe("job", sealed("a b:again c"))
    assert list(status.titles().values()) == ["a", "b (B)", "c"], "one member in two lives is one"
    status = describe("job", sealed("a b c", records={"b": {"name": "a"}}))
    assert status.titles() == {"A": "a (A)", "B": "a (B)", "C": "c"}


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (no_head("a"), (0, "none", 0)),
        (opened("a"), (0, "open", 0)),
        (sealed("a b"), (3, "sealed", 2)),
        (broken("a b c:lost"), (3, "broken", 3)),
        (closed("a"), (3, "closed", 1)),
    ],
)
def test_round_phase_and_size_are_those_of_the_head(view, expected):
    status = describe("job", view)
    assert (status.run_id, status.round, status.phase, status.size) == ("job", *expected)


@pytest.mark.parametrize(("late", "shown"), [(False, "last call, 30 s left"), (True, "last call, at most 30 s left")])
def test_who_came_after_a_timer_began_does_not_claim_to_know_its_end(late, shown):
    """S4."""
    view = opened("a b", call=Call.LAST, late=late)
    assert describe("job", view).reason == f"2 of 2..4 nodes: {shown}"


def test_how_far_a_round_is_from_its_quorum_can_be_told():
    status = describe("job", opened("a b:new_drains c", call=Call.LAST))
    assert (status.ready, status.min_nodes, status.max_nodes, status.call) == (2, 2, 4, "last")


def test_members_can_be_picked_by_state():
    status = describe("job", sealed("a b c:lost d:new"))
    assert [member.name for member in status.of("in")] == ["a", "b"]
    assert status.of("spare") == ()


@pytest.mark.parametrize(
    ("view", "text"),
    [
        (sealed("a b c:new d:new", max=3),
         "round 3 sealed: round 3 runs with 2 nodes; c waiting to come in (2 in, 1 spare, 1 waiting)"),
        (opened(""), "round 0 open: 0 of 2..4 nodes: waiting for 2 more (no members)"),
        (closed("a"), "round 3 closed: no reason was given (1 in)"),
    ],
)  # fmt: skip
def test_a_status_is_one_line_for_people(view, text):
    assert str(describe("job", view)) == f"run 'job', {text}"
    assert repr(describe("job", view)) == f"<Status run 'job', {text}>"


def wrote(seq, phase, number=1, size=2, cause=None, **more):
    """A journal entry."""
    return JournalEntry(
        seq=seq, run="r", era=ERA, number=number, phase=phase, size=size, call=Call.NONE, by="a", reason="full", cause=cause,
        **more,
    )  # fmt: skip


LOST = Cause(kind=CauseKind.LOST, text="b lost", members=("b",))
BROKEN = wrote(3, Phase.BROKEN, cause=LOST, stamp="then", lasted_s=7.5)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (wrote(1, Phase.OPEN, 0), "full"),
        (wrote(2, Phase.SEALED), "round 1 sealed with 2 nodes (full)"),
        (wrote(2, Phase.SEALED, came=("a",)), "round 1 sealed with 2 nodes (full)"),
        (BROKEN, "round 1 broken: b lost"),
        (wrote(4, Phase.SEALED, 2, 1, gone=("b",)), "round 2 sealed with 1 node (full); no longer in: b"),
        (wrote(4, Phase.SEALED, 2, came=("c", "d")), "round 2 sealed with 2 nodes (full); came in: c, d"),
        (wrote(5, Phase.CLOSED, cause=Cause(kind=CauseKind.CLOSED, text="enough (by me)")), "closed: enough (by me)"),
    ],
)
def test_each_change_is_told_in_words(entry, text):
    assert describe_events([entry]) == RunEvents(
        RunChange(
            text, entry.number, entry.phase.value, "a", entry.cause.kind if entry.cause else None,
            entry.cause.members if entry.cause else (), entry.stamp, entry.lasted_s,
        )
    )  # fmt: skip


def test_the_last_break_is_told_beside_a_later_change():
    assert describe_events([]) is None
    sealed_again, begun = wrote(4, Phase.SEALED, 2), wrote(1, Phase.OPEN, 0)
    events = describe_events([sealed_again, BROKEN, wrote(2, Phase.SEALED), begun])
    assert (events.last.round, events.broken.text, events.broken.members) == (2, "round 1 broken: b lost", ("b",))
    assert describe_events([BROKEN, wrote(2, Phase.SEALED)]).broken is None, "the last change is the break"
    assert describe_events([sealed_again, wrote(3, Phase.BROKEN)]).broken is None, "without a cause it explains nothing"
