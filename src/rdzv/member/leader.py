"""The leader: it keeps a mirror of the run, asks the rules, carries out one guarded act, and looks again.

The rules decide; the leader only acts. Everything that it must see lies under one prefix (`group/`), so that one watch
shows the run in the order of revisions, and each view is the run at one revision, on every engine.

Every write carries GUARD (create revision of the leader's own key, modify revision of the head), so a leader that was
paused or cut off can do no harm: its write is refused, and it lists again. An unknown outcome is treated like a
refusal.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import msgspec

from ..config.settings import NODES_MAX
from ..core import wire
from ..core.acts import Act, Evict, Seal, StrikeHost, Sweep, Verdict, WriteHead, must_overlook_nobody
from ..core.model import Head
from ..core.rules import lead
from ..core.view import View
from ..engines import port
from ..engines.port import Compare, DeletePrefix, LeaseGone, Modified, Operation, Outcome, Put
from ..errors import Unreachable
from ..system.timers import Wakeup, sleep
from .run_mirror import RunMirror

if TYPE_CHECKING:
    from .presence import Presence

BATCH_MAX = NODES_MAX
"""Entries of a rank table per transaction where the engine would allow more, so that no transaction takes it long.

Each further transaction costs every member one more watch event, because its entry is shown before the head that names it.
So the largest run that settings allow is sealed in one."""
RUN_LEASE_S = 24 * 3600.0
"""How long the records of a run outlive its last member."""
OUT_OF_TOUCH_S = 1.0
"""An answer that took longer, or is older, does not show who is there now.

A third of the time that members have to come back to an emptied engine (BACK_S)."""
JUDGING_S = 5e-6
"""Pause per member after each look, so that a storm of joins costs a few looks and not one each."""


class _Over(Exception):
    """The presence has ended."""


class _Stale(Exception):
    """The mirror may be out of date: list again."""


class Leader:
    """Leads while it runs. `idle` and `progress` tell the heartbeat that it is not stuck."""

    def __init__(self, presence: Presence, made_settings: bool) -> None:
        self._presence = presence
        self._made_settings = made_settings
        """This member put the run's settings when it registered, and they hang on no lease yet."""
        self.session = presence.session
        self._node = presence.node
        self._keys = presence.keys
        self._bell = Wakeup(presence.node)
        self._pending: deque[port.Batch] = deque()
        self._came = 0
        """Changes in the pending batches."""
        self._awaited = 0
        """The bell is not rung for fewer changes."""
        self._failed: BaseException | None = None
        self._drains_at: float | None = None
        self._stalls_at: float | None = None
        self._quorum_at: float | None = None
        self._away_asked_at = -math.inf
        self._listed_at = 0.0
        self._was_cut_off = False
        """The engine has not answered since the last listing."""
        self.mirror: RunMirror | None = None
        self.verdict: Verdict | None = None
        """The last decision. `mirror` stays as it was judged until the act has been answered."""
        self.idle = False
        self.progress = 0

    async def run(self) -> None:
        """Lead until cancelled, or until the presence ends. Raises EngineReset."""
        while True:
            try:
                await self._reign()
            except (port.Gap, _Stale):
                pass
            except _Over:
                return
            except Unreachable:
                self._was_cut_off = True
                self.idle = True
                await sleep(self._node, 0.1 + 0.4 * self._node.jitter())
                self.idle = False

    async def _reign(self) -> None:
        """List once, then follow the watch from there."""
        asked_at = self._node.now()
        listed = await self._list()
        self.progress += 1
        self._listed_at = self._node.now()
        if self._was_cut_off or self._listed_at - asked_at > OUT_OF_TOUCH_S:
            self._presence.give_time_to_return()
            self._was_cut_off = False
        mirror = self.mirror = RunMirror(self._keys, listed.reads[-1], listed.revision)
        self._pending.clear()
        self._came = 0
        self._failed = None
        self._show(mirror, listed.revision)
        pump = asyncio.get_running_loop().create_task(self._pump(listed.revision), name="rdzv leader's watch")
        try:
            while True:
                await self._look(mirror)
        finally:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)

    async def _list(self) -> Outcome:
        """List the run at one revision. Settings that this member has just made are put under the run's lease too."""
        presence, everything = self._presence, port.List(self._keys.group)
        made_settings, self._made_settings = self._made_settings, False
        if not made_settings:
            return await self.session.txn(then=[everything])
        settings = Put(self._keys.settings, wire.encode(presence.agreed), await self._new_run_lease())
        untouched: list[Compare] = [presence.own_guard, Modified(self._keys.settings, presence.created)]
        try:
            return await self.session.txn(untouched, [settings, everything], [everything])
        except LeaseGone:
            raise _Stale from None

    def changes(self, since: int) -> port.Watch:
        """Watch everything that the leader must see. A gap means: list again."""
        return self.session.watch([self._keys.group], since)

    async def _pump(self, since: int) -> None:
        changes = self.changes(since)
        try:
            async for batch in changes:
                self._pending.append(batch)
                self._came += len(batch.events)
                if self._came >= self._awaited:
                    self._bell.ring()
        except Exception as error:  # noqa: BLE001  Raised again by `_catch_up`.
            self._failed = error
            self._bell.ring()
        finally:
            await changes.aclose()

    async def _look(self, mirror: RunMirror) -> None:
        """Judge once; act, or wait for something to change."""
        self._catch_up(mirror)
        await self._keep_run_lease(mirror)
        view = self._view(mirror)
        verdict = self.verdict = lead(view)
        if verdict.act is not None:
            if view.head is None and view.reports and self._node.now() - self._listed_at > OUT_OF_TOUCH_S:
                # Only an engine that answers now can tell that a member has not come back (T15, seed 161314).
                raise _Stale
            if not self._presence.is_fresh:
                await self._rest(self._presence.settings.lease / 10)
                raise _Stale
            outcome = await self._carry_out(verdict.act, verdict.reason, view)
            await self._await_revision(mirror, outcome.revision)
            return
        self.progress += 1  # Where changes come all the time, a leader that judges them is hardly ever idle, and not stuck.
        await self._rest(verdict.look_again_s)
        await self._gather(view)

    async def _rest(self, timeout_s: float | None) -> None:
        """Wait until something happens. A little longer than asked, since clocks round down."""
        self.idle = True
        await self._bell.wait(None if timeout_s is None else max(timeout_s, 0.0) + 0.001)
        self.idle = False

    async def _gather(self, view: View) -> None:
        """Pause, so that a storm of joins costs a few looks and not one each. It ends early when a round may be complete.

        Otherwise the last to come would often wait for the end of the pause, which an event loop rounds up to milliseconds.
        """
        self._awaited = view.missing or sys.maxsize
        ends_at = self._node.now() + len(view.members) * JUDGING_S
        while self._came < self._awaited:
            if not await self._bell.wait(ends_at - self._node.now()):
                break
        self._awaited = 0

    def _catch_up(self, mirror: RunMirror) -> None:
        self._came = 0
        while self._pending:
            batch = self._pending.popleft()
            mirror.apply(batch)
            self._show(mirror, batch.revision)
        if self._failed is not None:
            raise self._failed
        if self._presence.is_over:
            raise _Over

    def _show(self, mirror: RunMirror, revision: int) -> None:
        """Show the head to the member, unless its key is gone.

        The member must hear of its eviction before it hears what the others did since (T10.8, scenario H29).
        """
        own = mirror.members.get(self._presence.id)
        if own is not None and own.created == self._presence.created:
            self._presence.show_head(mirror.head_item, revision)

    async def _await_revision(self, mirror: RunMirror, revision: int) -> None:
        """Wait until the mirror shows the leader's own write, so that it does not judge without it."""
        deadline = self._node.now() + self._presence.settings.lease / 3
        while mirror.revision < revision:
            await self._bell.wait(deadline - self._node.now())
            self._catch_up(mirror)
            if mirror.revision < revision and self._node.now() >= deadline:
                raise _Stale

    def _view(self, mirror: RunMirror) -> View:
        presence = self._presence
        view = mirror.view(
            settings=presence.agreed, me=presence.id, durable=self.session.durable,
            known_s=self._node.now() - presence.known_at, ages=presence.tracker.ages(),
            incarnation=presence.settings.incarnation, fresh=self._node.token(),
            place=self.session.place, promised=self.session.life is not None, fence_floor=self.session.fence_floor,
            wall_s=self._node.wall_s(), linger_s=presence.settings.linger if self.session.sees_ends else 0.0,
            away_asked_s=self._node.now() - self._away_asked_at,
        )  # fmt: skip
        if view.head is None and view.fits(view.ready):
            self._quorum_at = self._node.now() if self._quorum_at is None else self._quorum_at
            return msgspec.structs.replace(view, quorum_age_s=self._node.now() - self._quorum_at)
        self._quorum_at = None
        now = self._node.now()
        self._drains_at = (self._drains_at if self._drains_at is not None else now) if view.drains else None
        self._stalls_at = (self._stalls_at if self._stalls_at is not None else now) if view.stalled else None
        if self._drains_at is None and self._stalls_at is None:
            return view
        drain_s = 0.0 if self._drains_at is None else now - self._drains_at
        stall_s = 0.0 if self._stalls_at is None else now - self._stalls_at
        return msgspec.structs.replace(view, drain_age_s=drain_s, stall_age_s=stall_s)

    # ---- acts

    async def _carry_out(self, act: Act, reason: str, view: View) -> Outcome:
        if isinstance(act, WriteHead):
            return await self.write_head(act.head, reason, view)
        if isinstance(act, Seal):
            return await self._seal(act, reason, view)
        if isinstance(act, Evict):
            return await self._evict(act, view)
        if isinstance(act, StrikeHost):
            return await self._strike(act, view)
        return await self._sweep(act, view)

    def guard(self, view: View) -> list[Compare]:
        """Compare the leader's own key and the head it judged: a leader that was paused or cut off is refused."""
        return [self._presence.own_guard, Modified(self._keys.head, view.head_modified)]

    async def _txn(self, compares: list[Compare], writes: list[Operation]) -> Outcome:
        return await self._sure(self.session.txn(compares, writes))

    async def _sure(self, request: Awaitable[Outcome]) -> Outcome:
        """The outcome of a guarded write that took effect."""
        try:
            outcome = await request
        except LeaseGone:
            raise _Stale from None
        self.progress += 1
        if not outcome.succeeded:
            raise _Stale
        return outcome

    async def write_head(self, head: Head, reason: str, view: View) -> Outcome:
        """Write the head that the rules want."""
        guard = self.guard(view)
        if must_overlook_nobody(head, view.head):
            guard.append(port.Empty(self._keys.members, view.revision))
        return await self._sure(self._presence.write_head(head, reason, guard))

    async def _seal(self, act: Seal, reason: str, view: View) -> Outcome:
        """T6.12: seal in one transaction, where the engine takes so many writes.

        Otherwise the entries go ahead in batches, and only the last transaction, which checks all members, makes them
        count. The simulator runs a third of its seeds with six writes per transaction, so that both ways are taken.
        """
        keys, presence = self._keys, self._presence
        began_at = self._node.now()
        entries: list[Operation] = [
            Put(keys.entry(act.head.table, id), wire.encode(entry), presence.run_lease)
            for id, entry in act.entries.items()
        ]
        came = [entry.name for entry in act.entries.values() if entry.since == act.head.number]
        gone = [entry.name for id, entry in view.entries.items() if id not in act.entries]
        former = act.former_table
        swept = [DeletePrefix(keys.table(former)), DeletePrefix(keys.kv(former))] if former else []
        writes_max = self.session.writes_max
        room, last_room = min(writes_max, BATCH_MAX), min(writes_max - len(swept) - 2, BATCH_MAX)  # Head and journal.
        while entries and len(entries) > last_room:
            await self._txn(self.guard(view), entries[:room])
            del entries[:room]
        if self._node.now() - began_at > presence.settings.lease / 3:
            raise _Stale
        guard = [*self.guard(view), *self.members_unchanged(act, view)]
        sealing = presence.write_head(act.head, reason, guard, ahead=entries, behind=swept, came=came, gone=gone)
        return await self._sure(sealing)

    def members_unchanged(self, act: Seal, view: View) -> list[Compare]:
        """Compare that every member sealed in lives (G4).

        Where an engine cannot compare so many keys, rank 0 stands for all. A member that died unseen then breaks the
        round at once, because `seen` shows it.
        """
        chosen = {self._keys.member(id): entry.created for id, entry in act.entries.items()}
        first = self._keys.member(act.first)
        if len(chosen) + 3 > self.session.compares_max:
            chosen = {first: chosen[first]}
        return [port.AllCreated(chosen), Modified(first, view.members[act.first].modified)]

    async def _evict(self, act: Evict, view: View) -> Outcome:
        guard, cases = self.guard(view), []
        for id in act.ids:
            key = self._keys.member(id)
            compares = (*guard, Modified(key, view.members[id].modified), *self.is_away(key, act))
            cases.append(port.Case(compares, (port.Delete(key), port.Delete(self._keys.ask(id)))))
        if act.away_s is None:
            for case in cases:
                outcome = await self._txn([*case.compares], [*case.then])
            return outcome
        # One question for all of them. The last case does nothing: nobody is away, and the view still holds.
        first, *others = (*cases, port.Case(tuple(guard), ()))
        outcome = await self._sure(self.session.txn(first.compares, first.then, instead=others))
        if outcome.case < len(cases):
            return outcome
        self._away_asked_at = self._node.now()
        return msgspec.structs.replace(outcome, revision=view.revision)  # Nothing was written that the mirror will show.

    def is_away(self, key: str, act: Evict) -> list[Compare]:
        """Compare that the process behind the key has ended, if the act asks for that (T8.5)."""
        return [] if act.away_s is None else [port.Away(key, act.away_s)]

    async def _sweep(self, act: Sweep, view: View) -> Outcome:
        prefixes = [prefix(table) for table in act.tables for prefix in (self._keys.table, self._keys.kv)]
        writes: list[Operation] = [DeletePrefix(prefix) for prefix in prefixes[: self.session.writes_max]]
        return await self._txn(self.guard(view), writes)

    async def _strike(self, act: StrikeHost, view: View) -> Outcome:
        """T17.2: note the strike, and the quarantine if there is one, each under a lease of its own."""
        keys, table = self._keys, view.head.table if view.head is not None else ""
        strike = await self.session.grant(act.lasts_s)
        writes: list[Operation] = [Put(keys.strike(act.host, table), wire.encode(act.strike), strike)]
        writes += [port.Delete(keys.strike(act.host, former)) for former in act.replaced]
        if act.quarantine is not None:
            quarantine = await self.session.grant(act.quarantine_s)
            writes.append(Put(keys.quarantine(act.host), wire.encode(act.quarantine), quarantine))
        return await self._txn(self.guard(view), writes)

    async def _keep_run_lease(self, mirror: RunMirror) -> None:
        """T12.2: keep what outlives its writer under one lease, so that a run whose members all die is removed.

        The settings name that lease. They are those of every member (T1.1), so the leader's own replace them if they are
        gone or somebody has overwritten them: the next member to come would be refused, or make settings of its own.
        """
        presence, settings, key = self._presence, mirror.settings, self._keys.settings
        lease, modified = (settings.lease, settings.modified) if settings is not None else (0, 0)
        value = wire.encode(presence.agreed)
        if lease:
            presence.use_run_lease(lease)
            if settings is not None and settings.value == value:
                return
        put = Put(key, value, lease or await self._new_run_lease())
        outcome = await self._txn([presence.own_guard, Modified(key, modified)], [put])
        await self._await_revision(mirror, outcome.revision)

    async def _new_run_lease(self) -> int:
        return self._presence.use_run_lease(await self.session.grant(RUN_LEASE_S))
