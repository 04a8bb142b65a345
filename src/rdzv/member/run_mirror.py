"""A mirror of a run, kept up to date by a watch. The leader judges it, and `status` describes it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from ..config.settings import Settings
from ..core import wire
from ..core.keys import Keys
from ..core.model import (
    Ban,
    DrainRequest,
    Head,
    MemberRecord,
    ProgressReport,
    Quarantine,
    RankEntry,
    RunSettings,
    Strike,
)
from ..core.view import LiveMember, View
from ..engines.port import Batch, EngineReset, Item, List, Session
from ..errors import Incompatible, Unreachable

if TYPE_CHECKING:
    from .presence import Presence


class RunMirror:
    """The decoded records of a run at one revision. One that cannot be read is left out: it must not stop the run."""

    def __init__(self, keys: Keys, items: Iterable[Item], revision: int) -> None:
        self.problem = ""
        """Why the head cannot be read, if there is one."""
        self.keys = keys
        self.revision = revision
        self.settings: Item | None = None
        self.head: Head | None = None
        self.head_item: Item | None = None
        self.members: dict[str, LiveMember] = {}
        self.tables: dict[str, dict[str, RankEntry]] = {}
        self.asked: dict[str, str] = {}
        self.banned: dict[str, str] = {}
        self.strikes: dict[str, dict[str, int]] = {}
        self.quarantined: dict[str, str] = {}
        self.progress: dict[str, ProgressReport] = {}
        """How far the workers of each member are, if the caller has read or watched that."""
        for item in items:
            self._apply(item.key, item)

    def apply(self, batch: Batch) -> None:
        """Apply the changes up to a later revision."""
        for event in batch.events:
            self._apply(event.key, event.item)
        self.revision = max(self.revision, batch.revision)

    def _apply(self, key: str, item: Item | None) -> None:
        keys = self.keys
        if key.startswith(keys.members):
            self._member(key[len(keys.members) :], item)
        elif key.startswith(keys.ranks):
            table, _, id = key[len(keys.ranks) :].partition("/")
            self._entry(table, id, item)
        elif key == keys.head:
            self._head(item)
        elif key == keys.settings:
            self.settings = item
        elif key.startswith(keys.asks):
            self._note(self.asked, key[len(keys.asks) :], item, DrainRequest)
        elif key.startswith(keys.bans):
            self._note(self.banned, keys.host_of_ban(key), item, Ban)
        elif key.startswith(keys.strikes):
            self._strike(*keys.of_strike(key), item)
        elif key.startswith(keys.quarantines):
            self._note(self.quarantined, keys.host_of_quarantine(key), item, Quarantine)
        elif key.startswith(keys.progress):
            self._progress(key[len(keys.progress) :], item)

    def _head(self, item: Item | None) -> None:
        self.problem = ""
        # Kept even if it cannot be read: the leader's next write compares its revision.
        self.head, self.head_item = None, item
        if item is not None:
            try:
                self.head = wire.decode(Head, item.value)
            except Incompatible as error:
                self.problem = error.sentence

    def _member(self, id: str, item: Item | None) -> None:
        self.members.pop(id, None)
        if item is not None:
            with suppress(Incompatible):
                self.members[id] = LiveMember(id, wire.decode(MemberRecord, item.value), item.created, item.modified)

    def _entry(self, table: str, id: str, item: Item | None) -> None:
        entries = self.tables.setdefault(table, {})
        entries.pop(id, None)
        if item is not None:
            try:
                entry = wire.decode(RankEntry, item.value)
            except Incompatible:
                return
            # Reported to an emptied engine: key and entry were put in one transaction, at one revision (T13.4).
            entries[id] = entry if entry.created else msgspec.structs.replace(entry, created=item.created)
        elif not entries:
            del self.tables[table]

    def _progress(self, id: str, item: Item | None) -> None:
        self.progress.pop(id, None)
        if item is not None:
            with suppress(Incompatible):
                self.progress[id] = wire.decode(ProgressReport, item.value)

    def _strike(self, host: str, table: str, item: Item | None) -> None:
        strikes = self.strikes.setdefault(host, {})
        strikes.pop(table, None)
        if item is not None:
            strikes[table] = 1
            with suppress(Incompatible):  # One that cannot be read counts once.
                strikes[table] = wire.decode(Strike, item.value).count
        elif not strikes:
            del self.strikes[host]

    def _note(
        self, notes: dict[str, str], name: str, item: Item | None, kind: type[DrainRequest | Ban | Quarantine]
    ) -> None:
        notes.pop(name, None)
        if item is not None:
            notes[name] = wire.reason_of(kind, item.value)

    def view(
        self, *, settings: RunSettings, me: str, durable: bool, known_s: float, ages: tuple[float, float, float],
        late: bool = False, incarnation: int = 0, fresh: str = "",
        place: str = "", promised: bool = False, fence_floor: int | None = 0, wall_s: int = 0,
        linger_s: float = 0.0, away_asked_s: float = math.inf,
    ) -> View:  # fmt: skip
        """The view that the rules judge."""
        table = self.head.table if self.head is not None else ""
        # Without a head it is not known yet which of the reported tables will be the one.
        orphans = [] if self.head is None else [one for one in self.tables if one != table]
        return View(
            settings=settings, me=me, durable=durable, known_s=known_s, revision=self.revision,
            head=self.head, head_modified=self.head_item.modified if self.head_item is not None else 0,
            members=self.members, entries=self.tables.get(table, {}), orphans=orphans,
            asked=self.asked, banned=self.banned, strikes=self.strikes, quarantined=self.quarantined, progress=self.progress,
            call_age_s=ages[0], sealed_age_s=ages[1], grown_age_s=ages[2],
            late=late, incarnation=incarnation, fresh=fresh, place=place, promised=promised,
            fence_floor=fence_floor, wall_s=wall_s, linger_s=linger_s, away_asked_s=away_asked_s,
        )  # fmt: skip


async def read_run(
    session: Session, settings: Settings, presence: Presence | None, *, with_progress: bool = False
) -> View:
    """Read what a leader would judge, for `status` and for the last member to go. O(n). Raises Unreachable.

    `with_progress`: read how far the workers are, too, which no rule judges.
    """
    keys = Keys(settings.run_id)
    try:
        listed = await session.txn(then=[List(keys.group), *([List(keys.progress)] if with_progress else [])])
    except EngineReset:
        raise Unreachable("of this run", "it was restarted a moment ago") from None
    mirror, agreed = RunMirror(keys, chain(*listed.reads), listed.revision), settings.agreed()
    if presence is None:
        return mirror.view(settings=agreed, me="", durable=session.durable, known_s=0.0, ages=(0, 0, 0), late=True)
    known_s, ages, late = presence.node.now() - presence.known_at, presence.tracker.ages(), presence.tracker.late
    return mirror.view(settings=agreed, me=presence.id, durable=session.durable, known_s=known_s, ages=ages, late=late)
