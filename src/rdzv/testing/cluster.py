"""A simulated run: nodes with the real member on them, engines, and the faults that befall them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from ..config.secret import Secret
from ..core import wire
from ..core.keys import Keys
from ..core.model import MemberRecord as Record
from ..engines.embedded.limits import Limits
from ..engines.embedded.trust import Trust
from ..engines.port import Driver, EngineReset, Get, Item, List, Modified, Put, Session
from ..engines.register.driver import RegisterDriver
from ..errors import RdzvError
from ..operate import commands
from .application import CLOSED, Application, ring_at_close
from .convergence import Convergence
from .decisions import Decisions
from .driver import READ_TIMEOUT_S, SimDriver
from .history import Fault, History, MessageLost
from .network import SimNetwork, Way
from .nodes import SimNode
from .register import RegisterServer, SimRegister
from .scenario import KEPT, REPLACED, WAIT_UNTIL_S, FaultPlan, NodePlan, Scenario
from .server import SimServer
from .targeted_faults import AMBUSHES, TargetedFault
from .virtual_loop import VirtualLoop

CALLBACKS_MAX = 2_000_000
"""Callbacks of one run: ten times what the busiest needs. More is a loop without end."""

PLACE = "pod-0"
"""The declared place of the server, in scenarios that have one."""
LOOK_S = 1.0
"""How often a run is looked at in the calm phase, to end it when it has converged."""
HOLD_S = 1.0
"""How long a run must stay converged."""

Heal = Callable[[], object] | None
"""The end of a fault."""
TIGHT = Limits(unanswered=800, backlog=1_000)
"""Limits of the server in a quarter of the runs: a member that is paused or cut off soon counts as a slow reader."""


class _CheapSecret(Secret):
    """A secret whose proofs are made at once: deriving the key would take as long as ten runs."""

    def _proof_key(self) -> bytes:
        return self._key


class SimCluster:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, *, register: bool = False, observed: bool = False) -> None:
        """`register`: the run is kept in a compare-and-set register, in every second one of them with counters.

        `observed`: collect the leaders' decisions.
        """
        self.scenario = scenario
        self.options = scenario.options
        self.register = register
        self.loop = VirtualLoop()
        self.rng = random.Random(f"stage {scenario.seed}")  # noqa: S311
        self.history = History(self.loop)
        self.decisions = Decisions(self)
        self._observed = observed or any(trouble.when is not None for trouble in scenario.troubles)
        self.network = SimNetwork(self.loop, scenario.seed, loss=scenario.loss)
        self.network.on_loss = lambda node, way: self.history.add(MessageLost(actor=node, way=way))
        if scenario.seed % 4 == 2:
            self.network.trust = Trust(_CheapSecret("a secret of this run"))
        self.engine = self._server("engine", PLACE if scenario.promise else "")
        self.servers = [self.engine]
        ring_at_close(self.engine, self.living)
        self.routes: dict[str, SimServer] = {}
        self.network.route = lambda node: self.routes.get(node.name, self.engine)
        self.apps: dict[str, Application] = {}
        self.operator = SimNode(self.loop, "operator", scenario.seed)
        self.convergence = Convergence(self)
        self._born = 0
        self.isolated = 0
        """Number of faults that keep all nodes from the engine."""

    def _server(self, name: str, promised: str = "") -> SimServer:
        kind, drawn = RegisterServer if self.register else SimServer, self.scenario
        limits = TIGHT if drawn.seed % 4 == 1 else None
        server = kind(
            self.network, name, drawn.seed, limits=limits, writes_max=drawn.writes_max, stars=drawn.stars, promised=promised
        )
        self.history.follow(server)
        if self._observed:
            self.decisions.follow(server)
        return server

    def driver(self, node: SimNode, read_timeout_s: float = READ_TIMEOUT_S) -> Driver:
        """Return a driver for that node."""
        if not self.register:
            place = PLACE if self.scenario.promise and node is not self.operator else ""
            return SimDriver(self.network, node, read_timeout_s=read_timeout_s, place=place)
        register = SimRegister(self.network, node, beats=self.scenario.seed % 2 == 1)
        return RegisterDriver(register, node, timeout_s=read_timeout_s)

    @property
    def closed(self) -> bool:
        """Whether the run has been closed: looked at from outside, to let lingering applications go."""
        found = self.engine.engine.txn((), [Get(Keys("sim").head)], ()).item(0)
        return found is not None and CLOSED in found.value

    def play(self) -> None:
        """Run the scenario to its end."""
        self.loop.run(self._play(), limit_s=self.scenario.calm_at + 4000.0, callbacks_max=CALLBACKS_MAX)

    async def _play(self) -> None:
        for life in self.scenario.lives:
            self.loop.call_at(life.start_at, self.start, life)
        hands = [
            self.loop.create_task(self._inflict(trouble, index), name=f"trouble {index} {trouble.kind}")
            for index, trouble in enumerate(self.scenario.troubles)
        ]
        await asyncio.sleep(self.scenario.calm_at)
        for hand in hands:
            await hand
        self.history.add(Fault(kind="calm", target=""))
        hold_s = HOLD_S + (1.2 * self.scenario.options["lease"] if self.scenario.lingers else 0.0)
        converged = await self._converge(hold_s)
        for event in self.scenario.last_events if converged else ():
            self.history.add(Fault(kind="converged", target=""))
            if event == "finish":
                break
            self._last_event(event)
            if not await self._converge(HOLD_S):
                break
        self.history.add(Fault(kind="finish", target=""))
        if "finish" in self.scenario.last_events:
            for app in list(self.apps.values()):
                app.command("finish")
            await self._converge(HOLD_S)

    async def _converge(self, hold_s: float) -> bool:
        """Wait until the run has converged for `hold_s`. Return False if it has not in time, or has ended."""
        until, held_at = self.loop.now + self.scenario.tail_s, self.loop.now
        while self.loop.now < until and not all(app.exited.done() for app in self.apps.values()):
            await asyncio.sleep(LOOK_S)
            if not self.convergence.reached:
                held_at = self.loop.now
            elif self.loop.now - held_at >= hold_s:
                return True
        return False

    def _last_event(self, order: str) -> None:
        """Give an order to one of the applications that train, or let a newcomer come."""
        trains = [app for app in self.living() if app.trains]
        if order == "newcomer" or not trains:
            self._newcomer()
        else:
            self.rng.choice(trains).command(order)

    # ---- members

    def start(self, life: NodePlan) -> Application:
        """Start a process for that member, on its host; a second one of a name is a restart."""
        self._born += 1
        name = life.name if life.name not in self.apps else f"{life.name}.{self._born}"
        node = SimNode(self.loop, name, self.scenario.seed, host=f"host-{life.name}")
        node.steps = self.scenario.seed % 5 == 2
        if self.isolated:
            self.network.cut(node, self.engine)
        app = Application(self, life, node)
        self.apps[name] = app
        app.exited = node.spawn(app.run(), "app")
        return app

    def living(self, name: str = "") -> list[Application]:
        """Return the applications whose node lives, of that member if given."""
        return [app for app in self.apps.values() if not app.node.dead and name in ("", app.life.name)]

    def present(self) -> list[tuple[Item, str]]:
        """Return every member's key on the engine, and the node it belongs to."""
        owners = {(app.node.host, app.node.pid): name for name, app in self.apps.items()}
        items = self.engine.engine.txn((), [List(Keys("sim").members)], ()).reads[0]
        records = [(item, wire.decode(Record, item.value)) for item in items]
        return [(item, owners.get((record.host, record.pid), "?")) for item, record in records]

    # ---- faults: each method does one, and returns what ends it

    async def _inflict(self, trouble: FaultPlan, index: int) -> None:
        await asyncio.sleep(trouble.at)
        name = trouble.target
        if trouble.when is not None:
            leader = await self.decisions.wait_for(trouble.when, WAIT_UNTIL_S)
            if leader is None:
                return
            name = name or leader.life.name
        if trouble.kind in AMBUSHES:
            TargetedFault(self, trouble.kind)
            return
        targets = self.living(name)
        app = targets[-1] if targets else None
        target = app.node.name if app is not None else name
        self.history.add(Fault(kind=trouble.kind, target=target, detail=f"for {trouble.lasts_s} s"))
        heal = None
        if trouble.kind in _TO_ENGINE:
            heal = _TO_ENGINE[trouble.kind](self)
        elif app is not None:
            heal = _TO_NODE[trouble.kind](self, app)
        await asyncio.sleep(trouble.lasts_s)
        if heal is not None:
            heal()
        self.history.add(Fault(kind=trouble.kind, target=target, stop=True, detail=f"#{index}"))

    def _crash(self, app: Application, *, silent: bool = False) -> Heal:
        app.node.crash(silent=silent)
        return (lambda: self.start(app.life)) if self.rng.random() < 0.7 else None

    def _in_a_collective(self, fault: Callable[[], Heal]) -> Heal:
        """Let the workers of most others fail with the fault, and soon after it those of the rest."""
        healed = fault()
        for app in self.living():
            self.loop.call_later(self.rng.choice([0.0, 0.0, 0.05, 0.3, 2.0]), app.command, "fail")
        return healed

    def _cut(self, app: Application, *ways: Way) -> Heal:
        server = self.network.route(app.node) or self.engine
        self.network.cut(app.node, server, *ways)
        return lambda: None if self.isolated else self.network.heal(app.node, server, *ways)

    def _sick(self, app: Application) -> Heal:
        """Let the check of a node fail, and its workers too."""
        app.node.sick = "row remapping failed"
        app.command("fail")
        return lambda: setattr(app.node, "sick", "")

    def _ban(self, app: Application) -> Heal:
        self._operate("ban", app.node.host, "bad memory")
        return lambda: self._operate("unban", app.node.host)

    def _engine_crash(self) -> Heal:
        engine = self.engine
        engine.crash()
        return lambda: engine.restart() if self.engine is engine else None  # Else it was started on another machine.

    def _engine_slow(self) -> Heal:
        self.engine.slow_s = self.rng.uniform(0.01, 0.5)
        return lambda: setattr(self.engine, "slow_s", 0.0)

    def _engine_isolated(self) -> Heal:
        # The operator too: a server that hears from anybody does not take itself for isolated.
        for node in (self.operator, *(app.node for app in self.living())):
            self.network.cut(node, self.engine)
        self.isolated += 1

        def heal() -> None:
            self.isolated -= 1
            for node in (self.operator, *(app.node for app in self.living())):
                self.network.heal(node, self.engine)

        return heal

    def _compact(self) -> None:
        self.engine.forget()
        self.network.reset()

    def _second_engine(self, app: Application) -> Heal:
        """Let the endpoint's name lead some nodes elsewhere, while the first engine serves the others."""
        second = self._server(f"engine-{len(self.servers) + 1}")
        self.servers.append(second)
        moved = [one for one in self.living() if one is app or self.rng.random() < 0.4]
        for one in moved:
            self.history.add(Fault(kind="moved", target=one.node.name, detail=second.name))
            self.routes[one.node.name] = second
            self.network.reset(one.node, self.engine)

        def back() -> None:
            for one in moved:
                self.history.add(Fault(kind="moved", target=one.node.name, stop=True))
                self.routes.pop(one.node.name, None)
            second.crash()

        return back

    def _replace_pod(self) -> Heal:
        """Let the platform start the server of the declared place anew on another machine.

        If the promise is kept, the former process has ended before: it was stopped, or its node is lost and nobody is told.
        If it is broken, the former one goes on to serve those that are not cut off from it, until its node is reached again.
        """
        former, is_kept = self.engine, self.scenario.promise == KEPT
        is_lost = self.rng.random() < 0.5
        cut = [app.node for app in self.living() if is_lost or (not is_kept and self.rng.random() < 0.5)]
        for node in cut:
            self.network.cut(node, former)
            if not is_kept:
                self.network.reset(node, former)
        if is_kept:
            former.crash()

            return lambda: self._start_pod() if self.engine is former else None
        self._start_pod()

        def reached() -> None:
            for node in cut:
                self.network.heal(node, former)
            former.crash()

        return reached

    def _start_pod(self) -> None:
        self.engine = self._server(f"engine-{len(self.servers) + 1}", PLACE)
        self.servers.append(self.engine)
        ring_at_close(self.engine, self.living)
        self.history.add(Fault(kind="pod 0 started", target=self.engine.name))

    def _newcomer_first(self) -> Heal:
        """Restart the engine empty, and let a newcomer that knows nothing be there before all others."""
        nodes = [app.node for app in self.living()]
        for node in nodes:
            self.network.cut(node, self.engine)
        self.engine.restart()
        self._newcomer()

        def heal() -> None:
            for node in nodes:
                self.network.heal(node, self.engine)

        self.loop.call_later(self.rng.uniform(0.0, 2.0), heal)
        return heal

    def _garbage_head(self) -> None:
        """Overwrite the head of a run that goes on, as another program under the same keys could."""
        key, item = Keys("sim").head, self.engine.engine.get(Keys("sim").head)
        if item is not None and not self.closed:
            self._ask(lambda session: session.txn([Modified(key, item.modified)], [Put(key, b"garbage")]))

    def _newcomer(self, **options: float) -> None:
        self._born += 1
        self.start(NodePlan(f"n{self._born}", self.loop.now, 10_000.0, 0.3, options=dict(options)))

    def _command_all(self, order: str) -> None:
        for app in self.living():
            app.command(order)

    def _operate(self, deed: str, *args: str) -> None:
        self._ask(lambda session: getattr(commands, deed)(session, "sim", *args))

    def _ask(self, request: Callable[[Session], Awaitable[object]]) -> None:
        """Act as an operator, through an ordinary session. An operator whose engine is away gives up."""

        async def act() -> None:
            with suppress(RdzvError, EngineReset):
                driver = self.driver(self.operator, read_timeout_s=2.0)
                session = await driver.connect()
                await request(session)
                await session.close()
                await driver.close()

        self.operator.spawn(act())


def _begin(fault: Callable[[], object], heal: Heal) -> Heal:
    fault()
    return heal


_TO_NODE: dict[str, Callable[[SimCluster, Application], Heal]] = {
    "crash": SimCluster._crash,  # noqa: SLF001
    "power cut": lambda self, app: self._crash(app, silent=True),
    "pause": lambda _self, app: _begin(app.node.pause, app.node.resume),
    "sick": SimCluster._sick,  # noqa: SLF001
    "cut": SimCluster._cut,  # noqa: SLF001
    "cut requests": lambda self, app: self._cut(app, "requests"),
    "cut answers": lambda self, app: self._cut(app, "answers"),
    "reset": lambda self, app: self.network.reset(app.node),
    "crash in a collective": lambda self, app: self._in_a_collective(lambda: self._crash(app)),
    "reset in a collective": lambda self, app: self._in_a_collective(lambda: self.network.reset(app.node)),
    "cut in a collective": lambda self, app: self._in_a_collective(lambda: self._cut(app)),
    "lose request": lambda self, app: self.network.break_next(app.node, self.engine, "requests"),
    "lose answer": lambda self, app: self.network.break_next(app.node, self.engine, "answers"),
    "drain": lambda _self, app: app.command("drain"),
    "ask": lambda self, app: self._operate("drain", app.node.host, "maintenance"),
    "ban": SimCluster._ban,  # noqa: SLF001
    "second engine": SimCluster._second_engine,  # noqa: SLF001
}
_TO_ENGINE: dict[str, Callable[[SimCluster], Heal]] = {
    "reset all": lambda self: self.network.reset(),
    "engine restart": lambda self: self.engine.restart(),
    "engine crash": SimCluster._engine_crash,  # noqa: SLF001
    "engine stall": lambda self: _begin(self.engine.pause, self.engine.resume),
    "engine slow": SimCluster._engine_slow,  # noqa: SLF001
    "engine isolated": SimCluster._engine_isolated,  # noqa: SLF001
    "watch gap": lambda self: self.engine.drop_watches(),
    "compact": SimCluster._compact,  # noqa: SLF001
    "garbage head": SimCluster._garbage_head,  # noqa: SLF001
    REPLACED: SimCluster._replace_pod,  # noqa: SLF001
    "newcomer": SimCluster._newcomer,  # noqa: SLF001
    "newcomer first": SimCluster._newcomer_first,  # noqa: SLF001
    "stranger": lambda self: self._newcomer(last_call=99.0, regroup=88.0),
    "drain all": lambda self: self._command_all("drain"),
    "all done": lambda self: self._command_all("finish"),
    "operator close": lambda self: self._operate("close", "wrong data", "operator", ""),
}
