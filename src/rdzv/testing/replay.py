"""The state of an engine, rebuilt from its commits: the checkers judge by this.

The terms of the protocol are defined here a second time, independently of `core.view` and as plainly as possible, so
that a mistake in one of the two shows as a difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from ..core import wire
from ..core.keys import Keys
from ..core.model import BACK_S, STALL_GATHER_S, Call, Head, MemberRecord, Phase, RankEntry, RunSettings, Strike
from ..engines.port import Event
from .history import Commit

T = TypeVar("T")


class Term(Generic[T]):
    """A property that is computed once per commit. Python's own takes a lock each time."""

    def __init__(self, compute: Callable[[State], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__
        self._name = compute.__name__

    def __get__(self, state: State, _kind: type[State] | None = None) -> T:
        value = state.__dict__[self._name] = self._compute(state)
        return value


@dataclass
class Present:
    """A member's key as it stands in an engine."""

    id: str
    record: MemberRecord
    created: int


@dataclass
class State:
    """One engine instance at its latest commit."""

    instance: str
    keys: Keys
    head: Head | None = None
    settings: RunSettings | None = None
    members: dict[str, Present] = field(default_factory=dict)
    tables: dict[str, dict[str, RankEntry]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    banned: set[str] = field(default_factory=set)
    strikes: dict[tuple[str, str], int] = field(default_factory=dict)
    """By host and table: how many rounds the strike stands for."""
    quarantined: set[str] = field(default_factory=set)
    heads: list[tuple[int, Head | None]] = field(default_factory=list)
    """Every head, with the revision that wrote it."""
    lives: dict[str, list[int]] = field(default_factory=dict)
    """For each member id: the revision of its creation, and of its end if it has ended."""

    def apply(self, commit: Commit) -> None:
        changes = [event for event in commit.events if event.key.startswith(self.keys.group)]
        if changes:
            for term in _TERMS:
                self.__dict__.pop(term, None)
        for event in changes:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        keys, key, item = self.keys, event.key, event.item
        if key == keys.head:
            self.head = None if item is None else wire.read_head(item.value)
            self.heads.append((event.revision, self.head))
        elif key == keys.settings:
            self.settings = None if item is None else wire.decode(RunSettings, item.value)
        elif key.startswith(keys.members):
            id = key[len(keys.members) :]
            if item is None:
                self.members.pop(id, None)
                self.lives[id].append(event.revision)
            else:
                self.members[id] = Present(id, wire.decode(MemberRecord, item.value), item.created)
                self.lives.setdefault(id, [item.created])
        elif key.startswith(keys.ranks):
            table, _, id = key[len(keys.ranks) :].partition("/")
            entries = self.tables.setdefault(table, {})
            if item is None:
                entries.pop(id, None)
            else:
                entry = wire.decode(RankEntry, item.value)
                # 0: the entry and its member's key were put in one transaction.
                entries[id] = msgspec.structs.replace(entry, created=entry.created or item.created)
        elif key.startswith(keys.asks):
            (self.asked.add if item is not None else self.asked.discard)(key[len(keys.asks) :])
        elif key.startswith(keys.bans):
            (self.banned.add if item is not None else self.banned.discard)(keys.host_of_ban(key))
        elif key.startswith(keys.quarantines):
            (self.quarantined.add if item is not None else self.quarantined.discard)(keys.host_of_quarantine(key))
        elif key.startswith(keys.strikes):
            if item is None:
                self.strikes.pop(keys.of_strike(key), None)
            else:
                self.strikes[keys.of_strike(key)] = wire.decode(Strike, item.value).count

    # ---- the terms of the protocol; those that are cached hold until the next commit

    @Term
    def leader(self) -> Present | None:
        return min(self.members.values(), key=lambda one: one.created, default=None)

    @property
    def entries(self) -> dict[str, RankEntry]:
        """The entries of the head's table."""
        return self.tables.get(self.head.table, {}) if self.head is not None else {}

    @Term
    def seated(self) -> dict[str, Present]:
        """Members in the head's table."""
        created = {id: entry.created for id, entry in self.entries.items()}
        return {one.id: one for one in self.members.values() if created.get(one.id) == one.created}

    def usable(self, one: Present) -> bool:
        """Whether the member can be in a later round."""
        leaving = bool(one.record.drain) or one.id in self.asked or one.record.host in self.banned
        return not leaving and not one.record.done and not one.record.unhealthy

    def has_left(self, one: Present) -> bool:
        """Whether the member runs nothing of the head's round any more."""
        return self.head is not None and one.record.left >= self.head.round

    @Term
    def ready(self) -> list[Present]:
        """Those who want to come in, but of quarantined hosts only the fewest that make up a quorum."""
        runs = self.head is not None and self.head.phase is Phase.SEALED
        is_held = {one.id: one.record.host in self.quarantined and not (runs and one.id in self.seated) for one in self.wanting}
        free = [one for one in self.wanting if not is_held[one.id]]
        held = [one for one in self.wanting if is_held[one.id]]
        held.sort(key=lambda one: (self.struck(one.record.host), one.created))
        enough = [*free, *(one for one in self.survivors if one not in free)] if runs else free
        while held and not self.size_of(enough):
            free, enough = [*free, held[0]], [*enough, held.pop(0)]
        return free

    def struck(self, host: str) -> int:
        """How many rounds the host has broken, as far as that counts."""
        return sum(count for (one, _), count in self.strikes.items() if one == host)

    @Term
    def wanting(self) -> list[Present]:
        """Members that run nothing, and would be in the next round."""
        return [
            one
            for one in self.members.values()
            if self.usable(one)
            and (self.head is None or one.record.boot != self.head.boot)
            and (one.record.holds is None or one.record.left >= one.record.holds.round)
            and (one.id not in self.seated or self.has_left(one))
        ]

    @Term
    def survivors(self) -> list[Present]:
        return [one for one in self.seated.values() if self.usable(one)]

    @property
    def stragglers(self) -> list[Present]:
        return [one for one in self.survivors if not self.has_left(one)]

    @Term
    def newcomers(self) -> list[Present]:
        return [one for one in self.ready if one.id not in self.seated]

    @property
    def lost(self) -> list[RankEntry]:
        return [entry for id, entry in self.entries.items() if id not in self.seated and not entry.done]

    @Term
    def some_done(self) -> bool:
        """Whether a member of the table is done, gone or not."""
        return any(one.record.done for one in self.seated.values()) or any(one.done for one in self.entries.values())

    def whole(self, lives: list[Present]) -> int:
        """How many of these members are in whole segments of neighbours, if the run has segments."""
        segment = 1 if self.settings is None else self.settings.segment
        if segment == 1:
            return len(lives)
        racks = Counter("/".join(one.record.topology.split("/")[:-1]) for one in lives)
        return sum(count - count % segment for count in racks.values())

    def size_of(self, lives: list[Present]) -> int:
        """The size of a round of these members; 0 if they are no quorum."""
        return self._fitting(self.whole(lives))

    def _fitting(self, count: int) -> int:
        if self.settings is None:
            return 0
        size = min(count, self.settings.max_nodes)
        size -= size % self.settings.unit
        size -= size % self.settings.segment
        return size if size >= self.settings.min_nodes else 0

    @Term
    def next_size(self) -> int:
        """The size of the round that would follow the head's; 0 if there would be none."""
        return self.size_of([*self.survivors, *self.newcomers])

    @property
    def can_grow(self) -> bool:
        """Whether a sealed round may be broken for newcomers, now or later."""
        head, settings = self.head, self.settings
        if settings is None or head is None or head.phase is not Phase.SEALED or settings.grow == "never":
            return False
        return not self.some_done and self.next_size > head.size

    # ---- what is owed

    @Term
    def owed(self) -> tuple[str, float] | None:
        """The act that the leader owes if nothing else happens, and within how many seconds; None if it owes none."""
        settings, head = self.settings, self.head
        if settings is None or not self.members or (head is not None and head.phase is Phase.CLOSED):
            return None
        if head is not None and head.phase is Phase.SEALED:
            return self._owed_sealed(settings, head)
        if not self.size_of(self.ready):
            return None
        if self.stragglers:
            return "evict stragglers", settings.regroup + settings.last_call
        if self.whole(self.ready) >= self._fitting(settings.max_nodes):
            reported = any(one.record.holds or one.record.heard for one in self.members.values())
            # Two debts, each with a time of its own: until the head is restored, and from then on.
            return ("go on: full", 3.0) if reported and head is None else ("seal: full", 0.0)
        if head is not None and head.call is Call.REGROUP:
            # Members of a round that lost its quorum by cut connections have time to come back.
            return "seal: regrouped", max(settings.replace_wait, 0.0 if self.size_of(self.survivors) else BACK_S)
        if head is None or head.number == 0:
            return "seal: last call", max(settings.last_call, BACK_S)
        return "seal: last call", settings.last_call + BACK_S

    def _owed_sealed(self, settings: RunSettings, head: Head) -> tuple[str, float] | None:
        sick = [one for one in self.seated.values() if one.record.unhealthy]
        if self.lost or any(self.has_left(one) for one in (*self.survivors, *sick)):
            return "break: a member of the table is gone or has left", 0.0
        undone = [one for one in self.seated.values() if not one.record.done]
        told = [one.record.stalled for one in undone if one.record.stalled is not None]
        if any(stall.table == head.table for stall in told):
            return "break: a member stalled", min(STALL_GATHER_S, settings.stall)
        leaving = sum(bool(one.record.drain) or one.id in self.asked for one in undone)
        if leaving and settings.drain_notice:
            return self._owed_to_drains(head, undone, leaving)
        if leaving and self.next_size:
            return "break: a member drains", settings.drain_settle
        if self.can_grow and not settings.grow_every and not head.flaps:
            return "break: let newcomers in", 0.0 if settings.grow == "now" else settings.settle
        return None


    def _owed_to_drains(self, head: Head, undone: list[Present], leaving: int) -> tuple[str, float] | None:
        """T7.17, T7.18: the workers are told at once, and the notice ends when all have answered, or when its time is over."""
        given = head.notice
        if given is None or (head.call is not Call.NOTICE and leaving > given.drains):
            return "break: the workers are told of a drain", 0.0
        if head.call is not Call.NOTICE:
            return ("break: a member drains, and had its notice", 0.0) if self.next_size else None
        if all(one.record.saved == head.call_seq for one in undone):
            return "break: all have saved", 0.0
        return "break: the time of the notice is over", given.limit_s


_TERMS = tuple(name for name, value in vars(State).items() if isinstance(value, Term))
