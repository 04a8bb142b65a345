"""One checker per guarantee (G1 to G10 of docs/protocol.md).

A checker judges the history alone: what was observed from outside, not how it came about. It is shown every observation
in order and reports violations. `run` shows a history to several checkers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..core.fence import LIFE
from ..core.keys import Keys
from ..core.model import NO_ROUND, CauseKind, Head, Phase, RoundId, RunSettings, WorkerRanks
from .held_back import HeldBack
from .history import Acted, Changed, ClosedTold, Commit, EvictedTold, Fault, Given, History, Observation
from .replay import State

EPSILON_S = 0.5
AGREE_S = 2.0
"""Wall clocks that agree do so within less than this, and show whole seconds."""
DRIFT = 1.02
"""Node clocks may be this much slower than virtual time: 1 % by their rates, and as much to spare."""


@dataclass
class CheckContext:
    """Facts about a run besides its history."""

    keys: Keys
    owners: dict[tuple[str, int], str]
    """Node by host and process id, which a member's record names."""
    agreed: dict[str, RunSettings]
    """Settings that each node was started with."""
    slow_stop: frozenset[str]
    """Nodes whose workers may take longer to stop than the others wait."""
    loss: float
    """Chance per message that its connection breaks."""
    steps: bool = False
    """Wall clocks step, so that no two of them agree."""
    register: bool = False
    """The engine is a compare-and-set register, which promises less (`engines/register/driver.py`)."""
    states: dict[str, State] = field(default_factory=dict)
    """State of each engine instance at the observation being shown."""
    calm: Calm = field(default_factory=lambda: Calm([], 0.0))

    def owner(self, state: State, member_id: str) -> str:
        """Return the node that a member's key belongs to, or "?"."""
        present = state.members.get(member_id)
        return self.owners.get((present.record.host, present.record.pid), "?") if present is not None else "?"


class Calm:
    """The times without faults and without their after-effects, which last for `margin_s`."""

    def __init__(self, faults: list[Fault], margin_s: float) -> None:
        self._spans: list[tuple[float, float]] = []
        open_since: dict[tuple[str, str], list[float]] = {}
        for fault in faults:
            starts = open_since.setdefault((fault.kind, fault.target), [])
            if fault.stop:
                self._spans.append((starts.pop(0) if starts else fault.at, fault.at + margin_s))
            elif fault.kind == "converged":
                # All members are where they belong, so that no fault before has after-effects.
                self._spans = [(start, min(end, fault.at)) for start, end in self._spans]
            elif fault.kind not in ("calm", "finish"):
                starts.append(fault.at)
        self._spans += [(start, float("inf")) for starts in open_since.values() for start in starts]

    def since(self, at: float) -> float | None:
        """Return since when it has been calm at that time; None if it is not."""
        last = max((end for start, end in self._spans if start <= at), default=0.0)
        return last if last <= at else None

    def throughout(self, start: float, end: float) -> bool:
        """Whether it was calm from start to end."""
        return all(b <= start or a >= end for a, b in self._spans)


@dataclass(eq=False)
class Checker:
    """Base of all checkers. Subclasses override the hooks that they need."""

    name = ""
    context: CheckContext
    wrong: list[str] = field(default_factory=list)

    def report(self, at: float, problem: str) -> None:
        self.wrong.append(f"{self.name} at {at:.4f} s: {problem}")

    def before(self, commit: Commit, state: State) -> None:
        """Called with the state before the commit is applied to it."""

    def after(self, commit: Commit, state: State) -> None:
        """Called with the state after the commit was applied to it."""

    def see(self, seen: Observation) -> None:
        """Called with every observation but a commit."""


@dataclass(eq=False)
class G1Agreement(Checker):
    """All members that are given a round are given the same world."""

    name = "G1 agreement"
    _rounds: dict[tuple[str, RoundId], tuple[object, ...]] = field(default_factory=dict)

    def see(self, seen: Observation) -> None:
        if isinstance(seen, Given):
            key = (seen.run, RoundId(seen.era, seen.number))
            world = (seen.size, seen.digest, seen.boot, seen.table, seen.fence)
            first = self._rounds.setdefault(key, world)
            if first != world:
                self.report(seen.at, f"{seen.actor} was given {world} for round {seen.number}, another one {first}")

    def after(self, commit: Commit, state: State) -> None:
        """Check that a round does not begin at the address of the round before (T4.5)."""
        head = new_seal(commit, state)
        former = state.heads[-2][1] if len(state.heads) > 1 else None
        if head is not None and former is not None and former.run == head.run and former.boot == head.boot:
            self.report(commit.at, f"rounds {former.number} and {head.number} both have the address {head.boot}")


@dataclass(eq=False)
class G2Ranks(Checker):
    """Ranks are 0..size-1, each once, and the size is allowed."""

    name = "G2 ranks"
    _ranks: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    _sealed: dict[str, list[WorkerRanks | None]] = field(default_factory=dict)
    """For each table: the worker ranks of its members, by rank."""

    def after(self, commit: Commit, state: State) -> None:
        head = new_head(commit, state)
        if head is None or head.phase is not Phase.SEALED or state.settings is None:
            return
        ranks = sorted(entry.rank for entry in state.entries.values())
        if not head.adopted and ranks != list(range(head.size)):
            self.report(commit.at, f"round {head.number} of size {head.size} was sealed with ranks {ranks}")
        if new_seal(commit, state) is not None:
            self._check_workers(commit, state, head)
            self._check_segments(commit, state, state.settings.segment)
        low, high = state.settings.min_nodes, state.settings.max_nodes
        if not low <= head.size <= high or head.size % state.settings.unit or head.size % state.settings.segment:
            self.report(commit.at, f"round {head.number} was sealed with size {head.size}, allowed are {low}..{high}")

    def _check_segments(self, commit: Commit, state: State, segment: int) -> None:
        """Check that each block of ranks belongs to neighbours, if the run has segments."""
        racks: dict[int, set[str]] = {}
        for entry in state.entries.values() if segment > 1 else ():
            racks.setdefault(entry.rank // segment, set()).add("/".join(entry.topology.split("/")[:-1]))
        if any(len(rack) > 1 for rack in racks.values()):
            self.report(commit.at, f"a segment was sealed over several racks: {racks}")

    def _check_workers(self, commit: Commit, state: State, head: Head) -> None:
        """Check that the workers of all members have the ranks of one world, each once, or none has a rank."""
        entries = sorted(state.entries.values(), key=lambda entry: entry.rank)
        self._sealed[head.table] = ranks = [entry.workers for entry in entries]
        if any(entry.sealed_as not in state.members for entry in entries):
            return  # G4 reports it.
        counts = [state.members[entry.sealed_as].record.workers for entry in entries]
        expected: list[tuple[int, int] | None] = [(sum(counts[:at]), sum(counts)) for at in range(len(counts))]
        if 0 in counts:
            expected = [None] * len(counts)
        if [None if one is None else (one.first, one.total) for one in ranks] != expected:
            self.report(commit.at, f"round {head.number} was sealed with the worker ranks {ranks} of {counts} workers")

    def see(self, seen: Observation) -> None:
        if isinstance(seen, Given):
            sealed = self._sealed.get(seen.table, [])
            if seen.rank < len(sealed) and sealed[seen.rank] != seen.workers:
                self.report(seen.at, f"{seen.actor} was given the worker ranks {seen.workers}, sealed were {sealed}")
            holder = self._ranks.setdefault((seen.run, seen.table), {}).setdefault(seen.rank, seen.member)
            if holder != seen.member or not 0 <= seen.rank < seen.size:
                self.report(seen.at, f"rank {seen.rank} of {seen.size} was given to {seen.member} and to {holder}")


@dataclass(eq=False)
class G3Order(Checker):
    """Rounds only grow and have one record each; a world is given only while it stands."""

    name = "G3 order"
    _sealed: dict[str, dict[RoundId, str]] = field(default_factory=dict)
    _taken: dict[tuple[str, str], RoundId] = field(default_factory=dict)
    _training: dict[str, tuple[str, RoundId]] = field(default_factory=dict)
    """Incarnation and round whose workers a node runs."""

    def after(self, commit: Commit, state: State) -> None:
        head = new_head(commit, state)
        if head is None:
            return
        former = state.heads[-2][1] if len(state.heads) > 1 else None
        if former is not None and former.run == head.run and head.round < former.round:
            self.report(commit.at, f"the head went back from {former.round} to {head.round}")
        if head.phase is not Phase.SEALED:
            return
        sealed = self._sealed.setdefault(head.run, {})
        if sealed.setdefault(head.round, head.table) != head.table:
            self.report(commit.at, f"round {head.round} was sealed twice, with two tables")
        if new_seal(commit, state) is not None:
            self._check_sealed_in(commit, state, head)

    def _check_sealed_in(self, commit: Commit, state: State, head: Head) -> None:
        """Check that no member sealed in runs workers of this incarnation, or has taken this round or a later seen.

        An engine that came back empty may not know of such a round, but its member does.
        """
        for id in state.entries:
            node = self.context.owner(state, id)
            taken = self._taken.get((node, head.run), NO_ROUND)
            if taken >= head.round:
                self.report(commit.at, f"{node} was sealed into round {head.round} after it had taken {taken}")
            run, round = self._training.get(node, ("", NO_ROUND))
            if run == head.run:
                self.report(commit.at, f"{node} was sealed into round {head.number} while it ran {round}")

    def see(self, seen: Observation) -> None:
        if isinstance(seen, Given):
            self._given(seen)
            self._training[seen.actor] = (seen.run, RoundId(seen.era, seen.number))
        elif isinstance(seen, Acted | EvictedTold | ClosedTold):
            self._training.pop(seen.actor, None)

    def _given(self, seen: Given) -> None:
        round = RoundId(seen.era, seen.number)
        last = self._taken.get((seen.actor, seen.run), NO_ROUND)
        if round <= last:
            self.report(seen.at, f"{seen.actor} took round {round} after {last}")
        self._taken[seen.actor, seen.run] = round
        state = self.context.states[seen.instance]
        head = next((head for revision, head in reversed(state.heads) if revision <= seen.revision), None)
        if head is None or head.phase is not Phase.SEALED or head.table != seen.table:
            self.report(seen.at, f"{seen.actor} was given table {seen.table} by a read that showed {head}")
        life = state.lives.get(seen.member, [])
        if not life or life[0] > seen.revision or (len(life) > 1 and life[1] <= seen.revision):
            self.report(seen.at, f"{seen.actor} was given round {seen.number} by a read at which its key did not live")


@dataclass(eq=False)
class Fences(Checker):
    """Fences only grow: within a run at one place always, elsewhere as far as clocks agree (T6.14)."""

    name = "fences"
    _top: dict[tuple[str, str], int] = field(default_factory=dict)
    """For each server and incarnation: the highest fence sealed."""
    _sealed_by: dict[tuple[str, str], str] = field(default_factory=dict)
    """The node that sealed it, and so knows of it as long as its process lives (seed 131099997)."""
    _sealed: list[tuple[float, int]] = field(default_factory=list)
    """Every fence sealed by any server, and when."""
    _made: dict[tuple[str, str], float] = field(default_factory=dict)
    """When the first head of each incarnation was made at each place."""
    _just_sealed: dict[tuple[str, str], int] = field(default_factory=dict)
    """The highest fence that was sealed less than AGREE_S before such a head was last made or restored there; 0: none."""
    _held_back: HeldBack = field(default_factory=HeldBack)

    def see(self, seen: Observation) -> None:
        self._held_back.see(seen)

    def after(self, commit: Commit, state: State) -> None:
        head = new_head(commit, state)
        if head is None:
            return
        here = commit.server, head.run
        # A head that is restored at its place keeps its life: clocks that step must not order the rounds of one run. So an
        # incarnation that others had replaced, and that one of its members brings back, keeps its lower fences (steered 865).
        # A write that was held back has the time of its making (seeds 31098571, 141001456).
        written_at = commit.at - self._held_back.held_s(commit.actor, commit.at)
        made_at = self._made.setdefault(here, written_at)
        if head.seq == 1:
            self._just_sealed[here] = max((fence for at, fence in self._sealed if at >= written_at - AGREE_S), default=0)
        if new_seal(commit, state) is None:
            return
        top = self._top.get(here, 0)
        certain = not (self.context.register and self.context.steps)  # A register cannot tell that it was emptied.
        if certain and head.fence <= top and not self._is_forgotten(here, head, state):
            self.report(commit.at, f"round {head.number} has fence {head.fence}, after {top} at {commit.server}")
        # A head that nobody told of an earlier one goes by the clocks. Those of two nodes are less than a second apart.
        earlier = [fence for at, fence in self._sealed if at < made_at - AGREE_S]
        if not self.context.steps and earlier and head.fence <= max(earlier):
            self.report(commit.at, f"round {head.number} has fence {head.fence}, a head made later than {max(earlier)}")
        if head.fence > top:
            self._top[here], self._sealed_by[here] = head.fence, commit.actor
        self._sealed.append((commit.at, head.fence))

    def _is_forgotten(self, here: tuple[str, str], head: Head, state: State) -> bool:
        """Whether nobody who is here knew of the highest fence, and the clocks need not show it either.

        The run had gone above the fences of another life (seed 161015637), or a register was emptied just after the seal: what
        is restored there goes by clocks that show whole seconds (register seed 183003715).
        """
        if self._sealed_by[here] in {self.context.owner(state, id) for id in state.members}:
            return False
        if self.context.register and self._top[here] == self._just_sealed.get(here):
            return True
        known = max((live.record.fence for live in state.members.values()), default=0)
        return max(head.fence, known) // LIFE < self._top[here] // LIFE


class G4Ghosts(Checker):
    """Every member that is sealed in has a live key at that moment."""

    name = "G4 no ghosts"

    def after(self, commit: Commit, state: State) -> None:
        head = new_seal(commit, state)
        if head is None:
            return
        for id, entry in state.entries.items():
            present = state.members.get(id)
            if present is None or present.created != entry.created:
                self.report(commit.at, f"round {head.number} was sealed with {entry.name}, whose key had ended")
            elif present.record.unhealthy:
                self.report(commit.at, f"round {head.number} was sealed with {entry.name}: {present.record.unhealthy}")


@dataclass(eq=False)
class G8Fencing(Checker):
    """No write takes effect without a live key, of the head by a non-leader, or into the store of an old round."""

    name = "G8 fencing"
    _held: dict[str, tuple[str, str, str]] = field(default_factory=dict)
    """For each node: engine instance and member id of its last world, and the run's incarnation."""
    _gave_up: set[str] = field(default_factory=set)
    """Nodes that gave their last world up."""

    def before(self, commit: Commit, state: State) -> None:
        if commit.kind == "revoked" and state.head is None and commit.actor in self._gave_up:
            # It has no world any more, and comes again by itself because the head is gone (T11.12, steered seed 162029908).
            self._held.pop(commit.actor, None)
        if commit.kind != "then" or commit.actor == "operator":
            return
        keys = self.context.keys
        guarded = [event for event in commit.events if event.key == keys.head or event.key.startswith(keys.run + "kv/")]
        if not guarded:
            return
        own = [one for one in state.members.values() if self.context.owner(state, one.id) == commit.actor]
        for event in guarded:
            if event.key == keys.head and event.item is not None:
                closes = b'"phase":"closed"' in event.item.value
                leader = state.leader
                if closes and not state.members:
                    continue  # The last member to leave closes a run in which all are done; G9 judges whether all are.
                if not own or (not closes and leader not in own):
                    who = leader.record.name if leader else "nobody"
                    self.report(commit.at, f"{commit.actor} wrote the head, but {who} leads")
            elif event.key != keys.head and event.item is not None:
                table = event.key[len(keys.run + "kv/") :].partition("/")[0]
                if not any(one.id in state.tables.get(table, {}) for one in own):
                    self.report(commit.at, f"{commit.actor} wrote {event.key}, but is not in that table")
                if state.head is not None and state.head.table != table:
                    self.report(commit.at, f"{commit.actor} wrote {event.key}, but the head names {state.head.table}")

    def see(self, seen: Observation) -> None:
        if isinstance(seen, Given):
            instance, member, run = self._held.get(seen.actor, ("", "", ""))
            state = self.context.states.get(instance)
            ended = state is not None and len(state.lives.get(member, ())) > 1
            if ended and instance == seen.instance and member != seen.member and run == seen.run:
                self.report(seen.at, f"{seen.actor} was given a world under a new id and not told of its eviction")
            self._held[seen.actor] = (seen.instance, seen.member, seen.run)
            self._gave_up.discard(seen.actor)
        elif isinstance(seen, Acted) and seen.what == "ready":
            self._gave_up.add(seen.actor)
        elif isinstance(seen, EvictedTold) or (isinstance(seen, Changed) and seen.kind == "evicted"):
            self._held.pop(seen.actor, None)


@dataclass(eq=False)
class G9Closing(Checker):
    """A run is closed only for an allowed reason, and stays closed."""

    name = "G9 leaving is not closing"
    _closing: set[str] = field(default_factory=set)
    """Nodes whose application has called close."""
    _operator_closes: bool = False
    _died_done: set[str] = field(default_factory=set)
    """Members that were done when their lease ended: a close that was decided before then may come after it."""

    def before(self, commit: Commit, state: State) -> None:
        keys, closed = self.context.keys, state.head is not None and state.head.phase is Phase.CLOSED
        for event in commit.events:
            if closed and event.key == keys.head and event.item is not None:
                self.report(commit.at, f"{commit.actor} wrote the head after it was closed")
            elif event.item is None and event.key.startswith(keys.members):
                gone = state.members.get(event.key[len(keys.members) :])
                if gone is not None and gone.record.done:
                    self._died_done.add(gone.id)

    def after(self, commit: Commit, state: State) -> None:
        head = new_head(commit, state)
        # The first write of a head is a close only if an earlier close is restored, also after its record expired (T14.1).
        if head is None or head.phase is not Phase.CLOSED or head.seq == 1:
            return
        kind = head.cause.kind if head.cause is not None else None
        if kind is CauseKind.SUCCESS:
            ids = self._died_done | {id for id, one in state.members.items() if one.record.done}
            done = {entry.rank for id, entry in state.entries.items() if entry.done or id in ids}
            undone = [entry.name for entry in state.entries.values() if entry.rank not in done]
            if undone or len(done) != head.size:
                self.report(commit.at, f"closed with success, but {', '.join(undone) or 'entries'} not done or missing")
        elif kind in (CauseKind.GAVE_UP, CauseKind.LOST):
            left = [one for one in state.members.values() if state.usable(one)]
            if state.size_of(left):
                self.report(commit.at, f"closed because of a failure, but {len(left)} members could go on")
        elif kind is CauseKind.CLOSED:
            if commit.actor not in self._closing and not self._operator_closes:
                self.report(commit.at, f"closed by {commit.actor}, who was not asked to")
        elif kind is not CauseKind.FUTILE:  # T11Futile judges that.
            self.report(commit.at, f"closed with cause {kind}")

    def see(self, seen: Observation) -> None:
        if isinstance(seen, Acted) and seen.what == "closing":
            self._closing.add(seen.actor)
        elif isinstance(seen, Fault) and seen.kind == "operator close":
            self._operator_closes = True


class G10Clocks(Checker):
    """No record holds an instant of a node's clock: every simulated clock shows more than a billion."""

    name = "G10 no wall clock"
    _FENCE = re.compile(rb'"fence":\d+')
    """A fence is made of a clock, but no rule reads it."""
    _LARGE = re.compile(rb"[:\[,]-?(\d{9,}(?:\.\d+)?|\d(?:\.\d+)?[eE]\+?\d+)[,}\]]")

    def after(self, commit: Commit, state: State) -> None:  # noqa: ARG002
        for event in commit.events:
            if event.item is not None and not event.key.startswith(self.context.keys.run + "kv/"):
                for found in self._LARGE.findall(self._FENCE.sub(b"", event.item.value)):
                    self.report(commit.at, f"{commit.actor} wrote {found!r} in {event.key}")


class T1Settings(Checker):
    """All live members were started with the run's settings, and no round sees another round's store."""

    name = "T1 settings and stores"

    def after(self, commit: Commit, state: State) -> None:
        for event in commit.events:
            if event.key.startswith(self.context.keys.members) and event.item is not None:
                mine = self.context.agreed.get(commit.actor)
                if mine is not None and state.settings is not None and mine != state.settings:
                    self.report(commit.at, f"{commit.actor} is in with {mine}, the run agreed on {state.settings}")

    def see(self, seen: Observation) -> None:
        if isinstance(seen, Acted) and seen.what == "store mixed":
            self.report(seen.at, f"{seen.actor} {seen.detail}")


SAFETY_CHECKERS: tuple[type[Checker], ...] = (
    G1Agreement, G2Ranks, G3Order, Fences, G4Ghosts, G8Fencing, G9Closing, G10Clocks, T1Settings,
)  # fmt: skip


def new_head(commit: Commit, state: State) -> Head | None:
    """Return the head if this commit wrote it."""
    return state.head if state.heads and state.heads[-1][0] == commit.revision else None


def new_seal(commit: Commit, state: State) -> Head | None:
    """Return the head if this commit sealed a round by it, and did not only restore or repeat an earlier seal."""
    head = new_head(commit, state)
    if head is None or head.phase is not Phase.SEALED or head.adopted:
        return None
    former = state.heads[-2][1] if len(state.heads) > 1 else None
    return head if former is None or former.table != head.table else None


class Judge:
    """Shows a history to checkers, observation by observation."""

    def __init__(self, context: CheckContext, checkers: list[Checker]) -> None:
        self._context = context
        self._checkers = checkers
        self._befores, self._afters, self._sees = (
            [getattr(one, hook) for one in checkers if getattr(type(one), hook) is not getattr(Checker, hook)]
            for hook in ("before", "after", "see")
        )

    def show(self, seen: Observation) -> None:
        """Let the checkers judge the next observation."""
        if not isinstance(seen, Commit):
            for see in self._sees:
                see(seen)
            return
        states = self._context.states
        state = states.get(seen.instance)
        if state is None:
            state = states[seen.instance] = State(seen.instance, self._context.keys)
        for before in self._befores:
            before(seen, state)
        state.apply(seen)
        for after in self._afters:
            after(seen, state)

    @property
    def wrong(self) -> list[str]:
        """All that the checkers have reported so far."""
        return [problem for checker in self._checkers for problem in checker.wrong]


def run(context: CheckContext, history: History, checkers: list[Checker]) -> list[str]:
    """Show the whole history to all checkers, and return what they report."""
    judge = Judge(context, checkers)
    for seen in history:
        judge.show(seen)
    return judge.wrong
