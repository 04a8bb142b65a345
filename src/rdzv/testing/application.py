"""The application on a simulated node: it uses the real member, and records everything that it is told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from typing import Any, Protocol

import msgspec

from ..config.settings import Settings
from ..core.member_rules import Change, ChangeKind
from ..core.model import NO_ROUND, RoundId, StallReport
from ..engines.port import Batch, Driver, EngineReset
from ..errors import (
    Banned,
    Closed,
    Drained,
    EngineMoved,
    Evicted,
    JoinTimeout,
    RoundOver,
    SettingsError,
    StoreTimeout,
    Unreachable,
)
from ..member.member import Member
from ..member.world import AsyncWorld
from ..system.timers import Wakeup
from .history import Acted, Changed, ClosedTold, EvictedTold, Given, History
from .nodes import SimNode
from .scenario import NodePlan
from .server import SimServer

CLOSED = b'"phase":"closed"'
"""Part of the record of a closed run's head."""


class Stage(Protocol):
    """The part of a simulated run that an application needs."""

    history: History
    options: dict[str, Any]

    @property
    def closed(self) -> bool:
        """Whether the run has been closed."""

    def driver(self, node: SimNode) -> Driver: ...

PATIENT_S = 86_400.0
"""How long it insists on what it has to say: longer than any simulation."""


def ring_at_close(server: SimServer, living: Callable[[], Iterable[Application]]) -> None:
    """Wake the applications that linger when the run is closed on that server."""

    def committed(_server: object, _actor: str, batch: Batch, _kind: str) -> None:
        if any(event.item is not None and CLOSED in event.item.value for event in batch.events):
            for app in living():
                app.bell.ring()

    server.commits.append(committed)


@lru_cache(maxsize=4)
def _settings(options: tuple[tuple[str, Any], ...]) -> Settings:
    """Return the settings of a run. They are read once for all its members."""
    return Settings.make("memory://", run_id="sim", **dict(options))


class Application:
    """An application that trains, stops when told, and ends some day."""

    exited: asyncio.Future[None]

    def __init__(self, stage: Stage, life: NodePlan, node: SimNode) -> None:
        self.stage = stage
        self.life = life
        self.node = node
        self.settings = msgspec.structs.replace(_settings(tuple(stage.options.items())), **life.options)
        self.member = Member(stage.driver(node), self.settings, node)
        self.member.reached = self._reached
        self.bell = Wakeup(node)
        self.order = ""
        """Given from outside: the way in which its training ends."""
        self.holds: RoundId = NO_ROUND
        self.joins = False
        """It waits in `join`."""
        self.trains = False
        """It holds a round and waits for something to happen to it, its own work being done or not."""
        self._trained_s = 0.0
        self._stalled = False
        self._began_at = node.now()

    @property
    def rests(self) -> bool:
        """Whether it waits for others, and has nothing to do by itself."""
        return self.joins or (self.trains and not self.order)

    def act(self, what: str, detail: str = "") -> None:
        """Record an action of its own."""
        self.stage.history.add(Acted(actor=self.node.name, what=what, detail=detail, round=self.holds))

    def command(self, order: str) -> None:
        """Interrupt its training."""
        self.order = self.order or order
        self.bell.ring()

    async def run(self) -> None:
        """Join and train, again and again, until something final happens."""
        while True:
            self.act("ready" if self.holds != NO_ROUND else "joined")
            self.joins = True
            try:
                world = await self.member.join(workers=self.life.workers, role=self.life.role)
            except Evicted as evicted:
                self._told_evicted(evicted)
                continue
            except Closed as closed:
                self._told_closed(closed)
                break
            except (Drained, Banned, SettingsError, EngineMoved, JoinTimeout) as error:
                self.act("refused", f"{type(error).__name__}: {error}")
                break
            finally:
                self.joins = False
            self.holds = RoundId(world.era, world.round)
            self.stage.history.add(Given.of(self.node.name, world))
            watchers = [asyncio.get_running_loop().create_task(self._watch(), name="watcher")]
            if self.life.stall_after_s is not None:
                watchers.append(asyncio.get_running_loop().create_task(self._stall(world), name="staller"))
            if self.settings.drain_notice:
                watchers.append(asyncio.get_running_loop().create_task(self._save(), name="saver"))
            ending = await self._train(world)
            self.trains = False
            for watcher in watchers:
                watcher.cancel()
            if ending and not await self._end(ending):
                break
        await self.member.leave()
        self.act("gone")

    async def _watch(self) -> None:
        """Record the moment of each change, whatever the workers are doing."""
        while (change := await self.member.wait_changed()) is not None and change.kind is not ChangeKind.LEFT:
            self._told(change)
            self.bell.ring()
            await self._until_undone()

    async def _until_undone(self) -> None:
        """Wait until the round goes on after all, as it may on an emptied engine, before the workers have looked."""
        while self.member.state.change is not None:  # To read `changed` would acknowledge an eviction.
            await self.member.bell.wait(None, self.member.bell.rings)

    async def _stall(self, world: AsyncWorld) -> None:
        """Report, once in its life, that the workers get no further (T7.15). They go on until the round is broken."""
        await Wakeup(self.node).wait(self.life.stall_after_s)
        if self._stalled or self.member.state.done:
            return
        self._stalled = True
        self.act("stalled")
        report = StallReport(table=world.table, step=world.round, ranks=(world.rank,), for_s=self.settings.stall)
        while True:  # As the member's own watch over its workers: an eviction is not told to it, but to the program.
            presence = self.member.presence
            if presence is not None and not presence.is_over:
                with suppress(Unreachable, EngineReset, Evicted):
                    await presence.put_record(stalled=report)
                    return
            await Wakeup(self.node).wait(1.0)

    async def _save(self) -> None:
        """Answer every notice that the round will end, after the time that its workers take to save (T7.19)."""
        member, saves_s = self.member, self.life.saves_after_s
        while saves_s is not None:
            rings = member.bell.rings
            if member.notice is None:
                await member.bell.wait(None, rings)
                continue
            await Wakeup(self.node).wait(saves_s)
            await member.answer_notice()  # As for the workers of an agent.
            await Wakeup(self.node).wait(0.5)

    def _reached(self, round: int) -> int:
        """How far its workers got in that round."""
        return -1 if self.life.gains is None else 5 + self.life.gains * round

    def _told(self, change: Change) -> None:
        seen = Changed(actor=self.node.name, round=self.holds, kind=change.kind.value, reason=change.reason)
        self.stage.history.add(seen)

    async def _train(self, world: AsyncWorld) -> str:
        """Train until something happens. Returns what it was, if it was not a change of the round."""
        await self._use_store(world)
        life, began_at = self.life, self.node.now()
        limits = {
            "done": life.train_s - self._trained_s,
            "fail": life.fail_every_s,
            "give up": None if life.give_up_after_s is None else life.give_up_after_s - (began_at - self._began_at),
            "leave": None if life.leave_after_s is None else life.leave_after_s - (began_at - self._began_at),
        }
        ending, limit_s = min(((name, s) for name, s in limits.items() if s is not None), key=lambda pair: pair[1])
        # A change rings the bell. Only an application that closes after a pause looks at the clock, to notice the pause.
        self.trains = True
        look_s = 5.0 if life.closes else math.inf
        while self.member.changed is None and not self.order:
            left_s = limit_s - (self.node.now() - began_at)
            if left_s <= 0:
                return ending
            waited_at = self.node.now()
            await self.bell.wait(min(left_s, look_s))
            if life.closes and self.node.now() - waited_at > self.settings.lease + 5.0:
                return "close"
        self.trains = False
        self._trained_s += self.node.now() - began_at
        if (change := self.member.changed) is None:
            order, self.order = self.order, ""
            return order
        if change.kind is ChangeKind.EVICTED:
            self._told(change)  # Perhaps it was told of something else before, and this is all that it will hear of it.
        await Wakeup(self.node).wait(life.stop_s)
        return ""

    async def _use_store(self, world: AsyncWorld) -> None:
        """Write, count and read in the store: everything found there must be of this round."""
        store = world.store
        store.set_timeout(4.0)
        with suppress(RoundOver, StoreTimeout, Unreachable, EngineReset, Evicted):
            if world.rank == 0:
                await store.set("from/0", world.table)
            if not self.life.stores:
                return
            count = await store.add("count", 1)
            if count > world.size:
                self.act("store mixed", f"counted {count} members in a world of {world.size}")
            said = await store.get("from/0")
            if said.decode() != world.table:
                self.act("store mixed", f"read {said!r} in {world.table}")

    async def _end(self, ending: str) -> bool:
        """Carry out an ending. Returns whether the application goes on."""
        member = self.member
        try:
            if ending == "fail":
                self.act("workers failed")
                await Wakeup(self.node).wait(min(self.life.stop_s, 1.0))
                return True
            if ending in ("done", "finish"):
                self.act("done")
                await member.done(timeout_s=PATIENT_S)
                await self._linger()
            elif ending == "close":
                self.act("closing")
                await member.close_run("finished after a long sleep", timeout_s=PATIENT_S)
                self.act("closed")
            elif ending == "drain":
                self.act("drained")
                await member.drain("SIGTERM", timeout_s=PATIENT_S)
                saving = asyncio.get_running_loop().create_task(self._save(), name="saver")
                await member.wait_drained()
                saving.cancel()
                await Wakeup(self.node).wait(self.life.stop_s)
            elif ending == "give up":
                self.act("failed")
                await member.leave(failed=True, reason="exit code 1")
            else:
                self.act("left")
        except Evicted as evicted:
            self._told_evicted(evicted)
            return True
        except Closed as closed:
            self._told_closed(closed)
        except RoundOver:
            return True
        except (SettingsError, Banned, EngineMoved) as error:
            self.act("refused", f"{type(error).__name__}: {error}")
        return False

    async def _linger(self) -> None:
        """Wait for the others, after this one is done. If the round breaks, they go on without it."""
        ringing = asyncio.get_running_loop().create_task(self._ring_at_change(), name="lingering")
        self.trains = True
        while self.member.changed is None and not self.stage.closed:
            self.order = ""  # There is no training left to interrupt.
            if not await self.bell.wait(600.0):
                break
        self.trains = False
        ringing.cancel()
        # It is in no hurry, and nobody may wait for it.
        await Wakeup(self.node).wait(1.5)

    async def _ring_at_change(self) -> None:
        while True:
            await self.member.wait_changed()
            self.bell.ring()
            await self._until_undone()

    def _told_evicted(self, evicted: Evicted) -> None:
        self.stage.history.add(EvictedTold(actor=self.node.name, member=evicted.member, reason=str(evicted)))
        self.holds = NO_ROUND

    def _told_closed(self, closed: Closed) -> None:
        name, member = self.node.name, self.life.name
        self.stage.history.add(ClosedTold(actor=name, member=member, reason=closed.reason, success=closed.success))
