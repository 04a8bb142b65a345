"""What ends a running round: T7's losses, restarts and drains. Growth has a file of its own, and so has closing."""

from __future__ import annotations

import pytest

from rdzv.core.acts import Verdict, WriteHead
from rdzv.core.model import CAUSE_MEMBERS_MAX, FLAPS_MAX, Call, Cause, CauseKind, Phase
from rdzv.core.rules import lead
from support.views import NUMBER, ROUND, after, sealed


def breaks(view, kind, text, *about, call=Call.REGROUP, **others):
    """The verdict that breaks round 3 for that cause."""
    cause = Cause(kind=kind, text=text, members=about)
    return Verdict(
        WriteHead(after(view, phase=Phase.BROKEN, cause=cause, call=call, **others)), f"round 3 broken: {text}"
    )


def test_a_quiet_round_is_left_alone():
    """T7.13: only an event changes that."""
    assert lead(sealed("a b c")) == Verdict(None, "round 3 runs with 3 nodes")


# ---- losses

LOSSES = [
    ("a b c:lost", CauseKind.LOST, "c lost", ("c",)),
    ("a b c:lost d:lost", CauseKind.LOST, "c and d lost", ("c", "d")),
    ("a b c:again", CauseKind.LOST, "c lost", ("c",)),
    # All said why they went; else the one that did not is the news.
    ("a b c:went", CauseKind.LEFT, "c left: scaled down", ("c",)),
    ("a b c:went d:went", CauseKind.LEFT, "c and d left: scaled down", ("c", "d")),
    ("a b c:went d:lost", CauseKind.LOST, "c and d lost", ("c", "d")),
    # A failure says more than the losses that may have followed from it.
    ("a b c:gave_up", CauseKind.GAVE_UP, "c gave up: exit code 1", ("c",)),
    ("a b c:lost d:gave_up", CauseKind.GAVE_UP, "d gave up: exit code 1", ("d",)),
    ("a b c:went d:gave_up e:gave_up", CauseKind.GAVE_UP, "d gave up: exit code 1", ("d", "e")),
]


@pytest.mark.parametrize(("people", "kind", "text", "about"), LOSSES)
def test_a_loss_breaks_the_round_and_says_which(people, kind, text, about):
    """T7.1."""
    view = sealed(people)
    assert lead(view) == breaks(view, kind, text, *about)


@pytest.mark.parametrize(
    ("people", "kind", "text"),
    [
        ("a b c:lost d:lost", CauseKind.BANNED, "c banned: bad memory"),
        ("a b c:went d:went", CauseKind.BANNED, "c banned: bad memory"),
        ("a b c:lost d:gave_up", CauseKind.GAVE_UP, "d gave up: exit code 1"),
    ],
)
def test_the_loss_of_a_banned_member_is_the_operators_doing(people, kind, text):
    """T7.1: unless somebody failed."""
    view = sealed(people, banned={"node-c": "bad memory"})
    assert lead(view) == breaks(view, kind, text, "d" if kind is CauseKind.GAVE_UP else "c")


def test_whoever_was_done_and_went_is_not_lost():
    """T7.1, W2."""
    assert lead(sealed("a b:gone c")).act is None


def test_h21_a_cause_names_a_few_members_only():
    """T7.1: the head goes to everybody, so its size must not depend on how many were lost."""
    lost = [f"x{index:02d}" for index in range(20)]
    verdict = lead(sealed("a b " + " ".join(f"{name}:lost" for name in reversed(lost)), max=40))
    cause = verdict.act.head.cause
    assert cause.members == tuple(lost[:CAUSE_MEMBERS_MAX])
    assert cause.text == "x00, x01, x02 and 17 more lost"


@pytest.mark.parametrize(
    ("people", "low", "unit", "call"),
    [
        ("a b c:lost", 2, 1, Call.REGROUP),
        ("a b:lost c:lost", 2, 1, Call.NONE),
        ("a b c d:lost", 3, 2, Call.NONE),
        # Newcomers do not count: others may follow them in a moment, and regrouping does not wait for those.
        ("a b:lost c:new", 2, 1, Call.NONE),
        # Nor do those who will not be in the next round.
        ("a b:done c:lost", 2, 1, Call.NONE),
        ("a b:drains c:lost", 2, 1, Call.NONE),
    ],
)
def test_h18_the_survivors_regroup_only_if_they_are_a_quorum_alone(people, low, unit, call):
    """T7.2."""
    # A run in which somebody is done would be closed instead.
    broken = lead(sealed(people, min=low, unit=unit, on_failure="wait")).act.head
    assert (broken.phase, broken.cause.kind, broken.call) == (Phase.BROKEN, CauseKind.LOST, call)


def test_a_break_ends_the_settling_of_newcomers():
    """T7.2: a new call starts a new age."""
    view = sealed("a b c:lost d:new", call=Call.SETTLE, age=1.9)
    assert lead(view) == breaks(view, CauseKind.LOST, "c lost", "c")
    assert lead(view).act.head.call_seq == view.head.seq + 1


def test_h5_a_member_that_came_again_is_lost_to_its_round():
    """T7.1: a leader that lists anew sees its id alive, and must break the round all the same."""
    view = sealed("a b c:again")
    assert lead(view) == breaks(view, CauseKind.LOST, "c lost", "c")


# ---- restarts


def test_h6_a_member_that_restarts_its_workers_breaks_the_round():
    """T7.3: it gave the round up while all others were healthy."""
    view = sealed("a b:ready c")
    assert lead(view) == breaks(view, CauseKind.RESTARTED, "the workers of b stopped: a new round is wanted", "b")


def test_several_that_restart_are_one_cause():
    """T7.3."""
    view = sealed("a:ready b:ready c")
    assert lead(view) == breaks(view, CauseKind.RESTARTED, "the workers of a and b stopped: a new round is wanted", "a", "b")


def test_a_loss_is_the_cause_rather_than_the_restart_that_follows_from_it():
    """T7.1, T7.3."""
    view = sealed("a b:ready c:lost")
    assert lead(view) == breaks(view, CauseKind.LOST, "c lost", "c")


def test_whoever_gives_the_round_up_to_go_does_not_restart():
    """T7.3: only survivors restart."""
    assert "draining" in lead(sealed("a b c:drains", records={"c": {"left": ROUND}})).reason


# ---- drains


def test_drains_are_gathered():
    """T7.4: a scheduler signals many at once."""
    assert lead(sealed("a b c:drains", drain_age=0.25)) == Verdict(None, "round 3: c draining, gathering others", 0.75)


def test_drains_that_have_gathered_break_the_round():
    """T7.4."""
    view = sealed("a b c:drains d:drains", drain_age=1.0)
    assert lead(view) == breaks(view, CauseKind.DRAINED, "c and d draining: SIGTERM", "c", "d")


def test_a_drain_is_not_gathered_if_that_takes_no_time():
    """T7.4."""
    view = sealed("a b c:drains", drain_settle=0.0)
    assert lead(view) == breaks(view, CauseKind.DRAINED, "c draining: SIGTERM", "c")


def test_h22_a_drain_that_an_operator_asked_for_needs_no_answer_of_the_member():
    """T9.1, T7.4: the operator does not write the member's record, so the leader looks at both."""
    view = sealed("a b c", asked={"C": "maintenance"}, drain_age=1.0)
    assert lead(view) == breaks(view, CauseKind.DRAINED, "c draining: maintenance", "c")


def test_the_members_own_word_comes_before_the_operators():
    """T7.4."""
    view = sealed("a b c:drains", asked={"C": "maintenance"}, drain_age=1.0)
    assert lead(view) == breaks(view, CauseKind.DRAINED, "c draining: SIGTERM", "c")


def test_the_round_goes_on_if_too_few_would_remain():
    """T7.5: training for the rest of the notice is worth more than standing still."""
    assert lead(sealed("a b:drains c:drains", drain_age=5.0)) == Verdict(
        None, "round 3 runs with 3 nodes; b and c draining, but too few would remain without"
    )


def test_newcomers_can_take_the_place_of_those_who_drain():
    """T7.4, T7.2: then the round is broken, but the survivors alone do not regroup."""
    view = sealed("a b:drains c:new", drain_age=1.0)
    assert lead(view) == breaks(view, CauseKind.DRAINED, "b draining: SIGTERM", "b", call=Call.NONE)


def test_one_survivor_is_enough_if_one_is_a_quorum():
    """T7.4."""
    view = sealed("a b:drains", min=1, drain_age=1.0)
    assert lead(view) == breaks(view, CauseKind.DRAINED, "b draining: SIGTERM", "b")


def test_with_members_draining_newcomers_wait_for_more_than_a_unit():
    """T7.5, T7.13."""
    assert lead(sealed("a:drains b:drains c:drains d:new", max=4, drain_age=5.0)) == Verdict(
        None, "round 3 runs with 3 nodes; d waiting; a, b and c draining, but too few would remain without"
    )


def test_a_loss_does_not_wait_for_drains_to_gather():
    """T7.1 comes before T7.4."""
    view = sealed("a b c:drains d:lost", drain_age=0.0)
    assert lead(view) == breaks(view, CauseKind.LOST, "d lost", "d")


# ---- flaps

NEW_IN_3 = {"since": NUMBER}


@pytest.mark.parametrize(
    ("sealed_age", "since", "before", "noted"),
    [
        (59.0, NUMBER, {}, {"node-c": 1}),
        (59.0, NUMBER, {"node-c": 2}, {"node-c": 3}),
        (59.0, NUMBER, {"node-c": 30}, {"node-c": 30}),
        (59.0, NUMBER, {"node-c": 29, "node-x": 1}, {"node-c": 30, "node-x": 1}),
        # It had been in for longer, or the round had: nothing flaps.
        (59.0, NUMBER - 1, {}, {}),
        (60.0, NUMBER, {}, {}),
        # Its earlier flaps are not forgiven by another loss, however late.
        (60.0, NUMBER, {"node-c": 2}, {"node-c": 2}),
        # Those who stayed long enough are forgiven, and only then.
        (59.0, NUMBER - 1, {"node-a": 2}, {"node-a": 2}),
        (60.0, NUMBER - 1, {"node-a": 2, "node-x": 1}, {"node-x": 1}),
    ],
)
def test_h26_a_host_that_is_lost_soon_after_it_came_is_noted(sealed_age, since, before, noted):
    """T7.6."""
    view = sealed("a b c:lost", sealed_age=sealed_age, flaps=before, lines={"c": {"since": since}})
    assert lead(view) == breaks(view, CauseKind.LOST, "c lost", "c", flaps=noted)


@pytest.mark.parametrize(("number", "noted"), [(1, {}), (2, {"node-c": 1})])
def test_nobody_flaps_in_the_first_round(number, noted):
    """T7.6: it came with all the others, and made nobody restart."""
    view = sealed("a b c:lost", number=number, lines={"c": {"since": number}})
    assert lead(view).act.head.flaps == noted


def test_h21_only_the_worst_flaps_are_kept():
    """T7.6: the head has a limit."""
    before = {f"x{index:02d}": 1 + index % 2 for index in range(FLAPS_MAX + 4)}
    view = sealed("a b c:lost", sealed_age=1.0, flaps=before, lines={"c": NEW_IN_3})
    noted = lead(view).act.head.flaps
    assert len(noted) == FLAPS_MAX
    assert [host for host, count in noted.items() if count == 2] == sorted(
        h for h, count in before.items() if count == 2
    )
    assert [host for host, count in noted.items() if count == 1] == ["node-c", "x00", "x02", "x04", "x06", "x08"]
