"""The stage of a simulated run: machines with the real member on them, engines, and the hand that hurts them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress

from .. import operate
from ..core import wire
from ..core.keys import Keys
from ..core.model import NO_ROUND, Agreed, RoundId
from ..core.model import Member as Record
from ..drivers.base import Driver, EngineReset, Get, Item, List
from ..drivers.register import RegisterDriver
from ..errors import (
    Banned,
    Closed,
    Drained,
    EngineMoved,
    Evicted,
    JoinTimeout,
    RdzvError,
    RoundOver,
    SettingsError,
    StoreTimeout,
    Unreachable,
)
from ..machine import Bell
from ..member import Member
from ..world import World
from .ambush import AMBUSHES, Ambush
from .driver import READ_TIMEOUT_S, SimDriver
from .history import Acted, Changed, ClosedTold, EvictedTold, Fault, Given, History
from .loop import VirtualLoop
from .machines import SimMachine
from .network import Network
from .register import RegisterServer, SimRegister
from .scenario import Life, Scenario, Trouble
from .server import SimServer

CALLBACKS_MAX = 2_000_000
"""Ten times what the busiest runs need: more is a loop without end."""


class App:
    """What runs on a machine: an application that trains, stops when told, and ends some day."""

    def __init__(self, stage: Stage, life: Life, machine: SimMachine) -> None:
        self.stage = stage
        self.life = life
        self.machine = machine
        self.settings = stage.scenario.settings(life)
        self.member = Member(stage.driver(machine), self.settings, machine)
        self.bell = Bell(machine)
        self.order = ""
        """What somebody wants of it: drain, finish."""
        self.holds: RoundId = NO_ROUND
        self._trained_s = 0.0
        self._began_at = machine.now()

    def act(self, what: str, detail: str = "") -> None:
        """Put on record what it did."""
        self.stage.history.add(Acted(actor=self.machine.name, what=what, detail=detail, round=self.holds))

    def command(self, order: str) -> None:
        """Interrupt its training."""
        self.order = self.order or order
        self.bell.ring()

    async def run(self) -> None:
        """Its life."""
        while True:
            self.act("ready" if self.holds != NO_ROUND else "joined")
            try:
                world = await self.member.join()
            except Evicted as evicted:
                self.stage.history.add(EvictedTold(actor=self.machine.name, member=evicted.member, reason=str(evicted)))
                self.holds = NO_ROUND
                continue
            except Closed as closed:
                self._told_closed(closed)
                break
            except (Drained, Banned, SettingsError, EngineMoved, JoinTimeout) as error:
                self.act("refused", f"{type(error).__name__}: {error}")
                break
            self._given(world)
            watcher = asyncio.get_running_loop().create_task(self._watch(), name="watcher")
            ending = await self._train(world)
            watcher.cancel()
            if ending and not await self._end(ending):
                break
        await self.member.leave()
        self.act("gone")

    def _given(self, world: World) -> None:
        instance, member, revision = world.given_by
        self.holds = RoundId(world.era, world.round)
        self.stage.history.add(
            Given(
                actor=self.machine.name,
                member=member,
                instance=instance,
                revision=revision,
                run=world.incarnation,
                era=world.era,
                number=world.round,
                table=world.table,
                size=world.size,
                rank=world.rank,
                digest=world.digest,
                boot=str(world.bootstrap),
            )
        )

    async def _watch(self) -> None:
        """Put on record the moment it is told, whatever its workers are doing."""
        change = await self.member.wait_changed()
        if change is not None:
            self.stage.history.add(
                Changed(actor=self.machine.name, round=self.holds, kind=change.kind.value, reason=change.reason)
            )
            self.bell.ring()

    async def _train(self, world: World) -> str:
        """Until something happens; what, if it is not a change of the round."""
        await self._use_store(world)
        life, began_at = self.life, self.machine.now()
        limits = {
            "done": life.train_s - self._trained_s,
            "fail": life.fail_every_s,
            "give up": None if life.give_up_after_s is None else life.give_up_after_s - (began_at - self._began_at),
            "leave": None if life.leave_after_s is None else life.leave_after_s - (began_at - self._began_at),
        }
        ending, limit_s = min(((name, s) for name, s in limits.items() if s is not None), key=lambda pair: pair[1])
        while self.member.changed is None and not self.order:
            left_s = limit_s - (self.machine.now() - began_at)
            if left_s <= 0:
                return ending
            waited_at = self.machine.now()
            await self.bell.wait(min(left_s, 5.0))
            if life.closes and self.machine.now() - waited_at > self.settings.lease + 5.0:
                return "close"
        self._trained_s += self.machine.now() - began_at
        if self.member.changed is None:
            return self.order
        await Bell(self.machine).wait(life.stop_s)
        return ""

    async def _use_store(self, world: World) -> None:
        """Say who we are, count ourselves, and read what rank 0 says: all of it must be of this round."""
        store = world.store
        store.set_timeout(4.0)
        with suppress(RoundOver, StoreTimeout, Unreachable, EngineReset, Evicted):
            await store.set(f"from/{world.rank}", world.table)
            count = await store.add("count", 1)
            if count > world.size:
                self.act("store mixed", f"counted {count} members in a world of {world.size}")
            said = await store.get("from/0")
            if said.decode() != world.table:
                self.act("store mixed", f"read {said!r} in {world.table}")

    async def _end(self, ending: str) -> bool:
        """Do it; whether its life goes on."""
        member = self.member
        try:
            if ending == "fail":
                self.act("workers failed")
                await Bell(self.machine).wait(min(self.life.stop_s, 1.0))
                return True
            if ending in ("done", "finish"):
                self.act("done")
                await member.done()
                return await self._linger()
            if ending == "close":
                self.act("closing")
                await member.close_run("finished after a long sleep")
                self.act("closed")
            elif ending == "drain":
                self.act("drained")
                await member.drain("SIGTERM")
                await Bell(self.machine).wait(self.life.stop_s)
            elif ending == "give up":
                self.act("failed")
                await member.leave(failed=True, reason="exit code 1")
            else:
                self.act("left")
        except Evicted as evicted:
            self.stage.history.add(EvictedTold(actor=self.machine.name, member=evicted.member, reason=str(evicted)))
            self.holds = NO_ROUND
            return True
        except Closed as closed:
            self._told_closed(closed)
        except RoundOver:
            return True
        except (SettingsError, Banned, EngineMoved) as error:
            self.act("refused", f"{type(error).__name__}: {error}")
        return False

    async def _linger(self) -> bool:
        """Done: wait for the others. If the round breaks, those who are not done go on without us."""
        waited_s = 0.0
        while waited_s < 600.0 and self.member.changed is None and not self.stage.closed:
            await self.bell.wait(1.0)
            waited_s += 1.0
        # It is in no hurry, and nobody may wait for it.
        await Bell(self.machine).wait(4.0)
        return False

    def _told_closed(self, closed: Closed) -> None:
        self.stage.history.add(
            ClosedTold(actor=self.machine.name, member=self.life.name, reason=closed.reason, success=closed.success)
        )


class Stage:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario, *, register: bool = False) -> None:
        """`register`: the run is kept in a compare-and-set register, in every second one of them with counters."""
        self.scenario = scenario
        self.register = register
        self.loop = VirtualLoop()
        self.rng = random.Random(f"stage {scenario.seed}")  # noqa: S311
        self.history = History(self.loop)
        self.network = Network(self.loop, scenario.seed, loss=scenario.loss)
        self.engine = self._server("engine")
        self.servers = [self.engine]
        self.routes: dict[str, SimServer] = {}
        self.network.route = lambda machine: self.routes.get(machine.name, self.engine)
        self.apps: dict[str, App] = {}
        self.agreed: dict[str, Agreed] = {}
        """By machine: the settings it was started with."""
        self.operator = SimMachine(self.loop, "operator", scenario.seed)
        self._born = 0
        self.isolated = 0

    def _server(self, name: str) -> SimServer:
        kind = RegisterServer if self.register else SimServer
        drawn = self.scenario
        server = kind(self.network, name, drawn.seed, tick_s=0.4, writes_max=drawn.writes_max, stars=drawn.stars)
        self.history.follow(server)
        return server

    def driver(self, machine: SimMachine, read_timeout_s: float = READ_TIMEOUT_S) -> Driver:
        """How that machine gets to the engine."""
        if not self.register:
            return SimDriver(self.network, machine, read_timeout_s=read_timeout_s)
        register = SimRegister(self.network, machine, beats=self.scenario.seed % 2 == 1)
        return RegisterDriver(register, machine, timeout_s=read_timeout_s)

    @property
    def closed(self) -> bool:
        """The run has been closed; looked at from outside, to let lingering applications go."""
        found = self.engine.engine.txn((), [Get(Keys("sim").head)], ()).item(0)
        return found is not None and b'"phase":"closed"' in found.value

    def play(self) -> History:
        """Run it to its end."""
        self.loop.run(self._play(), limit_s=self.scenario.end_at + 4000.0, callbacks_max=CALLBACKS_MAX)
        return self.history

    async def _play(self) -> None:
        for life in self.scenario.lives:
            self.loop.call_at(life.start_at, self.start, life)
        hands = [
            self.loop.create_task(self._inflict(trouble, index), name=f"trouble {index} {trouble.kind}")
            for index, trouble in enumerate(self.scenario.troubles)
        ]
        await self._until(self.scenario.calm_at)
        for hand in hands:
            await hand
        self.history.add(Fault(kind="calm", target=""))
        await self._until(max(self.scenario.end_at, self.loop.time() + 30.0))
        self.history.add(Fault(kind="finish", target=""))
        for app in list(self.apps.values()):
            app.command("finish")
        await self._until(self.loop.time() + 30.0)

    async def _until(self, at: float) -> None:
        await asyncio.sleep(max(0.0, at - self.loop.time()))

    # ---- members

    def start(self, life: Life) -> App:
        """Start a process for that member, on its host; a second one of a name is a restart."""
        self._born += 1
        name = life.name if life.name not in self.apps else f"{life.name}.{self._born}"
        machine = SimMachine(self.loop, name, self.scenario.seed, host=f"host-{life.name}")
        if self.isolated:
            self.network.cut(machine, self.engine)
        app = App(self, life, machine)
        self.apps[name] = app
        self.agreed[name] = app.settings.agreed()
        machine.spawn(app.run(), "app").add_done_callback(_look)
        return app

    def living(self, name: str = "") -> list[App]:
        """Applications whose machine lives, of that member if given."""
        return [app for app in self.apps.values() if not app.machine.dead and name in ("", app.life.name)]

    def present(self) -> list[tuple[Item, str]]:
        """Every member's key on the engine, and the machine it belongs to."""
        keys = Keys("sim")
        owners = {(app.machine.host, app.machine.pid): name for name, app in self.apps.items()}
        items = self.engine.engine.txn((), [List(keys.members)], ()).reads[0]
        records = [(item, wire.decode(Record, item.value)) for item in items]
        return [(item, owners.get((record.host, record.pid), "?")) for item, record in records]

    # ---- faults

    async def _inflict(self, trouble: Trouble, index: int) -> None:
        await self._until(trouble.at)
        targets = self.living(trouble.target)
        app = targets[-1] if targets else None
        if trouble.kind in AMBUSHES:
            Ambush(self, trouble.kind)
            return
        kind = trouble.kind.replace(" ", "_")
        deed: Callable[[App | None, Trouble], object] = getattr(self, f"_{kind}")
        target = app.machine.name if app is not None else trouble.target
        self.history.add(Fault(kind=trouble.kind, target=target, detail=f"for {trouble.lasts_s} s"))
        heal = deed(app, trouble)
        if asyncio.iscoroutine(heal):
            heal = await heal
        await asyncio.sleep(trouble.lasts_s)
        if callable(heal):
            done = heal()
            if asyncio.iscoroutine(done):
                await done
        self.history.add(Fault(kind=trouble.kind, target=target, stop=True, detail=f"#{index}"))

    def _crash(self, app: App | None, _: Trouble, silent: bool = False) -> Callable[[], object] | None:
        if app is None:
            return None
        app.machine.crash(silent=silent)
        return (lambda: self.start(app.life)) if self.rng.random() < 0.7 else None

    def _power_cut(self, app: App | None, trouble: Trouble) -> Callable[[], object] | None:
        return self._crash(app, trouble, silent=True)

    def _pause(self, app: App | None, _: Trouble) -> Callable[[], object] | None:
        if app is None:
            return None
        app.machine.pause()
        return app.machine.resume

    def _cut(self, app: App | None, _: Trouble, *ways: str) -> Callable[[], object] | None:
        if app is None:
            return None
        server = self.network.route(app.machine) or self.engine
        self.network.cut(app.machine, server, *ways)  # type: ignore[arg-type]

        def heal() -> None:
            if not self.isolated:
                self.network.heal(app.machine, server, *ways)  # type: ignore[arg-type]

        return heal

    def _cut_requests(self, app: App | None, trouble: Trouble) -> Callable[[], object] | None:
        return self._cut(app, trouble, "requests")

    def _cut_answers(self, app: App | None, trouble: Trouble) -> Callable[[], object] | None:
        return self._cut(app, trouble, "answers")

    def _reset(self, app: App | None, _: Trouble) -> None:
        if app is not None:
            self.network.reset(app.machine)

    def _reset_all(self, _app: App | None, _: Trouble) -> None:
        self.network.reset()

    def _lose_request(self, app: App | None, _: Trouble) -> None:
        if app is not None:
            self.network.break_next(app.machine, self.engine, "requests")

    def _lose_answer(self, app: App | None, _: Trouble) -> None:
        if app is not None:
            self.network.break_next(app.machine, self.engine, "answers")

    def _engine_restart(self, _app: App | None, _: Trouble) -> None:
        self.engine.restart()

    def _engine_crash(self, _app: App | None, _: Trouble) -> Callable[[], object]:
        self.engine.crash()
        return self.engine.restart

    def _engine_stall(self, _app: App | None, _: Trouble) -> Callable[[], object]:
        self.engine.pause()
        return self.engine.resume

    def _engine_slow(self, _app: App | None, _: Trouble) -> Callable[[], object]:
        self.engine.slow_s = self.rng.uniform(0.01, 0.5)
        return lambda: setattr(self.engine, "slow_s", 0.0)

    def _engine_isolated(self, _app: App | None, _: Trouble) -> Callable[[], object]:
        for app in self.living():
            self.network.cut(app.machine, self.engine)
        self.isolated += 1

        def heal() -> None:
            self.isolated -= 1
            for app in self.living():
                self.network.heal(app.machine, self.engine)

        return heal

    def _watch_gap(self, _app: App | None, _: Trouble) -> None:
        self.engine.drop_watches()

    def _compact(self, _app: App | None, _: Trouble) -> None:
        self.engine.forget()
        self.network.reset()

    def _second_engine(self, app: App | None, _: Trouble) -> Callable[[], object]:
        """The endpoint's name leads some machines elsewhere, while the first engine serves the others."""
        second = self._server(f"engine-{len(self.servers) + 1}")
        self.servers.append(second)
        moved = [one for one in self.living() if one is app or self.rng.random() < 0.4]
        for one in moved:
            self.history.add(Fault(kind="moved", target=one.machine.name, detail=second.name))
            self.routes[one.machine.name] = second
            self.network.reset(one.machine, self.engine)

        def back() -> None:
            for one in moved:
                self.history.add(Fault(kind="moved", target=one.machine.name, stop=True))
                self.routes.pop(one.machine.name, None)
            second.crash()

        return back

    def _newcomer(self, _app: App | None, _: Trouble) -> None:
        self.start(self._fresh_life())

    def _newcomer_first(self, _app: App | None, _: Trouble) -> Callable[[], object]:
        """The engine comes back empty, and somebody who knows nothing is there before all others."""
        machines = [app.machine for app in self.living()]
        for machine in machines:
            self.network.cut(machine, self.engine)
        self.engine.restart()
        self.start(self._fresh_life())

        def heal() -> None:
            for machine in machines:
                self.network.heal(machine, self.engine)

        self.loop.call_later(self.rng.uniform(0.0, 2.0), heal)
        return heal

    def _fresh_life(self) -> Life:
        self._born += 1
        return Life(f"n{self._born}", self.loop.time(), 10_000.0, 0.3)

    def _stranger(self, _app: App | None, _: Trouble) -> None:
        """Somebody was started with other settings."""
        life = self._fresh_life()
        life.options = {"last_call": 99.0, "regroup": 88.0}
        self.start(life)

    def _drain(self, app: App | None, _: Trouble) -> None:
        if app is not None:
            app.command("drain")

    def _drain_all(self, _app: App | None, _: Trouble) -> None:
        for app in self.living():
            app.command("drain")

    async def _operate(self, deed: str, *args: str) -> None:
        """Through a session like anybody's; an operator whose engine is away gives up."""
        with suppress(RdzvError, EngineReset):
            driver = self.driver(self.operator, read_timeout_s=2.0)
            session = await driver.connect()
            await getattr(operate, deed)(session, "sim", *args)
            await session.close()
            await driver.close()

    def _ask(self, app: App | None, _: Trouble) -> None:
        if app is not None:
            self.operator.spawn(self._operate("drain", app.machine.host, "maintenance"))

    def _ban(self, app: App | None, _: Trouble) -> Callable[[], object] | None:
        if app is None:
            return None
        host = app.machine.host
        self.operator.spawn(self._operate("ban", host, "bad memory"))
        return lambda: self.operator.spawn(self._operate("unban", host))

    def _operator_close(self, _app: App | None, _: Trouble) -> None:
        self.operator.spawn(self._operate("close", "wrong data", "operator"))


def _look(exited: asyncio.Future[None]) -> None:
    """A crash is no failure of the run; an application's own error is."""
    if not exited.cancelled() and exited.exception() is not None:
        error = exited.exception()
        assert error is not None, "just looked"
        raise error
