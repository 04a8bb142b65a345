"""When a running round is broken for newcomers: the rest of T7."""

from __future__ import annotations

import pytest

from rdzv.core.acts import Verdict, WriteHead
from rdzv.core.model import FLAP_WAIT_MAX_S, Call, Cause, CauseKind, Phase
from rdzv.core.rules import lead
from support.views import after, sealed


def grows(view, text, *about):
    """The verdict that breaks round 3 for newcomers."""
    cause = Cause(kind=CauseKind.GROWTH, text=text, members=about)
    head = after(view, phase=Phase.BROKEN, call=Call.REGROUP, cause=cause)
    return Verdict(WriteHead(head), f"round 3 broken: {text}")


def test_a_useful_newcomer_starts_the_settling():
    """T7.7, T7.9."""
    view = sealed("a b c:new")
    assert lead(view) == Verdict(
        WriteHead(after(view, call=Call.SETTLE)), "round 3 runs with 2 nodes; c waiting to come in"
    )


def test_a_short_time_to_settle_is_a_time_to_settle():
    """T7.9, T7.12."""
    assert lead(sealed("a b c:new", settle=0.25)).act.head.call is Call.SETTLE


def test_newcomers_are_gathered_while_it_settles():
    """T7.11."""
    view = sealed("a b c:new", call=Call.SETTLE, age=0.5)
    assert lead(view) == Verdict(None, "round 3 runs with 2 nodes; c waiting to come in", 1.5)


def test_h26_settling_is_counted_from_the_first_newcomer_and_not_from_the_last():
    """T7.11: else a newcomer every second would keep all of them out."""
    view = sealed("a b c:new d:new", call=Call.SETTLE, age=1.5)
    assert lead(view) == Verdict(None, "round 3 runs with 2 nodes; c and d waiting to come in", 0.5)


def test_newcomers_that_have_settled_break_the_round():
    """T7.11."""
    view = sealed("a b c:new d:new", call=Call.SETTLE, age=2.0)
    assert lead(view) == grows(view, "c and d came to join", "c", "d")


def test_settling_stops_when_nobody_useful_is_left():
    """T7.10: the next newcomer settles from the beginning."""
    view = sealed("a b", call=Call.SETTLE, age=1.5)
    assert lead(view) == Verdict(WriteHead(after(view, call=Call.NONE)), "round 3 runs with 2 nodes")


@pytest.mark.parametrize("changes", [{"grow": "now"}, {"settle": 0.0}])
def test_without_a_time_to_settle_a_newcomer_is_let_in_at_once(changes):
    """T7.12."""
    view = sealed("a b c:new", **changes)
    assert lead(view) == grows(view, "c came to join", "c")


def test_a_flapping_host_is_let_in_at_once_if_there_is_no_settling():
    """T7.12."""
    view = sealed("a b c:new", grow="now", flaps={"node-c": 3})
    assert lead(view).act.head.phase is Phase.BROKEN


@pytest.mark.parametrize(
    ("people", "changes", "useful"),
    [
        ("a b c:new d:new", {"max": 3}, "c came to join"),
        ("a b d:new c:new", {"max": 3}, "d came to join"),
        ("a b c:new d:new e:new", {"max": 8, "unit": 2}, "c and d came to join"),
        ("a b c:new d:new e:new", {"max": 8}, "c, d and e came to join"),
    ],
)
def test_only_as_many_as_the_round_would_grow_by_are_useful(people, changes, useful):
    """T7.7: whoever came first."""
    view = sealed(people, call=Call.SETTLE, age=2.0, **changes)
    assert lead(view).reason == f"round 3 broken: {useful}"


def test_a_newcomer_that_drains_is_of_no_use():
    """T7.7, W6."""
    assert lead(sealed("a b c:new_drains")) == Verdict(None, "round 3 runs with 2 nodes")


QUIET = [
    ("a b c d e:new", {}, "round 3 runs with 4 nodes; e spare"),
    ("a b c d e:new f:new", {"max": 5, "unit": 2}, "round 3 runs with 4 nodes; e and f spare"),
    ("a b c:new", {"unit": 2}, "round 3 runs with 2 nodes; c waiting for a unit of 2"),
    ("a b c:new", {"grow": "never"}, "round 3 runs with 2 nodes; c waiting: this run does not grow"),
    ("a b:done c:new", {}, "round 3 runs with 2 nodes; c waiting: some members are done already"),
    ("a b:gone c:new", {}, "round 3 runs with 2 nodes; c waiting: some members are done already"),
]


@pytest.mark.parametrize(("people", "changes", "reason"), QUIET)
def test_newcomers_that_are_of_no_use_disturb_nobody_and_learn_why(people, changes, reason):
    """T7.8, T7.13: only an event changes that."""
    assert lead(sealed(people, **changes)) == Verdict(None, reason)


@pytest.mark.parametrize(("people", "changes", "reason"), QUIET)
def test_settling_stops_when_newcomers_have_become_useless(people, changes, reason):
    """T7.10."""
    view = sealed(people, call=Call.SETTLE, age=9.0, **changes)
    assert lead(view) == Verdict(WriteHead(after(view, call=Call.NONE)), reason)


# ---- grow_every


def test_a_run_that_grew_a_moment_ago_does_not_grow_again():
    """T7.8, T7.13: it looks again when it may."""
    for age, wait in ((45.0, 15.0), (59.5, 0.5)):
        view = sealed("a b c:new", grown=2, grown_age=age)
        assert lead(view) == Verdict(None, "round 3 runs with 2 nodes; c waiting: the run grew a moment ago", wait)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"grown": 2, "grown_age": 60.0}, "long enough ago"),
        ({"grown": 0, "grown_age": 0.0}, "it never grew"),
        ({"grown": 2, "grown_age": 0.0, "top": 3}, "it had that size before: c replaces somebody"),
        ({"grown": 2, "grown_age": 0.0, "grow_every": 0.0}, "no limit"),
    ],
)
def test_a_run_may_grow(changes, why):
    """T7.8."""
    assert lead(sealed("a b c:new", **changes)).act.head.call is Call.SETTLE, why


def test_a_replacement_is_let_in_even_if_another_newcomer_would_be_a_growth():
    """T7.8: one of the two only replaces somebody; the restart is worth it for that one, and the other comes along."""
    view = sealed("a b c:new d:new", grown=2, grown_age=45.0, top=3)
    assert lead(view).reason == "round 3 runs with 2 nodes; c and d waiting to come in"
    assert lead(view).act.head.call is Call.SETTLE


# ---- flapping hosts


@pytest.mark.parametrize(
    ("flaps", "wait"), [(0, 2.0), (1, 4.0), (2, 8.0), (8, 512.0), (9, FLAP_WAIT_MAX_S), (30, 600.0)]
)
def test_h26_a_flapping_host_waits_twice_as_long_each_time(flaps, wait):
    """T7.12."""
    view = sealed("a b c:new", call=Call.SETTLE, age=wait - 0.5, flaps={"node-c": flaps, "node-x": 5})
    assert lead(view) == Verdict(None, "round 3 runs with 2 nodes; c waiting to come in", 0.5)
    view = sealed("a b c:new", call=Call.SETTLE, age=wait, flaps={"node-c": flaps})
    assert lead(view) == grows(view, "c came to join", "c")


def test_a_settle_longer_than_the_longest_flap_wait_stays_as_it_is():
    """T7.12."""
    view = sealed("a b c:new", call=Call.SETTLE, settle=700.0, age=650.0, flaps={"node-c": 3})
    assert lead(view).look_again_s == 50.0


def test_a_flapping_host_comes_in_with_one_that_does_not_flap():
    """T7.11: the round is broken anyway, so the least wait counts."""
    view = sealed("a b c:new d:new", call=Call.SETTLE, age=2.0, flaps={"node-c": 5})
    assert lead(view) == grows(view, "c and d came to join", "c", "d")


# ---- what comes first


def test_growth_waits_while_drains_are_gathered():
    """T7.4 comes before T7.11: else the round would be broken twice."""
    view = sealed("a b c:drains d:new", call=Call.SETTLE, age=9.0, drain_age=0.5)
    assert lead(view) == Verdict(None, "round 3: c draining, gathering others", 0.5)
