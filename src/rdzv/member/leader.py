"""The leader's duty: keep a mirror of the run, ask the rules, carry out one guarded act, look again.

It has no opinions. Every write carries GUARD (our own key's create revision and the head's mod revision), so a leader that was
paused or cut off cannot do harm: its write is refused and it lists again. An unknown outcome is treated like a refusal.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from ..core import wire
from ..core.acts import Act, Evict, Seal, Sweep, WriteHead
from ..core.model import Head, Phase
from ..core.rules import lead
from ..core.view import View
from ..engines.port import (
    AllCreated,
    Batch,
    Compare,
    Created,
    Delete,
    DeletePrefix,
    Empty,
    Gap,
    LeaseGone,
    List,
    Modified,
    Operation,
    Outcome,
    Put,
)
from ..errors import Unreachable
from ..system.timers import Wakeup, sleep
from .run_mirror import RunMirror

if TYPE_CHECKING:
    from .presence import Presence

BATCH_MAX = 10_000
"""Lines of a rank table per transaction, where the engine would allow more: so that none takes it long.

Lines that go ahead are told apart from the head that makes them count, which is one notice more for each member.
"""
RUN_LEASE_S = 24 * 3600.0
"""How long the records of a run outlive its last member."""
OUT_OF_TOUCH_S = 1.0
"""An answer that took longer, or is older, does not show who is there now. A third of the time members have to come back."""
JUDGING_S = 5e-6
"""Pause per member after each look, so that a storm of joins costs a few looks and not one each."""


class _Stale(Exception):
    """What we know may be out of date: list again."""


class Leader:
    """Leads while it runs. `idle` and `progress` tell the heartbeat that it is not stuck."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._session = presence.session
        self._node = presence.node
        self._keys = presence.keys
        self._bell = Wakeup(presence.node)
        self._pending: deque[Batch] = deque()
        self._failed: BaseException | None = None
        self._drains_at: float | None = None
        self._listed_at = 0.0
        self._was_cut_off = False
        """The engine has not answered us since we last listed."""
        self.mirror: RunMirror | None = None
        self.reason = ""
        self.idle = False
        self.progress = 0

    async def run(self) -> None:
        """Until cancelled; raises EngineReset."""
        while True:
            try:
                await self._reign()
            except (Gap, _Stale):
                pass
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
            # Perhaps everybody was: all are given their time to come back anew.
            self._presence.known_at = self._listed_at
            self._was_cut_off = False
        mirror = self.mirror = RunMirror(self._keys, listed.reads[-1], listed.revision)
        self._pending.clear()
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
        """All of the run at one revision. Settings that we have just made are put under the run's lease on the way."""
        presence, everything = self._presence, List(self._keys.group)
        founds, presence.founds = presence.founds, False
        if not founds:
            return await self._session.txn(then=[everything])
        settings = Put(self._keys.settings, wire.encode(presence.agreed), await self._new_run_lease())
        untouched: list[Compare] = [presence.own_guard, Modified(self._keys.settings, presence.created)]
        try:
            return await self._session.txn(untouched, [settings, everything], [everything])
        except LeaseGone:
            raise _Stale from None

    async def _pump(self, since: int) -> None:
        watch = self._session.watch([self._keys.group], since)
        try:
            async for batch in watch:
                self._pending.append(batch)
                self._bell.ring()
        except Exception as error:  # noqa: BLE001  Raised again by the duty, which waits for this bell.
            self._failed = error
            self._bell.ring()
        finally:
            await watch.aclose()

    async def _look(self, mirror: RunMirror) -> None:
        """Judge once; act, or wait for something to change."""
        self._catch_up(mirror)
        await self._keep_run_lease(mirror)
        view = self._view(mirror)
        verdict = lead(view)
        self.reason = verdict.reason
        if verdict.act is not None:
            if view.head is None and view.reports and self._node.now() - self._listed_at > OUT_OF_TOUCH_S:
                # Whether somebody has not come back is for an engine to say that answers now (T15).
                raise _Stale
            if not self._presence.is_fresh:
                await self._rest(self._presence.settings.lease / 10)
                raise _Stale
            outcome = await self._carry_out(verdict.act, verdict.reason, view)
            await self._await_revision(mirror, outcome.revision)
            return
        await self._rest(verdict.look_again_s)
        await sleep(self._node, len(mirror.members) * JUDGING_S)

    async def _rest(self, timeout_s: float | None) -> None:
        """Idle until something happens. A little longer than asked, since clocks round down."""
        self.idle = True
        await self._bell.wait(None if timeout_s is None else max(timeout_s, 0.0) + 0.001)
        self.idle = False

    def _catch_up(self, mirror: RunMirror) -> None:
        while self._pending:
            batch = self._pending.popleft()
            mirror.apply(batch)
            self._show(mirror, batch.revision)
        if self._failed is not None:
            raise self._failed
        if self._presence.over is not None:
            raise self._presence.over

    def _show(self, mirror: RunMirror, revision: int) -> None:
        """Our presence sees the head, unless our key is gone: that we must hear before what the others did since (T10)."""
        own = mirror.members.get(self._presence.id)
        if own is not None and own.created == self._presence.created:
            self._presence.sight.show(mirror.head_item, revision)

    async def _await_revision(self, mirror: RunMirror, revision: int) -> None:
        """Do not judge before our own write is in what we judge."""
        deadline = self._node.now() + self._presence.settings.lease / 3
        while mirror.revision < revision:
            await self._bell.wait(deadline - self._node.now())
            self._catch_up(mirror)
            if mirror.revision < revision and self._node.now() >= deadline:
                raise _Stale

    def _view(self, mirror: RunMirror) -> View:
        presence = self._presence
        view = mirror.view(
            settings=presence.agreed,
            me=presence.id,
            durable=self._session.durable,
            known_s=self._node.now() - presence.known_at,
            ages=presence.sight.ages(),
            incarnation=presence.settings.incarnation,
            fresh=self._node.token(),
        )
        if not view.drains:
            self._drains_at = None
            return view
        if self._drains_at is None:
            self._drains_at = self._node.now()
        return msgspec.structs.replace(view, drain_age_s=self._node.now() - self._drains_at)

    # ---- acts

    async def _carry_out(self, act: Act, reason: str, view: View) -> Outcome:
        if isinstance(act, WriteHead):
            return await self._write_head(act.head, reason, view)
        if isinstance(act, Seal):
            return await self._seal(act, reason, view)
        if isinstance(act, Evict):
            return await self._evict(act, view)
        return await self._sweep(act, view)

    def _guard(self, view: View) -> list[Compare]:
        presence = self._presence
        return [
            Created(self._keys.member(presence.id), presence.created),
            Modified(self._keys.head, view.head_modified),
        ]

    async def _txn(self, compares: list[Compare], writes: list[Operation]) -> Outcome:
        try:
            outcome = await self._session.txn(compares, writes)
        except LeaseGone:
            raise _Stale from None
        self.progress += 1
        if not outcome.succeeded:
            raise _Stale
        return outcome

    async def _write_head(self, head: Head, reason: str, view: View) -> Outcome:
        lease = self._presence.run_lease
        guard = self._guard(view)
        if head.phase is Phase.CLOSED:
            lease = await self._session.grant(self._presence.agreed.closed_for)
            # A close is final, so it must not overlook somebody who came meanwhile and could have gone on.
            guard.append(Empty(self._keys.members, view.revision))
        writes: list[Operation] = [
            Put(self._keys.head, wire.encode(head), lease),
            self._presence.journal(head, reason),
        ]
        return await self._txn(guard, writes)

    async def _seal(self, act: Seal, reason: str, view: View) -> Outcome:
        """T6. The lines go ahead in batches; only the last transaction, which checks all members, makes them count."""
        keys, session = self._keys, self._session
        began_at = self._node.now()
        lines: list[Operation] = [
            Put(keys.entry(act.head.table, id), wire.encode(line), self._presence.run_lease)
            for id, line in act.entries.items()
        ]
        came = [line.name for line in act.entries.values() if line.since == act.head.number]
        gone = [line.name for id, line in view.entries.items() if id not in act.entries]
        writes: list[Operation] = [
            Put(keys.head, wire.encode(act.head), self._presence.run_lease),
            self._presence.journal(act.head, reason, came, gone),
        ]
        if act.former_table:
            writes += [DeletePrefix(keys.table(act.former_table)), DeletePrefix(keys.kv(act.former_table))]
        room = min(session.writes_max, BATCH_MAX)
        while len(lines) + len(writes) > room:
            await self._txn(self._guard(view), lines[:room])
            del lines[:room]
        if self._node.now() - began_at > self._presence.settings.lease / 3:
            raise _Stale
        return await self._txn([*self._guard(view), *self._members_unchanged(act, view)], [*lines, *writes])

    def _members_unchanged(self, act: Seal, view: View) -> list[Compare]:
        """G4: every member sealed in lives. Where an engine cannot compare so many, rank 0 stands for all and `seen` tells."""
        chosen = {self._keys.member(id): line.created for id, line in act.entries.items()}
        first = self._keys.member(act.first)
        if len(chosen) + 3 > self._session.compares_max:
            chosen = {first: chosen[first]}
        return [AllCreated(chosen), Modified(first, view.members[act.first].modified)]

    async def _evict(self, act: Evict, view: View) -> Outcome:
        for id in act.ids:
            key = self._keys.member(id)
            unchanged = Modified(key, view.members[id].modified)
            outcome = await self._txn([*self._guard(view), unchanged], [Delete(key), Delete(self._keys.ask(id))])
        return outcome

    async def _sweep(self, act: Sweep, view: View) -> Outcome:
        writes: list[Operation] = []
        for table in act.tables:
            writes += [DeletePrefix(self._keys.table(table)), DeletePrefix(self._keys.kv(table))]
        return await self._txn(self._guard(view), writes[: self._session.writes_max])

    async def _keep_run_lease(self, mirror: RunMirror) -> None:
        """T12: all that outlives its writer hangs on one lease, so that a run whose members all die does not stay for ever."""
        presence = self._presence
        settings = mirror.settings
        if settings is None:
            # Expired or removed under us: whoever comes next would agree on settings of its own.
            writes: list[Operation] = [Put(self._keys.settings, wire.encode(presence.agreed), await self._new_run_lease())]
            modified = 0
        elif settings.lease:
            presence.run_lease = settings.lease
            return
        else:
            writes = [Put(self._keys.settings, settings.value, await self._new_run_lease())]
            modified = settings.modified
        own = Created(self._keys.member(presence.id), presence.created)
        outcome = await self._txn([own, Modified(self._keys.settings, modified)], writes)
        await self._await_revision(mirror, outcome.revision)

    async def _new_run_lease(self) -> int:
        self._presence.run_lease = await self._session.grant(RUN_LEASE_S)
        return self._presence.run_lease
