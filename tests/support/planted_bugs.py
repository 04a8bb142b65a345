"""Deliberate defects, to show that the simulator finds them: a checker that cannot fail is worth nothing.

Each replaces small functions of the product by wrong ones while it is planted (`BUGS`, at the end).
`PYTHONPATH=tests python -m support.planted_bugs "seals below quorum" --seed 0` shows one caught, and `--table` alone makes
the table of docs/track-record.md: the first seed that catches each.
"""

from __future__ import annotations

import multiprocessing
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import msgspec

from rdzv.config import settings as settings_module
from rdzv.core import (
    choice,
    drain_notice,
    futile,
    member,
    member_events,
    quarantine,
    ranks,
    recovery,
    rules,
    topology,
    view,
    wire,
)
from rdzv.core.acts import Evict, Verdict, close_head
from rdzv.core.keys import Keys
from rdzv.core.member_rules import TakeResult, take_result
from rdzv.core.model import CauseKind, Head, MemberRecord, Phase, RankEntry, Reach, WorkerRanks
from rdzv.core.view import LiveMember, View
from rdzv.engines.leases import Leases
from rdzv.engines.port import Batch, Created, EngineReset, Gap, Get, LeaseGone, List, Order, Outcome, Put
from rdzv.errors import Unreachable
from rdzv.member import heir, registration
from rdzv.member.head_tracker import HeadTracker
from rdzv.member.heir import Heir
from rdzv.member.leader import Leader
from rdzv.member.member import Member
from rdzv.member.presence import Look, Presence
from rdzv.member.run_mirror import RunMirror
from rdzv.member.store import AsyncStore
from rdzv.system.timers import sleep
from rdzv.testing.explore import explore
from rdzv.testing.sim import main, simulate
from support.explored_bugs import EXPLORED_BUGS

Patch = tuple[object, str, Any]
"""An owner, its attribute, and the wrong value for it."""


class PlantedBug(NamedTuple):
    """A defect, and the guarantee (or transaction) of docs/protocol.md that it breaks."""

    breaks: str
    patches: list[Patch]
    in_broken_rounds: bool = False
    """The bug is looked for in the scenarios of `--broken`: only these have it."""
    noticed: bool = False
    """The same for those of `--noticed`."""

    @property
    def scenarios(self) -> dict[str, bool]:
        """The arguments of `simulate` for the scenarios that may have it."""
        return {"broken": self.in_broken_rounds, "noticed": self.noticed}


# The right functions, which some of the wrong ones call.
_right_view, _right_ages, _right_write_head = RunMirror.view, HeadTracker.ages, Presence.write_head
_right_restored_head, _right_away_s, _right_changes = recovery.restored_head, member.away_s, Leader.changes
_right_hang_up, _right_stays = Leases.hang_up, View.stays
_right_close_run, _right_look_again, _right_examine = Presence.close_run, Presence.look_again, Presence.examine


_right_give_notice = drain_notice.give_notice


def _forget_rounds(made: View) -> Reach | None:
    found = futile.next_reach(made)
    return None if found is None else msgspec.structs.replace(found, rounds=min(found.rounds, 1))


def _wait_for_all(made: View) -> Verdict | None:
    return _right_give_notice(msgspec.structs.replace(made, call_age_s=0.0))


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
    return call if begun is None else self.now() - begun, sealed, grown


async def _write_and_note(self: Presence, head: Head, *given: Any, **operations: Any) -> Outcome:
    _calls_started[head.run, head.call_seq] = self.node.now()
    return await _right_write_head(self, head, *given, **operations)


async def _write_instant(self: Presence, head: Head, *given: Any, **operations: Any) -> Outcome:
    with_instant = msgspec.structs.replace(head, seen=int(self.node.now()))
    return await _right_write_head(self, with_instant, *given, **operations)


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


async def _changes_after_gaps(self: Leader, since: int) -> AsyncIterator[Batch]:
    while True:
        watch = _right_changes(self, since)
        try:
            async for batch in watch:
                yield batch
        except Gap:
            since = (await self.session.txn(then=[])).revision
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


def _hide_losses(view: View) -> Verdict | None:
    return None if view.lost else rules.break_round(view)


def _close_hastily(view: View) -> Verdict | None:
    settings = msgspec.structs.replace(view.settings, min_nodes=1 << 20)
    return rules.close_after_failure(msgspec.structs.replace(view, settings=settings))


def _well(record: MemberRecord) -> MemberRecord:
    return msgspec.structs.replace(record, unhealthy="")


def _evict_leader_anyway(view: View) -> Verdict:
    """Whether this member has given up the round or not."""
    leader = min(view.members.values(), key=lambda live: live.created)
    return Verdict(Evict((leader.id,), view.linger_s / 4), "it may be dead")


def _blamed_at_the_break(view: View) -> set[str]:
    """Hosts that the cause names: those that were lost later are overlooked."""
    cause = None if view.head is None else view.head.cause
    return {one.host for one in view.vanished if cause is not None and one.name in cause.members}


def _kept_out_always(view: View) -> dict[str, LiveMember]:
    return {id: live for id, live in view.members.items() if live.record.host in view.quarantined}


_hung_up: set[int] = set()
"""Leases whose connection was lost once."""


def _hang_up_and_note(self: Leases, lease: int, linger_s: float, *, process_ended: bool = False) -> None:
    _hung_up.add(lease)
    _right_hang_up(self, lease, linger_s, process_ended=process_ended)


def _rule(right: object, wrong: object) -> Patch:
    """The tables of rules with one rule replaced."""
    table = {phase: tuple(wrong if rule is right else rule for rule in rows) for phase, rows in rules.RULES.items()}
    return (rules, "RULES", table)


_one_store: Patch = (Keys, "kv", lambda self, _table: f"{self.run}kv/all/")

BUGS: dict[str, PlantedBug] = {
    "seals below quorum": PlantedBug("G2", [(View, "fitting", _fitting)]),
    "former leader's write is accepted": PlantedBug("G8", [(Leader, "guard", lambda _self, _view: [])]),
    "ghost is sealed in": PlantedBug("G4", [(Leader, "members_unchanged", lambda _self, _act, _view: [])]),
    "rank table of another attempt is used": PlantedBug("G2", [(RunMirror, "view", _same_table)]),
    "loss is not published": PlantedBug("G6", [_rule(rules.break_round, _hide_losses)]),
    "last-call age is taken from another machine's clock": PlantedBug("G10", [
        (HeadTracker, "ages", _foreign_ages),
        (Presence, "write_head", _write_and_note),
    ]),
    "an instant is written": PlantedBug("G10", [(Presence, "write_head", _write_instant)]),
    "round number is reused after a restart": PlantedBug("G3", [
        (recovery, "restored_head", _same_era),
        (recovery, "next_era", lambda view: view.head.next_era),
    ]),
    "engine that came back is not told": PlantedBug("G7", [(member, "reports", lambda _state: (None, None, None))]),
    "spare disturbs the round": PlantedBug("G7", [(rules, "useful_newcomers", lambda view: (view.newcomers, "", None))]),
    "done member blocks re-forming": PlantedBug("G5", [
        (View, "stays", lambda self, live: not self.is_draining(live) and live.record.host not in self.banned)
    ]),
    "success closes too early": PlantedBug("G9", [_rule(rules.close_after_success, _close_early)]),
    "close ends a later incarnation": PlantedBug("G8", [
        (Presence, "close_run", _close_any),
        (Member, "insist", _insist),
        (Member, "check", lambda *_: None),
    ]),
    "settings mismatch is ignored": PlantedBug("T1", [(settings_module, "differences", lambda _mine, _theirs: [])]),
    "settings are taken for one's own without a compare": PlantedBug("T1", [
        (registration, "Equals", lambda _key, _value: Created("nothing", 0))
    ]),
    "one who came later is watched": PlantedBug("G5", [(Presence, "look_again", _watch_newest)]),
    "store of the old round is visible": PlantedBug("G8", [_one_store]),
    "late writer reaches the store": PlantedBug("G8", [
        (Presence, "entry_guard", lambda self, _table: Created(self.keys.settings + "/none", 0)),
        (AsyncStore, "end", lambda _self, _reason: None),
        _one_store,
    ]),
    "watch gap is not re-listed": PlantedBug("G6", [(Presence, "look_again", _look_at_nothing)]),
    "leader's gap is not re-listed": PlantedBug("G5", [(Leader, "changes", _changes_after_gaps)]),
    "two worlds from two engines": PlantedBug("T16", [(member, "is_elsewhere", lambda _state, _place: False)]),
    "evicted member acts": PlantedBug("G8", [
        (Presence, "heartbeat", _take_lease_again),
        (Presence, "why_gone", _say_reset),
        (Presence, "own_guard", property(lambda _self: Created("nothing", 0))),
    ]),
    "world is given from memory": PlantedBug("G3", [(Presence, "examine", _examine_memory)]),
    "ready is not tied to a round": PlantedBug("G3", [
        (View, "is_ready", lambda self, live: self.stays(live)),
        (View, "stragglers", property(lambda _view: [])),
    ]),
    "engine's return is not waited for": PlantedBug("G7", [(View, "young", property(lambda _view: False))]),
    "outage is told at once": PlantedBug("G7", [(member, "away_s", lambda state, now: _right_away_s(state, now) * 1000.0)]),
    "round broken before it was taken is not given up": PlantedBug("G5", [(member, "take_result", _never_give_up)]),
    "stragglers are waited for without end": PlantedBug("G5", [_rule(rules.evict_stragglers, lambda _view: None)]),
    "worker ranks are those of a world of one's own": PlantedBug("G2", [
        (rules, "worker_ranks", lambda shares: [WorkerRanks(0, count, 0, count) for _, count in shares])
    ]),
    "address of the former round is used again": PlantedBug("G1", [
        (view, "shares_address", lambda _announced, _head: False)
    ]),
    "segments are cut across racks": PlantedBug("G2", [
        (owner, "neighbourhood", lambda _path: "") for owner in (topology, ranks, choice)
    ]),
    "fence of a restarted server begins at what it is told": PlantedBug("fences", [
        (rules, "next_fence", lambda made: max(made.head.fence, *(one.record.fence for one in made.members.values())) + 1)
    ]),
    "stragglers are taken for dead without asking": PlantedBug("T8", [(Leader, "is_away", lambda _self, _key, _act: [])]),
    "a lost connection is taken for the end of a process": PlantedBug("T8", [
        (Leases, "away_s", lambda _self, lease: 9.9 if lease in _hung_up else -1.0),
        (Leases, "hang_up", _hang_up_and_note),
    ], in_broken_rounds=True),
    "unhealthy member is sealed in": PlantedBug("G4", [
        (View, "stays", lambda self, live: _right_stays(self, msgspec.structs.replace(live, record=_well(live.record))))
    ], in_broken_rounds=True),
    "quarantined host is let in without need": PlantedBug("T17", [
        (View, "kept_out", property(lambda _view: {}))
    ], in_broken_rounds=True),
    "strikes are counted at the break only": PlantedBug("T17", [
        (quarantine, "blamed", _blamed_at_the_break)
    ], in_broken_rounds=True),
    "quarantined host is kept out of a quorum": PlantedBug("G5", [
        (View, "kept_out", property(_kept_out_always))
    ], in_broken_rounds=True),
    "leader is taken for dead without asking": PlantedBug("T8", [(Heir, "is_away", lambda _self, _key, _act: [])]),
    "leader of a running round is evicted": PlantedBug("T8", [
        (heir, "is_left_alone", lambda _head, _left: True),
        (heir, "evict_leader", _evict_leader_anyway),
    ], in_broken_rounds=True),
    "failure closes although others could go on": PlantedBug("G9", [_rule(rules.close_after_failure, _close_hastily)]),
    "round is broken before all have saved": PlantedBug("T7", [(drain_notice, "unsaved", lambda _view: [])], noticed=True),
    "drain is not told to the workers": PlantedBug("T7", [(drain_notice, "give_notice", lambda _view: None)], noticed=True),
    "notice that is not answered has no end": PlantedBug("G6", [(drain_notice, "give_notice", _wait_for_all)], noticed=True),
    "rounds without progress are counted by each leader anew": PlantedBug("T11", [
        (rules, "next_reach", _forget_rounds)
    ], noticed=True),
    "growth counts as a round without progress": PlantedBug("T11", [(futile, "FAILURES", frozenset(CauseKind))], noticed=True),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant that defect for the duration of the block."""
    if name not in BUGS:
        raise ValueError(f"no planted bug is called {name!r}; there are: {', '.join(sorted(BUGS))}")
    undo: list[Patch] = []
    try:
        for target, attribute, wrong in BUGS[name].patches:
            # From __dict__, so that a property or function comes back as what it was.
            undo.append((target, attribute, vars(target)[attribute]))
            setattr(target, attribute, wrong)
        yield
    finally:
        for target, attribute, right in reversed(undo):
            setattr(target, attribute, right)


# ---- by which seed, and how soon


def first_caught(name: str, seeds: int, *, steered: bool = False) -> tuple[int, str] | None:
    """Return the first seed that catches the bug, and the checkers that fire; None: none of them does."""
    with planted(name):
        for seed in range(seeds):
            wrong = simulate(seed, **({"steered": True} if steered else BUGS[name].scenarios)).wrong
            if wrong:
                names = {one.partition(" ")[0] for one in wrong}
                # One report is no checker's: that the run did not come to an end.
                return seed, ", ".join(sorted("no end" if name == "the" else name for name in names))
    return None


def explored(name: str) -> str:
    """Return how many states exploration meets until it finds the bug, and the checkers that fire; "-": not explored."""
    if name not in EXPLORED_BUGS:
        return "-"
    with planted(name):
        report = explore(EXPLORED_BUGS[name][0], choices_max=20_000)
    problem = report.wrong[0][0] if report.wrong else "none"
    checkers = sorted(set(re.findall(r"(?:^|; )([GT][0-9]+|fences) ", problem)))
    return f"{report.states:,} states: {', '.join(checkers) or problem}"


def seeds_cell(name: str, seeds: int, *, steered: bool = False) -> str:
    """Return which seed finds the bug, and how; "-": steered seeds have no such scenarios."""
    options = "".join(f" with `--{option}`" for option, chosen in BUGS[name].scenarios.items() if chosen)
    if steered and options:
        return "-"
    caught = first_caught(name, seeds, steered=steered)
    return f"none of {seeds}" if caught is None else f"{caught[0]}{options}: {caught[1]}"


def table_row(seeds: int, name: str) -> str:
    """Return one line of the table: the bug, the guarantee it breaks, and how each way of searching catches it."""
    plain, steered = seeds_cell(name, seeds), seeds_cell(name, seeds, steered=True)
    return f"| {' | '.join([name, BUGS[name].breaks, plain, steered, explored(name)])} |"


def table(seeds: int = 300, jobs: int = 2) -> Iterator[str]:
    """Yield the lines of the table, in Markdown."""
    yield "| planted bug | breaks | plain seed: checkers | steered seed: checkers | exploration |"
    yield "|---|---|---|---|---|"
    with multiprocessing.Pool(jobs) as pool:
        yield from pool.imap(partial(table_row, seeds), BUGS)


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        sys.stdout.writelines(f"{line}\n" for line in table())
    else:
        with planted(sys.argv[1]):
            sys.exit(main(sys.argv[2:]))
