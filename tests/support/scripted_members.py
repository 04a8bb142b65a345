"""The players of a run that is moved by hand: a machine each, with the real member on it. See `hands`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from rdzv.config.settings import Settings
from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.member_rules import Change, ChangeKind
from rdzv.core.model import NO_ROUND, Head, Phase, RoundId
from rdzv.core.model import MemberRecord as Record
from rdzv.engines.port import Compare, Get, Item, Operation, Outcome, Put, Watch
from rdzv.errors import Banned, Closed, Drained, EngineMoved, Evicted, JoinTimeout, RdzvError, SettingsError
from rdzv.member.member import Member
from rdzv.member.notices import Notice
from rdzv.member.world import AsyncWorld
from rdzv.system.timers import sleep
from rdzv.testing.driver import SimDriver, SimSession
from rdzv.testing.history import Acted, Changed, ClosedTold, EvictedTold, Given
from rdzv.testing.network import Way
from rdzv.testing.nodes import SimNode

if TYPE_CHECKING:
    from support.scripted_simulation import Hands

RUN_ID = "sim"
KEYS = Keys(RUN_ID)

Picks = Callable[["Request"], object]


class Request:
    """A transaction as it arrives at the engine, or is about to be sent."""

    def __init__(self, actor: str, compares: tuple[Compare, ...], writes: tuple[Operation, ...]) -> None:
        self.actor = actor
        self.compares = compares
        self.operations = writes
        self.puts = {write.key: write.value for write in writes if isinstance(write, Put)}

    @property
    def head(self) -> Head | None:
        """The head that it would write."""
        value = self.puts.get(KEYS.head)
        return None if value is None else wire.decode(Head, value)

    @property
    def record(self) -> Record | None:
        """The member's record that it would write."""
        values = [value for key, value in self.puts.items() if key.startswith(KEYS.members)]
        return wire.decode(Record, values[0]) if values else None

    @property
    def entries(self) -> list[str]:
        """Lines of rank tables that it reads."""
        return [one.key for one in self.operations if isinstance(one, Get) and one.key.startswith(KEYS.ranks)]


# ---- which request is meant


def seal(request: Request) -> bool:
    return request.head is not None and request.head.phase is Phase.SEALED and not request.head.adopted


def take(request: Request) -> bool:
    """A waiting member asks whether a round is its own (T3)."""
    return bool(request.entries) and not request.puts


def closing(request: Request) -> bool:
    return request.head is not None and request.head.phase is Phase.CLOSED


def leading(request: Request) -> bool:
    """It changes what only a leader may change."""
    return any(key == KEYS.head or key.startswith(KEYS.ranks) for key in request.puts) and request.record is None


def record(request: Request) -> bool:
    return request.record is not None


def stored(key: str) -> Picks:
    """A write of that key in a round's store."""
    return lambda request: any(name.endswith(f"/value/{key}=") for name in request.puts)


class Gate:
    """Holds a player's own transactions back, as a process does that is slow at just the wrong moment."""

    def __init__(self, player: Player, picks: Picks) -> None:
        self.player = player
        self.picks = picks
        self.held = 0
        """How many transactions are waiting at it."""
        self._opened: asyncio.Future[None] = player.node.loop.create_future()

    async def pass_by(self) -> None:
        self.held += 1
        try:
            await asyncio.shield(self._opened)
        finally:
            self.held -= 1

    def open(self) -> None:
        """Let everything through, now and later."""
        self.player.gates.remove(self)
        self._opened.set_result(None)
        self.player.hands.fault("held", self.player, stop=True)


class HandSession(SimSession):
    """A session whose transactions have to pass the player's gates."""

    player: Player

    async def txn(self, compares=(), then=(), otherwise=(), instead=()) -> Outcome:
        await self._pass_gates(compares, then)
        return await super().txn(compares, then, otherwise, instead)

    async def txn_then_watch(self, plan, compares=(), then=(), *more) -> tuple[Outcome, Watch | None]:
        if self.stars:  # Else it is a transaction like any, and a watch.
            await self._pass_gates(compares, then)
        return await super().txn_then_watch(plan, compares, then, *more)

    async def _pass_gates(self, compares, then) -> None:
        request = Request(self.player.node.name, tuple(compares), tuple(then))
        for gate in list(self.player.gates):
            if gate.picks(request):
                await gate.pass_by()


class HandDriver(SimDriver):
    """Gives sessions that know their player."""

    session_type = HandSession

    def __init__(self, player: Player) -> None:
        super().__init__(player.hands.network, player.node, place=player.hands.place)
        self.player = player

    async def connect(self) -> HandSession:
        session = await super().connect()
        session.player = self.player
        return session


class Player:
    """A machine with a member on it, and what became of that member."""

    def __init__(self, hands: Hands, name: str, host: str, rate: float | None, options: Mapping[str, Any]) -> None:
        self.hands = hands
        self.name = name
        self.node = SimNode(hands.loop, name, hands.seed, host=host or name, rate=rate)
        self.settings = Settings.make("memory://", run_id=RUN_ID, **{**hands.options, **options})
        self.gates: list[Gate] = []
        self.notices: list[Notice] = []
        self.member = Member(HandDriver(self), self.settings, self.node, self.notices.append)
        self.stop_s = 0.05
        """How long its workers take to stop, while it lives by itself."""
        self.worlds: list[AsyncWorld] = []
        self.told: list[Change] = []
        self.told_at: list[float] = []
        self.ended: RdzvError | None = None
        """What its life ended with."""
        self._watcher: asyncio.Task[None] | None = None
        self._holds = NO_ROUND

    def __repr__(self) -> str:
        return f"<Player {self.name}: given {self.rounds}, told {self.kinds}, ended {self.ended!r}>"

    # ---- what became of it

    @property
    def world(self) -> AsyncWorld:
        return self.worlds[-1]

    @property
    def rounds(self) -> list[int]:
        return [world.round for world in self.worlds]

    @property
    def kinds(self) -> list[str]:
        """The kinds of the changes it was told, in order."""
        return [change.kind.value for change in self.told]

    @property
    def key(self) -> Item | None:
        return self.hands.present.get(self.name)

    @property
    def record(self) -> Record:
        assert self.key is not None, f"{self.name} is not present"
        return wire.decode(Record, self.key.value)

    @property
    def is_in(self) -> bool:
        """It holds the round of a head that is sealed."""
        head = self.hands.head
        return head is not None and head.phase is Phase.SEALED and self.holds(head.number) and self.world.table == head.table

    def holds(self, number: int) -> bool:
        """It was given that round last, and nothing has changed since."""
        return bool(self.worlds) and self.world.round == number and self.member.world is self.world

    # ---- by itself

    def start(self, stop_s: float = 0.05) -> Player:
        """Live by itself: join, stop the workers when told, join again."""
        self.stop_s = stop_s
        self.on(self._live())
        return self

    async def _live(self) -> None:
        while True:
            try:
                await self._join(None)
                watcher = self._watcher
                assert watcher is not None
                await asyncio.wait([watcher])
                if watcher.cancelled():
                    return
            except Evicted:
                continue
            except (Closed, Drained, Banned, SettingsError, EngineMoved, JoinTimeout) as error:
                self.ended = error
                self._act("refused", type(error).__name__)
                return
            if self.told and self.told[-1].kind is not ChangeKind.CLOSED:
                await sleep(self.node, self.stop_s)

    # ---- by hand

    def on(self, coro: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
        """Run it on the player's machine."""
        exited = self.node.spawn(coro)
        exited.add_done_callback(lambda done: done.cancelled() or done.exception())
        return exited

    def join(self, timeout_s: float | None = None) -> asyncio.Future[AsyncWorld]:
        """Say that no worker runs any more, and wait for a world."""
        return self.on(self._join(timeout_s))

    async def _join(self, timeout_s: float | None) -> AsyncWorld:
        if self._watcher is not None:
            self._watcher.cancel()
        self._act("ready" if self._holds != NO_ROUND else "joined")
        try:
            world = await self.member.join(timeout_s)
        except Evicted as evicted:
            self._holds = NO_ROUND
            self.hands.history.add(EvictedTold(actor=self.name, member=evicted.member, reason=str(evicted)))
            self._tell(Change(ChangeKind.EVICTED, evicted.reason))
            raise
        except Closed as closed:
            told = ClosedTold(actor=self.name, member=self.name, reason=closed.reason, success=closed.success)
            self.hands.history.add(told)
            raise
        self.worlds.append(world)
        self._holds = RoundId(world.era, world.round)
        self.hands.history.add(Given.of(self.name, world))
        self._watcher = asyncio.get_running_loop().create_task(self._watch(), name="watcher")
        return world

    async def _watch(self) -> None:
        """Put on record the moment it is told, whatever its workers are doing."""
        change = await self.member.wait_changed()
        if change is not None:
            self._record(change)

    def _record(self, change: Change) -> None:
        seen = Changed(actor=self.name, round=self._holds, kind=change.kind.value, reason=change.reason)
        self.hands.history.add(seen)
        self._tell(change)

    def look(self) -> Change | None:
        """Read what it is told at present, and put that on record if it is something else than before."""
        change = self.member.changed
        if change is not None and (not self.told or change.kind is not self.told[-1].kind):
            self._record(change)
        return change

    def _tell(self, change: Change) -> None:
        self.told.append(change)
        self.told_at.append(self.hands.now)

    def _act(self, what: str, detail: str = "") -> None:
        self.hands.history.add(Acted(actor=self.name, what=what, detail=detail, round=self._holds))

    def done(self) -> asyncio.Future[None]:
        self._act("done")
        return self.on(self.member.done())

    def drain(self, reason: str = "SIGTERM") -> asyncio.Future[None]:
        self._act("drained")
        return self.on(self.member.drain(reason))

    def close(self, reason: str = "finished") -> asyncio.Future[None]:
        self._act("closing")
        return self.on(self.member.close_run(reason))

    def leave(self, *, failed: bool = False, reason: str = "") -> asyncio.Future[None]:
        self._act("failed" if failed else "left")
        return self.on(self.member.leave(failed=failed, reason=reason))

    # ---- what is done to it

    def hold(self, picks: Picks) -> Gate:
        """Its transactions of that sort wait from now on."""
        gate = Gate(self, picks)
        self.gates.append(gate)
        self.hands.fault("held", self)
        return gate

    def pause(self) -> None:
        """As by SIGSTOP."""
        self.hands.fault("pause", self)
        self.node.pause()

    def resume(self) -> None:
        """As by SIGCONT."""
        self.node.resume()
        self.hands.fault("pause", self, stop=True)

    def crash(self, *, silent: bool = False) -> None:
        """As by SIGKILL; silent: as by a power cut."""
        self.hands.fault("power cut" if silent else "crash", self)
        self.node.crash(silent=silent)
        self.hands.fault("power cut" if silent else "crash", self, stop=True)

    def cut(self, *ways: Way) -> None:
        """Nothing gets through between it and the engine it is led to, in that direction or in both."""
        self.hands.fault("cut", self)
        self.hands.network.cut(self.node, self.hands.server_of(self), *ways)

    def heal(self, *ways: Way) -> None:
        self.hands.network.heal(self.node, self.hands.server_of(self), *ways)
        self.hands.fault("cut", self, stop=True)

    def expire(self) -> None:
        """Its lease runs out at this very moment."""
        assert self.key is not None, f"{self.name} is not present"
        self.hands.fault("expire", self)
        self.hands.engine.expire(self.key.lease)
        self.hands.fault("expire", self, stop=True)
