"""A run as people see it: S1 to S4."""

from __future__ import annotations

import pytest

from rdzv.core.model import Call
from rdzv.core.rules import lead
from rdzv.core.status import MemberStatus, describe
from support.views import broken, closed, no_head, opened, sealed

EVERYBODY = (
    "in:in ready:ready drains:drains done:done lost:lost gone:gone new:new spare:new new_drains:new_drains again:again"
)


GOING = "drains:draining done:done"
LOST = "new_drains:draining again:spare lost:lost gone:done again:lost"


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
    assert describe("job", broken("a b:lost")).members[1] == MemberStatus("B", "b", "node-b", "lost", 1)


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
    assert describe("job", sealed("b a", me="A")).leader == "b"
    assert describe("job", sealed("")).leader == ""


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
