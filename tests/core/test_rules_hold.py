"""Properties of the rules for any view, however unlikely, and for any course that a run could take."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rdzv.core.acts import Evict, Seal, Verdict
from rdzv.core.flaps import FLAP_WAIT_MAX_S
from rdzv.core.model import BACK_S, Call, Phase, RoundId
from rdzv.core.rules import lead
from rdzv.core.view import View
from support.generated_views import AGE, AGREED, later, views
from support.rule_story import Story
from support.verdicts import check

pytestmark = pytest.mark.seeds


@settings(max_examples=1000, deadline=None)
@given(views())
def test_whatever_it_sees_the_leader_has_a_verdict_that_keeps_the_rules(view):
    check(view, lead(view))


@settings(max_examples=1000, deadline=None)
@given(views(), st.integers(0, 9))
def test_without_an_event_nothing_changes_before_the_time_that_was_said(view, tenths):
    """If no time was said, only an event changes the verdict: a running timer must not be forgotten."""
    verdict = lead(view)
    if verdict.act is not None:
        return
    call = Call.NONE if view.head is None else view.head.call
    if verdict.look_again_s is None:
        # Of the calls, only regroup can be without a time: when its survivors are not ready, only they can help.
        assert call is Call.NONE or (call is Call.REGROUP and not view.fits(view.ready))
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
        """Let every member look at the head and stop its workers when told to. Return whether anything changed."""
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
            assert not view.fits(view.ready)
            assert {one.record.name for one in view.stragglers} <= self.hung


TestRun = Run.TestCase
TestRun.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
