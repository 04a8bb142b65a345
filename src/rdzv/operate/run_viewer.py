"""A run as a non-member sees it: for `rdzv status` and `rdzv watch`.

A viewer writes nothing and never leads. It reads the settings from the run. It does not know when a running timer began, so it
shows the time left with "at most". The journal tells it what happened last, and how a run ended whose head is gone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from datetime import datetime
from itertools import chain

import msgspec

from ..core import wire
from ..core.keys import Keys
from ..core.model import CauseKind, Head, JournalEntry, Phase, RunSettings
from ..core.status import Status, describe, describe_events, progress_of_run
from ..engines.embedded.client import RemoteSession
from ..engines.port import Batch, Gap, Get, Item, List, Replicated, Session
from ..errors import Incompatible, Unreachable
from ..member.head_tracker import HeadTracker
from ..member.run_mirror import RunMirror
from ..system.node import stamp

UNKNOWN = RunSettings(min_nodes=1, max_nodes=1)  # In place of settings that cannot be read.
GONE = "nobody is here: the run was closed, or all have left"
RECENT = 8
"""Newest journal entries that are read: enough to find the break before a round."""
SERVING_HOSTS_MAX = 3


class RunViewer:
    """A view of one run on one engine instance. `now` is a monotonic clock of this process."""

    def __init__(self, session: Session, run_id: str, now: Callable[[], float]) -> None:
        self._session = session
        self._keys = Keys(run_id)
        self._run_id = run_id
        self._head = HeadTracker(now)
        self._mirror: RunMirror | None = None
        self._recent: list[JournalEntry] = []
        """Newest journal entries of the present head, newest first; of the run that ended if there is no head."""
        self._recent_of = -1
        """Revision of the head that they were read for; 0: there was none."""
        self._began = ""
        self._engine: tuple[str, ...] = ()

    async def look(self) -> Status | None:
        """Read the run; return None if the engine keeps none of that id. O(n). Raises Unreachable, EngineReset."""
        listed = await self._session.txn(then=[List(self._keys.group), List(self._keys.progress)])
        self._mirror = RunMirror(self._keys, chain(*listed.reads), listed.revision)
        self._head.show(self._mirror.head_item, listed.revision)
        await self._read_journal(self._mirror)
        if isinstance(self._session, Replicated):
            self._engine = tuple(str(member) for member in await self._session.health())
        return self.status()

    async def follow(self) -> AsyncIterator[Status | None]:
        """Yield the run now and after every change. Raises EngineReset, or Unreachable once the session is closed."""
        async for _ in self.changes():
            yield self.status()

    async def changes(self) -> AsyncIterator[Batch | None]:
        """Yield None after the run was read, and each batch of changes once `mirror` has it. One watch; raises as `follow`."""
        while True:
            await self.look()
            yield None
            watch = self._session.watch([self._keys.group, self._keys.progress], self.mirror.revision)
            try:
                async for batch in watch:
                    self.mirror.apply(batch)
                    self._head.show(self.mirror.head_item, batch.revision)
                    with suppress(Unreachable):  # The watch goes on by itself, and the next change is told again.
                        await self._read_journal(self.mirror)
                    yield batch
            except Gap:
                pass
            finally:
                await watch.aclose()

    @property
    def mirror(self) -> RunMirror:
        """The records of the run as they were read last."""
        assert self._mirror is not None, "look() sets it"
        return self._mirror

    async def _read_journal(self, mirror: RunMirror) -> None:
        """Read what happened last, once per head. Without head and members, read how the run ended."""
        head, modified = mirror.head, mirror.head_item.modified if mirror.head_item is not None else 0
        if modified == self._recent_of or mirror.settings is None or (head is None and mirror.members):
            return
        if head is not None:
            newest = range(head.seq, max(0, head.seq - RECENT), -1)
            # The first entry of a run that was full at once is the second one.
            found = await self._session.txn(then=[Get(self._keys.journal_entry(seq)) for seq in (*newest, 1, 2)])
            entries = {entry.seq: entry for entry in _entries(item for items in found.reads for item in items)}
            own = [entry for seq in newest if (entry := entries.get(seq)) and entry.run == head.run]
            self._recent = own if own and own[0].seq == head.seq else []
            first = entries.get(1) or entries.get(2)
            self._began = first.stamp if first is not None and first.run == head.run else ""
        else:
            listed = await self._session.txn(then=[List(self._keys.journal)])
            every = _entries(sorted(listed.reads[0], key=lambda item: item.modified, reverse=True))
            self._recent = [entry for entry in every if entry.run == every[0].run]
            self._began = self._recent[-1].stamp if self._recent else ""
        self._recent_of = modified

    def status(self) -> Status | None:
        """The run as it was read last, with current ages."""
        mirror = self._mirror
        if mirror is None or mirror.settings is None:
            return None
        settings, problem = _read_settings(mirror.settings.value)
        problem = problem or mirror.problem
        view = mirror.view(
            settings=settings,
            me="",
            durable=True,  # Only members can judge whether the engine lost its memory a moment ago.
            known_s=0.0,
            ages=self._head.ages(),
            late=self._head.late,
        )
        status = msgspec.structs.replace(describe(self._run_id, view), served_by=self._served_by(mirror), engine=self._engine)
        if status.progress is not None:
            now, told = stamp(), [one.progress for one in status.members]
            ages = {one.stamp: _seconds_between(one.stamp, now) for one in told if one is not None}
            status = msgspec.structs.replace(status, progress=progress_of_run(told, ages))
        is_forming = view.head is None and view.members  # The journal is that of an earlier incarnation then.
        recent = self._recent if self._recent_of == view.head_modified and not is_forming else []
        if recent:
            now = stamp()
            ages = {"age_s": _seconds_between(self._began, now), "changed_s": _seconds_between(recent[0].stamp, now)}
            status = msgspec.structs.replace(status, events=describe_events(recent[:RECENT]), **ages)
        if problem:
            return msgspec.structs.replace(status, reason=f"{problem}; the next member to lead replaces it")
        if view.head is None and not view.members:
            return _ended(status, recent)
        return status

    def _served_by(self, mirror: RunMirror) -> str:
        """Name the engine: for an embedded server where it is, and whether an agent of the run hosts it."""
        session = self._session
        if not isinstance(session, RemoteSession):
            return session.place
        address, _, _ = session.server_address.rpartition(":")
        if not session.is_hosted:
            return f"rdzv serve at {session.server_address}"
        hosts = {live.record.host for live in mirror.members.values() if live.record.addr == address.strip("[]")}
        named = f" on {' or '.join(sorted(hosts))}" if 0 < len(hosts) <= SERVING_HOSTS_MAX else ""
        return f"an agent of this run{named} at {session.server_address}"

    @property
    def succeeded(self) -> bool:
        """Whether the run was closed because all members were done."""
        head: Head | JournalEntry | None = self._head.head
        if head is None and self._recent:
            head = self._recent[0]
        return head is not None and head.cause is not None and head.cause.kind is CauseKind.SUCCESS


def _entries(items: Iterable[Item]) -> list[JournalEntry]:
    found = []
    for item in items:
        with suppress(Incompatible):
            found.append(wire.decode(JournalEntry, item.value))
    return found


def _ended(status: Status, recent: list[JournalEntry]) -> Status:
    """Return the status of a run without head and members: how it was closed, as long as the journal says."""
    if not recent or recent[0].phase is not Phase.CLOSED:
        return msgspec.structs.replace(status, reason=GONE)
    last = recent[0]
    reason = f"closed: {last.cause.text if last.cause else last.reason}"
    return msgspec.structs.replace(status, phase=last.phase.value, round=last.number, size=last.size, reason=reason)


def _seconds_between(then: str, now: str) -> float | None:
    """Return the seconds between two stamps for people; at least 0, since two clocks may differ."""
    try:
        return max(0.0, (datetime.fromisoformat(_utc(now)) - datetime.fromisoformat(_utc(then))).total_seconds())
    except (ValueError, TypeError):
        return None


def _utc(text: str) -> str:
    return text.removesuffix("Z") + "+00:00"  # Python 3.10 does not read the Z.


def _read_settings(data: bytes) -> tuple[RunSettings, str]:
    """Return the settings and no problem, or others and what is wrong with the run's."""
    try:
        settings = wire.decode(RunSettings, data)
    except Incompatible as error:
        return UNKNOWN, error.sentence
    if settings.unit >= 1 and settings.segment >= 1 and 1 <= settings.min_nodes <= settings.max_nodes:
        return settings, ""
    return UNKNOWN, "the run's settings are impossible (min_nodes, max_nodes, unit or segment)"
