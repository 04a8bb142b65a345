"""One checker per guarantee. They see what happened, as observed from outside, and know nothing of how it came about.

Each is a small class that is shown every observation in order, and says what is wrong. `check` runs them all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..core.keys import Keys
from ..core.model import NO_ROUND, CauseKind, Head, Phase, RoundId, RunSettings
from .history import Acted, Changed, ClosedTold, Commit, EvictedTold, Fault, Given, History, Observation
from .replay import State

EPSILON_S = 0.5
DRIFT = 1.02
"""Clocks may be this much slower than the simulation's."""


@dataclass
class CheckContext:
    """What the checkers are told of a run besides its history."""

    keys: Keys
    owners: dict[tuple[str, int], str]
    """Machine by host and process id, which is what a record says of its writer."""
    agreed: dict[str, RunSettings]
    slow_stop: frozenset[str]
    """Machines whose workers may take longer to stop than the others wait."""
    loss: float
    register: bool = False
    """The engine is a compare-and-set register, which promises less: see `drivers/register.py`."""
    states: dict[str, State] = field(default_factory=dict)
    """By engine instance, as of the observation being shown."""
    calm: Calm = field(default_factory=lambda: Calm([], 0.0))

    def owner(self, state: State, member_id: str) -> str:
        """The machine that a member's key belongs to."""
        present = state.members.get(member_id)
        return self.owners.get((present.record.host, present.record.pid), "?") if present is not None else "?"


class Calm:
    """When nothing was wrong, nor had been for long enough that its effects are over."""

    def __init__(self, faults: list[Fault], margin_s: float) -> None:
        self.margin_s = margin_s
        self._spans: list[tuple[float, float]] = []
        open_since: dict[tuple[str, str], list[float]] = {}
        for fault in faults:
            key = (fault.kind, fault.target)
            if fault.kind in ("calm", "finish"):
                continue
            if fault.stop:
                starts = open_since.get(key) or [fault.at]
                self._spans.append((starts.pop(0), fault.at + margin_s))
            else:
                open_since.setdefault(key, []).append(fault.at)
        self._spans += [(start, float("inf")) for starts in open_since.values() for start in starts]

    def since(self, at: float) -> float | None:
        """From when on it has been calm at that time; None: it is not."""
        ends = [end for start, end in self._spans if start <= at]
        last = max(ends, default=0.0)
        return last if last <= at else None

    def throughout(self, start: float, end: float) -> bool:
        """Nothing was wrong in between."""
        return all(b <= start or a >= end for a, b in self._spans)


class Checker:
    """What all have: a name, and a list of what is wrong."""

    name = ""

    def __init__(self, case: CheckContext) -> None:
        self.case = case
        self.wrong: list[str] = []

    def say(self, at: float, problem: str) -> None:
        """Something is wrong."""
        self.wrong.append(f"{self.name} at {at:.4f} s: {problem}")

    def before(self, commit: Commit, state: State) -> None:
        """A commit is about to be applied to that state."""

    def after(self, commit: Commit, state: State) -> None:
        """It was applied."""

    def see(self, one: Observation) -> None:
        """Anything but a commit."""

    def finish(self, at: float) -> None:
        """Nothing more will come."""


class G1Agreement(Checker):
    """All who are given a round are given the same."""

    name = "G1 agreement"

    def __init__(self, case: CheckContext) -> None:
        super().__init__(case)
        self._rounds: dict[tuple[str, RoundId], tuple[object, ...]] = {}

    def see(self, one: Observation) -> None:
        """Compare with the first of that round."""
        if isinstance(one, Given):
            key = (one.run, RoundId(one.era, one.number))
            world = (one.size, one.digest, one.boot, one.table)
            first = self._rounds.setdefault(key, world)
            if first != world:
                self.say(one.at, f"{one.actor} was given {world} for round {one.number}, another one {first}")


class G2Ranks(Checker):
    """Ranks are 0..size-1, each once, and the size is allowed."""

    name = "G2 ranks"

    def __init__(self, case: CheckContext) -> None:
        super().__init__(case)
        self._ranks: dict[tuple[str, str], dict[int, str]] = {}

    def after(self, commit: Commit, state: State) -> None:
        """The table that a seal names must be whole."""
        head = _new_head(commit, state)
        if head is None or head.phase is not Phase.SEALED or state.settings is None:
            return
        ranks = sorted(line.rank for line in state.lines.values())
        if not head.adopted and ranks != list(range(head.size)):
            self.say(commit.at, f"round {head.number} of size {head.size} was sealed with ranks {ranks}")
        low, high = state.settings.min_nodes, state.settings.max_nodes
        if not low <= head.size <= high or head.size % state.settings.unit:
            self.say(commit.at, f"round {head.number} was sealed with size {head.size}, allowed are {low}..{high}")

    def see(self, one: Observation) -> None:
        """No two members have one rank."""
        if isinstance(one, Given):
            holder = self._ranks.setdefault((one.run, one.table), {}).setdefault(one.rank, one.member)
            if holder != one.member or not 0 <= one.rank < one.size:
                self.say(one.at, f"rank {one.rank} of {one.size} was given to {one.member} and to {holder}")


class G3Order(Checker):
    """Rounds only grow; one record per round; a world is given only while it stands, and never an old one."""

    name = "G3 order"

    def __init__(self, case: CheckContext) -> None:
        super().__init__(case)
        self._sealed: dict[str, dict[RoundId, str]] = {}
        self._taken: dict[tuple[str, str], RoundId] = {}
        self._training: dict[str, tuple[str, RoundId]] = {}
        """By machine: the round whose workers it runs, and of which incarnation."""

    def after(self, commit: Commit, state: State) -> None:
        """Look at each new head."""
        head = _new_head(commit, state)
        if head is None:
            return
        former = state.heads[-2][1] if len(state.heads) > 1 else None
        if former is not None and former.run == head.run and head.round < former.round:
            self.say(commit.at, f"the head went back from {former.round} to {head.round}")
        if head.phase is not Phase.SEALED:
            return
        sealed = self._sealed.setdefault(head.run, {})
        if sealed.setdefault(head.round, head.table) != head.table:
            self.say(commit.at, f"round {head.round} was sealed twice, with two tables")
        newest = former is None or former.table != head.table
        if newest and not head.adopted:
            self._none_went_further(commit, state, head)
            self._nobody_trains(commit, state, head)

    def _none_went_further(self, commit: Commit, state: State, head: Head) -> None:
        """An engine that came back empty cannot know of a round of which nobody told it; but its members do."""
        for id in state.lines:
            node = self.case.owner(state, id)
            taken = self._taken.get((node, head.run), NO_ROUND)
            if taken >= head.round:
                self.say(commit.at, f"{node} was sealed into round {head.round} after it had taken {taken}")

    def _nobody_trains(self, commit: Commit, state: State, head: Head) -> None:
        for id in state.lines:
            node = self.case.owner(state, id)
            run, round = self._training.get(node, ("", NO_ROUND))
            if run == head.run:
                self.say(commit.at, f"{node} was sealed into round {head.number} while it ran {round}")

    def see(self, one: Observation) -> None:
        """Look at what is given, and at who runs workers."""
        if isinstance(one, Given):
            self._given(one)
            self._training[one.actor] = (one.run, RoundId(one.era, one.number))
        elif isinstance(one, Acted | EvictedTold | ClosedTold):
            self._training.pop(one.actor, None)

    def _given(self, one: Given) -> None:
        round = RoundId(one.era, one.number)
        last = self._taken.get((one.actor, one.run), NO_ROUND)
        if round <= last:
            self.say(one.at, f"{one.actor} took round {round} after {last}")
        self._taken[one.actor, one.run] = round
        state = self.case.states[one.instance]
        head = next((head for revision, head in reversed(state.heads) if revision <= one.revision), None)
        if head is None or head.phase is not Phase.SEALED or head.table != one.table:
            self.say(one.at, f"{one.actor} was given table {one.table} by a read that showed {head}")
        life = state.lives.get(one.member, [])
        if not life or life[0] > one.revision or (len(life) > 1 and life[1] <= one.revision):
            self.say(one.at, f"{one.actor} was given round {one.number} by a read at which its key did not live")


class G4Ghosts(Checker):
    """Whoever is sealed in lives at that moment."""

    name = "G4 no ghosts"

    def after(self, commit: Commit, state: State) -> None:
        """At the seal."""
        head = _new_head(commit, state)
        if head is None or head.phase is not Phase.SEALED or head.adopted:
            return
        if len(state.heads) > 1 and state.heads[-2][1] is not None and state.heads[-2][1].table == head.table:
            return
        for id, line in state.lines.items():
            present = state.members.get(id)
            if present is None or present.created != line.created:
                self.say(commit.at, f"round {head.number} was sealed with {line.name}, whose key had ended")


class G8Fencing(Checker):
    """Nothing takes effect that was written without a living key, or by one who does not lead, or into an old round."""

    name = "G8 fencing"

    def __init__(self, case: CheckContext) -> None:
        super().__init__(case)
        self._held: dict[str, tuple[str, str, str]] = {}
        """By machine: instance and id under which it was given its world, and the run's incarnation."""

    def before(self, commit: Commit, state: State) -> None:
        """Ask who writes this, and whether it may."""
        if commit.kind != "then" or commit.actor == "operator":
            return
        keys = self.case.keys
        own = [one for one in state.members.values() if self.case.owner(state, one.id) == commit.actor]
        for event in commit.events:
            if event.key == keys.head and event.item is not None:
                closes = b'"phase":"closed"' in event.item.value
                leader = state.leader
                if closes and not state.members:
                    continue  # The last to go closes behind it what all have finished; G9 judges whether they had.
                if not own or (not closes and leader not in own):
                    who = leader.record.name if leader else "nobody"
                    self.say(commit.at, f"{commit.actor} wrote the head, but {who} leads")
            elif event.key.startswith(keys.run + "kv/") and event.item is not None:
                table = event.key[len(keys.run + "kv/") :].partition("/")[0]
                if not any(one.id in state.tables.get(table, {}) for one in own):
                    self.say(commit.at, f"{commit.actor} wrote {event.key}, but is not in that table")
                if state.head is not None and state.head.table != table:
                    self.say(commit.at, f"{commit.actor} wrote {event.key}, but the head's table is {state.head.table}")

    def see(self, one: Observation) -> None:
        """An evicted member hears of it before it is given anything again."""
        if isinstance(one, Given):
            instance, member, run = self._held.get(one.actor, ("", "", ""))
            state = self.case.states.get(instance)
            ended = state is not None and len(state.lives.get(member, ())) > 1
            if ended and instance == one.instance and member != one.member and run == one.run:
                self.say(one.at, f"{one.actor} was given a world under a new id without being told that it was evicted")
            self._held[one.actor] = (one.instance, one.member, one.run)
        elif isinstance(one, EvictedTold) or (isinstance(one, Changed) and one.kind == "evicted"):
            self._held.pop(one.actor, None)


class G9Closing(Checker):
    """A run closes for a reason, and then for good."""

    name = "G9 leaving is not closing"

    def __init__(self, case: CheckContext) -> None:
        super().__init__(case)
        self._done: set[tuple[str, RoundId]] = set()
        self._failed = False
        self._closing: set[str] = set()
        self._asked = False

    def before(self, commit: Commit, state: State) -> None:
        """Nothing is written over a closed head while its incarnation lasts."""
        if state.head is None or state.head.phase is not Phase.CLOSED:
            return
        for event in commit.events:
            if event.key == self.case.keys.head and event.item is not None:
                self.say(commit.at, f"{commit.actor} wrote the head after it was closed")

    def after(self, commit: Commit, state: State) -> None:
        """A close must be one of those allowed."""
        head = _new_head(commit, state)
        if head is None or head.phase is not Phase.CLOSED or len(state.heads) < 2:
            return
        kind = head.cause.kind if head.cause is not None else None
        if kind is CauseKind.SUCCESS:
            undone = [
                line.name
                for id, line in state.lines.items()
                if not line.done and not (id in state.members and state.members[id].record.done)
            ]
            if undone or len(state.lines) != head.size:
                self.say(commit.at, f"closed with success, but {', '.join(undone) or 'lines'} were not done or missing")
        elif kind in (CauseKind.GAVE_UP, CauseKind.LOST):
            left = [one for one in state.members.values() if state.usable(one)]
            if state.size_of(len(left)):
                self.say(commit.at, f"closed because of a failure, but {len(left)} members could go on")
        elif kind is CauseKind.CLOSED:
            if commit.actor not in self._closing and not self._asked:
                self.say(commit.at, f"closed by {commit.actor}, who was not asked to")
        else:
            self.say(commit.at, f"closed with cause {kind}")

    def see(self, one: Observation) -> None:
        """Remember who meant to close."""
        if isinstance(one, Acted) and one.what == "closing":
            self._closing.add(one.actor)
        elif isinstance(one, Fault) and one.kind == "operator close":
            self._asked = True


class G10Clocks(Checker):
    """No instant leaves its machine: every clock of the simulation shows more than a billion."""

    name = "G10 no wall clock"
    _LARGE = re.compile(rb"[:\[,]-?(\d{9,}(?:\.\d+)?|\d(?:\.\d+)?[eE]\+?\d+)[,}\]]")

    def after(self, commit: Commit, state: State) -> None:  # noqa: ARG002
        """Look for large numbers in whatever is written."""
        for event in commit.events:
            if event.item is not None and not event.key.startswith(self.case.keys.run + "kv/"):
                found = self._LARGE.search(event.item.value)
                if found is not None:
                    self.say(commit.at, f"{commit.actor} wrote {found.group(1)!r} in {event.key}")


class T1Settings(Checker):
    """All live members of a run were started with what it agreed on; and no round sees another's store."""

    name = "T1 settings and stores"

    def after(self, commit: Commit, state: State) -> None:
        """At each arrival."""
        for event in commit.events:
            if event.key.startswith(self.case.keys.members) and event.item is not None:
                mine = self.case.agreed.get(commit.actor)
                if mine is not None and state.settings is not None and mine != state.settings:
                    self.say(commit.at, f"{commit.actor} is in with {mine}, the run agreed on {state.settings}")

    def see(self, one: Observation) -> None:
        """Applications check what they read."""
        if isinstance(one, Acted) and one.what == "store mixed":
            self.say(one.at, f"{one.actor} {one.detail}")


def _new_head(commit: Commit, state: State) -> Head | None:
    """The head, if this commit wrote it."""
    return state.head if state.heads and state.heads[-1][0] == commit.revision else None


def run(case: CheckContext, history: History, checkers: list[Checker]) -> Iterator[str]:
    """Show the whole history to all of them."""
    last_at = 0.0
    for one in history:
        last_at = one.at
        if isinstance(one, Commit):
            state = case.states.get(one.instance)
            if state is None:
                state = case.states[one.instance] = State(one.instance, case.keys, one.at)
            for checker in checkers:
                checker.before(one, state)
            state.apply(one)
            for checker in checkers:
                checker.after(one, state)
        else:
            for checker in checkers:
                checker.see(one)
    for checker in checkers:
        checker.finish(last_at)
        yield from checker.wrong
