"""What the rules keep whatever they are shown: any view, however unlikely, and any story that a run could live."""

from __future__ import annotations

import msgspec
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rdzv.core.acts import Evict, Seal, Sweep, Verdict, WriteHead
from rdzv.core.model import BACK_S, FLAP_WAIT_MAX_S, Call, Era, Head, Phase, RoundId
from rdzv.core.ranks import digest
from rdzv.core.rules import lead
from rdzv.core.view import View
from support.generated_views import AGE, AGREED, CALLS, later, views
from support.rule_story import Story

STEPS = {
    Phase.OPEN: {Phase.OPEN, Phase.CLOSED},
    Phase.SEALED: {Phase.SEALED, Phase.BROKEN, Phase.CLOSED},
    Phase.BROKEN: {Phase.BROKEN, Phase.CLOSED},
}
"""Where a mere write of the head may lead; a seal leads from open or broken to sealed."""

KEPT = [
    "run",
    "era",
    "number",
    "table",
    "size",
    "digest",
    "boot",
    "seen",
    "adopted",
    "next_era",
    "top",
    "grown",
    "incarnation",
]
"""What no mere write of the head touches."""


def check(view: View, verdict: Verdict) -> None:
    """All that a verdict must keep, whatever was seen."""
    assert verdict.reason
    act = verdict.act
    if act is None:
        assert verdict.look_again_s is None or verdict.look_again_s > 0
        return
    assert verdict.look_again_s is None
    assert view.head is None or view.head.phase is not Phase.CLOSED
    if isinstance(act, WriteHead):
        check_head(view, act.head)
    elif isinstance(act, Seal):
        check_seal(view, act)
    elif isinstance(act, Evict):
        check_evict(view, act)
    else:
        assert isinstance(act, Sweep)
        assert act.tables == tuple(view.orphans) != ()


def check_head(view: View, new: Head) -> None:
    assert new.call in CALLS[new.phase]
    old = view.head
    if old is None:
        assert new.seq == 1
        assert new.next_era.id == view.fresh
        assert new.next_era > new.era or (new.number, new.next_era) == (0, new.era)
        for _, told in view.reports:
            assert new.run != told.run or new.next_era.level > told.era.level
        return
    assert new.phase in STEPS[old.phase]
    assert [name for name in KEPT if getattr(new, name) != getattr(old, name)] == []
    assert new.seq == old.seq + 1
    assert new.call_seq == (old.call_seq if new.call is old.call else new.seq)
    if new.phase is old.phase:
        # Then it was written for the call, and for nothing else.
        assert new.call is not old.call
        assert (new.cause, new.flaps) == (old.cause, old.flaps)
    else:
        assert new.cause is not None
        assert new.cause.text
    if new.phase is Phase.CLOSED:
        assert new.call is Call.NONE


def check_seal(view: View, act: Seal) -> None:
    old, new, lines, agreed = view.head, act.head, act.entries, view.settings
    if old is None:
        # T2.4: nobody could come whom it should have waited for.
        assert (new.number, new.size, list(view.reports)) == (1, agreed.max_nodes // agreed.unit * agreed.unit, [])
        era = Era(1, view.fresh)
        old = Head(run=view.fresh, era=era, next_era=era, incarnation=view.incarnation)
    assert old.phase in (Phase.OPEN, Phase.BROKEN)
    assert new.phase is Phase.SEALED
    # G2
    assert sorted(line.rank for line in lines.values()) == list(range(new.size))
    assert agreed.min_nodes <= new.size <= agreed.max_nodes
    assert new.size % agreed.unit == 0
    # Nobody whose workers may run, in this round or beside it. Said here anew, and not in the words that the rules use.
    inside = {
        id for id, line in view.entries.items() if id in view.members and view.members[id].created == line.created
    }
    behind = {id for id in inside if view.members[id].record.left < old.round}
    for id in behind:
        going = view.members[id].record
        assert going.done or going.drain or id in view.asked
    holding = {one.id for one, told in view.reports if told is one.record.holds and one.record.left < told.round}
    assert not (behind | holding) & set(lines)
    for id, line in lines.items():
        one = view.members[id]
        assert (line.created, line.sealed_as, line.name) == (one.created, id, one.record.name)
        assert (one.record.done, one.record.drain, id in view.asked) == (False, "", False)
        assert one.record.host not in view.banned
        assert (line.done, line.gave_up, line.went) == (False, "", "")
    # G3
    assert new.round > old.round
    assert new.number > old.number
    assert new.era == new.next_era >= old.next_era
    for _, told in view.reports:
        assert new.number > told.number or told.run != old.run
        assert told.era.id == new.era.id or new.era.level > told.era.level
    # R1, T6.7
    for id in set(lines) & inside:
        before = view.entries[id].rank
        assert lines[id].rank == before or before >= new.size
    if {one.id for one in view.ready} & inside - set(lines):
        assert set(lines) <= inside
    # What all must agree on.
    assert lines[act.first].rank == 0
    assert new.boot == view.members[act.first].record.boot
    assert new.digest == digest(lines.values())
    assert (new.table, new.seen, act.former_table) == (view.fresh, view.revision, old.table)
    assert (new.run, new.cause, new.adopted, new.call, new.seq) == (old.run, None, False, Call.NONE, old.seq + 1)
    assert new.top == max(old.top, new.size)


def check_evict(view: View, act: Evict) -> None:
    assert act.ids
    assert len(set(act.ids)) == len(act.ids)
    assert view.me not in act.ids[:-1]
    banned = {one.id for one in view.members.values() if one.record.host in view.banned}
    if banned:
        assert set(act.ids) == banned
        return
    assert set(act.ids) == {one.id for one in view.stragglers}
    assert view.head is not None
    assert view.head.phase is Phase.BROKEN
    assert view.call_age_s >= view.settings.regroup
    assert view.fitting(len(view.ready))


@settings(max_examples=1000, deadline=None)
@given(views())
def test_whatever_it_sees_the_leader_has_a_verdict_that_keeps_the_rules(view):
    check(view, lead(view))


@settings(max_examples=1000, deadline=None)
@given(views(), st.integers(0, 9))
def test_without_an_event_nothing_changes_before_the_time_that_was_said(view, tenths):
    """And if none was said, never: a running timer must not be forgotten."""
    verdict = lead(view)
    if verdict.act is not None:
        return
    call = Call.NONE if view.head is None else view.head.call
    if verdict.look_again_s is None:
        # Of the calls, only regroup can be without a time: when its survivors are not ready, only they can help.
        assert call is Call.NONE or (call is Call.REGROUP and not view.fitting(len(view.ready)))
        for seconds in (0.5, BACK_S, 60.0, 2000.0):
            assert lead(later(view, seconds)) == verdict
    else:
        sooner = lead(later(view, verdict.look_again_s * tenths / 10))
        assert sooner.act is None
        assert lead(later(view, verdict.look_again_s)).reason != sooner.reason


@settings(max_examples=300, deadline=None)
@given(views(), st.randoms())
def test_the_order_in_which_records_are_listed_changes_no_seal(view, random):
    """Two leaders that see the same would seal the same."""
    shuffled = list(view.members)
    random.shuffle(shuffled)
    other = msgspec.structs.replace(view, members={id: view.members[id] for id in shuffled})
    one, two = lead(view), lead(other)
    assert type(one.act) is type(two.act)
    if isinstance(one.act, (Seal, Evict)):
        assert one == two


@settings(deadline=None)
@given(views())
def test_whoever_asks_gets_the_same_answer(view):
    """A verdict is a value: asking changes nothing, so status may ask what the leader asks."""
    before = msgspec.structs.replace(view)
    assert lead(view) == lead(view)
    assert view == before


# ---- any story


class Run(RuleBasedStateMachine):
    """Members come, work, fail and go in any order; the leader looks when it likes; the engine may forget all."""

    def __init__(self) -> None:
        super().__init__()
        self.sealed: dict[tuple[str, RoundId], tuple[str, int, str]] = {}
        self.given: dict[tuple[str, RoundId], set[tuple[int, str]]] = {}
        self.hung: set[str] = set()
        self.joins = 0

    @initialize(agreed=st.sampled_from(AGREED), durable=st.booleans(), count=st.integers(1, 5))
    def begin(self, agreed, durable, count):
        self.story = Story(agreed, durable=durable)
        for _ in range(count):
            self.join("h1", "")

    @property
    def here(self):
        return sorted(name for name, person in self.story.people.items() if not person.is_away)

    @property
    def alive(self):
        return [name for name in self.here if self.story.people[name].id in self.story.members]

    @property
    def working(self):
        return [name for name in self.alive if self.story.people[name].holds is not None]

    # What happens.

    @precondition(lambda self: len(self.story.people) < 6)
    @rule(host=st.sampled_from(["h1", "h2", "h3"]), order=st.sampled_from(["", "1", "10"]))
    def join(self, host, order):
        self.joins += 1
        self.story.join(f"m{self.joins}", host=host, order=order)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), what=st.sampled_from(["die", "go", "fail", "ask"]))
    def lose(self, data, what):
        name = data.draw(st.sampled_from(self.alive))
        done = self.story.members[self.story.people[name].id].record.done
        if what == "die":
            self.story.die(name)
        elif what == "ask":
            self.story.ask(name, "maintenance")
        elif done:
            self.story.go(name, done=True)
        else:
            self.story.go(name, **({"gave_up": "exit code 1"} if what == "fail" else {"went": "scaled down"}))

    @precondition(lambda self: self.working)
    @rule(data=st.data(), what=st.sampled_from(["stop", "stop", "drain", "done", "hang"]))
    def work(self, data, what):
        name = data.draw(st.sampled_from(self.working))
        if what == "stop":
            self.story.ready(name)
        elif what == "hang":
            self.hung.add(name)
        else:
            self.story.put(name, **({"drain": "SIGTERM"} if what == "drain" else {"done": True}))

    @precondition(lambda self: not self.story.durable and self.working)
    @rule(data=st.data())
    def restart_engine(self, data):
        """Some come back at once; the others later, or never."""
        self.story.forget()
        for name in data.draw(st.permutations(sorted(self.story.people))):
            if data.draw(st.sampled_from([True, True, True, False])):
                self.story.back(name)

    @precondition(lambda self: len(self.here) < len(self.story.people))
    @rule(data=st.data())
    def come_back_late(self, data):
        self.story.back(data.draw(st.sampled_from(sorted(set(self.story.people) - set(self.here)))))

    @rule(seconds=st.sampled_from(AGE))
    def wait(self, seconds):
        self.story.wait(seconds)

    @precondition(lambda self: self.here)
    @rule(data=st.data())
    def notice(self, data):
        self.see(data.draw(st.sampled_from(self.here)))

    @precondition(lambda self: self.story.members)
    @rule()
    def look(self):
        self.judge(*self.story.look())

    @precondition(lambda self: self.story.members)
    @rule(times=st.integers(1, 6))
    def go_on(self, times):
        """All do what they should for a while: most of a run's life."""
        for _ in range(times):
            self.go_on_once()

    @precondition(lambda self: self.story.members)
    @rule()
    def go_on_until_sealed(self):
        self.go_on(12)

    # What must hold.

    def see(self, name: str) -> str:
        """G1: whoever is given a round is given the same, and each rank once. G3: above all it gave up."""
        person = self.story.people[name]
        before, left = person.holds, person.left
        said = self.story.notice(name)
        note(f"  {name}: {said}")
        holds = person.holds
        if holds is None or holds is before:
            return said
        assert holds.round > left
        world = (holds.run, holds.round)
        assert self.sealed[world] == (holds.table, holds.size, holds.digest)
        others = self.given.setdefault(world, set())
        assert holds.rank not in {rank for rank, _ in others}
        others.add((holds.rank, name))
        return said

    def judge(self, view: View, verdict: Verdict) -> None:
        note(f"  {verdict.reason}")
        check(view, verdict)
        if not isinstance(verdict.act, Seal):
            return
        new = verdict.act.head
        # G1, G3: one record per round, whichever engine instances rounds were sealed on.
        assert (new.run, new.round) not in self.sealed
        self.sealed[new.run, new.round] = (new.table, new.size, new.digest)
        for person in self.story.people.values():
            if person.id in verdict.act.entries:
                # H2, P1: nobody is sealed in whose workers of an earlier round run.
                assert person.holds is None
                assert new.round > person.left

    @invariant()
    def a_round_has_as_many_lines_as_its_head_says(self):
        seen = self.story.head
        if seen is not None and seen.phase is Phase.SEALED:
            lines = self.story.tables[seen.table].values()
            assert len(lines) == seen.size or seen.adopted
            assert {line.rank for line in lines} == set(range(seen.size))

    def go_on_once(self) -> float | None:
        """The leader looks until it rests, and waits if nothing else happens. How long; None if for an event."""
        again = None
        for seen, verdict in self.story.rest():
            self.judge(seen, verdict)
            again = verdict.look_again_s
        if self.cooperate():
            return 0.0
        if again is not None:
            self.story.wait(again)
        return again

    def cooperate(self) -> bool:
        """Everybody looks at the head, and stops its workers when told to. Whether anything came of it."""
        changed = False
        for name in self.here:
            person = self.story.people[name]
            before = (person.holds, person.left)
            said = self.see(name)
            if said.startswith("told round") and name not in self.hung:
                self.story.ready(name)
            changed = changed or before != (person.holds, person.left) or said == "evicted"
        return changed

    def teardown(self):
        """G5: if all do what they are told from now on, the run comes to rest: sealed, closed, or short of a quorum."""
        if not hasattr(self, "story"):
            return
        agreed = self.story.settings
        longest = max(BACK_S, agreed.regroup, agreed.last_call, agreed.replace_wait, FLAP_WAIT_MAX_S)
        for _ in range(100):
            if not self.story.members:
                return
            waited = self.go_on_once()
            if waited is None:
                break
            assert waited <= longest
        else:
            raise AssertionError("the run does not come to rest")
        view = self.story.view()
        assert view.head is not None
        if view.head.phase in (Phase.OPEN, Phase.BROKEN):
            assert not view.fitting(len(view.ready))
            assert {one.record.name for one in view.stragglers} <= self.hung


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
