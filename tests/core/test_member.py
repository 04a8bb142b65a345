"""The machine of a member: its tables, stories of members, single decisions, and what holds whatever happens.

A story (tests/transcripts/member/*.txt) is a list of events, each followed by the actions that came of it and, if it changed,
the state. `pytest --rewrite` writes what happened instead of comparing it. The events are `EVENTS` and methods of `Teller`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rdzv.core import member as machine
from rdzv.core import member_actions as actions
from rdzv.core import member_events as events
from rdzv.core.member import step
from rdzv.core.member_rules import Change, ChangeKind
from rdzv.core.member_state import HOLDINGS, TRANSITIONS, Holding, Identity, MemberState, Standing, diagram
from rdzv.core.model import NO_ROUND, Cause, CauseKind, Era, Head, MemberRecord, Phase, RoundId
from rdzv.errors import Banned, Closed, Drained, EngineMoved, Evicted, LeftAlready
from support.views import ERA, entry

STORIES = sorted((Path(__file__).parent.parent / "transcripts" / "member").glob("*.txt"))
assert len(STORIES) >= 5, "they are found"
ME = Identity(run_id="job", name="a", endpoint="rdzv://n0", lease=10.0, outage_grace=60.0, closed_for=20.0, capacity=2)
MINE = entry("a", 0, created=11)


def head(phase=Phase.SEALED, number=1, **fields) -> Head:
    base = {"run": "r1", "era": ERA, "next_era": ERA, "number": number, "table": f"t{number}" if number else "", "size": 2}
    return Head(**{**base, "phase": phase, **fields})


OPEN = head(Phase.OPEN, 0)
CLOSED = head(Phase.CLOSED, cause=Cause(kind=CauseKind.CLOSED, text="enough"))


class Teller:
    """One member, and the time. Each method is an event."""

    def __init__(self) -> None:
        self.state = MemberState(ME)
        self.now = 100.0

    def on(self, event) -> list[actions.MemberAction]:
        return step(self.state, event, self.now)

    def wait(self, seconds) -> list[actions.MemberAction]:
        self.now += float(seconds)
        return []

    def __getattr__(self, verb):
        return lambda *words: self.on(EVENTS[verb](self, *words))

    def head(self, phase="", number="1", cause="", **fields):
        if not phase:
            return self.on(events.HeadSeen(None))
        why = Cause(kind=CauseKind.SUCCESS if cause == "all done" else CauseKind.LOST, text=cause) if cause else None
        return self.on(events.HeadSeen(head(Phase(phase), int(number), cause=why, **fields)))

    def other_life(self, phase):
        return self.head(phase, run="r2")

    def examined(self, whose="mine"):
        seen = self.state.head
        table = seen.table if seen else "t1"
        return self.on(events.Examined(table, seen, None if whose == "others" else MINE, 11))

    def failed(self, error="oops"):
        return self.on(events.Failed(error if isinstance(error, Exception) else ZeroDivisionError(error)))

    def next(self):
        wanted = machine.next_step(self.state, self.now)
        return [] if wanted is None else [wanted]

    def condition(self) -> str:
        state = self.state
        told = f"; told {state.change.kind.value}: {state.change.reason}" if state.change else ""
        return f"{state.standing.value}, {state.holding.value}{told}"


EVENTS = {
    "join": lambda _: events.Join(),
    "connected": lambda _: events.Connected("n1"),
    "registered": lambda self, how="", place="p1": events.Registered(11, how == "brought", self.now, place),
    "ready": lambda self: events.ReadyPut(self.state.left),
    "renewed": lambda self: events.Renewed(self.now),
    "unanswered": lambda self, how="": events.RenewalFailed(self.now, "no answer", how == "paused"),
    "key_gone": lambda _, reason="its lease ended": events.KeyGone(reason),
    "away": lambda _, trouble="no route": events.EngineAway(trouble),
    "elsewhere": lambda _, place="p2", why="": events.Elsewhere(place, why),
    "asked": lambda _, reason: events.DrainAsked(reason),
    "leads": lambda _: events.Leads(),
    "done": lambda _: events.WorkDone(),
    "drain": lambda _, reason: events.Draining(reason),
    "leave": lambda _: events.Leave(),
    "left": lambda _: events.Left(),
}
"""The events that need no more than their words."""


def shown(action: actions.MemberAction) -> str:
    if isinstance(action, actions.GiveRound):
        return f"GiveRound {action.head.number}, rank {action.entry.rank}"
    if isinstance(action, actions.TellHead):
        return f"TellHead {action.new.phase.value} {action.new.number}"
    if isinstance(action, actions.Raise):
        return f"Raise {type(action.error).__name__}"
    return " ".join([type(action).__name__, *map(str, msgspec.structs.astuple(action))])


def tell(text: str) -> str:
    """The story with what comes of its events. A member that is woken without a reason is not shown."""
    teller, lines = Teller(), []
    before = teller.condition()
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if not line or line.startswith("#"):
            continue
        verb, *words = shlex.split(line)
        lines += [f"    {shown(action)}" for action in getattr(teller, verb)(*words) if action != actions.WAKE]
        if teller.condition() != before:
            before = teller.condition()
            lines.append(f"    = {before}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("path", STORIES, ids=[path.stem for path in STORIES])
def test_the_story_goes_as_it_was_told(path, request):
    told = tell(path.read_text())
    if request.config.getoption("--rewrite"):
        path.write_text(told)
    else:
        assert told.splitlines() == path.read_text().splitlines()


@pytest.mark.parametrize(
    ("phase", "size", "told"),
    [
        ("sealed", 2, ["it has 2 nodes, and this node is a spare"]),
        ("sealed", 1, ["it has 1 node, and this node waits to be let in"]),
        ("broken", 1, []),
    ],
)
def test_a_member_is_told_that_a_round_runs_without_it(phase, size, told):
    one = Teller()
    for step_of in (one.join, one.connected, one.registered):
        step_of()
    one.head(phase, size=size)
    assert [action.reason for action in one.examined("others") if isinstance(action, actions.Tell)] == told



# ---- tables


def present(**changes) -> Teller:
    """A member that is present, with these fields."""
    teller = Teller()
    teller.join()
    teller.connected()
    teller.registered()
    for name, value in changes.items():
        setattr(teller.state, name, value)
    return teller


def holder() -> Teller:
    teller = present()
    teller.head("sealed")
    teller.examined()
    assert teller.state.holding is Holding.HOLDING
    return teller


def test_every_standing_and_every_holding_is_in_its_table():
    assert list(TRANSITIONS) == list(Standing)
    assert list(HOLDINGS) == list(Holding)
    kinds = {kind for listed in TRANSITIONS.values() for kind in listed}
    assert kinds == set(machine._HANDLERS) == set(events.MemberEvent.__subclasses__())


EXAMPLES = [
    events.Join(), events.Connected("n1"), events.Elsewhere("p2"), events.EngineAway("no route"),
    events.Registered(11, False, 100.0, "p1"), events.HeadSeen(OPEN), events.KeyGone("its lease ended"),
    events.Renewed(100.0), events.RenewalFailed(100.0, "no answer"), events.DrainAsked("scaled down"), events.Leads(),
    events.HeadSent(7), events.Examined("t1", head(), MINE, 11), events.ReadyPut(NO_ROUND), events.WorkDone(),
    events.Draining("SIGTERM"), events.Failed(ZeroDivisionError()), events.Leave(), events.Left(),
]  # fmt: skip


@pytest.mark.parametrize("standing", Standing)
@pytest.mark.parametrize("event", EXAMPLES, ids=lambda event: type(event).__name__)
def test_an_event_that_is_not_in_the_table_changes_nothing(standing, event):
    if type(event) in TRANSITIONS[standing]:
        return
    state = MemberState(ME, standing=standing)
    before = msgspec.structs.astuple(state)
    assert step(state, event, 100.0) == []
    assert msgspec.structs.astuple(state) == before


def test_the_diagram_shows_every_way_from_one_standing_to_another():
    lines = diagram().splitlines()
    assert lines[:2] == ["stateDiagram-v2", "    [*] --> idle"]
    assert "    idle --> away: Join" in lines
    assert "    away --> present: Registered" in lines
    assert "    present --> evicted: HeadSeen, KeyGone" in lines
    assert "    leaving --> left: Left" in lines
    assert not [line for line in lines if line.count("present") > 1], "a standing does not lead to itself"


# ---- decisions


def test_a_join_is_refused_until_the_holder_was_told_of_the_eviction():
    teller = holder()
    teller.key_gone()
    assert teller.state.change == Change(ChangeKind.EVICTED, "its lease ended")
    evicted = machine.join_refusal(teller.state, None)
    assert isinstance(evicted, Evicted)
    assert machine.refusal(teller.state, "done") is evicted
    assert machine.join_refusal(teller.state, evicted) is None, "the next join is that of a new member"
    # The first reason stands.
    assert teller.key_gone("again") == []
    assert teller.state.end.reason == "its lease ended"


@pytest.mark.parametrize(
    ("error", "kind", "again"),
    [
        (Banned("job", "n1", "bad memory"), ChangeKind.REFUSED, True),
        (EngineMoved("job", "p1", "p2"), ChangeKind.OUTAGE, True),
        (Closed("job", "enough"), ChangeKind.CLOSED, False),
        (Closed("job", "all done", True), None, False),
        (ZeroDivisionError("oops"), ChangeKind.REFUSED, False),
    ],
)
def test_something_final_is_told_and_most_of_it_may_be_over_at_the_next_join(error, kind, again):
    teller = holder()
    assert actions.EndPresence() in teller.failed(error)
    assert (teller.state.change.kind if teller.state.change else None) is kind
    assert machine.refusal(teller.state, "join") is error
    assert (actions.Connect() in teller.join()) is again
    assert teller.state.standing is (Standing.AWAY if again else Standing.ENDED)
    assert (machine.unusable(teller.state, "join") is error) is isinstance(error, ZeroDivisionError)


def test_a_member_that_has_left_refuses_every_call():
    teller = holder()
    assert actions.EndWorld("this member has left") in teller.leave()
    assert isinstance(machine.join_refusal(teller.state, None), LeftAlready)
    teller.left()
    assert isinstance(machine.refusal(teller.state, "done"), LeftAlready)
    assert teller.join() == teller.key_gone() == []


def test_the_own_leave_is_told_before_every_other_change():
    teller = holder()
    assert machine.change_to_tell(teller.state) is None
    teller.key_gone()
    assert machine.change_to_tell(teller.state) == Change(ChangeKind.EVICTED, "its lease ended")
    teller.leave()
    left = machine.change_to_tell(teller.state)
    assert left == Change(ChangeKind.LEFT, "this member has left run 'job'")
    teller.left()
    assert machine.change_to_tell(teller.state) == left


def test_a_summary_says_where_a_member_is():
    teller = Teller()
    assert machine.summary(teller.state) == "has not joined"
    teller.join()
    assert machine.summary(teller.state) == "waits for a round (away)"
    teller = holder()
    assert machine.summary(teller.state) == "rank 0 of 2 in round 1"
    teller.head("broken", cause="b was lost")
    assert machine.summary(teller.state) == "rank 0 of 2 in round 1, round: b was lost"
    teller.leave()
    assert machine.summary(teller.state) == "has left"
    teller.left()
    assert machine.summary(teller.state) == "has left"


def test_a_member_that_leaves_still_tells_of_heads_but_is_not_evicted():
    teller = holder()
    teller.leave()
    assert teller.head("broken") == [actions.TellHead(head(), head(Phase.BROKEN))]
    assert teller.head() == []
    assert teller.state.standing is Standing.LEAVING


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"head": head()}, actions.Examine("t1")),
        ({"head": OPEN}, None),
        ({}, None),
        # G3: what was examined, or given up, is not asked about again.
        ({"head": head(), "examined": "t1"}, None),
        ({"head": head(), "left": RoundId(ERA, 1)}, None),
        # A lease that may have ended: what is read could be of a time when the key stood.
        ({"head": head(), "renewed_at": 90.0}, None),
        ({"head": head(), "holding": Holding.OWING}, actions.PutReady()),
        ({"head": head(), "standing": Standing.AWAY}, None),
    ],
)
def test_what_a_waiting_join_does_next(changes, wanted):
    teller = present(**changes)
    assert machine.next_step(teller.state, teller.now) == wanted


@pytest.mark.parametrize(
    ("changes", "announced", "wanted"),
    [
        ({"examined": "t1"}, {"boot": "n1:1"}, actions.PutReady()),
        ({"examined": "t1"}, {"boot": "n1:1", "same_port": True}, None),
        ({"examined": "t1"}, {"boot": "n1:2"}, None),
        # It may be rank 0 of that very round.
        ({}, {"boot": "n1:1"}, actions.Examine("t1")),
        # The holder joined again with another number of workers.
        ({"workers": 2, "role": "t"}, {"boot": "n1:2"}, actions.PutReady()),
        ({"workers": 2, "role": "t", "examined": "t1"}, {"boot": "n1:2", "workers": 2, "role": "t"}, None),
    ],
)
def test_h32_a_waiting_member_announces_what_is_true_now(changes, announced, wanted):
    """T4.5: not the address of a round that it was not in, nor another number of workers."""
    teller = present(head=head(boot="n1:1"), **changes)
    record = MemberRecord(name="n1", host="n1", **announced)
    assert machine.next_step(teller.state, teller.now, record) == wanted
    assert machine.next_step(teller.state, teller.now, record, unsure=True) == actions.PutReady()


@pytest.mark.parametrize(
    ("changes", "error"),
    [({"asked": "scaled down"}, Drained), ({"drain": "SIGTERM"}, Drained), ({"head": CLOSED}, Closed)],
)
def test_a_join_of_a_draining_member_or_a_closed_run_fails(changes, error):
    teller = present(**changes)
    (raised,) = teller.next()
    assert type(raised.error) is error


def test_a_closed_head_without_a_cause_has_a_reason_all_the_same():
    assert machine.closed_error(ME, head(Phase.CLOSED)).reason == "no reason was given"


@pytest.mark.parametrize(
    "event",
    [
        events.Examined("t1", None, MINE, 11),
        events.Examined("t1", head(number=2), MINE, 11),
        events.Examined("t1", head(Phase.CLOSED), MINE, 11),
    ],
)
def test_what_says_nothing_about_the_table_is_asked_again(event):
    teller = present()
    teller.head("sealed")
    assert teller.on(event) == [actions.WAKE]
    assert teller.state.examined == ""


def test_an_answer_that_comes_too_late_gives_no_round():
    """H4, G3: the lease may have ended meanwhile, or the round was given up."""
    teller = present(renewed_at=80.0)
    assert teller.on(events.Examined("t1", head(), MINE, 11)) == [actions.WAKE]
    teller = present(left=RoundId(ERA, 1))
    assert teller.on(events.Examined("t1", head(), MINE, 11)) == [actions.WAKE]
    teller = holder()
    assert teller.on(events.Examined("t1", head(), MINE, 11)) == [actions.WAKE], "another join has it"
    assert teller.state.holding is Holding.HOLDING


def test_ready_counts_only_if_it_says_what_was_given_up_last():
    teller = present(holding=Holding.OWING, left=RoundId(ERA, 2))
    teller.on(events.ReadyPut(RoundId(ERA, 1)))
    assert teller.state.holding is Holding.OWING
    teller.on(events.ReadyPut(RoundId(ERA, 2)))
    assert teller.state.holding is Holding.NOTHING


def test_only_a_member_that_knows_a_round_refuses_an_engine_elsewhere():
    teller = Teller()
    assert not machine.is_elsewhere(teller.state, "p2")
    teller = present()
    assert not machine.is_elsewhere(teller.state, "p2")
    teller.head("sealed")
    assert machine.is_elsewhere(teller.state, "p2")
    assert not machine.is_elsewhere(teller.state, "p1")


@pytest.mark.parametrize(
    ("promised", "began_at", "problem"),
    [
        ("pod-0", 60.0, None),
        ("pod-0", 50.0, "it was started 0.0 s before the server of place 'pod-0' that this member followed"),
        ("pod-0", 10.0, "it was started 40.0 s before the server of place 'pod-0' that this member followed"),
        ("pod-1", 60.0, ""),
        ("", 60.0, ""),
    ],
)
def test_only_a_later_server_of_the_promised_name_is_followed_elsewhere(promised, began_at, problem):
    """T16.4: by the member's own clock, on which the former one was started at 50 s."""
    teller = present(promised="pod-0", began_at=50.0)
    found = machine.successor_problem(teller.state, promised, began_at)
    assert found == problem if not problem else found.startswith(problem)


def test_a_server_without_a_promise_has_no_successor():
    """T16.4: what was promised counts for the server that the member knew, not only for the one that answers now."""
    assert machine.successor_problem(present().state, "pod-0", 60.0) == ""


def test_a_member_remembers_the_server_on_which_it_was_present_last():
    """T16.4: one that it met and refused does not count."""
    teller = present(promised="pod-0", began_at=50.0)
    teller.on(events.EngineAway("no route"))
    teller.on(events.Elsewhere("p2", "the former one still answers"))
    assert (teller.state.promised, teller.state.began_at) == ("pod-0", 50.0)
    teller.on(events.Connected("n1"))
    teller.on(events.Registered(12, False, 101.0, "p2", "pod-0", 90.0))
    assert (teller.state.place, teller.state.promised, teller.state.began_at) == ("p2", "pod-0", 90.0)


def test_what_an_emptied_engine_is_told():
    assert machine.reports(present().state) == (None, None, None)
    teller = holder()
    holds, heard, mine = machine.reports(teller.state)
    assert (holds.number, heard.rank, mine) == (1, 0, MINE)
    teller.join()
    holds, heard, mine = machine.reports(teller.state)
    assert (holds, heard.left, mine) == (None, RoundId(ERA, 1), None)


# ---- whatever happens

HEADS = [None, OPEN, CLOSED, head(), head(Phase.BROKEN), head(number=2), head(run="r2"), head(Phase.OPEN, 0, run="r2")]
HEADS += [head(number=3, era=Era(2, "e2"), adopted=True), head(Phase.BROKEN, 2)]


class AnyLife(RuleBasedStateMachine):
    """A member to whom anything happens, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.state = MemberState(ME)
        self.now = 0.0

    @rule(event=st.sampled_from(EXAMPLES), wait=st.sampled_from([0.0, 1.0, 11.0, 61.0]))
    def anything(self, event, wait):
        self.happens(event, wait)

    @rule(seen=st.sampled_from(HEADS))
    def a_head(self, seen):
        self.happens(events.HeadSeen(seen))

    @rule(brought=st.booleans())
    def registration(self, brought):
        self.happens(events.Registered(11, brought, self.now, "p1"))

    @rule(seen=st.sampled_from(HEADS), mine=st.booleans())
    def an_answer(self, seen, mine):
        table = seen.table if seen else "t1"
        self.happens(events.Examined(table, seen, MINE if mine else None, 11))

    @rule()
    def what_a_join_does(self):
        machine.next_step(self.state, self.now)

    def happens(self, event, wait=0.0) -> None:
        self.now += wait
        before, evicted = self.state.standing, self.state.end
        done = step(self.state, event, self.now)
        if type(event) not in TRANSITIONS[before]:
            assert done == []
        told = [action for action in done if isinstance(action, actions.Tell) and action.kind == "evicted"]
        assert len(told) == (self.state.standing is Standing.EVICTED and before is not Standing.EVICTED)
        if before is Standing.EVICTED and self.state.standing is Standing.EVICTED:
            assert self.state.end is evicted, "the first reason stands"
        for action in done:
            if isinstance(action, actions.GiveRound):
                assert action.head.phase is Phase.SEALED
                assert action.head.round > self.state.left, "a round that was given up is never given again (G3)"

    @invariant()
    def what_is_held_has_an_entry(self):
        state = self.state
        assert (state.holds is not None) is (state.holding is Holding.HOLDING)
        if state.holding is Holding.HOLDING:
            assert state.entry is not None

    @invariant()
    def an_end_has_a_reason(self):
        state = self.state
        if state.standing in (Standing.EVICTED, Standing.ENDED):
            assert state.end is not None
        if state.standing in (Standing.IDLE, Standing.AWAY, Standing.PRESENT):
            assert state.end is None
        assert isinstance(state.end, Evicted) or state.standing is not Standing.EVICTED

    @invariant()
    def what_the_holder_is_told_follows_from_the_state(self):
        state = self.state
        if state.standing is Standing.EVICTED:
            assert state.change.kind is ChangeKind.EVICTED
        elif state.holding is not Holding.HOLDING and state.end is None:
            assert state.change is None


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(stateful_step_count=40)


def test_a_leader_remembers_the_fence_of_a_head_whose_write_was_never_answered():
    teller = Teller()
    for event in (events.Join(), events.Connected("n1", "p1"), events.Registered(11, False, teller.now, "p1")):
        teller.on(event)
    assert teller.on(events.HeadSent(7)) == []
    assert (teller.state.fence, teller.state.fence_place) == (7, "p1")
    teller.on(events.EngineAway("no route"))
    assert teller.state.fence == 7, "the next engine is told of it"


def test_the_highest_fence_and_its_place_are_remembered_over_instances():
    """Also of a head that is seen before the member has registered, and if a later engine knows only lower ones."""
    teller = Teller()
    teller.on(events.Join())
    for place, fence, known in (("p1", 7, (7, "p1")), ("p2", 5, (7, "p1")), ("p3", 9, (9, "p3")), ("p3", 0, (9, "p3"))):
        teller.on(events.Connected("n1", place))
        teller.on(events.HeadSeen(head(fence=fence)))
        teller.on(events.Registered(11, False, teller.now, place))
        assert (teller.state.fence, teller.state.fence_place) == known
        teller.on(events.EngineAway("no route"))
