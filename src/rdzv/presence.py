"""A member's presence on one engine instance, under one id: from the join (T1) until its key or the instance ends.

Here are the leased record and its renewal, the one watch that every member has (head, own key, own ask, predecessor), and the
guarded writes a member makes for itself. Deciding is left to `core`; what a presence's end means is left to `member`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from . import settings as settings_module
from ._version import __version__
from .core import wire
from .core.acts import close_head, journal_line
from .core.keys import Keys
from .core.model import (
    NO_ROUND,
    Agreed,
    Ask,
    Ban,
    Cause,
    Entry,
    Head,
    Member,
    Phase,
    RoundId,
    Told,
    Why,
)
from .core.told import Found, found
from .drivers.base import (
    Compare,
    Created,
    Delete,
    Empty,
    EngineReset,
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
from .errors import Banned, Closed, Evicted, RdzvError, SettingsError, Unreachable
from .leader import RUN_LEASE_S, Duty
from .machine import Bell, Machine, sleep
from .settings import Settings
from .sight import Listener, Sight


class Presence:
    """See the module's docstring. Made by `begin`, ended by `run` raising."""

    def __init__(
        self,
        session: Session,
        settings: Settings,
        machine: Machine,
        record: Member,
        on_head: Listener,
        on_beat: Callable[[], None],
    ) -> None:
        self.session = session
        self.settings = settings
        self.machine = machine
        self.record = record
        self.over: BaseException | None = None
        """Why this presence has ended, once it has."""
        self.keys = Keys(settings.run_id)
        self.id = machine.token()
        self.known_at = machine.now()
        self.sight = Sight(machine.now, on_head)
        self.created = 0
        self.agreed = settings.agreed()
        self.lease = 0
        self.run_lease = 0
        self.asked = ""
        self.duty: Duty | None = None
        self.renewed_at = machine.now()
        self.line: Entry | None = None
        self.taken_at = 0
        """Revision of the read by which the present round was given."""
        self._entry_created = 0
        self._on_beat = on_beat
        self._ended = Bell(machine)
        self._predecessor = ""
        self._since = 0
        self._run_renewed_at = machine.now()

    # ---- T1: coming

    async def begin(self, holds: Told | None, heard: Told | None, line: Entry | None) -> None:
        """T1, with what we tell an emptied engine (T13). Raises Closed, SettingsError, Banned, Unreachable, EngineReset."""
        self.record = msgspec.structs.replace(self.record, holds=holds, heard=heard, left=NO_ROUND)
        self.line = None if holds is None or line is None else msgspec.structs.replace(line, created=0)
        seen: Outcome | None = None
        while True:
            renewing_at = self.machine.now()
            try:
                if not self.lease:
                    self.lease = await self.session.grant(self.settings.lease)
                outcome = await self._come_in(*self._plan(seen))
            except LeaseGone:  # We were paused between grant and put.
                self.lease = 0
                continue
            except RdzvError:
                await self.give_back_lease()
                raise
            if outcome.succeeded:
                break
            seen = outcome
        self.renewed_at = renewing_at
        newest, head = outcome.reads[-2], outcome.item(len(outcome.reads) - 1)
        self.created = next(item.created for item in newest if item.key == self.keys.member(self.id))
        self._predecessor = next((item.key for item in newest if item.created < self.created), "")
        self._since = outcome.revision
        if self.line is not None:
            self.line = msgspec.structs.replace(self.line, created=self.created)
            self._entry_created = self.created
        self.sight.show(head, outcome.revision)
        if self.sight.head is not None and self.sight.head.phase is Phase.CLOSED:
            await self.give_back_lease()
            raise self.closed(self.sight.head)

    async def give_back_lease(self) -> None:
        """End our key now, so that nobody takes us for present until the lease runs out."""
        try:
            await self.session.revoke(self.lease)
        except (Unreachable, EngineReset):
            pass  # It ends by itself.

    def _look_around(self) -> list[Operation]:
        keys = self.keys
        return [Get(keys.settings), Get(keys.head), Get(keys.ban(self.record.host)), List(keys.members, limit=1)]

    def _plan(self, seen: Outcome | None) -> tuple[list[Compare], list[Operation]]:
        """By which transaction we can come in, after a look around; without one we take it that nobody was here before."""
        keys, mine = self.keys, self.settings.agreed()
        settings = head_item = ban = None
        nobody = True
        if seen is not None:
            settings, head_item, ban = seen.item(0), seen.item(1), seen.item(2)
            nobody = not seen.reads[3]
        if ban is not None:
            raise Banned(self.settings.run_id, self.record.host, wire.decode(Ban, ban.value).reason)
        compares: list[Compare] = [
            Modified(keys.settings, settings.modified if settings else 0),
            Created(keys.member(self.id), 0),
            Created(keys.ban(self.record.host), 0),
        ]
        writes: list[Operation] = []
        head = None if head_item is None else wire.decode(Head, head_item.value)
        if head is not None and head_item is not None and seen is not None and head.phase is Phase.CLOSED:
            # A higher incarnation is a new attempt at the same job: it need not wait until the close has expired.
            if not nobody or self.settings.incarnation <= head.incarnation:
                self.sight.show(head_item, seen.revision)
                raise self.closed(head)
            compares += [Empty(keys.members), Modified(keys.head, head_item.modified)]
            writes.append(Delete(keys.head))
        self.run_lease = settings.lease if settings else 0
        differences = [] if settings is None else _differences(mine, settings)
        if differences and not nobody:
            problem = f"run {self.settings.run_id!r} was started with other settings: {'; '.join(differences)}"
            raise SettingsError(f"{problem}; give all members the same")
        if differences:
            compares.append(Empty(keys.members))
        if settings is None or differences:
            writes.append(Put(keys.settings, wire.encode(mine), self.run_lease))
        return compares, writes

    async def _come_in(self, compares: list[Compare], writes: list[Operation]) -> Outcome:
        """Put our key, and read who was before us and the head; refused: what to plan from instead."""
        keys = self.keys
        own = keys.member(self.id)
        writes = [*writes, Put(own, wire.encode(self.record), self.lease)]
        if self.line is not None and self.record.holds is not None:
            writes.append(Put(keys.entry(self.record.holds.table, self.id), wire.encode(self.line), self.run_lease))
        reads: list[Operation] = [List(keys.members, Order.NEWEST, limit=2), Get(keys.head)]
        try:
            return await self.session.txn(compares, [*writes, *reads], self._look_around())
        except Unreachable as error:
            if error.applied is False:
                raise
        # Unknown: our id is ours alone, so the key itself says whether it was put.
        item = (await self.session.txn(then=[Get(own)])).item(0)
        if item is None:
            around = await self.session.txn(then=self._look_around())
            return msgspec.structs.replace(around, succeeded=False)
        reads[0] = List(keys.members, Order.NEWEST, limit=2, created_below=item.created + 1)
        return await self.session.txn([Created(own, item.created)], reads, self._look_around())

    def closed(self, head: Head) -> Closed:
        """The error for a closed head."""
        cause = head.cause
        text = cause.text if cause else "no reason was given"
        success = cause is not None and cause.kind is Why.SUCCESS
        return Closed(self.settings.run_id, text, success, self.agreed.closed_for)

    # ---- being there

    def end(self, error: BaseException) -> None:
        """It is over; `run` raises this. The first reason stands."""
        if self.over is None:
            self.over = error
            self._ended.ring()

    async def run(self) -> None:
        """Stay. Ends only by an exception: Evicted, EngineReset, what `end` was given, or a defect."""
        tasks = [self._spawn(self._heartbeat, "heartbeat"), self._spawn(self._stay_in_line, "watch")]
        try:
            while self.over is None:
                await self._ended.wait()
            raise self.over
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stay_in_line(self) -> None:
        """Follow; once nobody is before us, lead as well."""
        await self._follow()
        self.duty = Duty(self)
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
    def is_fresh(self) -> bool:
        """By our own clock our lease cannot have ended. Only a reason to stop leading and taking: truth is the compare."""
        return self.machine.now() - self.renewed_at < self.settings.lease

    async def _heartbeat(self) -> None:
        """Renew, but only while the duty makes progress: a leader that is stuck must lose its lease."""
        period = self.settings.lease / 3
        progress = -1
        while True:
            await sleep(self.machine, period)
            duty = self.duty
            if duty is not None:
                if not duty.idle and duty.progress == progress:
                    continue
                progress = duty.progress
            renewing_at = self.machine.now()
            try:
                await self.session.renew(self.lease)
                if duty is not None and renewing_at - self._run_renewed_at > RUN_LEASE_S / 24 and self.run_lease:
                    self._run_renewed_at = renewing_at
                    await self.session.renew(self.run_lease)
            except LeaseGone:
                silent_s = self.machine.now() - self.renewed_at
                raise self.evicted(f"its lease of {self.settings.lease:g} s was not renewed for {silent_s:.1f} s") from None
            except Unreachable:
                self._on_beat()
                await sleep(self.machine, period * (0.1 + 0.2 * self.machine.jitter()))
                continue
            self.renewed_at = renewing_at
            self._on_beat()

    def evicted(self, reason: str) -> Evicted:
        """The error for a presence that the others ended."""
        return Evicted(self.settings.run_id, self.record.name, reason)

    async def _follow(self) -> None:
        """Watch the head, our own key, an operator's ask, and the one who leads before us. Returns when nobody does."""
        keys = self.keys
        own, ask = keys.member(self.id), keys.ask(self.id)
        while True:
            if not self._predecessor and self.duty is None:
                return
            targets = [keys.head, own, ask, *([self._predecessor] if self._predecessor else [])]
            watch = self.session.watch(targets, self._since)
            try:
                async for batch in watch:
                    self._since = batch.revision
                    for event in batch.events:
                        if event.key == keys.head:
                            self.sight.show(event.item, event.revision)
                        elif event.key == own and event.item is None:
                            raise await self._why_gone()
                        elif event.key == ask and event.item is not None:
                            self.asked = wire.decode(Ask, event.item.value).reason
                            self._on_beat()
                        elif event.key == self._predecessor and event.item is None:
                            self._predecessor = ""
                    if not self._predecessor and self.duty is None:
                        break
            except Gap:
                pass
            finally:
                await watch.aclose()
            await self._look()

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
            self.asked = wire.decode(Ask, ask.value).reason
        self._predecessor = "" if self.duty is not None else next((item.key for item in seen.reads[3]), "")
        self._since = seen.revision
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
                await sleep(self.machine, 0.1 + 0.4 * self.machine.jitter())

    # ---- T3, T4: what a waiting member asks and says

    async def examine(self, table: str) -> tuple[Found, Head | None]:
        """T3: in one transaction, is the round of that table ours to take? Raises Evicted, Unreachable, EngineReset."""
        keys = self.keys
        outcome = await self.session.txn(
            [Created(keys.member(self.id), self.created)],
            [Get(keys.head), Get(keys.entry(table, self.id)), Get(keys.settings)],
        )
        if not outcome.succeeded:
            raise await self._why_gone()
        item, entry, settings = outcome.item(0), outcome.item(1), outcome.item(2)
        self.run_lease = settings.lease if settings else 0
        self.sight.show(item, outcome.revision)
        head = None if item is None else wire.decode(Head, item.value)
        line = None if entry is None else wire.decode(Entry, entry.value)
        result = found(head, table, line, self.created)
        if result is Found.GIVEN and line is not None and entry is not None:
            self.line, self._entry_created = line, entry.created
            self.taken_at = outcome.revision
        return result, head

    async def put_record(self, **changes: Any) -> None:
        """Write our own record, whatever its former contents: nobody else does. Raises Evicted, Unreachable, EngineReset."""
        self.record = msgspec.structs.replace(self.record, **changes)
        key = self.keys.member(self.id)
        try:
            outcome = await self.session.txn(
                [Created(key, self.created)], [Put(key, wire.encode(self.record), self.lease)]
            )
        except LeaseGone:
            raise await self._why_gone() from None
        if not outcome.succeeded:
            raise await self._why_gone()

    def entry_guard(self, table: str) -> Created:
        """Our line in the table: while it stands, our round does, and what we write in its store counts."""
        return Created(self.keys.entry(table, self.id), self._entry_created)

    # ---- T11: going

    async def go(self, table: str, mark: dict[str, Any]) -> None:
        """Delete our key; if we hold a round, mark our line in its table in the same transaction."""
        own = self.keys.member(self.id)
        compares: list[Compare] = [Created(own, self.created)]
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
                [Created(keys.member(self.id), self.created), Modified(keys.head, item.modified)],
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

    def journal(self, head: Head, reason: str) -> Put:
        """The journal's line for a head write, to go into the same transaction."""
        line = journal_line(head, self.record.name, reason)
        return Put(self.keys.journal_entry(head.seq), wire.encode(line), self.run_lease)


def _differences(mine: Agreed, settings: Item) -> list[str]:
    return settings_module.differences(mine, wire.decode(Agreed, settings.value))


def record_for(settings: Settings, machine: Machine, session: Session) -> Member:
    """Who we are, as the others see it."""
    name = f"{machine.host}/{settings.slot}" if settings.slot else machine.host
    return Member(
        name=name,
        host=machine.host,
        addr=settings.local_addr or session.local_host or machine.host,
        pid=machine.pid,
        order=settings.order,
        topology=settings.topology,
        version=__version__,
        info=dict(settings.info),
    )


