"""The checkers of what must happen in time, and of what must not happen without a cause: G5, G6, G7."""

from __future__ import annotations

from ..core.model import CauseKind, Phase
from .checkers import DRIFT, EPSILON_S, CheckContext, Checker, _new_head
from .history import Acted, Changed, ClosedTold, Commit, EvictedTold, Fault, Given, Observation
from .replay import State

LOSS_SLACK_S = 3.0
"""Where connections break at random, one more round trip and a reconnection may be needed."""
POLL_S = 0.75
"""Longest time between two looks at a register, that of a lost swap included."""


class G5Progress(Checker):
    """With quorum alive and nothing wrong, the leader does what is owed, and members take what they were given."""

    name = "G5 progress"
    prefix = "seal", "evict"

    def __init__(self, case: CheckContext) -> None:
        super().__init__(case)
        self._owed: dict[str, tuple[str, str, float, float, State]] = {}
        """By engine instance: what, by which leader, how long it may take, since when, and the engine's state."""
        self._dead: set[str] = set()
        self._newest: dict[str, str] = {}
        self._given: dict[str, str] = {}
        self._gone: set[str] = set()
        self._moved: set[str] = set()
        self._started: dict[str, float] = {}
        self._head_at = 0.0
        self._waits_at: dict[str, float] = {}

    @property
    def slack_s(self) -> float:
        """What every bound is allowed on top."""
        polls_s = 2 * POLL_S if self.case.register else 0.0
        return EPSILON_S + polls_s + (LOSS_SLACK_S if self.case.loss else 0.0)

    def after(self, commit: Commit, state: State) -> None:
        """See what is owed now, and whether what was owed before was paid in time."""
        if self._newest.get(commit.server, state.instance) != state.instance:
            self._owed.pop(self._newest[commit.server], None)
        self._newest[commit.server] = state.instance
        if _new_head(commit, state) is not None:
            self._head_at = commit.at
        before = self._owed.get(state.instance)
        if before is not None:
            self._judge(commit.at, before)
        owed, leader = state.owed(), state.leader
        if owed is None or leader is None or not owed[0].startswith(self.prefix):
            self._owed.pop(state.instance, None)
            return
        since = before[3] if before is not None and before[:2] == (owed[0], leader.id) else commit.at
        self._owed[state.instance] = (owed[0], leader.id, owed[1], since, state)

    def _judge(self, at: float, owed: tuple[str, str, float, float, State]) -> None:
        what, leader, allowed_s, since, state = owed
        calm = self.case.calm.since(at)
        here = {self.case.owner(state, id) for id in state.members} - self._gone - self._moved
        # A leader that was led elsewhere leaves a key behind until its lease ends, and leads nobody; and an engine that hears
        # nobody lets no lease end, so that keys of the dead may be all it has.
        if calm is None or not here or self.case.owner(state, leader) in self._moved:
            return
        waited_s = at - max(since, calm)
        if waited_s > (allowed_s + self.slack_s) * DRIFT:
            self.say(at, f"owed for {waited_s:.2f} s and not done: {what} (allowed: {allowed_s:.2f} s)")

    def see(self, one: Observation) -> None:
        """Remember who has what; at the end of the calm nothing may be owed, and everybody must be where he belongs."""
        if isinstance(one, Given):
            self._given[one.actor] = one.table
        elif isinstance(one, Acted):
            self._acted(one)
        elif isinstance(one, ClosedTold):
            self._gone.add(one.actor)
        elif isinstance(one, Fault):
            if one.kind in ("crash", "power cut") and not one.stop:
                self._gone.add(one.target)
            elif one.kind == "moved":
                self._moved.add(one.target)
            elif one.kind == "finish":
                self._end_of_calm(one.at)

    def _acted(self, one: Acted) -> None:
        if one.what in ("joined", "ready"):
            self._given.pop(one.actor, None)
            self._started.setdefault(one.actor, one.at)
            self._waits_at[one.actor] = one.at
        elif one.what in ("gone", "refused", "left", "failed", "drained", "done", "closed"):
            self._gone.add(one.actor)

    def _end_of_calm(self, at: float) -> None:
        for owed in self._owed.values():
            self._judge(at, owed)
        if type(self) is not G5Progress:
            return
        state = self.case.states.get(self._newest.get("engine", ""))
        if state is None or state.head is None or state.head.phase is Phase.CLOSED:
            return
        present = {self.case.owner(state, id): id for id in state.members}
        for node, started_at in self._started.items():
            settled = self.case.calm.since(at)
            excused = self._gone | self._moved | self.case.slow_stop
            if node in excused or settled is None or at - max(started_at, settled) < 15.0:
                continue
            if node not in present:
                self.say(at, f"{node} is alive and wants to be in, but is not present on the engine")
            elif present[node] in state.lines and at - max(self._head_at, self._waits_at[node]) > self.slack_s:
                self._check_seated(at, node, state, present[node])


    def _check_seated(self, at: float, node: str, state: State, id: str) -> None:
        """A member in the table holds its round, or, if it is broken and nothing of it runs there, has said so."""
        head = state.head
        assert head is not None, "a table has a head"
        if head.phase is Phase.SEALED and self._given.get(node) != head.table:
            self.say(at, f"{node} is in round {head.number}, but has not been given it")
        if head.phase is Phase.BROKEN and node not in self._given and not state.has_left(state.members[id]):
            self.say(at, f"{node} runs nothing of round {head.number}, which is broken, but has not given it up")


class G6Notice(G5Progress):
    """A loss is published at once, and everybody who holds the round is told at once."""

    name = "G6 notice"
    prefix = "break", "break"

    def __init__(self, case: CheckContext) -> None:
        super().__init__(case)
        self._holds: dict[str, str] = {}
        self._due: dict[str, tuple[float, str]] = {}

    def after(self, commit: Commit, state: State) -> None:
        """A break or close makes notices due."""
        super().after(commit, state)
        self._check_due(commit.at)
        head = _new_head(commit, state)
        if head is None or head.phase not in (Phase.BROKEN, Phase.CLOSED):
            return
        if head.phase is Phase.CLOSED and head.cause is not None and head.cause.kind is CauseKind.SUCCESS:
            return
        for node, table in self._holds.items():
            if table == head.table:
                self._due.setdefault(node, (commit.at, head.phase.value))

    def see(self, one: Observation) -> None:
        """Being told, or acting by itself, pays what is due."""
        super().see(one)
        self._check_due(one.at)
        if isinstance(one, Given):
            self._holds[one.actor] = one.table
        elif isinstance(one, Changed | EvictedTold | ClosedTold | Acted):
            self._holds.pop(one.actor, None)
            self._due.pop(one.actor, None)
        elif isinstance(one, Fault):
            self._holds.pop(one.target, None)
            self._due.pop(one.target, None)

    def _check_due(self, at: float) -> None:
        for node, (since, what) in list(self._due.items()):
            if at - since > self.slack_s:
                del self._due[node]
                if self.case.calm.throughout(since, since + self.slack_s):
                    self.say(at, f"{node} holds a round that was {what} at {since:.4f} s and was not told")


_ENGINE_ONLY = frozenset(
    {
        "reset",
        "reset all",
        "lose request",
        "lose answer",
        "engine restart",
        "engine crash",
        "engine stall",
        "engine slow",
        "engine isolated",
        "watch gap",
        "compact",
        "calm",
        "finish",
    }
)
"""Faults that must disturb no running round."""
_RESTARTS = frozenset({"engine restart", "engine crash", "restart at seal", "newcomer first"})
_BLIPS = frozenset({"reset", "reset all", "lose request", "lose answer"})
"""Faults of a connection that is restored at once, unless the engine is in trouble at the same time."""
_WILLING = frozenset({"ready", "left", "failed", "drained", "gone", "workers failed", "refused", "closed"})
"""What a member of a round can do to break it."""
_MEMORY_S = 30.0
"""How long before the round was sealed a fault may have begun whose effect breaks it."""


_ANYBODY = frozenset({"second engine", "ask", "ban", "newcomer first"})
"""Causes whose victims are not all named in the history."""
_IN_FLIGHT_S = 1.5
"""Two slow messages: what a leader acts on may be gone for so long."""


class G7Cause(Checker):
    """No running round is disturbed without a cause among its members, a newcomer or an operator."""

    name = "G7 no restart without cause"

    def __init__(self, case: CheckContext) -> None:
        super().__init__(case)
        self._tables: dict[str, tuple[float, set[str]]] = {}
        """By table: when it was sealed and which machines are in it."""
        self._causes: list[tuple[float, str, str]] = []
        """When, what, and the machine it is about."""
        self._held: dict[str, str] = {}
        self._restarts: list[float] = []
        self._engine_faults = 0
        self._grown: set[str] = set()
        self._took: dict[str, set[str]] = {}
        """By table: machines that were given it."""
        self._useful_at: dict[str, float] = {}
        self._done_at: dict[str, float] = {}
        """By table: when the first of its members was done."""

    def before(self, commit: Commit, state: State) -> None:
        """A growth must be worth its price."""
        head, settings = state.head, state.settings
        if head is None or settings is None or head.phase is not Phase.SEALED:
            return
        if state.size_of(len(state.survivors) + len(state.newcomers)) > head.size:
            self._useful_at[state.instance] = commit.at
        written = [event.item for event in commit.events if event.key == self.case.keys.head and event.item is not None]
        if not written or b'"kind":"growth"' not in written[0].value or b'"phase":"broken"' not in written[0].value:
            return
        if commit.at - self._useful_at.get(state.instance, -10.0) > _IN_FLIGHT_S or settings.grow == "never":
            self.say(commit.at, f"round {head.number} was broken for newcomers that it has no use for")
        if commit.at - self._done_at.get(head.table, commit.at) > _IN_FLIGHT_S:
            self.say(commit.at, f"round {head.number} was broken for newcomers when some were done already")

    def after(self, commit: Commit, state: State) -> None:
        """Remember who is in which table, and since when somebody of it is done."""
        if state.head is not None and state.some_done:
            self._done_at.setdefault(state.head.table, commit.at)
        head = _new_head(commit, state)
        if head is not None and head.cause is not None and head.cause.kind is CauseKind.GROWTH:
            self._grown.add(head.table)
        if head is not None and head.phase is Phase.SEALED and head.table not in self._tables:
            self._tables[head.table] = (commit.at, {self.case.owner(state, id) for id in state.lines})

    def see(self, one: Observation) -> None:
        """Collect causes; judge what members are told."""
        if isinstance(one, Given):
            self._held[one.actor] = one.table
            self._took.setdefault(one.table, set()).add(one.actor)
        elif isinstance(one, Fault):
            if one.kind in ("engine restart", "engine crash"):
                self._restarts.append(one.at)
            if one.kind in _RESTARTS and self.case.register:
                self._causes.append((one.at, "second engine", one.target))  # Whose value is lost tells nobody apart.
            if one.kind.startswith("engine") and one.kind != "engine restart":
                self._engine_faults += -1 if one.stop else 1
            blip = one.kind in _BLIPS and self._engine_faults > 0
            if blip or one.kind not in _ENGINE_ONLY:
                self._causes.append((one.at, one.kind, one.target))
        elif isinstance(one, Acted):
            if one.what in _WILLING:
                self._causes.append((one.at, one.what, one.actor))
            elif one.what == "joined":
                self._causes.append((one.at, "newcomer", one.actor))
        elif isinstance(one, Changed):
            self._judge(one.at, one.actor, one.kind, one.reason)
        elif isinstance(one, EvictedTold):
            self._causes.append((one.at, "evicted", one.actor))
            self._judge(one.at, one.actor, "evicted", one.reason)

    def _judge(self, at: float, node: str, kind: str, reason: str) -> None:
        table = self._held.get(node, "")
        sealed_at, seated = self._tables.get(table, (at, {node}))
        if kind == "closed" or (kind == "round" and table in self._grown):
            return
        if kind == "refused" and any(what in ("stranger", "ban") for _, what, _ in self._causes):
            return  # A stranger that came first to an emptied engine made its settings the run's.
        if kind in ("outage", "refused"):
            self.say(at, f"{node} was told of an outage: {reason}")
            return
        own = kind == "evicted"
        for cause_at, what, about in self._causes:
            if cause_at < sealed_at - _MEMORY_S or cause_at > at:
                continue
            if what in _ANYBODY:
                return
            if what == "newcomer":
                # On an emptied engine, as many newcomers as the run can hold need not wait for anybody (T2).
                if own and about not in seated and any(cause_at - _MEMORY_S < restart <= at for restart in self._restarts):
                    return
            elif about == node if own else about in seated:
                if own and what in _WILLING:
                    continue
                return
        if not own and seated - self._took.get(table, set()) and self._restarts:
            # Who was sealed in but had not taken the round when the engine was emptied cannot tell of it, so it cannot go on.
            return
        if own and node in self.case.slow_stop:
            return
        if not own and seated & self.case.slow_stop:
            return
        self.say(at, f"{node} was disturbed ({kind}: {reason}), and nothing had happened to its round")
