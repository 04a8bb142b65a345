"""Small worlds, explored: every interleaving within the bounds of a plan, with every guarantee checked in each state."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from rdzv.testing import explore as module
from rdzv.testing.choices import FAULTS, TARGETS, VERBS, Choice
from rdzv.testing.explore import WORLDS, explore, main, read_story, tell
from support.explored_bugs import EXPLORED_BUGS
from support.planted_bugs import BUGS, planted

pytestmark = pytest.mark.seeds

CHOICES_MAX = 150
"""Choices for each world in `make test`. What is counted is the same on every machine, unlike seconds."""
LARGE = {
    "two re-form", "three re-form: losses", "three re-form: pauses", "three re-form: engine", "three re-form: growth",
    "three re-form: sick nodes", "three re-form: notices", "lone survivors",
    "three re-form: messages and pauses", "three re-form: engine and losses", "three re-form: losses and pauses",
    "three re-form: engine and pauses",
}  # fmt: skip
"""Worlds that `make soak` walks for a minute each, and all others to the end. These take up to an hour each."""


@pytest.mark.parametrize("name", WORLDS)
def test_every_guarantee_holds(name, record_property):
    report = explore(WORLDS[name], choices_max=CHOICES_MAX)
    record_property("explored", str(report))
    assert not report.wrong, tell(report.plan, report.wrong[0][1])[0]
    assert report.complete or report.choices >= CHOICES_MAX
    assert report.states > 50


@pytest.mark.soak
@pytest.mark.timeout(1_300)
@pytest.mark.parametrize("name", WORLDS)
def test_every_guarantee_holds_for_longer(name, record_property):
    report = explore(WORLDS[name], 60.0 if name in LARGE else 1200.0)
    record_property("explored", str(report))
    assert not report.wrong, tell(report.plan, report.wrong[0][1])[0]
    assert report.complete or name in LARGE, str(report)


def test_among_three_members_each_fault_meets_each():
    """In a world of two faults. A newcomer comes once, and the deeds of programs have a world of their own."""
    kinds, met = WORLDS["three re-form"].faults, set()
    for plan in WORLDS.values():
        if (plan.members, plan.faults_max, plan.formed, plan.options, plan.racks) == (3, 2, True, {}, ()):
            one, other = (plan.crossed, set(plan.faults) - set(plan.crossed)) if plan.crossed else (plan.faults, plan.faults)
            met |= {frozenset((a, b)) for a in one for b in other}
    assert {frozenset((a, b)) for a in kinds for b in kinds} - met == {frozenset({"newcomer"})} - met


def test_of_crossed_faults_the_second_is_of_the_other_kinds():
    plan = WORLDS["three re-form: engine and pauses"]
    offered = []

    def choose(world, choices):
        faults = {choice.verb for choice in choices if choice.verb in FAULTS}
        offered.append(faults)
        return None if len(world.decisions) > 3 else Choice("gap") if Choice("gap") in choices else choices[0]

    module.SmallWorld(plan, choose, lambda _: None, ()).play()
    first = next(faults for faults in offered if faults)
    assert first >= {"restart", "gap", "pause", "stall"}
    later = set().union(*offered[offered.index(first) + 1 :])
    assert later
    assert later <= {"pause", "stall"}


LATE = {
    "round number is reused after a restart", "fence of a restarted server begins at what it is told",
    "two worlds from two engines",
}  # fmt: skip
"""Bugs that are met only after thousands of choices."""


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=[pytest.mark.soak] if bug in LATE else []) for bug in sorted(EXPLORED_BUGS)]
)
def test_planted_bug_is_found(bug):
    """And its story can be told again."""
    plan, words = EXPLORED_BUGS[bug]
    with planted(bug):
        report = explore(plan, choices_max=20_000 if bug in LATE else 1_000)
        assert report.wrong, f"{bug}: {report}"
        problem, decisions = report.wrong[0]
        assert words in problem
        story, world = tell(plan, decisions)
    assert words in story or world.outcome == "no progress"


def test_the_safe_worlds_of_planted_bugs_hold():
    """Otherwise the bug would not be what is found. The worlds of `WORLDS` are walked above."""
    plans = {repr(plan): plan for plan, _ in EXPLORED_BUGS.values() if plan not in WORLDS.values()}
    for plan in plans.values():
        assert not explore(plan, choices_max=30).wrong


def test_every_planted_safety_bug_is_explored():
    """G5, G6 and G7 are promises about time and disturbance, and T11 counts more rounds than a small world has."""
    safety = {name for name, bug in BUGS.items() if bug.breaks not in ("G5", "G6", "G7", "T11")}
    assert safety <= set(EXPLORED_BUGS)


def test_a_story_is_read_as_it_was_told(tmp_path, capsys):
    plan = WORLDS["three re-form: losses"]
    with planted("seals below quorum"):
        report = explore(plan, choices_max=2_000)
        story, world = tell(plan, report.wrong[0][1])
        assert read_story(story) == (plan, report.wrong[0][1])
        path = tmp_path / "story.txt"
        path.write_text(story)
        assert main(["--replay", str(path)]) == 1
        assert capsys.readouterr().out.strip() == story
    assert world.judge.wrong
    assert main(["--replay", str(path)]) == 0, "without the bug, the same decisions break nothing"


def test_a_file_that_is_no_story_is_refused_with_a_sentence(tmp_path, capsys):
    path = tmp_path / "story.txt"
    impossible = "world two form\nserve m7"
    for text, words in (("world nowhere", "not with 'nowhere'"), ("", "a story begins"), (impossible, "cannot happen")):
        path.write_text(text)
        with pytest.raises(SystemExit):
            main(["--replay", str(path)])
        assert words in capsys.readouterr().err


def test_a_story_that_cannot_happen_is_refused():
    with pytest.raises(ValueError, match="release m1 cannot happen here; what can: serve m0"):
        tell(WORLDS["two form"], [Choice("release", "m1")])


@pytest.mark.parametrize(
    ("world", "first"),
    [("other settings", Choice("serve", "m1")), ("two re-form: slow stops", Choice("fail", "m0"))],
    ids=["the odd member comes first", "a program fails and has told nobody yet"],
)
def test_what_follows_is_walked(world, first):
    """Once the odd member was taken for one like the others, and a world with a failed program for one at rest."""
    assert tell(WORLDS[world], [first])[1].outcome == ""


def test_a_program_that_has_ended_does_not_tell_states_apart():
    """One that runs does. The first member leaves, and its program ends before the others have formed a round again."""
    told = []

    def choose(world, choices):
        if world.decisions and world.apps["m0"].exited.done():
            for name in "m0", "m1":
                before = world.fingerprint()
                world.apps[name].mark = name
                told.append(before != world.fingerprint())
            return None
        return choices[0] if world.decisions else Choice("leave", "m0")

    module.SmallWorld(WORLDS["three re-form: ends"], choose, lambda _: None, ()).play()
    assert told == [False, True]


class Comparison:
    """Random walks through a world: does a choice lead to equal states wherever it is made in equal ones?"""

    def __init__(self, plan):
        self.plan = plan
        self.compared = 0
        self.different = []
        """The ways to two states that were equal before the last choice, and are not after it."""
        self._found = {}
        self._draw = random.Random(1)
        self._before = None

    def walk(self):
        self._before = None
        module.SmallWorld(self.plan, self._choose, self._ended, ()).play()

    def _choose(self, world, choices):
        self._before = self._came_to(world, world.fingerprint()), self._pick(choices)
        return self._before[1]

    def _pick(self, choices):
        faults = [choice for choice in choices if choice.verb in FAULTS]
        calm = [choice for choice in choices if choice.verb not in FAULTS]
        return self._draw.choice(faults if faults and (not calm or self._draw.random() < 0.25) else calm)

    def _ended(self, world):
        self._came_to(world, world.outcome)

    def _came_to(self, world, state):
        if self._before is not None:
            way = tuple(world.decisions)
            other, known = self._found.setdefault(self._before, (state, way))
            self.compared += known != way
            if other != state:
                self.different.append((known, way))
        return state

    def exact(self, way):
        """Return the state to which these choices lead, told apart from all others as exactly as can be."""
        left, states = list(way), []

        def choose(world, _choices):
            if not left:
                states.append(world.fingerprint(exact=True))
            return left.pop(0) if left else None

        module.SmallWorld(self.plan, choose, lambda _: None, ()).play()
        return states[0]


ENOUGH = 20
"""Choices to be compared. With fewer, one that goes on differently for one of the reasons below is half of them."""


def compare(plan, walks):
    """Return how many choices were compared, after so many walks, or ten times as many until enough were.

    States that differ by less than half a second may go on differently: a timer of one fires before a timer of the other. So
    may those that differ by the revision of a former engine (`fingerprint`).
    """
    comparison = Comparison(plan)
    for number in range(10 * walks):
        if number >= walks and comparison.compared >= ENOUGH:
            break
        comparison.walk()
    for one, other in comparison.different:
        assert comparison.exact(one[:-1]) != comparison.exact(other[:-1]), f"{[*map(str, one)]} and {[*map(str, other)]}"
    assert len(comparison.different) <= comparison.compared / 2
    return comparison.compared


@pytest.mark.parametrize("name", ["two form on etcd", "three re-form: growth"])
def test_states_with_equal_fingerprints_go_on_alike(name):
    """Else the fingerprint lacks something that decides, and a walk skips what it has not seen."""
    assert compare(WORLDS[name], walks=100) >= ENOUGH


@pytest.mark.soak
@pytest.mark.parametrize("name", WORLDS)
def test_states_with_equal_fingerprints_go_on_alike_in_every_world(name, record_property):
    compared = compare(WORLDS[name], walks=200)
    record_property("compared", f"{name}: {compared} choices in states that were met before")
    assert compared >= ENOUGH


def test_a_world_without_a_way_to_rest_is_found():
    """A defect that loses no guarantee at once: nobody is evicted, and the world waits for ever."""
    plan = replace(WORLDS["three re-form: losses"], faults=("hold",), faults_max=0)
    shared = module._Shared()
    shared.add_edge(module.START, Choice("wait"), 5)
    shared.add_edge(5, Choice("serve", "m0"), 6)
    shared.add_edge(6, Choice("serve", "m1"), 5)
    shared.add_edge(5, Choice("crash", "m1"), module.REST)
    assert [path for _, path in shared.stuck()] == [[], [Choice("serve", "m0")]]
    shared.add_edge(6, Choice("wait"), module.REST)
    assert not list(shared.stuck())
    assert explore(plan).complete


def test_the_command_names_the_worlds(capsys):
    assert main(["other settings", "--limit", "0.5"]) == 0
    assert "other settings: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["no such world"])
    assert "there is no world 'no such world'; there are two form" in capsys.readouterr().err


def test_a_world_can_be_walked_in_parts(capsys):
    def choices(*faults):
        assert main(["other settings", *(f"--fault={fault}" for fault in faults)]) == 0
        return int(re.search(r"(\d+) choices", capsys.readouterr().out)[1])

    assert choices("crash") < choices("crash", "expire")
    with pytest.raises(SystemExit):
        main(["other settings", "--fault", "gap"])
    assert "'other settings' has no fault gap; it has restart, expire, crash" in capsys.readouterr().err


def test_every_choice_has_a_bit():
    """Choices are kept as bits of three words."""
    assert len(VERBS) * len(TARGETS) <= 3 * 64
    assert set(FAULTS) < set(VERBS)
    for text in ("wait", "serve m0", "lose request m1", "restart", "newcomer n0"):
        assert str(Choice.parse(text)) == text
