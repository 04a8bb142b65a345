"""Deliberate defects, to show that the simulator finds them: a checker that cannot fail is worth nothing.

Each replaces one small function of the product by a wrong one, while it is planted. Nothing in the product knows of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from ..config import settings as settings_module
from ..core import member, member_events, recovery, rules, wire
from ..core.acts import Verdict, close_head
from ..core.keys import Keys
from ..core.member_rules import TakeResult, take_result
from ..core.model import Head, Phase, RankEntry
from ..core.view import LiveMember, View
from ..engines.port import Created, EngineReset, Gap, Get, LeaseGone, List, Order, Outcome, Put
from ..errors import Unreachable
from ..member import registration
from ..member.head_tracker import HeadTracker
from ..member.leader import Leader
from ..member.member import Member
from ..member.presence import Look, Presence
from ..member.run_mirror import RunMirror
from ..member.store import AsyncStore
from ..system.timers import sleep

Patch = tuple[object, str, Any]

BUGS: dict[str, Callable[[], list[Patch]]] = {}


def _bug(name: str) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    def add(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        BUGS[name] = make
        return make

    return add


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant that defect for the duration of the block."""
    if name not in BUGS:
        msg = f"no planted bug is called {name!r}; there are: {', '.join(sorted(BUGS))}"
        raise ValueError(msg)
    undo: list[Patch] = []
    try:
        for target, attribute, wrong in BUGS[name]():
            # From __dict__, so that a property or function comes back as what it was.
            undo.append((target, attribute, vars(target)[attribute]))
            setattr(target, attribute, wrong)
        yield
    finally:
        for target, attribute, right in reversed(undo):
            setattr(target, attribute, right)


def _cached(function: Callable[[View], Any]) -> property:
    return property(function)


@_bug("seals below quorum")
def _seals_below_quorum() -> list[Patch]:
    def fitting(self: View, count: int) -> int:
        return min(count, self.settings.max_nodes) // self.settings.unit * self.settings.unit

    return [(View, "fitting", fitting)]


@_bug("former leader's write is accepted")
def _no_guard() -> list[Patch]:
    return [(Leader, "guard", lambda _self, _view: [])]


@_bug("ghost is sealed in")
def _ghost() -> list[Patch]:
    return [(Leader, "members_unchanged", lambda _self, _act, _view: [])]


@_bug("rank table of another attempt is used")
def _same_table() -> list[Patch]:
    right = RunMirror.view

    def view(self: RunMirror, **given: Any) -> View:
        made = right(self, **given)
        number = made.head.number if made.head is not None else 0
        return msgspec.structs.replace(made, fresh=f"table{number + 1}")

    return [(RunMirror, "view", view)]


@_bug("loss is not published")
def _loss_hidden() -> list[Patch]:
    return [(rules, "_loss", lambda _view: None)]


@_bug("last-call age is taken from another machine's clock")
def _foreign_age() -> list[Patch]:
    started: dict[tuple[str, int], float] = {}
    right, right_write = HeadTracker.ages, Leader.write_head

    def ages(self: HeadTracker) -> tuple[float, float, float]:
        call, sealed, grown = right(self)
        begun = None if self.head is None else started.get((self.head.run, self.head.call_seq))
        return call if begun is None else self._now() - begun, sealed, grown

    async def write(self: Leader, head: Head, reason: str, view: View) -> Outcome:
        started[head.run, head.call_seq] = self._node.now()
        return await right_write(self, head, reason, view)

    return [(HeadTracker, "ages", ages), (Leader, "write_head", write)]


@_bug("an instant is written")
def _instant() -> list[Patch]:
    right = Leader.write_head

    async def write(self: Leader, head: Head, reason: str, view: View) -> Any:
        stamped = msgspec.structs.replace(head, seen=int(self._node.now()))
        return await right(self, stamped, reason, view)

    return [(Leader, "write_head", write)]


@_bug("round number is reused after a restart")
def _no_era() -> list[Patch]:
    def again(view: View, told: Any, phase: Phase, call: Any, cause: Any) -> Head:
        return msgspec.structs.replace(right(view, told, phase, call, cause), next_era=told.era)

    right = recovery._restored_head
    return [(recovery, "_restored_head", again), (recovery, "next_era", lambda view: view.head.next_era)]


@_bug("engine that came back is not told")
def _untold() -> list[Patch]:
    return [(member, "reports", lambda _state: (None, None, None))]


@_bug("spare disturbs the round")
def _spare_disturbs() -> list[Patch]:
    return [(rules, "_useful", lambda view: (view.newcomers, "", None))]


@_bug("done member blocks re-forming")
def _done_blocks() -> list[Patch]:
    def stays(self: View, live: LiveMember) -> bool:
        return not self.is_draining(live) and live.record.host not in self.banned

    return [(View, "_stays", stays)]


@_bug("success closes too early")
def _early_success() -> list[Patch]:
    right = rules.close_after_success

    def close(view: View) -> Verdict | None:
        if not view.done or view.head is None:
            return None
        few = msgspec.structs.replace(view, head=msgspec.structs.replace(view.head, size=len(view.done)))
        return right(few)

    return [_in_rules(rules.close_after_success, close)]


@_bug("close ends a later incarnation")
def _late_close() -> list[Patch]:
    right = Presence.close_run

    async def close(self: Presence, cause: Any, _holds: Any) -> bool:
        with suppress(Exception):
            return await right(self, cause, None)
        lease = await self.session.grant(60.0)
        item = (await self.session.txn(then=[Get(self.keys.head)])).item(0)
        if item is None:
            return False
        head = wire.decode(Head, item.value)
        closed = close_head(head, cause)
        await self.session.txn(then=[Put(self.keys.head, wire.encode(closed), lease)])
        return True

    async def insist(self: Member, _call: str, act: Callable[[Presence], Any]) -> Any:
        while self.presence is None:
            await self.bell.wait(1.0)
        return await act(self.presence)

    return [(Presence, "close_run", close), (Member, "insist", insist), (Member, "check", lambda *_: None)]


@_bug("settings mismatch is ignored")
def _any_settings() -> list[Patch]:
    return [(settings_module, "differences", lambda _mine, _theirs: [])]


@_bug("settings are taken for one's own without a compare")
def _settings_guessed() -> list[Patch]:
    return [(registration, "Equals", lambda _key, _value: Created("nothing", 0))]


@_bug("one who came later is watched")
def _later_watched() -> list[Patch]:
    """Two members that watch each other wait for ever when all earlier ones have gone."""

    async def look(self: Presence) -> None:
        await right(self)
        if self.predecessor:
            others = await self.read_patiently([List(self.keys.members, Order.NEWEST)])
            self.predecessor = next(
                (item.key for item in others.reads[0] if item.key != self.keys.member(self.id)), self.predecessor
            )

    right = Presence.look_again
    return [(Presence, "look_again", look)]


@_bug("store of the old round is visible")
def _one_store() -> list[Patch]:
    return [(Keys, "kv", lambda self, _table: f"{self.run}kv/all/")]


@_bug("late writer reaches the store")
def _no_entry_guard() -> list[Patch]:
    return [
        (Presence, "entry_guard", lambda self, _table: Created(self.keys.settings + "/none", 0)),
        (AsyncStore, "end", lambda _self, _reason: None),
        (Keys, "kv", lambda self, _table: f"{self.run}kv/all/"),
    ]


@_bug("watch gap is not re-listed")
def _gap_ignored() -> list[Patch]:
    right = Presence.look_again

    async def look(self: Presence) -> None:
        if self.predecessor or self.leader is not None:
            self.since = (await self.read_patiently([])).revision
            return
        await right(self)

    return [(Presence, "look_again", look)]


@_bug("leader's gap is not re-listed")
def _leaders_gap_ignored() -> list[Patch]:
    async def pump(self: Leader, since: int) -> None:
        while True:
            watch = self._session.watch([self._keys.group], since)
            try:
                async for batch in watch:
                    self._pending.append(batch)
                    self._bell.ring()
            except Gap:
                since = (await self._session.txn(then=[])).revision
            except Exception as error:  # noqa: BLE001
                self._failed = error
                self._bell.ring()
                return
            finally:
                await watch.aclose()

    return [(Leader, "_pump", pump)]


@_bug("two worlds from two engines")
def _follow_any() -> list[Patch]:
    return [(member, "is_elsewhere", lambda _state, _place: False)]


@_bug("evicted member acts")
def _evicted_acts() -> list[Patch]:
    """The member takes a new lease and goes on under its old id, as if nothing had happened."""

    async def heartbeat(self: Presence) -> None:
        while True:
            await sleep(self.node, self.settings.lease / 3)
            try:
                await self.session.renew(self.lease)
            except LeaseGone:
                self.lease = await self.session.grant(self.settings.lease, presence=True)
                await self.session.txn(then=[Put(self.keys.member(self.id), wire.encode(self.record), self.lease)])
            except Unreachable:
                continue
            self.emit(member_events.Renewed(self.node.now()))

    async def why_gone(self: Presence) -> Exception:
        await sleep(self.node, 0.5)
        return EngineReset("again")

    no_guard = property(lambda _self: Created("nothing", 0))
    return [
        (Presence, "heartbeat", heartbeat),
        (Presence, "why_gone", why_gone),
        (Presence, "own_guard", no_guard),
    ]


@_bug("world is given from memory")
def _from_memory() -> list[Patch]:
    right = Presence.examine

    async def examine(self: Presence, table: str) -> Look:
        head = self.tracker.head
        outcome = await self.session.txn(then=[Get(self.keys.entry(table, self.id))])
        item = outcome.item(0)
        if item is not None and head is not None and head.phase is Phase.SEALED:
            await sleep(self.node, 0.2)
            return Look(head, item, wire.decode(RankEntry, item.value), outcome.revision)
        return await right(self, table)

    return [(Presence, "examine", examine)]


@_bug("ready is not tied to a round")
def _always_ready() -> list[Patch]:
    return [
        (View, "is_ready", lambda self, live: self._stays(live)),
        (View, "stragglers", _cached(lambda _view: [])),
    ]


@_bug("engine's return is not waited for")
def _never_young() -> list[Patch]:
    return [(View, "young", property(lambda _view: False))]


@_bug("outage is told at once")
def _hasty_outage() -> list[Patch]:
    right = member.away_s
    return [(member, "away_s", lambda state, now: right(state, now) * 1000.0)]


@_bug("round broken before it was taken is not given up")
def _never_given_up() -> list[Patch]:
    right = take_result

    def found(*given: Any) -> Any:
        result = right(*given)
        return TakeResult.NOT_OURS if result is TakeResult.GIVE_UP else result

    return [(member, "take_result", found)]


@_bug("stragglers are waited for without end")
def _no_eviction() -> list[Patch]:
    return [_in_rules(rules.evict_stragglers, lambda _view: None)]


@_bug("failure closes although others could go on")
def _hasty_close() -> list[Patch]:
    right = rules.close_after_failure

    def close(view: View) -> Verdict | None:
        nobody = msgspec.structs.replace(view, settings=msgspec.structs.replace(view.settings, min_nodes=1 << 20))
        return right(nobody)

    return [_in_rules(rules.close_after_failure, close)]


def _in_rules(right: object, wrong: object) -> Patch:
    """The tables of rules with one rule replaced."""
    table = {
        phase: tuple(wrong if rule is right else rule for rule in listed) for phase, listed in rules.RULES.items()
    }
    return (rules, "RULES", table)
