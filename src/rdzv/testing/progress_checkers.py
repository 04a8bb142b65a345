"""The checkers of what must happen in time (G5, G6), of what must not happen without a cause (G7, T8), and of quarantine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..core.model import CauseKind, Head, Phase
from ..core.quarantine import HOSTS_MAX
from .checkers import DRIFT, EPSILON_S, Checker, new_head, new_seal
from .held_back import HeldBack
from .history import Acted, Changed, ClosedTold, Commit, EvictedTold, Fault, Given, MessageLost, Observation
from .replay import Present, State

KILLS = frozenset({"crash", "crash after head write", "crash in a collective"})
"""Faults that end a process while its node runs on."""
LOSS_SLACK_S = 3.0
"""Where connections break at random, one more round trip and a reconnection may be needed."""
POLL_S = 0.75
"""Longest time between two reads of a register, including a lost swap."""
SETTLED_S = 15.0
"""A node that has been up, without faults, for so long must be present on the engine."""


@dataclass
class Debt:
    """Something that a leader must do before long."""

    what: str
    leader: str
    node: str
    """The leader's node. Its key may be gone when the debt is judged."""
    allowed_s: float
    since: float
    state: State


@dataclass(eq=False)
class DebtChecker(Checker):
    """The leader does in time what it owes by the state of the engine, unless faults excuse it."""

    kinds: ClassVar[tuple[str, ...]]
    """First words of the debts that this checker judges."""

    _owed: dict[str, Debt] = field(default_factory=dict)
    """Keyed by engine instance."""
    _newest: dict[str, str] = field(default_factory=dict)
    """For each server: its latest instance."""
    _heard_at: dict[str, float] = field(default_factory=dict)
    """For each engine instance on which a live node is present, so that it lets leases end: since when."""
    _gone: set[str] = field(default_factory=set)
    """Nodes that are dead, or whose application has ended or is about to."""
    _moved: set[str] = field(default_factory=set)
    """Nodes whose endpoint leads, or led, to another engine."""
    _losses: list[tuple[float, str]] = field(default_factory=list)
    """When a message was lost, and of which node."""

    @property
    def slack_s(self) -> float:
        """Time that every bound is allowed on top."""
        polls_s = 2 * POLL_S if self.context.register else 0.0
        return EPSILON_S + polls_s + (LOSS_SLACK_S if self.context.loss else 0.0)

    def after(self, commit: Commit, state: State) -> None:
        if self._newest.get(commit.server, state.instance) != state.instance:
            self._owed.pop(self._newest[commit.server], None)
        self._newest[commit.server] = state.instance
        was_heard = state.instance in self._heard_at
        if self._is_heard(state):
            self._heard_at.setdefault(state.instance, commit.at)
        else:
            self._heard_at.pop(state.instance, None)
        before = self._owed.get(state.instance)
        if before is not None and was_heard:  # Until then no lease could end (steered seed 112027384).
            self._judge(commit.at, before)
        owed, leader = state.owed, state.leader
        if owed is None or leader is None or not owed[0].startswith(self.kinds):
            self._owed.pop(state.instance, None)
            return
        same = before is not None and (before.what, before.leader) == (owed[0], leader.id)
        since = before.since if before is not None and same else commit.at
        node = self.context.owner(state, leader.id)
        if node in self._gone and state.instance in self._heard_at and state.settings is not None:
            # An engine that hears nobody lets no lease end. That of a dead leader begins again when somebody is heard, also
            # if nothing was owed before (steered seed 1013591, noticed seed 95201467).
            since = max(since, self._heard_at[state.instance] + state.settings.lease)
        self._owed[state.instance] = Debt(owed[0], leader.id, node, owed[1], since, state)

    def _is_heard(self, state: State) -> bool:
        return bool({self.context.owner(state, id) for id in state.members} - self._gone - self._moved)

    def _judge(self, at: float, debt: Debt) -> None:
        calm_since = self.context.calm.since(at)
        # A leader that was led to another engine leaves its key behind until the lease ends, and leads nobody. An
        # engine that hears nobody lets no lease end, so all its keys may belong to the dead.
        if calm_since is None or not self._is_heard(debt.state) or debt.node in self._moved:
            return
        waited_s = at - max(debt.since, calm_since)
        # A leader that comes back gives the others their time to come back, too, each time (seed 141080656).
        losses = sum(lost_at >= debt.since and node == debt.node for lost_at, node in self._losses)
        slack_s = self.slack_s + LOSS_SLACK_S * max(0, losses - 1)
        if waited_s > (debt.allowed_s + slack_s) * DRIFT:
            self.report(at, f"owed for {waited_s:.2f} s and not done: {debt.what} (allowed: {debt.allowed_s:.2f} s)")

    def see(self, seen: Observation) -> None:
        if isinstance(seen, Acted):
            if seen.what in ("gone", "refused", "left", "failed", "drained", "done", "closed"):
                self._gone.add(seen.actor)
        elif isinstance(seen, ClosedTold):
            self._gone.add(seen.actor)
        elif isinstance(seen, MessageLost):
            self._losses.append((seen.at, seen.actor))
        elif isinstance(seen, Fault):
            if seen.kind in KILLS | {"power cut"} and not seen.stop:
                self._gone.add(seen.target)
                for instance in [one for one in self._heard_at if not self._is_heard(self.context.states[one])]:
                    del self._heard_at[instance]  # The next commit may be that of somebody else (seed 151085896).
            elif seen.kind == "moved":
                self._moved.add(seen.target)
            elif seen.kind == "finish":
                for debt in self._owed.values():
                    self._judge(seen.at, debt)


@dataclass(eq=False)
class G5Progress(DebtChecker):
    """Rounds are sealed in time if a quorum is alive and nothing is wrong, and members take the rounds they are in."""

    name = "G5 progress"
    kinds = "seal", "evict"
    _given: dict[str, str] = field(default_factory=dict)
    """For each node: the table it holds."""
    _started: dict[str, float] = field(default_factory=dict)
    _head_at: float = 0.0
    _waits_at: dict[str, float] = field(default_factory=dict)

    def after(self, commit: Commit, state: State) -> None:
        if new_head(commit, state) is not None:
            self._head_at = commit.at
        super().after(commit, state)

    def see(self, seen: Observation) -> None:
        super().see(seen)
        if isinstance(seen, Given):
            self._given[seen.actor] = seen.table
        elif isinstance(seen, Acted) and seen.what in ("joined", "ready"):
            self._given.pop(seen.actor, None)
            self._started.setdefault(seen.actor, seen.at)
            self._waits_at[seen.actor] = seen.at
        elif isinstance(seen, Fault) and seen.kind == "finish":
            self._check_nodes(seen.at)

    def _check_nodes(self, at: float) -> None:
        """Check that every live node is present, and holds its round or waits for one."""
        state = self.context.states.get(self._newest.get("engine", ""))
        if state is None or state.head is None or state.head.phase is Phase.CLOSED:
            return
        present = {self.context.owner(state, id): id for id in state.members}
        calm_since = self.context.calm.since(at)
        excused = self._gone | self._moved | self.context.slow_stop
        for node, started_at in self._started.items():
            if node in excused or calm_since is None or at - max(started_at, calm_since) < SETTLED_S:
                continue
            if node not in present:
                self.report(at, f"{node} is alive and wants to be in, but is not present on the engine")
            elif present[node] in state.entries and at - max(self._head_at, self._waits_at[node]) > self.slack_s:
                self._check_seated(at, node, state.head, state.has_left(state.members[present[node]]))

    def _check_seated(self, at: float, node: str, head: Head, has_left: bool) -> None:
        """Check that a member in the table holds its round, or has given it up if it is broken."""
        if head.phase is Phase.SEALED and self._given.get(node) != head.table:
            self.report(at, f"{node} is in round {head.number}, but has not been given it")
        if head.phase is Phase.BROKEN and node not in self._given and not has_left:
            self.report(at, f"{node} runs nothing of round {head.number}, which is broken, but has not given it up")


@dataclass(eq=False)
class G6Notice(DebtChecker):
    """A loss is published at once, and every member that holds the round is told at once."""

    name = "G6 notice"
    kinds = ("break",)
    _holds: dict[str, str] = field(default_factory=dict)
    """For each node: the table it holds."""
    _due: dict[str, tuple[float, str]] = field(default_factory=dict)
    """For each node that must be told: since when, and of what."""

    def after(self, commit: Commit, state: State) -> None:
        super().after(commit, state)
        self._check_due(commit.at)
        head = new_head(commit, state)
        if head is None or head.phase not in (Phase.BROKEN, Phase.CLOSED):
            return
        if head.phase is Phase.CLOSED and head.cause is not None and head.cause.kind is CauseKind.SUCCESS:
            return
        for node, table in self._holds.items():
            if table == head.table:
                self._due.setdefault(node, (commit.at, head.phase.value))

    def see(self, seen: Observation) -> None:
        super().see(seen)
        self._check_due(seen.at)
        if isinstance(seen, Given):
            self._holds[seen.actor] = seen.table
            return
        if isinstance(seen, MessageLost):
            return
        # Being told settles what is due. A node that acts by itself, or that a fault hits, is excused.
        node = seen.target if isinstance(seen, Fault) else seen.actor
        self._holds.pop(node, None)
        self._due.pop(node, None)

    def _check_due(self, at: float) -> None:
        for node, (since, what) in list(self._due.items()):
            if at - since > self.slack_s:
                del self._due[node]
                if self.context.calm.throughout(since, since + self.slack_s):
                    self.report(at, f"{node} holds a round that was {what} at {since:.4f} s and was not told")


_RESETS = frozenset({"reset all", "compact"})
"""Faults that break the connections of all members."""
_BLIPS = _RESETS | {"reset"}
"""Faults of a connection that is restored at once, unless the engine is in trouble at the same time: then a linger may be over
before that. A lost message is another."""
_HARMLESS = frozenset({
    "lose request", "lose answer", "watch gap", "engine restart", "engine crash", "engine stall", "engine slow",
    "engine isolated", "calm", "converged", "finish",
})  # fmt: skip
"""Faults that must disturb no running round."""
_RESTARTS = frozenset({"engine restart", "engine crash", "restart at seal", "newcomer first"})
_WILLING = frozenset({"ready", "left", "failed", "drained", "gone", "workers failed", "stalled", "refused", "closed"})
"""Acts by which a member of a round breaks it."""
_ANYBODY = _RESETS | {"isolated again", "pod 0 replaced", "second engine", "ask", "ban", "newcomer first"}
"""Causes whose victims are not all named in the history."""
_MEMORY_S = 30.0
"""How long before the round was sealed a fault may have begun whose effect breaks it."""
_TURNS_S = 10.0
"""On a slow register a write may also wait for the swaps of all other members."""
_LINGER_S = 1.0
"""A connection that broke so long ago is restored, or it will not be in time."""


@dataclass(eq=False)
class G7Cause(Checker):
    """No running round is disturbed without a cause among its members, a newcomer or an operator."""

    name = "G7 no restart without cause"
    _tables: dict[str, tuple[float, set[str]]] = field(default_factory=dict)
    """For each table: when it was sealed, and the nodes in it."""
    _causes: list[tuple[float, str, str]] = field(default_factory=list)
    """Time, kind, and the node concerned."""
    _held: dict[str, str] = field(default_factory=dict)
    _restarts: list[float] = field(default_factory=list)
    _engine_faults: int = 0
    _lease_s: float = 0.0
    _isolated_at: float = float("-inf")
    """When the last isolation of the engine began or ended."""
    _grown: set[str] = field(default_factory=set)
    _closed: set[str] = field(default_factory=set)
    """Tables of runs that were closed. A member that was cut off until the head had expired hears only that it is gone."""
    _took: dict[str, set[str]] = field(default_factory=dict)
    """For each table: nodes that were given it."""
    _useful_at: dict[str, float] = field(default_factory=dict)
    _done_at: dict[str, float] = field(default_factory=dict)
    """For each table: when its first member was done."""
    _held_back: HeldBack = field(default_factory=HeldBack)
    _blips: list[tuple[float, str, str]] = field(default_factory=list)
    """Broken connections: time, kind, and the node concerned."""

    def before(self, commit: Commit, state: State) -> None:
        """Check that a growth is worth its price."""
        head, settings = state.head, state.settings
        if head is None or settings is None or head.phase is not Phase.SEALED:
            return
        if state.next_size > head.size:
            self._useful_at[state.instance] = commit.at
        head_key = self.context.keys.head
        written = [event.item for event in commit.events if event.key == head_key and event.item is not None]
        if not written or b'"kind":"growth"' not in written[0].value or b'"phase":"broken"' not in written[0].value:
            return
        if len(state.seated) < head.size:
            return  # A member was lost while the write was under way: the round has to end in any case (seed 30038957).
        in_flight_s = self._held_back.in_flight_s(commit.actor, commit.at)  # Seed 111048740.
        in_flight_s += _TURNS_S if self.context.register else 0.0
        if commit.at - self._useful_at.get(state.instance, -100.0) > in_flight_s or settings.grow == "never":
            self.report(commit.at, f"round {head.number} was broken for newcomers that it has no use for")
        if commit.at - self._done_at.get(head.table, commit.at) > in_flight_s:
            self.report(commit.at, f"round {head.number} was broken for newcomers when some were done already")

    def after(self, commit: Commit, state: State) -> None:
        if state.settings is not None:
            self._lease_s = state.settings.lease
        if state.head is not None and state.some_done:
            self._done_at.setdefault(state.head.table, commit.at)
        head = new_head(commit, state)
        cause = head.cause if head is not None and head.phase is Phase.BROKEN else None
        if head is not None and cause is not None and cause.kind is CauseKind.GROWTH:
            self._grown.add(head.table)
        if head is not None and head.phase is Phase.CLOSED:
            self._closed.add(head.table)
        if head is not None and head.phase is Phase.SEALED and head.table not in self._tables:
            self._tables[head.table] = (commit.at, {self.context.owner(state, id) for id in state.entries})

    def see(self, seen: Observation) -> None:
        self._held_back.see(seen)
        if isinstance(seen, Given):
            self._held[seen.actor] = seen.table
            self._took.setdefault(seen.table, set()).add(seen.actor)
        elif isinstance(seen, Fault):
            if seen.kind in ("engine restart", "engine crash"):
                self._restarts.append(seen.at)
            if seen.kind in _RESTARTS and self.context.register:
                self._causes.append((seen.at, "second engine", seen.target))  # A lost value may hit anybody.
            if seen.kind.startswith("engine") and seen.kind != "engine restart":
                self._engine_faults += -1 if seen.stop else 1
                self._causes += [one for one in self._blips if seen.at - one[0] < _LINGER_S]
            if seen.kind == "engine isolated":
                if seen.stop and self._engine_faults > 0:
                    # Some connections do not survive that, and beside another trouble of the engine a linger may be over
                    # before they are restored (seed 117023182).
                    self._causes.append((seen.at, "isolated again", seen.target))
                if not seen.stop and seen.at - self._isolated_at < self._lease_s:
                    # An engine that hears nobody for less than half a lease lets it run on. One such silence is too short to
                    # end a lease; two with a word of somebody between them may end that of a member that said nothing then.
                    self._causes.append((seen.at, "isolated again", seen.target))
                self._isolated_at = seen.at
            if seen.kind in _BLIPS:
                self._blip(seen.at, seen.kind, seen.target)
            elif seen.kind not in _HARMLESS:
                self._causes.append((seen.at, seen.kind, seen.target))
        elif isinstance(seen, MessageLost):
            # Also by chance (seed 131119310), and also long after the scenario asked for it (seed 117018239).
            self._blip(seen.at, "message lost", seen.actor)
        elif isinstance(seen, Acted):
            if seen.what in _WILLING:
                self._causes.append((seen.at, seen.what, seen.actor))
            elif seen.what == "joined":
                self._causes.append((seen.at, "newcomer", seen.actor))
        elif isinstance(seen, Changed):
            self._judge(seen.at, seen.actor, seen.kind, seen.reason)
        elif isinstance(seen, EvictedTold):
            self._causes.append((seen.at, "evicted", seen.actor))
            self._judge(seen.at, seen.actor, "evicted", seen.reason)

    def _blip(self, at: float, kind: str, node: str) -> None:
        self._blips.append((at, kind, node))
        if self._engine_faults > 0:
            self._causes.append((at, kind, node))

    def _judge(self, at: float, node: str, kind: str, reason: str) -> None:
        table = self._held.get(node, "")
        sealed_at, seated = self._tables.get(table, (at, {node}))
        if kind == "closed" or table in self._closed or (kind == "round" and table in self._grown):
            return
        if kind == "refused" and any(what in ("stranger", "ban") for _, what, _ in self._causes):
            return  # A stranger with other settings came first to an emptied engine, and made them the run's.
        if kind in ("outage", "refused"):
            self.report(at, f"{node} was told of an outage: {reason}")
            return
        own = kind == "evicted"
        for cause_at, what, about in self._causes:
            if cause_at < sealed_at - _MEMORY_S or cause_at > at:
                continue
            if what in _ANYBODY:
                return
            if what == "newcomer":
                # On an emptied engine, newcomers that fill the run need not wait for anybody (T2).
                emptied = any(cause_at - _MEMORY_S < restart <= at for restart in self._restarts)
                if own and about not in seated and emptied:
                    return
            elif about == node if own else about in seated:
                if own and what in _WILLING:
                    continue
                return
        if not own and seated - self._took.get(table, set()) and self._restarts:
            # A member that had not taken the round when the engine was emptied cannot report it, so it cannot go on.
            return
        if ({node} if own else seated) & self.context.slow_stop:
            return
        self.report(at, f"{node} was disturbed ({kind}: {reason}), and nothing had happened to its round")


@dataclass(eq=False)
class T8Evictions(Checker):
    """A member is evicted before `regroup` is over only if its host is banned, or its process was killed in a broken round.

    A round that the evicting member has given up counts as broken: no leader may be there to say so (T8.6).
    """

    # A connection that is reset is back within a linger of one second. A node that lost its power says nothing to anybody.

    name = "T8 evictions"
    evicted: int = 0
    """How many killed processes were evicted before their linger was over."""
    _killed: set[str] = field(default_factory=set)
    _called: dict[tuple[str, str, int], float] = field(default_factory=dict)
    """When each call was set on each instance."""
    _banned_at: dict[str, float] = field(default_factory=dict)
    """When each host was last banned: its member's eviction may be under way when the ban is lifted (steered seeds 40000512 and
    118002285)."""
    _held_back: HeldBack = field(default_factory=HeldBack)

    def before(self, commit: Commit, state: State) -> None:
        self._banned_at.update(dict.fromkeys(state.banned, commit.at))
        head, settings, keys = state.head, state.settings, self.context.keys
        # On a register members end the leases of others, by swaps that look like any other.
        if commit.kind != "then" or head is None or settings is None or self.context.register:
            return
        deleted = [event.key for event in commit.events if event.item is None and event.key.startswith(keys.members)]
        for key in deleted:
            gone = state.members[key[len(keys.members) :]]
            node = self.context.owner(state, gone.id)
            age_s = commit.at - self._called.get((state.instance, head.run, head.call_seq), commit.at)
            late = head.phase is Phase.BROKEN and age_s * DRIFT >= settings.regroup
            decided_at = commit.at - self._held_back.in_flight_s(commit.actor, commit.at)
            banned = self._banned_at.get(gone.record.host, -100.0) >= decided_at
            if node == commit.actor or banned or late:
                continue
            self.evicted += 1
            if node not in self._killed:
                self.report(commit.at, f"{commit.actor} evicted {node}, which lives, {age_s:.2f} s after the break")
            if head.phase is not Phase.BROKEN and not self._gave_up(commit.actor, state):
                self.report(commit.at, f"{commit.actor} evicted {node} from round {head.number}, which runs")

    def _gave_up(self, actor: str, state: State) -> bool:
        """Whether the actor was in the head's round and has given it up."""
        return any(state.has_left(one) and self.context.owner(state, one.id) == actor for one in state.seated.values())

    def after(self, commit: Commit, state: State) -> None:
        head = new_head(commit, state)
        if head is not None:
            self._called.setdefault((state.instance, head.run, head.call_seq), commit.at)

    def see(self, seen: Observation) -> None:
        self._held_back.see(seen)
        if isinstance(seen, Fault) and seen.kind in KILLS and not seen.stop:
            self._killed.add(seen.target)


@dataclass(eq=False)
class T17Quarantine(Checker):
    """A host is kept out after enough strikes, while quorum does not need it, and every host that was lost has its strike."""

    name = "T17 quarantine"
    _struck: set[tuple[str, str, str]] = field(default_factory=set)
    """Instance, host and table of every strike."""
    _held: list[Present] = field(default_factory=list)
    _free: list[Present] = field(default_factory=list)
    _unstruck: list[str] = field(default_factory=list)

    def before(self, commit: Commit, state: State) -> None:  # noqa: ARG002
        limit = None if state.settings is None else state.settings.quarantine
        self._held, self._free, self._unstruck = [], [], []
        if limit is None or state.head is None or state.head.phase is Phase.SEALED:
            return
        self._held = [one for one in state.wanting if one.record.host in state.quarantined]
        self._free = [one for one in state.wanting if one.record.host not in state.quarantined]
        gone = {one.host for one in state.lost if not (one.went or one.gave_up or one.host in state.banned)}
        if len(gone) <= HOSTS_MAX and state.head.number:
            here = (state.instance, state.head.table)
            self._unstruck = sorted(host for host in gone if (here[0], host, here[1]) not in self._struck)

    def after(self, commit: Commit, state: State) -> None:
        keys, limit = state.keys, None if state.settings is None else state.settings.quarantine
        if limit is None:
            return
        for event in commit.events:
            if event.item is not None and event.key.startswith(keys.strikes):
                self._struck.add((state.instance, *keys.of_strike(event.key)))
            if event.item is not None and event.key.startswith(keys.quarantines):
                host = keys.host_of_quarantine(event.key)
                if state.struck(host) < limit.strikes:
                    self.report(commit.at, f"{host} is quarantined after {state.struck(host)} of {limit.strikes} strikes")
        head = new_seal(commit, state)
        if head is None:
            return
        if self._unstruck:
            self.report(commit.at, f"round {head.number} was sealed without a strike for {', '.join(self._unstruck)}")
        let_in = [one for one in self._held if one.id in state.entries]
        free = [one for one in self._free if one.created <= head.seen]  # Those that the leader could know of (seed 95103692).
        if let_in and state.size_of([*free, *let_in[1:]]):
            self.report(commit.at, f"round {head.number} was sealed with {let_in[0].record.name}, whose host is quarantined")
