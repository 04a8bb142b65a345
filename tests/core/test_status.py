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


def states(view):
    """By name, as shown. A former life is shown beside the present one."""
    return [(member.name, member.state) for member in describe("job", view).members]


def test_everybody_in_a_running_round_is_shown_as_what_it_is():
    """S1, S2, S3: one place is left beside the two survivors."""
    assert states(sealed(EVERYBODY, max=3)) == [
        ("in", "in"),
        ("ready", "ready"),
        ("drains", "draining"),
        ("done", "done"),
        ("new", "waiting"),
        ("spare", "spare"),
        ("new_drains", "draining"),
        ("again", "spare"),
        ("lost", "lost"),
        ("gone", "done"),
        ("again", "lost"),
    ]


def test_everybody_in_a_broken_round_is_shown_as_what_it_is():
    """S1, S2, S3."""
    assert states(broken(EVERYBODY, max=4)) == [
        ("in", "straggling"),
        ("ready", "ready"),
        ("drains", "draining"),
        ("done", "done"),
        ("new", "ready"),
        ("spare", "ready"),
        ("new_drains", "draining"),
        ("again", "spare"),
        ("lost", "lost"),
        ("gone", "done"),
        ("again", "lost"),
    ]


@pytest.mark.parametrize("make", [no_head, opened])
def test_before_the_first_round_members_are_ready_or_spare(make):
    """S1, S2: who came first has the room."""
    assert states(make("b a c", max=2)) == [("b", "ready"), ("a", "ready"), ("c", "spare")]


def test_room_is_counted_in_whole_units():
    """S2."""
    assert states(sealed("a b c:new d:new e:new", max=5, unit=2))[2:] == [
        ("c", "waiting"),
        ("d", "waiting"),
        ("e", "spare"),
    ]


def test_those_who_drain_leave_room_and_those_who_are_done_too():
    """S2."""
    assert states(sealed("a:drains b:done c:new d:new e:new", max=2))[2:] == [
        ("c", "waiting"),
        ("d", "waiting"),
        ("e", "spare"),
    ]


def test_newcomers_that_drain_take_no_room():
    """S2."""
    assert states(sealed("a b:new_drains c:new", max=2)) == [("a", "in"), ("b", "draining"), ("c", "waiting")]


@pytest.mark.parametrize("people", ["a", "a:done", "a:drains", "a:new"])
def test_a_ban_is_what_matters_most(people):
    """S1."""
    assert states(sealed(people, banned={"node-a": "bad memory"})) == [("a", "banned")]


def test_whoever_was_asked_to_drain_is_draining():
    """S1, T9.1."""
    assert states(sealed("a b", asked={"B": "maintenance"}))[1] == ("b", "draining")


def test_done_is_shown_rather_than_draining():
    """S1."""
    assert states(sealed("a:done", asked={"A": "maintenance"})) == [("a", "done")]


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
    [
        no_head("a"),
        opened("a b"),
        sealed("a b"),
        sealed("a b:lost"),
        broken("a b:ready"),
        closed("a"),
    ],
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


def test_nobody_is_lost_in_a_closed_run():
    """S1, S3: all go, and some have gone already."""
    assert states(closed("in:in gone:gone lost:lost")) == [("in", "in"), ("gone", "done"), ("lost", "left")]
    assert str(describe("job", closed("a"))).count("closed") == 1


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


def test_a_status_is_one_line_for_people():
    assert str(describe("job", sealed("a b c:new d:new", max=3))) == (
        "run 'job', round 3 sealed: round 3 runs with 2 nodes; c waiting to come in (2 in, 1 spare, 1 waiting)"
    )


def test_a_run_without_members_says_so():
    assert str(describe("job", opened(""))) == (
        "run 'job', round 0 open: 0 of 2..4 nodes: waiting for 2 more (no members)"
    )
