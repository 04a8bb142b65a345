"""A simulated run moved by hand: the test plays an interleaving step by step, with the real member on every machine.

`Hands` is a stage without a script. A `Player` is a machine with a member on it; it lives by itself once started (`start`), or
does just what the test asks of it (`join`, `leave`, `done` ...). Exact moments come from three tools:

- `hands.before(what, deed)`: when such a request arrives at the engine, before it takes effect;
- `hands.after(what, deed)`: when such a head has been written, before anybody hears of it;
- `player.hold(what)`: the player's own transactions of that sort are not sent before the gate is opened.

Whatever happens is put on record, and `by_hand` shows it to the checkers of every guarantee when the test's story is over.
A test that could not fail is worth nothing, so `by_hand` also tells the story with defects planted, and each must be noticed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from rdzv.core import rules, wire
from rdzv.core.model import DrainRequest, Head, Phase, RankEntry, RunSettings
from rdzv.core.model import MemberRecord as Record
from rdzv.core.view import View
from rdzv.engines.embedded.frames import Frame, Txn
from rdzv.engines.port import Batch, Get, Item, List, Operation, Outcome, Put
from rdzv.operate import commands
from rdzv.testing.checkers import Calm, CheckContext, run
from rdzv.testing.driver import SimDriver
from rdzv.testing.history import Commit, Fault, History
from rdzv.testing.network import SimNetwork
from rdzv.testing.nodes import SimNode
from rdzv.testing.server import SimServer
from rdzv.testing.sim import CHECKERS
from rdzv.testing.virtual_loop import VirtualLoop
from support.planted_bugs import Patch, planted
from support.scripted_members import KEYS, RUN_ID, Picks, Player, Request

STEP_S = 0.002
"""How often `until` looks."""
LIMIT_S = 30.0
"""How long `until` waits, unless told otherwise."""
EPSILON_S = 0.5
"""What every bound in time is allowed on top, as by the checkers."""

OPTIONS: dict[str, Any] = {
    "last_call": 3.0, "regroup": 30.0, "lease": 6.0, "settle": 0.5, "grow_every": 0.0, "join_timeout": 100_000.0,
}  # fmt: skip
"""What every player is started with, if the test does not say otherwise."""

Bug = str | Callable[[], list[Patch]]


class Hands:
    """One run."""

    def __init__(
        self, seed: int = 1, *, durable: bool = False, writes_max: int = 100_000, stars: bool = True, place: str = "",
        **options: Any,
    ) -> None:
        self.seed = seed
        self.options = {**OPTIONS, **options}
        self.loop = VirtualLoop()
        self.history = History(self.loop)
        self.network = SimNetwork(self.loop, seed)
        self.place = place
        """The declared place of all its servers."""
        self._server_options = {
            "durable": durable, "writes_max": writes_max, "stars": stars and not durable, "promised": place,
        }  # fmt: skip
        self.engine = self.serve("engine")
        self.routes: dict[str, SimServer] = {}
        """Which server the endpoint's name means to a player, if not the first one."""
        self.network.route = lambda node: self.routes.get(node.name, self.engine)
        self.players: dict[str, Player] = {}
        self.operator = SimNode(self.loop, "operator", seed)
        self.accepted: list[str] = []
        """What the checkers may say in this story, as regular expressions: with the reason beside it."""

    def serve(self, name: str) -> SimServer:
        """One more engine, at a place of its own."""
        server = SimServer(self.network, name, self.seed, **self._server_options)
        self.history.follow(server)
        return server

    def server_of(self, player: Player) -> SimServer:
        """The one it is led to."""
        return self.routes.get(player.name, self.engine)

    # ---- players

    def player(self, name: str, *, host: str = "", rate: float | None = None, **options: Any) -> Player:
        """A member that waits to be told what to do. A second one on a host is a process started anew."""
        assert name not in self.players, f"there is a {name} already"
        player = self.players[name] = Player(self, name, host, rate, options)
        return player

    def start(self, *names: str, **options: Any) -> list[Player]:
        """Members that live by themselves."""
        return [self.player(name, **options).start() for name in names]

    async def come(self, *who: str | Player, **options: Any) -> list[Player]:
        """Members that live by themselves and are present. They come in this order, so the first of all leads."""
        players = [self.player(one, **options) if isinstance(one, str) else one for one in who]
        for player in players:
            player.start()
            await self.until(lambda player=player: player.key is not None, what=f"{player.name} is present")
        return players

    async def form(self, *names: str, **options: Any) -> list[Player]:
        """The same, once all of them are in a round."""
        players = await self.come(*names, **options)
        await self.until(lambda: all(player.is_in for player in players), what=f"a round of {', '.join(names)}")
        return players

    async def form_by_hand(self, *names: str, **options: Any) -> list[Player]:
        """Members that are in a round, and do nothing by themselves."""
        players, joins = [self.player(name, **options) for name in names], []
        for player in players:
            joins.append(player.join())
            await self.until(lambda player=player: player.key is not None, what=f"{player.name} is present")
        await self.all(*joins)
        return players

    async def all(self, *pending: asyncio.Future[Any], limit_s: float = LIMIT_S) -> list[Any]:
        """Wait until all of them are done, and return their results."""
        await self.until(lambda: all(one.done() for one in pending), limit_s, "what was asked for is answered")
        return [one.result() for one in pending]

    async def raises(self, kind: type[Exception], pending: asyncio.Future[Any], limit_s: float = LIMIT_S) -> Exception:
        """The error it comes to, of that kind."""
        await self.until(pending.done, limit_s, f"{kind.__name__} is raised")
        error = pending.exception()
        assert isinstance(error, kind), f"expected {kind.__name__}, got {error!r}, {None if error else pending.result()}"
        return error

    # ---- what stands on the engine

    def read(self, *operations: Operation) -> Outcome:
        """Look into the engine's memory."""
        return self.engine.engine.txn((), operations, ())

    @property
    def head(self) -> Head | None:
        item = self.read(Get(KEYS.head)).item(0)
        return None if item is None else wire.decode(Head, item.value)

    @property
    def sealed(self) -> int:
        """Number of the round that stands sealed now; 0: none does."""
        head = self.head
        return head.number if head is not None and head.phase is Phase.SEALED else 0

    @property
    def phase(self) -> Phase | None:
        return None if self.head is None else self.head.phase

    @property
    def settings(self) -> RunSettings | None:
        """The settings that the run agreed on."""
        item = self.read(Get(KEYS.settings)).item(0)
        return None if item is None else wire.decode(RunSettings, item.value)

    @property
    def present(self) -> dict[str, Item]:
        """Every member's key, by player."""
        owners = {(player.node.host, player.node.pid): player.name for player in self.players.values()}
        found = {}
        for item in self.read(List(KEYS.members)).reads[0]:
            one = wire.decode(Record, item.value)
            found[owners[one.host, one.pid]] = item
        return found

    @property
    def leader(self) -> str:
        """The player whose key was created first."""
        return min(self.present.items(), key=lambda pair: pair[1].created)[0]

    @property
    def seated(self) -> list[str]:
        """Names in the head's table, by rank."""
        assert self.head is not None
        items = self.read(List(KEYS.table(self.head.table))).reads[0]
        lines = [wire.decode(RankEntry, item.value) for item in items]
        return [line.name for line in sorted(lines, key=lambda line: line.rank)]

    @property
    def heads(self) -> list[tuple[float, Head]]:
        """All that were ever written, and when."""
        events = [(commit.at, event) for commit in self.history.of(Commit) for event in commit.events]
        written = [(at, event.item) for at, event in events if event.key == KEYS.head and event.item is not None]
        return [(at, wire.decode(Head, item.value)) for at, item in written]

    def seals(self) -> list[tuple[float, Head]]:
        """The heads that sealed a round, and when."""
        return self._first_of_each_table(lambda head: head.phase is Phase.SEALED and not head.adopted)

    def breaks(self) -> list[tuple[float, Head]]:
        """The heads that broke a round, and when."""
        return self._first_of_each_table(lambda head: head.phase is Phase.BROKEN)

    def _first_of_each_table(self, holds: Callable[[Head], bool]) -> list[tuple[float, Head]]:
        found: dict[str, tuple[float, Head]] = {}
        for at, head in self.heads:
            if holds(head):
                found.setdefault(head.table, (at, head))
        return list(found.values())

    # ---- time and moments

    @property
    def now(self) -> float:
        return self.loop.time()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def until(self, holds: Callable[[], object], limit_s: float = LIMIT_S, what: str = "") -> float:
        """Wait for it; the time it happened."""
        deadline = self.now + limit_s
        while not holds():
            if self.now > deadline:
                recent = "\n".join(str(self.history).splitlines()[-25:])
                raise AssertionError(f"did not happen within {limit_s} s: {what}\n{self.players}\n{recent}")
            await asyncio.sleep(STEP_S)
        return self.now

    def before(self, picks: Picks, deed: Callable[[Request], object], *, times: int = 1) -> None:
        """When such a transaction arrives at the engine: do that before it takes effect."""
        left = times

        def arrival(actor: str, frame: Frame) -> None:
            nonlocal left
            if isinstance(frame, Txn) and left and picks(request := Request(actor, frame.compares, frame.then)):
                left -= 1
                deed(request)

        self.engine.arrivals.append(arrival)

    def after(self, holds: Callable[[Head], bool], deed: Callable[[], object]) -> None:
        """When such a head has been written: do that at once, before anybody hears of it."""
        done = False

        def commit(_server: SimServer, _actor: str, batch: Batch, *_: object) -> None:
            nonlocal done
            for event in batch.events:
                if event.key == KEYS.head and event.item is not None and not done:
                    done = holds(wire.decode(Head, event.item.value))
                    if done:
                        deed()

        self.engine.commits.append(commit)

    def fault(self, kind: str, player: Player | None = None, *, stop: bool = False) -> None:
        """Put on record what is done to the run."""
        self.history.add(Fault(kind=kind, target=player.name if player else "", stop=stop))

    def restart(self, instance: str = "") -> None:
        """The engine comes back empty at the same place; that is another instance."""
        self.fault("engine restart")
        self.engine.restart()
        self.engine.engine.instance = instance or self.engine.engine.instance
        self.fault("engine restart", stop=True)

    def operate(self, deed: str, *args: str, server: SimServer | None = None) -> asyncio.Future[Any]:
        """As an operator does it, through a session like anybody's."""

        async def act() -> Any:
            self.routes["operator"] = server or self.engine
            session = await SimDriver(self.network, self.operator).connect()
            try:
                return await getattr(commands, deed)(session, RUN_ID, *args)
            finally:
                await session.close()

        names = {"drain": "ask", "ban": "ban", "close": "operator close"}
        self.fault(names.get(deed, deed))
        self.fault(names.get(deed, deed), stop=True)
        return self.operator.spawn(act())

    def put_ask(self, player: Player, reason: str) -> None:
        """An operator's request to drain, in the engine at this very moment."""
        assert player.key is not None
        self.fault("ask", player)
        id = player.key.key[len(KEYS.members) :]
        self.read(Put(KEYS.ask(id), wire.encode(DrainRequest(reason=reason))))
        self.engine.publish("operator", "then")
        self.fault("ask", player, stop=True)

    # ---- judgement

    def wrong(self) -> list[str]:
        """The findings of the checkers of all guarantees."""
        players = self.players
        case = CheckContext(
            keys=KEYS,
            owners={(one.node.host, one.node.pid): name for name, one in players.items()},
            agreed={name: one.settings.agreed() for name, one in players.items()},
            slow_stop=frozenset(name for name, one in players.items() if one.stop_s > 10.0),
            loss=0.0,
        )
        case.calm = Calm(self.history.of(Fault), 10.0 + self.options["lease"] * 1.1 + 5.0)
        said = run(case, self.history, [kind(case) for kind in CHECKERS])
        return [one for one in said if not any(re.search(accepted, one) for accepted in self.accepted)]


# ---- telling a story


@contextmanager
def defect(bug: Bug) -> Iterator[None]:
    """Have it for a while: one of `support.planted_bugs`, or one of the test's own."""
    if isinstance(bug, str):
        with planted(bug):
            yield
        return
    undo: list[tuple[Any, str, Any]] = []
    try:
        for target, attribute, wrong in bug():
            # From __dict__, so that a property or function comes back as what it was.
            undo.append((target, attribute, vars(target).get(attribute, undo)))
            setattr(target, attribute, wrong)
        yield
    finally:
        for target, attribute, right in reversed(undo):
            if right is undo:
                delattr(target, attribute)
            else:
                setattr(target, attribute, right)


def tell(story: Callable[[Hands], Coroutine[Any, Any, None]], options: Mapping[str, Any]) -> Hands:
    """Play it to its end, and show what happened to the checkers."""
    hands = Hands(**options)

    async def play() -> None:
        await story(hands)
        hands.fault("finish")

    hands.loop.run(play(), limit_s=10_000.0)
    wrong = hands.wrong()
    assert not wrong, "\n".join([*wrong[:10], str(hands.history)])
    return hands


def by_hand(
    catches: Mapping[Bug, str] | None = None, fails: str = "", seeds: int = 1, **options: Any
) -> Callable[[Any], Callable[[Bug | None], None]]:
    """Make a test of a story.

    It is told as the product is, and once with each defect of `catches`, which must then be noticed with words that match.
    `seeds`: it is told that often, with other delays and another order of what happens at one moment.
    `fails`: why the product is known not to be up to this story yet.
    """
    defects: dict[Bug | None, str] = {None: "", **(catches or {})}
    known = pytest.param(None, id="as it is", marks=[pytest.mark.xfail(reason=fails, strict=True)] if fails else [])
    planted = [pytest.param(bug, id=bug if isinstance(bug, str) else bug.__name__.replace("_", " ")) for bug in catches or {}]

    def make(story: Callable[[Hands], Coroutine[Any, Any, None]]) -> Callable[[Bug | None], None]:
        def test(bug: Bug | None) -> None:
            if bug is None:
                tell_all()
                return
            with defect(bug), pytest.raises(AssertionError, match=f"(?s){defects[bug]}"):
                tell_all()

        def tell_all() -> None:
            for seed in range(1, seeds + 1):
                tell(story, {"seed": seed, **options})

        test.__name__, test.__doc__, test.__module__ = story.__name__, story.__doc__, story.__module__
        return pytest.mark.parametrize("bug", [known, *planted])(test)

    return make


def in_rules(replaced: Mapping[Any, Any]) -> Patch:
    """The tables of rules with some rules replaced."""
    table = {phase: tuple(replaced.get(rule, rule) for rule in listed) for phase, listed in rules.RULES.items()}
    return (rules, "RULES", table)


def with_settings(rule: Callable[[View], Any], **changes: Any) -> Callable[[View], Any]:
    """The rule as it would be if these settings were others."""

    def changed(view: View) -> Any:
        return rule(msgspec.structs.replace(view, settings=msgspec.structs.replace(view.settings, **changes)))

    return changed
