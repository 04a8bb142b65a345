"""A member's presence on one engine instance, under one id: from its registration (T1) until its key ends.

A presence makes the requests: it registers, renews the lease, keeps the one watch that every member has (head, own key,
own entry, an operator's ask, predecessor), and writes what a member writes for itself, each write guarded. It decides
nothing. Everything that comes of it goes to the member's machine as an event (`emit`), and the machine ends the
presence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import msgspec

from ..config.settings import Settings
from ..core import member as machine
from ..core import wire
from ..core.acts import close_head, journal_line
from ..core.keys import Keys
from ..core.member_events import DrainAsked, HeadSeen, HeadSent, KeyGone, Leads, MemberEvent, RenewalFailed, Renewed
from ..core.member_state import MemberState
from ..core.model import (
    NO_ROUND,
    Cause,
    DrainRequest,
    Head,
    MemberRecord,
    Phase,
    ProgressReport,
    RankEntry,
    RoundId,
    RoundReport,
)
from ..engines import port
from ..engines.port import Compare, Created, EngineReset, Get, Item, LeaseGone, Modified, Operation, Outcome, Put
from ..errors import Banned, Closed, Evicted, Incompatible, SettingsError, Unreachable
from ..system.node import Node
from ..system.timers import Timer, Wakeup, sleep
from .head_tracker import HeadTracker
from .head_write import write_head
from .heir import Heir
from .leader import RUN_LEASE_S, Leader
from .registration import Registration


class Look(msgspec.Struct, frozen=True):
    """Head and own entry of one table, as they were at one revision while the own key stood."""

    head: Head | None
    item: Item | None
    entry: RankEntry | None
    revision: int


class Presence:
    """One key of a member on one instance. Begun by `begin`; `run` lasts until it ends.

    Only this class writes its attributes. `state` is the member's state, to read.
    """

    def __init__(
        self, session: port.Session, settings: Settings, node: Node, record: MemberRecord, state: MemberState,
        emit: Callable[[MemberEvent], None],
    ) -> None:  # fmt: skip
        self.session = session
        self.settings = settings
        self.agreed = settings.agreed()
        self.node = node
        self.keys = Keys(settings.run_id)
        self.state = state
        self.record = record
        self.id = node.token()
        self.created = 0
        """Create revision of the own key."""
        self._modified = 0
        """Revision of the last write of the own record, as far as it is known."""
        self.lease = 0
        self.run_lease = 0
        """The lease of everything in the run that outlives its writer (T12.2); 0: not known."""
        self.known_at = node.now()
        """Since when members that come back to this instance have had time to do so."""
        self.tracker = HeadTracker(node.now)
        self.leader: Leader | None = None
        """Set once no earlier member is left."""
        self.predecessor = ""
        """Key of a member that came earlier, while one is watched (W15)."""
        self.taken_at = 0
        """Revision of the read by which the present round was given."""
        self.is_over = False
        self._emit = emit
        self._error: BaseException | None = None
        self._ended = Wakeup(node)
        self._made_settings = False
        self._watch: port.Watch | None = None
        """The watch that is listened to."""
        self._leading: asyncio.Task[None] | None = None
        self.since = 0
        """The watch has shown everything up to this revision."""
        self._shown: Item | None = None
        """Own entry in a table, if the watch has shown it since `forget_shown`: as it is at revision `since`."""
        self._entry_created = 0
        self._run_renewed_at = node.now()
        self._tasks: list[asyncio.Task[None]] = []
        self._gave_up = NO_ROUND
        """The highest round given up, as far as the engine knows it."""
        self._heir_due: Timer | None = None

    # ---- coming

    async def begin(self, holds: RoundReport | None, heard: RoundReport | None, entry: RankEntry | None) -> float:
        """T1, with what an emptied engine is told (T13). Returns when the lease was asked for.

        After Unreachable it may be called again, with other reports. Closed, SettingsError, Banned and Evicted are
        final.
        """
        self.record = msgspec.structs.replace(self.record, holds=holds, heard=heard, left=NO_ROUND)
        while True:
            asked_at = self.node.now()
            try:
                if not self.lease:
                    # `presence` lets the engine end this lease soon after its connection is lost. Other leases must
                    # not: the run's records would go with the first leader.
                    self.lease = await self.session.grant(self.settings.lease, presence=True)
                found = await Registration(self, entry).come_in()
            except LeaseGone:
                # The process stood still between grant and put. The key may have been there and gone, so it needs
                # another id: one that comes a second time would be taken for its former life.
                self.lease, self.id = 0, self.node.token()
                continue
            except (Closed, SettingsError, Banned):
                await self.give_back_lease()
                raise
            break
        # Members that come back are waited for from here on: on a slow engine they need as long as this one did.
        self.known_at = self.node.now()
        self.record, self.created, self.run_lease = found.record, found.created, found.run_lease
        if self.created < 0:
            raise await self.why_gone()
        self.predecessor, self.since = found.predecessor, found.revision
        self._made_settings, self._watch = found.made_settings, found.watch
        self._entry_created = self._modified = self.created
        self.show_head(found.head, found.revision)
        head = self.tracker.head
        if head is not None and head.phase is Phase.CLOSED:
            # T1.5. Nobody hears of it before the key is gone, so that a higher incarnation can follow at once.
            await self.give_back_lease()
            raise machine.closed_error(self.state.me, head)
        return asked_at

    async def give_back_lease(self) -> None:
        """End the key now, so that nobody takes this member for present until the lease runs out."""
        if self.lease:
            with suppress(Unreachable, EngineReset):  # Then it ends by itself.
                await self.session.revoke(self.lease)

    # ---- being there

    def emit(self, event: MemberEvent) -> None:
        """Tell the machine. A presence that has ended has nothing more to say."""
        if not self.is_over:
            self._emit(event)

    def end(self, error: BaseException | None = None) -> None:
        """End `run`, which raises the error if there is one. The first reason stands."""
        if not self.is_over:
            self.is_over, self._error = True, error
            self._ended.ring()

    async def run(self) -> None:
        """Stay until `end` is called. Raises EngineReset, or a defect."""
        self._stay_in_line()
        # A timer first, and a task once there is something to renew: thousands may come at once.
        due_s = self.state.renewed_at + self.settings.lease / 3 - self.node.now()
        first = self.node.call_later(due_s, lambda: self._start(self.heartbeat, "heartbeat"))
        try:
            while not self.is_over:
                await self._ended.wait()
            if self._error is not None:
                raise self._error
        finally:
            first.cancel()
            if self._heir_due is not None:
                self._heir_due.cancel()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            if self._watch is not None:
                await self._watch.aclose()

    def _start(self, work: Callable[[], Coroutine[Any, Any, None]], what: str) -> asyncio.Task[None]:
        """Start a task of this presence, which ends with it."""

        async def watched() -> None:
            try:
                await work()
            except Evicted:
                pass  # The machine was told by an event, and knows whether that matters.
            except Exception as error:  # noqa: BLE001  Whatever it is, it ends the presence, and `run` raises it.
                self.end(error)

        task = asyncio.get_running_loop().create_task(watched(), name=f"rdzv {what} {self.record.name}")
        self._tasks = [*(one for one in self._tasks if not one.done()), task]
        return task

    def _stay_in_line(self) -> None:
        """Follow: listen to the watch, without a task. Once no earlier member is left, lead as well."""
        if self.is_over:
            return
        if not self.predecessor and self.leader is None:
            self.leader = Leader(self, self._made_settings)
            self.emit(Leads())
            self._leading = self._start(self._lead, "duty")
        if self._watch is None:
            ends = [one for one in (self.keys.member(self.id), self.predecessor) if one]
            self._watch = self.session.watch(self.keys.watched_by(self.id, self.session.stars), self.since, ends)
        self._watch.listen(partial(self._told, self._watch))

    async def _lead(self) -> None:
        """Lead. A leader that fails must not stay as one that leads nobody: its lease ends with it."""
        assert self.leader is not None, "made before this task is"
        try:
            await self.leader.run()
        except EngineReset:
            raise
        except Exception:
            await self.give_back_lease()
            raise

    @property
    def is_fresh(self) -> bool:
        """Whether, by the member's own clock, its lease cannot have ended."""
        return machine.is_fresh(self.state, self.node.now())

    async def heartbeat(self) -> None:
        """Renew, but only while leading makes progress: a leader that is stuck must lose its lease (T12.3)."""
        period = self.settings.lease / 3
        progress = -1
        # Counted from when the lease was asked for, and later from when each renewal was sent: on a slow engine the
        # time that answers take is part of the lease (seed 101358).
        due_at = self.state.renewed_at + period
        while True:
            await sleep(self.node, due_at - self.node.now())
            sent_at = self.node.now()
            due_at = sent_at + period
            leader = self.leader
            if leader is not None:
                if not leader.idle and leader.progress == progress:
                    continue
                progress = leader.progress
            try:
                await self.session.renew(self.lease)
                if leader is not None:
                    await self._keep_run_alive(sent_at)
            except LeaseGone:
                late_s = machine.unrenewed_s(self.state, self.node.now())
                self.emit(KeyGone(f"its lease of {self.settings.lease:g} s was not renewed for {late_s:.1f} s"))
                return
            except Unreachable as error:
                # Soon again: after one lost renewal a whole period more would end the lease (seed 445).
                due_at = self.node.now() + period * (0.1 + 0.2 * self.node.jitter())
                paused = self.node.now() - sent_at >= 2 * self.settings.read_timeout
                self.emit(RenewalFailed(sent_at, error.sentence, paused))
            else:
                self.emit(Renewed(sent_at))

    async def _keep_run_alive(self, now: float) -> None:
        """T12.2: the leader renews the run's lease too. The leader itself sees when it has ended."""
        if self.run_lease and now - self._run_renewed_at > RUN_LEASE_S / 24:
            self._run_renewed_at = now
            with suppress(LeaseGone):
                await self.session.renew(self.run_lease)

    def _told(self, watch: port.Watch, news: port.Batch | Exception) -> None:
        """Heed what the watch shows. A task is needed only if that takes a request."""
        if watch is not self._watch or self.is_over:
            return
        is_key_gone = False
        if isinstance(news, port.Batch):
            self.since = news.revision
            try:
                is_key_gone = self._heed_all(news.events)
            except Exception as error:  # noqa: BLE001  Whatever it is, it ends the presence, and `run` raises it.
                self.end(error)
            if not is_key_gone and (self.predecessor or self.leader is not None):
                return
        elif not isinstance(news, port.Gap):
            self.end(news)
            return
        self._watch = None
        self._start(partial(self._go_on, watch, is_key_gone), "watch")

    def _heed_all(self, events: tuple[port.Event, ...]) -> bool:
        """Note what the watch shows. Return True, and heed no more, if the own key is gone."""
        own = self.keys.member(self.id)
        for event in events:
            if event.key == own:
                self.forget_shown()
                return True
            self._heed(event)
        return False

    async def _go_on(self, watch: port.Watch, is_key_gone: bool) -> None:
        """Find out what has become of this member, or whom it follows now, and watch anew."""
        await watch.aclose()
        if is_key_gone:
            self._evicted(await self.why_gone())
        await self.look_again()
        self._stay_in_line()

    def _evicted(self, error: Exception) -> NoReturn:
        """Stop leading at once: the machine was told, and ends this presence."""
        if self._leading is not None:
            self._leading.cancel()
        raise error

    def _heed(self, event: port.Event) -> None:
        """Note what the watch shows, in the order in which it happened."""
        key, item, keys = event.key, event.item, self.keys
        if key == keys.head:
            self.show_head(item, event.revision)
        elif key.startswith(keys.ranks):
            if item is not None or (self._shown is not None and self._shown.key == key):
                self._shown = item
        elif key == self.predecessor:
            if item is None:
                self.predecessor = ""
        elif key == keys.ask(self.id) and item is not None:
            self.emit(DrainAsked(wire.reason_of(DrainRequest, item.value)))

    async def look_again(self) -> None:
        """Read what the watch shows anew, and who came earlier and is still there."""
        keys = self.keys
        before = port.List(keys.members, port.Order.NEWEST, limit=1, created_below=self.created)
        reads: list[Operation] = [Get(keys.head), Get(keys.member(self.id)), Get(keys.ask(self.id)), before]
        seen = await self.read_patiently(reads)
        own, ask = seen.item(1), seen.item(2)
        if own is None or own.created != self.created:
            self._evicted(await self.why_gone())
        if ask is not None:
            self.emit(DrainAsked(wire.reason_of(DrainRequest, ask.value)))
        self.predecessor = "" if self.leader is not None else next((item.key for item in seen.reads[3]), "")
        self.since = seen.revision
        self.forget_shown()
        self.show_head(seen.item(0), seen.revision)

    async def read_patiently(self, reads: list[Operation]) -> Outcome:
        """Repeat a read until the engine answers."""
        while True:
            try:
                return await self.session.txn(then=reads)
            except Unreachable:
                await sleep(self.node, 0.1 + 0.4 * self.node.jitter())

    async def why_gone(self) -> Exception:
        """Find out why the own key is gone, tell the machine, and return the error."""
        try:
            await self.session.renew(self.lease)
            reason = f"the leader removed it (workers not stopped within {self.agreed.regroup:g} s, or banned)"
        except (LeaseGone, Unreachable):
            reason = f"its lease of {self.settings.lease:g} s ended"
        self.emit(KeyGone(reason))
        return Evicted(self.settings.run_id, self.record.name, reason)

    def show_head(self, item: Item | None, revision: int) -> None:
        """The head was this at that revision; None: there was none."""
        if self.tracker.show(item, revision):
            self.emit(HeadSeen(self.tracker.head))

    # ---- for the leader

    def give_time_to_return(self) -> None:
        """Perhaps nobody could reach the engine: members are given their time to come back anew."""
        self.known_at = self.node.now()

    def use_run_lease(self, lease: int) -> int:
        """Put what outlives its writer under this lease from now on."""
        self.run_lease = lease
        return lease

    # ---- T3, T4: what a waiting member reads and writes

    async def examine(self, table: str) -> Look:
        """T3.2: read head and own entry of that table at one revision. Raises Evicted, Unreachable, EngineReset."""
        item, head, revision = self._shown_entry(table), self.tracker.head, self.since
        if item is None:
            item, head, revision = await self._read(table)
        entry = None
        if item is not None:
            with suppress(Incompatible):  # An entry that cannot be read gives no rank.
                entry = wire.decode(RankEntry, item.value)
        return Look(head, item, entry, revision)

    def shows(self, table: str) -> bool:
        """Whether `examine` needs no request for that table."""
        return self._shown_entry(table) is not None

    def _shown_entry(self, table: str) -> Item | None:
        """Own entry in that table, if the watch has shown everything about head, own key and own entry up to `since`.

        A watch delivers everything of its targets in order. So at the revision it has come to, all three are known
        exactly: this is the read of T3.2 without a request (T3.6; 1,000 members form in 0.27 s instead of 0.30 s). It
        is like the answer of a transaction that was long on its way, but its age is bounded more closely: by half a
        lease on the member's own clock. Seed 1002370: a member whose requests were cut off must not take what it is
        shown.
        """
        item = self._shown
        if item is None or item.key != self.keys.entry(table, self.id) or self.tracker.modified > self.since:
            return None
        return item if machine.unrenewed_s(self.state, self.node.now()) < self.settings.lease / 2 else None

    async def _read(self, table: str) -> tuple[Item | None, Head | None, int]:
        keys = self.keys
        outcome = await self.session.txn([self.own_guard], [Get(keys.head), Get(keys.entry(table, self.id))])
        if not outcome.succeeded:
            raise await self.why_gone()
        item = outcome.item(0)
        self.show_head(item, outcome.revision)
        head = None if item is None else self.tracker.head
        if item is not None and item.modified != self.tracker.modified:
            head = wire.read_head(item.value)  # A later one has been seen meanwhile.
        return outcome.item(1), head, outcome.revision

    def take(self, look: Look) -> None:
        """The round of that look is this member's: its entry guards what is written in the round's store."""
        assert look.item is not None, "a round that is given comes with an entry in its table"
        self._entry_created, self.taken_at = look.item.created, look.revision
        self.run_lease = look.item.lease

    def forget_shown(self) -> None:
        """Forget what the watch has shown of own entries: only what comes, or another read, gives a round."""
        self._shown = None

    async def put_record(self, **changes: Any) -> None:
        """Write the own record, which nobody else writes. Raises Evicted, Unreachable, EngineReset."""
        # By its last revision: a write that was given up for want of an answer may arrive late, and would undo this one.
        self.record = msgspec.structs.replace(self.record, **changes)
        key = self.keys.member(self.id)
        while True:
            outcome = await self._put_own(Modified(key, self._modified), key, wire.encode(self.record))
            if outcome.succeeded:
                self._modified = outcome.revision
                break
            own = (await self.session.txn(then=[Get(key)])).item(0)
            if own is None or own.created != self.created:
                raise await self.why_gone()
            self._modified = own.modified
        if self.record.left > self._gave_up:
            self._gave_up = self.record.left
            self._expect_leader()

    async def put_progress(self, report: ProgressReport) -> None:
        """Tell how far the workers are, beside what the leader watches. Raises Evicted, Unreachable, EngineReset."""
        stamped = msgspec.structs.replace(report, stamp=self.node.stamp())
        outcome = await self._put_own(self.own_guard, self.keys.progress_of(self.id), wire.encode(stamped))
        if not outcome.succeeded:
            raise await self.why_gone()

    async def _put_own(self, guard: Compare, key: str, value: bytes) -> Outcome:
        """Write a key of this member alone, which goes with it."""
        try:
            return await self.session.txn([guard], [Put(key, value, self.lease)])
        except LeaseGone:
            raise await self.why_gone() from None

    def _expect_leader(self) -> None:
        """T8.6: if nobody goes on from the round that was given up, ask in time whether the leader is dead."""
        # A timer first: nearly always the leader is quicker, and thousands may give up a round at once.
        if self._heir_due is not None:
            self._heir_due.cancel()
        pause_s = Heir(self).pause_s
        self._heir_due = self.node.call_later(pause_s, self._inherit) if pause_s else None

    def _inherit(self) -> None:
        heir = Heir(self)
        if heir.is_needed and not self.is_over:
            self._start(heir.run, "heir")

    @property
    def own_guard(self) -> Created:
        """Compare the own key: while it stands, the member has not been evicted."""
        return Created(self.keys.member(self.id), self.created)

    def entry_guard(self, table: str) -> Created:
        """Compare the own entry in the table: while it stands, so does the round, and writes in its store count."""
        return Created(self.keys.entry(table, self.id), self._entry_created)

    # ---- T11: going and closing

    async def go(self, table: str, entry: RankEntry | None) -> None:
        """Delete the own key. If there is an entry to mark, write it in the same transaction."""
        compares: list[Compare] = [self.own_guard]
        writes: list[Operation] = [port.Delete(self.keys.member(self.id)), port.Delete(self.keys.ask(self.id))]
        if table and entry is not None:
            mark = Put(self.keys.entry(table, self.id), wire.encode(entry), self.run_lease)
            if (await self.session.txn([*compares, self.entry_guard(table)], [*writes, mark])).succeeded:
                return
        await self.session.txn(compares, writes)

    async def close_run(self, cause: Cause, holds: RoundId | None) -> bool:
        """T11.7: close the run, if the own key lives and the head still is at the round held. False: it is not.

        Raises Unreachable while there is no head.
        """
        keys = self.keys
        while True:
            seen = await self.session.txn(then=[Get(keys.head), Get(keys.settings)])
            item, settings = seen.item(0), seen.item(1)
            self.run_lease = settings.lease if settings else 0
            self.show_head(item, seen.revision)
            head = None if item is None else wire.read_head(item.value)
            if item is None or head is None:
                # An engine that came back empty has none until the leader has made it anew, perhaps of the round held.
                raise Unreachable(self.state.me.endpoint, "the run has no head yet", applied=False)
            if head.phase is Phase.CLOSED:
                return True
            if holds is not None and head.round != holds:
                return False
            guard: tuple[Compare, ...] = (self.own_guard, Modified(keys.head, item.modified))
            own: list[Operation] = [Get(keys.member(self.id))]
            closed = close_head(head, cause)
            outcome = await self.write_head(closed, cause.text, guard, behind=[Get(keys.head)], otherwise=own)
            if outcome.succeeded:
                self.show_head(outcome.item(2), outcome.revision)
                return True
            if outcome.item(0) is None:
                raise await self.why_gone()

    async def write_head(
        self, head: Head, reason: str, guard: Iterable[Compare], *,
        came: Iterable[str] = (), gone: Iterable[str] = (), **operations: Iterable[Operation],
    ) -> Outcome:  # fmt: skip
        """Write a head, with this member's journal entry. `operations`: as for the function of this name."""
        self.emit(HeadSent(head.fence))
        lasted_s, stamp = self.tracker.lasted_s(), self.node.stamp()
        entry = journal_line(head, self.record.name, reason, came=came, gone=gone, lasted_s=lasted_s, stamp=stamp)
        return await write_head(
            self.session, self.settings.run_id, head, entry, guard,
            run_lease=self.run_lease, closed_for=self.agreed.closed_for, **operations,
        )  # fmt: skip
