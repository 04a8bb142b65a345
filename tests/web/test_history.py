"""The model behind metrics and page: what each line, look and fact changes, and that its sums are those of `rdzv journal`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.model import Call, Cause, CauseKind, Era, JournalEntry, Phase
from rdzv.core.status import MemberStatus, Status
from rdzv.operate.journal import histories
from rdzv.web import history
from rdzv.web.history import BUCKETS_S, Histogram, Line, RunModel, counts, missing

OPEN, SEALED, BROKEN, CLOSED = Phase
LOST = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))
STOPPED = Cause(kind=CauseKind.RESTARTED, text="the workers of a stopped", members=("a",))
GROWTH = Cause(kind=CauseKind.GROWTH, text="d came", members=("d",))


def entry(seq, phase, number=1, lasted_s=None, **others):
    fields = {"run": "r", "era": Era(1, "e"), "size": 2, "call": Call.NONE, "by": "a", "reason": "why", **others}
    return JournalEntry(seq=seq, phase=phase, number=number, lasted_s=lasted_s, **fields)


def lines(*entries, start=1):
    return [Line(start + index, one) for index, one in enumerate(entries)]


def status(phase="sealed", round=1, names="abc", gone="", **others):
    members = [MemberStatus(f"id-{name}", name, f"host-{name}", "in", rank) for rank, name in enumerate(names)]
    members += [MemberStatus(f"id-{name}", name, f"host-{name}", "lost", len(names)) for name in gone]
    fields = {"size": len(members), "reason": "", "leader": "a", "min_nodes": 2, "max_nodes": 4, **others}
    return Status(run_id="job", round=round, phase=phase, members=tuple(members), **fields)


def told(*entries, now=100.0):
    """A model that found these lines when it came."""
    model = RunModel("job")
    model.tell("i", lines(*entries), now, live=False)
    return model


A_LOSS = (
    entry(1, OPEN, 0),
    entry(2, SEALED, lasted_s=2.0, came=("a", "b", "c")),
    entry(3, BROKEN, lasted_s=10.0, cause=LOST),
    entry(4, BROKEN, lasted_s=1.5, call=Call.LAST),
    entry(5, SEALED, 2, lasted_s=0.25, came=("d",), gone=("c",)),
)


@pytest.mark.parametrize(
    ("entries", "sealed", "broken", "lost_s", "restarts"),
    [
        ((), 0, {}, {}, []),
        (A_LOSS[:1], 0, {}, {}, []),
        (A_LOSS[:2], 1, {}, {}, []),
        # A break that lasts has cost nothing yet.
        (A_LOSS[:4], 1, {"lost": 1}, {}, []),
        (A_LOSS, 2, {"lost": 1}, {"lost": 1.75}, [1.75]),
        # The root cause was found later (T7.14): one break, whose cost is that of the loss.
        ((*A_LOSS[:2], entry(3, BROKEN, lasted_s=10.0, cause=STOPPED), entry(4, BROKEN, lasted_s=1.5, cause=LOST), A_LOSS[4]),
         2, {"restarted": 1}, {"lost": 1.75}, [1.75]),
        # A settle call is no new round.
        ((*A_LOSS, entry(6, SEALED, 2, lasted_s=1.0, call=Call.SETTLE)), 2, {"lost": 1}, {"lost": 1.75}, [1.75]),
        # A close ends a break: the time is lost, but it is no restart.
        ((*A_LOSS[:4], entry(5, CLOSED, lasted_s=3.0)), 1, {"lost": 1}, {"lost": 4.5}, []),
        # An unknown part: the sum is a lower bound, and a histogram of lower bounds would be too good.
        ((*A_LOSS[:3], entry(4, SEALED, 2)), 2, {"lost": 1}, {"lost": 0.0}, []),
        # The engine adopted the same round again: not sealed twice.
        ((*A_LOSS[:2], entry(1, SEALED, lasted_s=None)), 1, {}, {}, []),
        ((entry(7, BROKEN), entry(8, SEALED, 5, lasted_s=0.5)), 1, {"unknown": 1}, {"unknown": 0.5}, [0.5]),
        # Another incarnation counts from 1 again.
        ((*A_LOSS[:2], entry(3, CLOSED), entry(1, SEALED, run="s")), 2, {}, {}, []),
    ],
)
def test_lines_are_counted(entries, sealed, broken, lost_s, restarts):
    counters = told(*entries).counters
    assert (counters.sealed, counters.broken, counters.lost_s) == (sealed, broken, lost_s)
    assert (sum(counters.restart.counts), counters.restart.sum_s) == (len(restarts), sum(restarts))


@given(st.lists(st.tuples(st.sampled_from(list(Phase)), st.floats(0, 100), st.sampled_from(list(CauseKind)))))
def test_the_sums_are_those_of_the_journal(steps):
    number, entries = 0, []
    for seq, (phase, lasted_s, kind) in enumerate(steps, 1):
        number += phase is SEALED
        cause = Cause(kind=kind, text="t") if phase is BROKEN else None
        entries.append(entry(seq, phase, number, round(lasted_s, 3), cause=cause))
        if phase is CLOSED:
            break
    model = told(*entries)
    restarts = [restart for one in histories(entries) for restart in one.restarts]
    over = restarts[:-1] if model.is_restarting else restarts
    assert sum(model.counters.broken.values()) == len(restarts)
    assert sum(model.counters.lost_s.values()) == pytest.approx(sum(one.cost.seconds for one in over), abs=0.01)


def test_a_line_is_folded_once_however_often_it_is_read():
    model = told(*A_LOSS)
    model.tell("i", lines(*A_LOSS), 101.0, live=True)
    assert (model.counters.sealed, len(model.entries)) == (2, 5)
    # An engine that came back empty counts its revisions anew.
    model.tell("j", lines(entry(6, BROKEN, 2, cause=LOST)), 102.0, live=True)
    assert model.counters.broken == {"lost": 2}


def test_an_operators_note_changes_no_sum():
    before, after = told(*A_LOSS), told(*A_LOSS, entry(5, SEALED, 2, lasted_s=0.0, reason="asked to drain a", by="anna"))
    assert (after.counters, after.rounds) == (before.counters, before.rounds)
    assert after.lines()[0]["text"] == "asked to drain a"


def test_rounds_are_placed_on_the_timeline_by_their_own_durations_and_then_by_the_observers_clock():
    model = told(*A_LOSS, now=100.0)
    first, second = model.rounds
    assert (first.begin_s, first.end_s, first.cause, first.text, first.caused_by) == (2.0, 12.0, "lost", "c lost", ("c",))
    assert (first.cost_s, second.begin_s, second.end_s, model.at_s(100.0)) == (1.75, 13.75, None, 13.75)
    # The observer was there for the next line, which does not know its own duration.
    model.tell("i", lines(entry(6, BROKEN, 2, cause=LOST), start=6), 107.0, live=True)
    model.tell("i", lines(entry(7, SEALED, 3), start=7), 110.5, live=True)
    assert (second.end_s, second.cost_s, model.rounds[-1].begin_s) == (20.75, 3.5, 24.25)
    assert model.counters.restart.counts[history.bisect_left(BUCKETS_S, 3.5)] == 1
    assert all(one.is_exact for one in model.rounds)


def test_a_round_with_an_unknown_part_says_so():
    model = told(*A_LOSS[:2], entry(3, SEALED, call=Call.SETTLE), entry(4, BROKEN, lasted_s=1.0, cause=LOST))
    assert [(one.is_exact, one.end_s) for one in model.rounds] == [(False, 3.0)]


def test_a_close_ends_the_round_with_its_reason():
    done = Cause(kind=CauseKind.SUCCESS, text="all are done")
    model = told(*A_LOSS, entry(6, CLOSED, 2, lasted_s=4.0, cause=done))
    assert (model.rounds[-1].end_s, model.rounds[-1].cause, model.rounds[-1].text) == (17.75, "success", "all are done")


@pytest.mark.parametrize(
    ("appeared", "looks", "entries", "formed"),
    [
        # From the first sight of a member to the seal, by the observer's clock.
        (True, [(10.0, "none", "a")], [(14.0, entry(1, OPEN, 0)), (16.0, entry(2, SEALED, lasted_s=1.9))], 6.0),
        (False, [(5.0, None, ""), (10.0, "none", "a")], [(16.0, entry(2, SEALED))], 6.0),
        # The run was there before: only the heads' own durations are known.
        (False, [(10.0, "open", "a")], [(14.0, entry(1, OPEN, 0)), (16.0, entry(2, SEALED, lasted_s=1.9))], 1.9),
        # The journal begins later: nothing is known.
        (False, [(10.0, "open", "a")], [(16.0, entry(9, SEALED, lasted_s=1.9))], None),
        # All left, and others came: they have waited from then on.
        (True, [(10.0, "none", "a"), (20.0, None, ""), (30.0, "none", "b")], [(31.0, entry(2, SEALED))], 1.0),
    ],
)
def test_forming_takes_from_the_first_member_to_the_first_seal(appeared, looks, entries, formed):
    model = RunModel("job")
    if appeared:
        model.appeared(10.0)
    for now, phase, names in looks:
        model.look(status(phase, 0, names) if phase else None, now)
    for index, (now, one) in enumerate(entries, 1):
        model.tell("i", lines(one, start=index), now, live=True)
    form = model.counters.form
    assert (sum(form.counts), form.sum_s) == ((0, 0.0) if formed is None else (1, pytest.approx(formed)))


def test_members_of_earlier_rounds_follow_from_who_came_and_who_was_gone():
    model = told(*A_LOSS)
    model.look(status(round=2, names="abd"), 100.0)
    lanes, more = model.lanes()
    assert [(lane.name, lane.stays, lane.is_there) for lane in lanes] == [
        ("a", ((0, 1),), True), ("b", ((0, 1),), True), ("c", ((0, 0),), False), ("d", ((1, 1),), True)
    ]  # fmt: skip
    assert more == 0
    assert [lane.host for lane in lanes] == ["host-a", "host-b", "c", "host-d"]


def test_members_of_later_rounds_are_guessed_from_the_line_and_then_seen():
    model = told(*A_LOSS)
    model.look(status(round=2, names="abd"), 100.0)
    model.tell("i", lines(entry(6, SEALED, 3, lasted_s=1.0, gone=("d",)), start=6), 101.0, live=True)
    assert [lane.stays for lane in model.lanes()[0] if lane.name in "bd"] == [((0, 2),), ((1, 1),)]
    # The line named some only.
    model.look(status(round=3, names="ac"), 101.2)
    assert {lane.name: lane.stays for lane in model.lanes()[0]} == {
        "a": ((0, 2),), "b": ((0, 1),), "c": ((0, 0), (2, 2)), "d": ((1, 1),)
    }  # fmt: skip


def test_a_new_incarnation_has_its_own_members():
    model = told(*A_LOSS[:2], entry(3, CLOSED, lasted_s=1.0), entry(1, SEALED, run="s"))
    model.look(status(names="x"), 100.0)
    assert [(lane.name, lane.stays) for lane in model.lanes()[0]] == [("x", ((1, 1),))]


def test_lanes_show_those_that_changed_first_and_count_the_others(monkeypatch):
    monkeypatch.setattr(history, "LANES_MAX", 2)
    model = told(*A_LOSS)
    model.look(status(round=2, names="abd"), 100.0)
    lanes, more = model.lanes()
    assert ([lane.name for lane in lanes], more) == (["c", "d"], 2)


def test_old_rounds_are_forgotten_with_their_members(monkeypatch):
    monkeypatch.setattr(history, "ROUNDS_MAX", 2)
    model = told(*A_LOSS)
    model.look(status(round=2, names="abd"), 100.0)
    model.tell("i", lines(entry(6, BROKEN, 2, cause=LOST), entry(7, SEALED, 3), start=6), 101.0, live=True)
    assert [one.number for one in model.rounds] == [2, 3]
    assert [(lane.name, lane.stays) for lane in model.lanes()[0]] == [("a", ((0, 1),)), ("b", ((0, 1),)), ("d", ((0, 1),))]
    assert model.counters.sealed == 3


def test_hosts_are_blamed_for_restarts_and_share_the_cost():
    both = Cause(kind=CauseKind.LOST, text="b and c lost", members=("b", "c"))
    model = RunModel("job")
    model.look(status(names="abc"), 0.0)
    model.tell("i", lines(
        entry(1, SEALED), entry(2, BROKEN, lasted_s=9.0, cause=both), entry(3, SEALED, 2, lasted_s=3.0),
        entry(4, BROKEN, 2, lasted_s=9.0, cause=LOST), entry(5, SEALED, 3, lasted_s=1.0),
        entry(6, BROKEN, 3, lasted_s=9.0, cause=GROWTH), entry(7, SEALED, 4, lasted_s=0.5),
    ), 1.0, live=False)  # fmt: skip
    assert [(one.host, one.restarts, one.lost_s, one.growths, one.last) for one in model.blame()] == [
        ("host-c", 2, 2.5, 0, "lost"), ("host-b", 1, 1.5, 0, "lost"), ("d", 0, 0.0, 1, "growth")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("leaders", "changes"), [(["a", "a"], 0), (["a", "b"], 1), (["a", "", "b"], 1), (["", "a"], 0), (["a", "b", "a"], 2)]
)
def test_leader_changes_are_counted(leaders, changes):
    model = RunModel("job")
    for id in leaders:
        model.leader_is(id)
    assert model.counters.leader_changes == changes


def test_a_phase_has_an_age_that_is_exact_only_if_its_beginning_was_seen():
    model = RunModel("job")
    model.look(status("sealed"), 10.0)
    assert (model.phase_at, model.phase_is_exact) == (10.0, False)
    model.look(status("sealed", names="ab"), 11.0)
    assert model.phase_at == 10.0
    model.look(status("broken"), 12.0)
    assert (model.phase_at, model.phase_is_exact) == (12.0, True)


@pytest.mark.parametrize(
    ("phase", "ready", "expected"), [("none", 0, 2), ("open", 1, 1), ("broken", 3, 0), ("sealed", 0, 0), ("closed", 0, 0)]
)
def test_the_distance_from_quorum(phase, ready, expected):
    assert missing(status(phase, ready=ready)) == expected


def test_states_are_counted_with_zeros():
    assert counts(status(names="ab", gone="c"), ["in", "lost", "spare"]) == {"in": 2, "lost": 1, "spare": 0}


@pytest.mark.parametrize(("seconds", "bucket"), [(0.0, 0), (0.1, 0), (0.11, 1), (600.0, 11), (601.0, 12)])
def test_a_duration_falls_into_its_bucket(seconds, bucket):
    histogram = Histogram()
    histogram.observe(seconds)
    assert histogram.counts.index(1) == bucket


def test_names_and_hosts_are_bounded(monkeypatch):
    monkeypatch.setattr(history, "NAMES_MAX", 2)
    monkeypatch.setattr(history, "HOSTS_MAX", 0)
    model = told(*A_LOSS)
    model.look(status(round=2, names="abd"), 100.0)
    assert (len(model.lanes()[0]), len(model._host_of), model.blame()) == (2, 2, [])
