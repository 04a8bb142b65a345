"""Deliberate defects, to show that the simulator finds them: a checker that cannot fail is worth nothing.

Each replaces small functions of the product by wrong ones while it is planted (`BUGS`, at the end).
`PYTHONPATH=tests python -m support.planted_bugs "seals below quorum" --seed 0` shows one caught.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from rdzv.config import settings as settings_module
from rdzv.core import member, member_events, recovery, rules, view, wire
from rdzv.core.acts import Verdict, close_head
from rdzv.core.keys import Keys
from rdzv.core.member_rules import TakeResult, take_result
from rdzv.core.model import Head, Phase, RankEntry, WorkerRanks
from rdzv.core.view import View
from rdzv.engines.port import Created, EngineReset, Gap, Get, LeaseGone, List, Order, Outcome, Put
from rdzv.errors import Unreachable
from rdzv.member import registration
from rdzv.member.head_tracker import HeadTracker
from rdzv.member.leader import Leader
from rdzv.member.member import Member
from rdzv.member.presence import Look, Presence
from rdzv.member.run_mirror import RunMirror
from rdzv.member.store import AsyncStore
from rdzv.system.timers import sleep
from rdzv.testing.sim import main

Patch = tuple[object, str, Any]
"""An owner, its attribute, and the wrong value for it."""

# The right functions, which some of the wrong ones call.
_right_view, _right_ages, _right_write_head = RunMirror.view, HeadTracker.ages, Leader.write_head
_right_restored_head, _right_away_s = recovery._restored_head, member.away_s
_right_close_run, _right_look_again, _right_examine = Presence.close_run, Presence.look_again, Presence.examine


def _fitting(self: View, count: int) -> int:
    return min(count, self.settings.max_nodes) // self.settings.unit * self.settings.unit


def _same_table(self: RunMirror, **given: Any) -> View:
    made = _right_view(self, **given)
    number = made.head.number if made.head is not None else 0
    return msgspec.structs.replace(made, fresh=f"table{number + 1}")


_calls_started: dict[tuple[str, int], float] = {}
"""When each last call began, by the clock of the leader that began it."""


def _foreign_ages(self: HeadTracker) -> tuple[float, float, float]:
    call, sealed, grown = _right_ages(self)
    begun = None if self.head is None else _calls_started.get((self.head.run, self.head.call_seq))
    return call if begun is None else self._now() - begun, sealed, grown


async def _write_and_note(self: Leader, head: Head, reason: str, view: View) -> Outcome:
    _calls_started[head.run, head.call_seq] = self._node.now()
    return await _right_write_head(self, head, reason, view)


async def _write_instant(self: Leader, head: Head, reason: str, view: View) -> Any:
    return await _right_write_head(self, msgspec.structs.replace(head, seen=int(self._node.now())), reason, view)


def _same_era(view: View, told: Any, phase: Phase, call: Any, cause: Any) -> Head:
    return msgspec.structs.replace(_right_restored_head(view, told, phase, call, cause), next_era=told.era)


def _close_early(view: View) -> Verdict | None:
    if not view.done or view.head is None:
        return None
    head = msgspec.structs.replace(view.head, size=len(view.done))
    return rules.close_after_success(msgspec.structs.replace(view, head=head))


async def _close_any(self: Presence, cause: Any, _holds: Any) -> bool:
    with suppress(Exception):
        return await _right_close_run(self, cause, None)
    lease = await self.session.grant(60.0)
    item = (await self.session.txn(then=[Get(self.keys.head)])).item(0)
    if item is None:
        return False
    closed = close_head(wire.decode(Head, item.value), cause)
    await self.session.txn(then=[Put(self.keys.head, wire.encode(closed), lease)])
    return True


async def _insist(self: Member, _call: str, act: Callable[[Presence], Any]) -> Any:
    while self.presence is None:
        await self.bell.wait(1.0)
    return await act(self.presence)


async def _watch_newest(self: Presence) -> None:
    """Two members that watch each other wait for ever when all earlier ones have gone."""
    await _right_look_again(self)
    if self.predecessor:
        others = await self.read_patiently([List(self.keys.members, Order.NEWEST)])
        keys = [item.key for item in others.reads[0] if item.key != self.keys.member(self.id)]
        self.predecessor = keys[0] if keys else self.predecessor


async def _look_at_nothing(self: Presence) -> None:
    if self.predecessor or self.leader is not None:
        self.since = (await self.read_patiently([])).revision
    else:
        await _right_look_again(self)


async def _pump_on(self: Leader, since: int) -> None:
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


async def _take_lease_again(self: Presence) -> None:
    """The member takes a new lease and goes on under its old id, as if nothing had happened."""
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


async def _say_reset(self: Presence) -> Exception:
    await sleep(self.node, 0.5)
    return EngineReset("again")


async def _examine_memory(self: Presence, table: str) -> Look:
    head = self.tracker.head
    outcome = await self.session.txn(then=[Get(self.keys.entry(table, self.id))])
    item = outcome.item(0)
    if item is not None and head is not None and head.phase is Phase.SEALED:
        await sleep(self.node, 0.2)
        return Look(head, item, wire.decode(RankEntry, item.value), outcome.revision)
    return await _right_examine(self, table)


def _never_give_up(*given: Any) -> Any:
    result = take_result(*given)
    return TakeResult.NOT_OURS if result is TakeResult.GIVE_UP else result


def _close_hastily(view: View) -> Verdict | None:
    settings = msgspec.structs.replace(view.settings, min_nodes=1 << 20)
    return rules.close_after_failure(msgspec.structs.replace(view, settings=settings))


def _rule(right: object, wrong: object) -> Patch:
    """The tables of rules with one rule replaced."""
    table = {phase: tuple(wrong if rule is right else rule for rule in rows) for phase, rows in rules.RULES.items()}
    return (rules, "RULES", table)


_one_store: Patch = (Keys, "kv", lambda self, _table: f"{self.run}kv/all/")

BUGS: dict[str, list[Patch]] = {
    "seals below quorum": [(View, "fitting", _fitting)],
    "former leader's write is accepted": [(Leader, "guard", lambda _self, _view: [])],
    "ghost is sealed in": [(Leader, "members_unchanged", lambda _self, _act, _view: [])],
    "rank table of another attempt is used": [(RunMirror, "view", _same_table)],
    "loss is not published": [(rules, "_loss", lambda _view: None)],
    "last-call age is taken from another machine's clock": [
        (HeadTracker, "ages", _foreign_ages),
        (Leader, "write_head", _write_and_note),
    ],
    "an instant is written": [(Leader, "write_head", _write_instant)],
    "round number is reused after a restart": [
        (recovery, "_restored_head", _same_era),
        (recovery, "next_era", lambda view: view.head.next_era),
    ],
    "engine that came back is not told": [(member, "reports", lambda _state: (None, None, None))],
    "spare disturbs the round": [(rules, "_useful", lambda view: (view.newcomers, "", None))],
    "done member blocks re-forming": [
        (View, "_stays", lambda self, live: not self.is_draining(live) and live.record.host not in self.banned)
    ],
    "success closes too early": [_rule(rules.close_after_success, _close_early)],
    "close ends a later incarnation": [
        (Presence, "close_run", _close_any),
        (Member, "insist", _insist),
        (Member, "check", lambda *_: None),
    ],
    "settings mismatch is ignored": [(settings_module, "differences", lambda _mine, _theirs: [])],
    "settings are taken for one's own without a compare": [
        (registration, "Equals", lambda _key, _value: Created("nothing", 0))
    ],
    "one who came later is watched": [(Presence, "look_again", _watch_newest)],
    "store of the old round is visible": [_one_store],
    "late writer reaches the store": [
        (Presence, "entry_guard", lambda self, _table: Created(self.keys.settings + "/none", 0)),
        (AsyncStore, "end", lambda _self, _reason: None),
        _one_store,
    ],
    "watch gap is not re-listed": [(Presence, "look_again", _look_at_nothing)],
    "leader's gap is not re-listed": [(Leader, "_pump", _pump_on)],
    "two worlds from two engines": [(member, "is_elsewhere", lambda _state, _place: False)],
    "evicted member acts": [
        (Presence, "heartbeat", _take_lease_again),
        (Presence, "why_gone", _say_reset),
        (Presence, "own_guard", property(lambda _self: Created("nothing", 0))),
    ],
    "world is given from memory": [(Presence, "examine", _examine_memory)],
    "ready is not tied to a round": [
        (View, "is_ready", lambda self, live: self._stays(live)),
        (View, "stragglers", property(lambda _view: [])),
    ],
    "engine's return is not waited for": [(View, "young", property(lambda _view: False))],
    "outage is told at once": [(member, "away_s", lambda state, now: _right_away_s(state, now) * 1000.0)],
    "round broken before it was taken is not given up": [(member, "take_result", _never_give_up)],
    "stragglers are waited for without end": [_rule(rules.evict_stragglers, lambda _view: None)],
    "worker ranks are those of a world of one's own": [
        (rules, "worker_ranks", lambda shares: [WorkerRanks(0, count, 0, count) for _, count in shares])
    ],
    "address of the former round is used again": [(view, "shares_address", lambda _announced, _head: False)],
    "failure closes although others could go on": [_rule(rules.close_after_failure, _close_hastily)],
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant that defect for the duration of the block."""
    if name not in BUGS:
        raise ValueError(f"no planted bug is called {name!r}; there are: {', '.join(sorted(BUGS))}")
    undo: list[Patch] = []
    try:
        for target, attribute, wrong in BUGS[name]:
            # From __dict__, so that a property or function comes back as what it was.
            undo.append((target, attribute, vars(target)[attribute]))
            setattr(target, attribute, wrong)
        yield
    finally:
        for target, attribute, right in reversed(undo):
            setattr(target, attribute, right)


if __name__ == "__main__":
    with planted(sys.argv[1]):
        sys.exit(main(sys.argv[2:]))
