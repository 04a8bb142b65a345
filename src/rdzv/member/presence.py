"""A member's presence on one engine instance, under one id: from the join (T1) until its key or the instance ends.

Here are the leased record and its renewal, the one watch that every member has (head, own key, own ask, predecessor), and the
guarded writes a member makes for itself. Deciding is left to `core`; what a presence's end means is left to `member`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any

import msgspec

from ..config.settings import Settings
from ..core import wire
from ..core.acts import close_head, journal_line
from ..core.keys import Keys
from ..core.member import TakeResult, take_result
from ..core.model import (
    NO_ROUND,
    Cause,
    CauseKind,
    DrainRequest,
    Head,
    MemberRecord,
    Phase,
    RankEntry,
    RoundId,
    RoundReport,
)
from ..engines.port import (
    Compare,
    Created,
    Delete,
    EngineReset,
    Event,
    Gap,
    Get,
    Item,
    LeaseGone,
    List,
    Modified,
    Operation,
    Order,
    Outcome,
    Put,
    Session,
)
from ..errors import Banned, Closed, Evicted, SettingsError, Unreachable
from ..system.node import Node
from ..system.timers import Wakeup, sleep
from .head_tracker import HeadTracker, Listener
from .leader import RUN_LEASE_S, Leader
from .registration import Registration


class Presence:
    """See the module's docstring. Made by `begin`, ended by `run` raising."""

    def __init__(
        self,
        session: Session,
        settings: Settings,
        node: Node,
        record: MemberRecord,
        on_head: Listener,
        on_beat: Callable[[], None],
        on_lead: Callable[[], None],
    ) -> None:
        self.session = session
        self.settings = settings
        self.node = node
        self.record = record
        self.over: BaseException | None = None
        """Why this presence has ended, once it has."""
        self._goes = False
        """By itself: then its end is no news, and its last words need the session."""
        self.keys = Keys(settings.run_id)
        self.id = node.token()
        self.known_at = node.now()
        self.sight = HeadTracker(node.now, on_head)
        self.created = 0
        self.agreed = settings.agreed()
        self.lease = 0
        self.run_lease = 0
        self.founds = False
        self.asked = ""
        self.duty: Leader | None = None
        self.renewed_at = node.now()
        self.silent_at: float | None = None
        """Since when no renewal has been answered; None: the last one was."""
        self.trouble = ""
        """What came of the last renewal that was not answered."""
        self.line: RankEntry | None = None
        self.taken_at = 0
        """Revision of the read by which the present round was given."""
        self._entry_created = 0
        self._shown: Item | None = None
        """Our line in a table, if the watch has shown it since `overlook`: as it is at revision `_since`."""
        self._on_beat = on_beat
        self._on_lead = on_lead
        self._ended = Wakeup(node)
        self._predecessor = ""
        self._since = 0
        self._run_renewed_at = node.now()

    # ---- coming

    async def begin(self, holds: RoundReport | None, heard: RoundReport | None, line: RankEntry | None) -> None:
        """T1, with what we tell an emptied engine (T13). After Unreachable it may be called again; other errors are final."""
        self.record = msgspec.structs.replace(self.record, holds=holds, heard=heard, left=NO_ROUND)
        self.line = None if holds is None else line
        arrival = Registration(self)
        while True:
            renewing_at = self.node.now()
            try:
                if not self.lease:
                    self.lease = await self.session.grant(self.settings.lease, presence=True)
                await arrival.come_in()
            except LeaseGone:
                # We were paused between grant and put. Our key may have been there and gone, so it needs another id: one that
                # comes a second time would be taken for its former life.
                self.lease, self.id = 0, self.node.token()
                arrival = Registration(self)
                continue
            except (Closed, SettingsError, Banned):
                await self.give_back_lease()
                raise
            break
        self.renewed_at = renewing_at
        # Whoever waits for the others to come back counts from here: on a slow engine they need as long as we did.
        self.known_at = self.node.now()
        if self.created < 0:
            raise await self._why_gone()
        self._predecessor, self._since = arrival.predecessor, arrival.revision
        self.founds = arrival.founds
        self._entry_created = self.created
        self.line = None if self.line is None or self.record.holds is None else self._line_again(self.line)
        self.sight.show(arrival.head, arrival.revision)
        if self.sight.head is not None and self.sight.head.phase is Phase.CLOSED:
            await self.give_back_lease()
            raise self.closed(self.sight.head)

    def _line_again(self, line: RankEntry) -> RankEntry:
        """Our line in a table that was told: put with our key, so it bears our key's revision."""
        return msgspec.structs.replace(line, created=self.created)

    async def give_back_lease(self) -> None:
        """End our key now, so that nobody takes us for present until the lease runs out."""
        if not self.lease:
            return
        with suppress(Unreachable, EngineReset):  # Then it ends by itself.
            await self.session.revoke(self.lease)

    def closed(self, head: Head) -> Closed:
        """The error for a closed head."""
        cause = head.cause
        text = cause.text if cause else "no reason was given"
        success = cause is not None and cause.kind is CauseKind.SUCCESS
        return Closed(self.settings.run_id, text, success, self.agreed.closed_for)

    # ---- being there

    def end(self, error: BaseException) -> None:
        """It is over; `run` raises this. The first reason stands."""
        if self.over is None:
            self.over = error
            self._ended.ring()

    async def run(self) -> None:
        """Stay. Ends only by an exception: Evicted, EngineReset, what `end` was given, or a defect."""
        tasks = [self._spawn(self._stay_in_line, "watch")]
        # Until there is something to renew, a timer does: thousands may come at once.
        due_s = self.renewed_at + self.settings.lease / 3 - self.node.now()
        first = self.node.call_later(due_s, lambda: tasks.append(self._spawn(self._heartbeat, "heartbeat")))
        try:
            while self.over is None or self._goes:
                await self._ended.wait()
            raise self.over
        finally:
            first.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stay_in_line(self) -> None:
        """Follow; once nobody is before us, lead as well."""
        await self._follow()
        self.duty = Leader(self)
        self._on_lead()
        leading = self._spawn(self._lead, "duty")
        try:
            await self._follow()
        finally:
            leading.cancel()
            await asyncio.gather(leading, return_exceptions=True)

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> asyncio.Task[None]:
        async def watched() -> None:
            try:
                await work()
            except Exception as error:  # noqa: BLE001  Whatever it is, it ends the presence, and `run` raises it.
                self.end(error)

        return asyncio.get_running_loop().create_task(watched(), name=f"rdzv {what} {self.record.name}")

    async def _lead(self) -> None:
        """A duty that fails must not leave a leader that leads nobody: its lease ends with it."""
        assert self.duty is not None, "made before this task is"
        try:
            await self.duty.run()
        except EngineReset:
            raise
        except Exception:
            await self.give_back_lease()
            raise

    @property
    def unrenewed_s(self) -> float:
        """For how long our lease has not been renewed, by our own clock."""
        return self.node.now() - self.renewed_at

    @property
    def is_fresh(self) -> bool:
        """By our own clock our lease cannot have ended. Only a reason to stop leading and taking: truth is the compare."""
        return self.unrenewed_s < self.settings.lease

    async def _heartbeat(self) -> None:
        """Renew, but only while the duty makes progress: a leader that is stuck must lose its lease."""
        period = self.settings.lease / 3
        progress = -1
        # Counted from when the lease was asked for, and later from when each renewal was sent: on a slow engine the time that
        # answers take is part of the lease.
        due_at = self.renewed_at + period
        while True:
            await sleep(self.node, due_at - self.node.now())
            due_at = self.node.now() + period
            duty = self.duty
            if duty is not None:
                if not duty.idle and duty.progress == progress:
                    continue
                progress = duty.progress
            renewing_at = self.node.now()
            try:
                await self.session.renew(self.lease)
                if duty is not None:
                    await self._keep_run_alive(renewing_at)
            except LeaseGone:
                late = f"was not renewed for {self.unrenewed_s:.1f} s"
                raise self.evicted(f"its lease of {self.settings.lease:g} s {late}") from None
            except Unreachable as error:
                self.trouble = error.sentence
                due_at = self.node.now() + period * (0.1 + 0.2 * self.node.jitter())
                # If it took longer than any call may take, it was us who stood still, which says nothing of the engine.
                if self.silent_at is None and self.node.now() - renewing_at < 2 * self.settings.read_timeout:
                    self.silent_at = renewing_at
                self._on_beat()
                continue
            self.renewed_at, self.silent_at = renewing_at, None
            self._on_beat()

    async def _keep_run_alive(self, now: float) -> None:
        """T12: what outlives its writer hangs on the run's lease, which the leader keeps. The duty sees it if it has ended."""
        if self.run_lease and now - self._run_renewed_at > RUN_LEASE_S / 24:
            self._run_renewed_at = now
            with suppress(LeaseGone):
                await self.session.renew(self.run_lease)

    def evicted(self, reason: str) -> Evicted:
        """The error for a presence that the others ended."""
        return Evicted(self.settings.run_id, self.record.name, reason)

    async def _follow(self) -> None:
        """Watch the head, our own key and lines, an operator's ask, and who leads before us. Returns when nobody does."""
        keys = self.keys
        own, ask, lines = keys.member(self.id), keys.ask(self.id), keys.entry("*", self.id)
        while True:
            if not self._predecessor and self.duty is None:
                return
            targets = [keys.head, own, ask, lines if self.session.stars else "", self._predecessor]
            watch = self.session.watch([target for target in targets if target], self._since)
            try:
                async for batch in watch:
                    self._since = batch.revision
                    for event in batch.events:
                        if event.key == own and event.item is None:
                            self.overlook()
                            raise await self._why_gone()
                        self._heed(event)
                    if not self._predecessor and self.duty is None:
                        break
            except Gap:
                pass
            finally:
                await watch.aclose()
            await self._look()

    def _heed(self, event: Event) -> None:
        """What the watch shows, in the order in which it happened."""
        key, item = event.key, event.item
        if key == self.keys.head:
            self.sight.show(item, event.revision)
        elif key.startswith(self.keys.ranks):
            if item is not None or (self._shown is not None and self._shown.key == key):
                self._shown = item
        elif key == self._predecessor:
            if item is None:
                self._predecessor = ""
        elif key == self.keys.ask(self.id) and item is not None:
            self.asked = wire.decode(DrainRequest, item.value).reason
            self._on_beat()

    async def _look(self) -> None:
        """Read anew what the watch shows, and who is before us now."""
        keys = self.keys
        before = List(keys.members, Order.NEWEST, limit=1, created_below=self.created)
        seen = await self.patiently(
            lambda: self.session.txn(
                then=[Get(keys.head), Get(keys.member(self.id)), Get(keys.ask(self.id)), before]
            )
        )
        own, ask = seen.item(1), seen.item(2)
        if own is None or own.created != self.created:
            raise await self._why_gone()
        if ask is not None:
            self.asked = wire.decode(DrainRequest, ask.value).reason
        self._predecessor = "" if self.duty is not None else next((item.key for item in seen.reads[3]), "")
        self._since = seen.revision
        self.overlook()
        self.sight.show(seen.item(0), seen.revision)
        self._on_beat()

    async def _why_gone(self) -> Evicted:
        """Our key is gone: by its lease, or because the leader removed it. Either way this presence is over."""
        try:
            await self.session.renew(self.lease)
            evicted = self.evicted(
                f"the leader removed it (workers not stopped within {self.agreed.regroup:g} s, or banned)"
            )
        except (LeaseGone, Unreachable):
            evicted = self.evicted(f"its lease of {self.settings.lease:g} s ended")
        self.end(evicted)
        return evicted

    async def patiently(self, ask: Callable[[], Coroutine[Any, Any, Outcome]]) -> Outcome:
        """Repeat a *read* until the engine answers."""
        while True:
            try:
                return await ask()
            except Unreachable:
                await sleep(self.node, 0.1 + 0.4 * self.node.jitter())

    # ---- T3, T4: what a waiting member asks and says

    async def examine(self, table: str) -> tuple[TakeResult, Head | None]:
        """T3: by one read, is the round of that table ours to take? Raises Evicted, Unreachable, EngineReset."""
        entry, head, revision = self._shown_line(table), self.sight.head, self._since
        if entry is None:
            entry, head, revision = await self._read(table)
        line = None if entry is None else wire.decode(RankEntry, entry.value)
        result = take_result(head, table, line, self.created)
        if result is TakeResult.GIVEN and line is not None and entry is not None:
            self.line, self._entry_created = line, entry.created
            self.run_lease, self.taken_at = entry.lease, revision
        return result, head

    def _shown_line(self, table: str) -> Item | None:
        """Our line in that table, if the watch has shown all there was of the head, our key and our line up to `_since`.

        That is a read like any, but for its age. Who renews in time has not been out of touch for half a lease.
        """
        line = self._shown
        if line is None or line.key != self.keys.entry(table, self.id) or self.sight.modified > self._since:
            return None
        return line if self.unrenewed_s < self.settings.lease / 2 else None

    async def _read(self, table: str) -> tuple[Item | None, Head | None, int]:
        """Our line in that table and the head, and at which revision, all of it while our key stood."""
        keys = self.keys
        outcome = await self.session.txn(
            [self.own_guard],
            [Get(keys.head), Get(keys.entry(table, self.id))],
        )
        if not outcome.succeeded:
            raise await self._why_gone()
        item = outcome.item(0)
        self.sight.show(item, outcome.revision)
        head = None if item is None else self.sight.head
        if item is not None and item.modified != self.sight.modified:
            head = wire.decode(Head, item.value)  # We have seen a later one meanwhile.
        return outcome.item(1), head, outcome.revision

    def overlook(self) -> None:
        """What the watch has shown of our line is of the past: only what comes, or another read, gives us a round."""
        self._shown = None

    async def put_record(self, **changes: Any) -> None:
        """Write our own record, whatever its former contents: nobody else does. Raises Evicted, Unreachable, EngineReset."""
        self.record = msgspec.structs.replace(self.record, **changes)
        key = self.keys.member(self.id)
        try:
            outcome = await self.session.txn(
                [self.own_guard], [Put(key, wire.encode(self.record), self.lease)]
            )
        except LeaseGone:
            raise await self._why_gone() from None
        if not outcome.succeeded:
            raise await self._why_gone()

    @property
    def own_guard(self) -> Created:
        """Our key: while it stands, we have not been evicted."""
        return Created(self.keys.member(self.id), self.created)

    def entry_guard(self, table: str) -> Created:
        """Our line in the table: while it stands, our round does, and what we write in its store counts."""
        return Created(self.keys.entry(table, self.id), self._entry_created)

    # ---- T11: going

    async def go(self, table: str, mark: dict[str, Any]) -> None:
        """Delete our key; if we hold a round, mark our line in its table in the same transaction."""
        self._goes = True
        own = self.keys.member(self.id)
        compares: list[Compare] = [self.own_guard]
        writes: list[Operation] = [Delete(own), Delete(self.keys.ask(self.id))]
        if table and self.line is not None and mark:
            entry = self.keys.entry(table, self.id)
            marked = msgspec.structs.replace(self.line, **mark)
            outcome = await self.session.txn(
                [*compares, self.entry_guard(table)],
                [*writes, Put(entry, wire.encode(marked), self.run_lease)],
            )
            if outcome.succeeded:
                return
        await self.session.txn(compares, writes)

    async def close_run(self, cause: Cause, holds: RoundId | None) -> bool:
        """T11: close for everybody, if our key lives and the head still is at our round. False: it was not ours to close."""
        keys = self.keys
        lease = await self.session.grant(self.agreed.closed_for)
        while True:
            seen = await self.session.txn(then=[Get(keys.head), Get(keys.settings)])
            item, settings = seen.item(0), seen.item(1)
            self.run_lease = settings.lease if settings else 0
            self.sight.show(item, seen.revision)
            if item is None:
                return False
            head = wire.decode(Head, item.value)
            if head.phase is Phase.CLOSED:
                return True
            if holds is not None and head.round != holds:
                return False
            closed = close_head(head, cause)
            outcome = await self.session.txn(
                [self.own_guard, Modified(keys.head, item.modified)],
                [
                    Put(keys.head, wire.encode(closed), lease),
                    self.journal(closed, cause.text),
                    Get(keys.head),
                ],
                [Get(keys.member(self.id))],
            )
            if outcome.succeeded:
                self.sight.show(outcome.item(2), outcome.revision)
                return True
            if outcome.item(0) is None:
                raise await self._why_gone()

    def journal(self, head: Head, reason: str, came: Iterable[str] = (), gone: Iterable[str] = ()) -> Put:
        """The journal's line for a head write, to go into the same transaction."""
        line = journal_line(
            head,
            self.record.name,
            reason,
            came=came,
            gone=gone,
            lasted_s=self.sight.lasted_s(),
            stamp=self.node.stamp(),
        )
        return Put(self.keys.journal_entry(head.seq), wire.encode(line), self.run_lease)
