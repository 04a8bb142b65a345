"""A small world in which everything that can happen next is a choice made from outside.

Members, clients, sessions, server and engine are the ones that ship. The choices are which request the engine serves next,
whether a timer fires before that, and which fault strikes whom. Within these bounds nothing is left to chance:

- The engine's answers are delivered at once, and so are requests that change nothing for others: greetings, renewals, watches.
  An answer that comes late is a member that is paused.
- Time stands still while a request waits, unless a timer is due within `SOON_S`. A request that comes late is *held*.
- A fault strikes a member when its request is about to arrive, or while nothing is under way, after something has happened.
  A second fault strikes before the world is at rest again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config.settings import Settings
from ..core import wire
from ..core.keys import Keys
from ..core.model import Call, Head, Phase
from ..core.topology import in_segments, with_host
from ..engines.embedded.trust import Trust
from ..engines.reference import Engine
from . import fingerprint
from .application import Application, ring_at_close
from .checkers import Calm, CheckContext, Checker, Judge
from .choices import DEAD, ENGINE, FAULTS, HOLDING, KEY, NEW, ORDINARY, REQUEST_OR_QUIET, Choice
from .chosen import ChosenChannel, ChosenLoop, ChosenNetwork, ChosenNode, ChosenServer, decode_frames
from .driver import SimDriver
from .fingerprint import CLOCK_STEP, FAR_S, GRAIN_S
from .history import Fault, Given, History
from .network import SimNetwork
from .nodes import SimNode
from .scenario import NodePlan
from .server import SimServer
from .virtual_loop import Process, current_process

SOON_S = 0.001
"""A timer due within this time may fire before or after a request that is under way arrives."""
LONG_S = 15.0
"""No member stays paused, and no request is held, for longer: by then every time limit has run out."""
HORIZON_S = 150.0
"""Virtual seconds after the last fault within which the world must have come to rest."""
KEYS = Keys("sim")

PERIODIC = {"ClientConnection._check", "LeaseClock._tick"}
"""Timers that are always there: one decides nothing by itself, the other's period is shorter than instants are told apart."""

OPTIONS: dict[str, Any] = {
    "min_nodes": 2, "max_nodes": 3, "last_call": 1.0, "regroup": 10.0, "lease": 60.0, "settle": 0.5, "grow_every": 0.0,
    "drain_settle": 1.0, "join_timeout": 100_000.0, "segment": 1,
}  # fmt: skip
"""Settings of a small world. The lease is long, so that its end is a choice and not a matter of time."""


@dataclass(frozen=True)
class WorldPlan:
    """The bounds of a small world: who is in it, and which faults may strike."""

    name: str
    members: int
    faults: tuple[str, ...]
    faults_max: int
    crossed: tuple[str, ...] = ()
    """If not empty: one of two faults is of these kinds, and the other is not."""
    formed: bool = False
    """Choices begin once a round stands. How it came to stand is another plan's matter."""
    chooses_reads: bool = True
    """A request that only reads waits for its turn, too. Otherwise it is served when it comes."""
    stars: bool = True
    """The engine is the embedded one; otherwise it stands for etcd, where a late request may still take effect."""
    writes_max: int = 100_000
    uses_store: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from `OPTIONS`."""
    odd: dict[str, Any] = field(default_factory=dict)
    """Settings of the last member that differ from those of the others."""
    stop_s: float = 0.05
    """How long the workers of a member take to stop."""
    saves_s: float | None = None
    """Time that the workers of a member take to save when they are told that the round will end; None: they do not answer."""
    gains: int | None = None
    """How many steps the workers get further in each round than in the one before; None: they tell no steps."""
    racks: tuple[str, ...] = ()
    """Rack of each member, in the order in which they start; empty: they name none."""


Chooser = Callable[["SmallWorld", list[Choice]], Choice | None]
"""Picks one of the choices; None ends the run."""


class SmallWorld:
    """One run of a plan."""

    def __init__(
        self, plan: WorldPlan, choose: Chooser, ended: Callable[[SmallWorld], None], kinds: Sequence[type[Checker]]
    ) -> None:
        """`ended` is called at the end, before anything is cleaned up. `kinds`: the checkers."""
        self.plan = plan
        self.options = {**OPTIONS, **plan.options}
        self.loop = ChosenLoop(self._decide)
        self.history = History(self.loop)
        self.network = ChosenNetwork(self.loop, chooses_reads=plan.chooses_reads)
        self.engine = self.serve("engine")
        ring_at_close(self.engine, self.alive)
        self.second: ChosenServer | None = None
        self.routes: dict[str, SimServer] = {}
        self.network.route = lambda node: self.routes.get(node.name, self.engine)
        self.apps: dict[str, Application] = {}
        self.context = CheckContext(KEYS, {}, {}, frozenset(), loss=0.0, steps=True)
        self.context.calm = _LiveCalm(self.history, 10.0 + 5.0)
        self.judge = Judge(self.context, [kind(self.context) for kind in kinds])
        self.decisions: list[Choice] = []
        """The choices made where there were several, or where time began to pass."""
        self.faults_left = plan.faults_max
        self.kinds = plan.faults
        """The faults that may still strike, while any are left."""
        self.lasting: dict[Choice, int] = {}
        """The choices that end a fault that lasts, and the length of the history when each was last offered."""
        self.held: dict[str, ChosenChannel] = {}
        """Members with a request that is held, and the channel it is in."""
        self.outcome = ""
        """How the run ended: "at rest", "no progress", "wrong", or "" if the chooser ended it."""
        self._choose = choose
        self._ended = ended
        self._formed = not plan.formed
        self._judged = 0
        self._struck_at = self.loop.now
        self._offered = -1
        """Length of the history when faults were last offered while nothing was under way."""
        self._waited = False
        self._new: list[str] = []
        """Members that have not been served yet. They are alike."""
        self._end = self.loop.create_future()

    # ---- the run

    def play(self) -> None:
        """Run to the end."""

        async def main() -> None:
            for index in range(self.plan.members):
                self.start(f"m{index}")
            await self._end

        self.loop.run(main(), limit_s=1e9)

    def serve(self, name: str) -> ChosenServer:
        """Start an engine."""
        server = ChosenServer(self.network, name, stars=self.plan.stars, writes_max=self.plan.writes_max)
        self.history.follow(server)
        return server

    def start(self, name: str, host: str = "") -> None:
        """Start a member, on a host of its own unless one is given."""
        index = len(self.apps)
        node = ChosenNode(self.loop, name, index + 1, host or f"host-{name}")
        options = dict(self.plan.odd) if index == self.plan.members - 1 else {}
        if self.plan.racks:
            options["topology"] = self.plan.racks[index % len(self.plan.racks)]
        plan = self.plan
        life = NodePlan(name, 0.0, 1e6, plan.stop_s, options=options, saves_after_s=plan.saves_s, gains=plan.gains)
        app = self.apps[name] = _Application(self, life, node)
        self._new.append(name)
        self.context.owners[node.host, node.pid] = name
        self.context.agreed[name] = app.settings.agreed()
        app.exited = node.spawn(app.run(), "app")

    def driver(self, node: SimNode) -> SimDriver:
        return SimDriver(self.network, node)

    @property
    def head(self) -> Head | None:
        item = self.engine.engine.get(KEYS.head)
        return None if item is None else wire.decode(Head, item.value)

    @property
    def closed(self) -> bool:
        return self.head is not None and self.head.phase is Phase.CLOSED

    def alive(self) -> list[Application]:
        """Return the applications that run."""
        return [app for app in self.apps.values() if not app.node.dead and not app.exited.done()]

    def leases(self) -> dict[str, int]:
        """Return the lease of each member's key on the engine, by node."""
        state = self.context.states.get(self.engine.instance)
        items = [item for item in self.engine.engine.items() if item.key.startswith(KEYS.members)]
        return {self.context.owner(state, item.key[len(KEYS.members) :]): item.lease for item in items} if state else {}

    def _decide(self) -> bool:
        """Make one thing happen. Return False to let time pass instead."""
        if self._end.done():
            return False
        for observation in self.history[self._judged :]:
            self.judge.show(observation)
        self._judged = len(self.history)
        if self.judge.wrong:
            return self._finish("wrong")
        self.network.deliver_plain(self._paused(), list(self.held.values()))
        if self.loop.is_busy or self.loop.next_timer_in_s() <= 0.0:
            return self.loop.is_busy
        if self.loop.now - self._struck_at > HORIZON_S:
            return self._finish("no progress")
        choices = self.choices()
        if not choices:
            return self._finish("at rest")
        # Where time begins to pass, the chooser is asked although there is no choice: a long wait may lead to a known state.
        if not self._formed or (len(choices) == 1 and (choices[0].verb != "wait" or self._waited)):
            return self._apply(choices[0])
        choice = self._choose(self, choices)
        if choice is None:
            return self._finish("")
        self.decisions.append(choice)
        return self._apply(choice)

    def _finish(self, outcome: str) -> bool:
        self.outcome = outcome
        self._ended(self)
        self._end.set_result(None)
        return True

    # ---- choices

    def choices(self) -> list[Choice]:
        """Return all that may happen next. The first is what happens without faults and delays; none: the world is at rest."""
        waiting = self.network.waiting(list(self.held.values()))
        # Members that have not been served yet and have the same settings are alike. Any order of their first requests is
        # this one under other names.
        alike = {str(self.apps[name].life.options): name for name in sorted(waiting, reverse=True) if name in self._new}
        waiting = {name: one for name, one in waiting.items() if name not in self._new or name in alike.values()}
        soon = self.loop.next_timer_in_s() <= SOON_S
        size = len(self.history)
        if not (waiting or soon or self.lasting) and self._is_at_rest():
            self._formed = True
            # A world that is at rest again after a fault is much like one that has met none: faults combine before that.
            is_first = self.faults_left == self.plan.faults_max
            return [Choice("rest"), *faults] if is_first and (faults := self._faults(waiting, size)) else []
        found = [Choice("serve", name) for name in waiting]
        if soon or not waiting:
            found.append(Choice("wait"))
        if not self._formed:
            return found[:1]
        late = self.loop.now - self._struck_at > LONG_S
        if late and not waiting and self.lasting:
            found = []
        found += [choice for choice, offered in self.lasting.items() if offered != size or late]
        return found + self._faults(waiting, size)

    def _faults(self, waiting: dict[str, ChosenChannel], size: int) -> list[Choice]:
        if not self.faults_left or (not waiting and self._offered == size):
            return []
        found: list[Choice] = []
        for kind in self.kinds:
            when = FAULTS[kind].when
            if when is ENGINE:
                found.append(Choice(kind))
            elif when is KEY:
                found += [Choice(kind, name) for name in self.leases() if name in self.apps]
            elif when is NEW:
                found += [Choice(kind, "n0")] if "n0" not in self.apps else []
            elif when is DEAD:
                found += [Choice(kind, app.node.name) for app in self.apps.values() if app.node.dead and "n0" not in self.apps]
            elif when is HOLDING:
                found += [Choice(kind, app.node.name) for app in self._free() if app.holds.number and not waiting]
            else:
                found += [Choice(kind, app.node.name) for app in self._free() if self._strikes(when, app, waiting)]
        return found

    def _paused(self) -> set[str]:
        return {name for verb, name in self.lasting if verb == "resume"}

    def _free(self) -> list[Application]:
        paused = self._paused()
        return [app for app in self.alive() if app.node.name not in paused]

    def _strikes(self, when: str, app: Application, waiting: dict[str, ChosenChannel]) -> bool:
        return app.node.name in waiting or (when is REQUEST_OR_QUIET and not waiting)

    def _is_at_rest(self) -> bool:
        """Whether all that is owed has been done: a round stands, the run is closed, or too few live to form a round."""
        alive, head = self.alive(), self.head
        if not alive or (head is not None and head.phase is Phase.CLOSED):
            return not alive
        # A member whose program has failed stops its workers before it tells anybody.
        if {app.node.name for app in alive} != self.leases().keys() or not all(app.rests for app in alive):
            return False
        if head is None or head.phase is not Phase.SEALED:
            return self._usable(alive) < int(self.options["min_nodes"])
        holders = [app for app in alive if app.member.world is not None and app.member.world.table == head.table]
        is_held = head.call is Call.NONE and len(holders) == head.size and all(app.member.changed is None for app in holders)
        return is_held and head.size >= min(self._usable(alive), int(self.options["max_nodes"]))

    def _usable(self, apps: list[Application]) -> int:
        """How many of these members can be in one round. Quarantined hosts are only let in to make up a quorum."""
        state = self.context.states.get(self.engine.instance)
        least, segment = int(self.options["min_nodes"]), int(self.options["segment"])
        paths = {app.node.host: with_host(app.settings.topology, app.node.host) for app in apps}
        free = [path for host, path in paths.items() if state is None or host not in state.quarantined]
        return max(in_segments(free, segment), min(in_segments(paths.values(), segment), least))

    def _apply(self, choice: Choice) -> bool:
        """Let it happen. Return False if that is the passing of time."""
        verb, name = choice
        self._waited = verb == "wait"
        if name in self._new:
            self._new.remove(name)
        if verb == "wait":
            self._offered = len(self.history)
            self.lasting = dict.fromkeys(self.lasting, self._offered)
            return False
        if verb == "rest":
            return self._finish("at rest")
        if verb in FAULTS:
            self.faults_left -= 1
            if crossed := self.plan.crossed:
                self.kinds = tuple(kind for kind in self.kinds if (kind in crossed) != (verb in crossed))
            self._struck_at = self.loop.now
            FAULTS[verb].strike(self, name)
        else:
            ORDINARY[verb](self, name)
        return self.loop.is_busy

    # ---- for what choices do

    def request_of(self, name: str) -> ChosenChannel:
        return self.network.waiting([])[name]

    def record(self, kind: str, name: str) -> None:
        """Put a fault that is over at once into the history."""
        self.begin(kind, name)
        self.end(kind, name)

    def begin(self, kind: str, name: str, *ends: str) -> None:
        """Begin a fault that lasts until one of these choices is made."""
        self.history.add(Fault(kind=kind, target=name))
        self.lasting.update({Choice(verb, name): len(self.history) for verb in ends})

    def end(self, kind: str, name: str, *ends: str) -> None:
        for verb in ends:
            del self.lasting[Choice(verb, name)]
        self.history.add(Fault(kind=kind, target=name, stop=True))

    # ---- the state

    def fingerprint(self, *, exact: bool = False) -> bytes:
        """Return a fingerprint of all that the future depends on."""
        for run in self.engine.core.runs.values():
            run.presences  # noqa: B018  Looking drops those that have ended, as the next step of time would.
        clocks = dict(self.engine.clocks())
        clocks.update({int(app.node.now() // CLOCK_STEP): app.node.now() for app in self.apps.values()})
        return fingerprint.fingerprint(self._roots(), {**clocks, 5: self.loop.now}, exact=exact)

    def _roots(self) -> Iterator[object]:
        # Without a fault left it does not matter which could strike, and whether they have been offered.
        yield self.faults_left, self.kinds if self.faults_left else ()
        yield not self.faults_left or self._offered == len(self.history), self._new, [*self.lasting]
        for name, app in self.apps.items():
            # A program that has ended decides nothing more. Tasks and timers that it left behind are shown by themselves.
            yield name if app.node.dead else (name, "ended") if app.exited.done() else (app, app.node.held)
        for task, label in self.loop.tasks.items():
            app_of = self.apps.get(label.removeprefix("exit of ").partition("/")[0])
            if app_of is None or not app_of.node.dead:
                yield task
        yield self.engine.core
        yield self.second and self.second.core
        for connection, channel in self.network.channels():
            yield connection
            for deliver, args in channel.queue:
                yield deliver.__name__, [decode_frames(one) if isinstance(one, bytes) else one for one in args]
        timers = self.loop.pending_timers()
        # The order of those that do not fire before the world is at rest decides nothing.
        near = sum(at - self.loop.now < FAR_S - GRAIN_S / 2 for at, _ in timers)
        for at, call in timers[:near] + sorted(timers[near:], key=lambda one: getattr(_process_of(one[1]), "name", "")):
            if not getattr(_process_of(call), "dead", False) and _name(call.callback) not in PERIODIC:
                yield at, call.callback, call.args
        # Rounds that were given are remembered: whether a later one agrees with them is part of what is checked.
        given = self.history.of(Given)
        yield sorted((one.era.level, one.number, one.actor, one.table, one.digest, one.boot) for one in given)


def _process_of(call: Any) -> Process | None:
    process: Process | None = call.context.get(current_process)
    return process


def _name(callback: Callable[..., object]) -> str:
    return getattr(callback, "__qualname__", "")


class _Application(Application):
    """A holder that trains until it is told, or asked, to do something else."""

    stage: SmallWorld

    async def _use_store(self, world: Any) -> None:
        if self.stage.plan.uses_store:
            await super()._use_store(world)


class _LiveCalm(Calm):
    """The calm of a history that still grows."""

    def __init__(self, history: History, margin_s: float) -> None:
        super().__init__([], margin_s)
        self._history = history
        self._margin_s = margin_s

    def since(self, at: float) -> float | None:
        return Calm(self._history.of(Fault), self._margin_s).since(at)

    def throughout(self, start: float, end: float) -> bool:
        return Calm(self._history.of(Fault), self._margin_s).throughout(start, end)


def _visit_engine(walk: fingerprint.Walk, engine: Engine) -> None:
    """Describe an engine by its keys, leases and watchers. The journal and the past decide nothing."""
    if walk.is_met(engine):
        return
    items = [item for item in engine.items() if not item.key.startswith(KEYS.journal)]
    # In the order of keys, not of subscriptions: a watch subscribes to its keys in the order of a set.
    watchers = [sorted(by.items(), key=lambda pair: pair[0]) for by in (engine._by_key, engine._by_prefix)]
    walk.items([engine.instance, engine.revision, items, *watchers])
    leases = engine.leases
    # A lease without a key decides nothing when it ends.
    for lease in sorted({item.lease for item in items} & leases._leases.keys()):
        held = leases._leases[lease]
        walk.items([lease, held.due, held.cut, held.ended_at])
    walk.items([leases._hang_ups, leases._lingering, leases._spared])


fingerprint.IGNORED += [SmallWorld, SimNetwork, SimServer, SimNode, History, Settings, Trust]
fingerprint.VISITORS[Engine] = _visit_engine
