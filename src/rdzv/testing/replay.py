"""A run's engines, built again from what they committed: what the checkers judge by.

The words of the protocol are defined here a second time, independently of `core.view`, in the plainest way: a mistake in one of
the two shows as a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from ..core import wire
from ..core.keys import Keys
from ..core.model import Call, Head, MemberRecord, Phase, RankEntry, RunSettings
from ..engines.port import Event
from .history import Commit


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
    began_at: float
    revision: int = 0
    head: Head | None = None
    settings: RunSettings | None = None
    members: dict[str, Present] = field(default_factory=dict)
    tables: dict[str, dict[str, RankEntry]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    banned: set[str] = field(default_factory=set)
    heads: list[tuple[int, Head | None]] = field(default_factory=list)
    lives: dict[str, list[int]] = field(default_factory=dict)
    """By member id: revision of its creation, and of its end if it has ended."""

    def apply(self, commit: Commit) -> None:
        """Go on to that commit."""
        self.revision = commit.revision
        for event in commit.events:
            self._apply(event)

    def _apply(self, event: Event) -> None:
        keys, key, item = self.keys, event.key, event.item
        if key == keys.head:
            self.head = None if item is None else wire.decode(Head, item.value)
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
            lines = self.tables.setdefault(table, {})
            if item is None:
                lines.pop(id, None)
            else:
                line = wire.decode(RankEntry, item.value)
                lines[id] = msgspec.structs.replace(line, created=line.created or item.created)
        elif key.startswith(keys.asks):
            (self.asked.add if item is not None else self.asked.discard)(key[len(keys.asks) :])
        elif key.startswith(keys.bans):
            (self.banned.add if item is not None else self.banned.discard)(keys.host_of_ban(key))

    # ---- the protocol's words, once more

    @property
    def leader(self) -> Present | None:
        """The live member that came first."""
        return min(self.members.values(), key=lambda one: one.created, default=None)

    @property
    def lines(self) -> dict[str, RankEntry]:
        """Of the head's table."""
        return self.tables.get(self.head.table, {}) if self.head is not None else {}

    def seated(self, one: Present) -> bool:
        """It is in the head's table."""
        line = self.lines.get(one.id)
        return line is not None and line.created == one.created

    def usable(self, one: Present) -> bool:
        """It can be in a later round."""
        leaving = bool(one.record.drain) or one.id in self.asked or one.record.host in self.banned
        return not leaving and not one.record.done

    def has_left(self, one: Present) -> bool:
        """It runs nothing of the head's round any more."""
        return self.head is not None and one.record.left >= self.head.round

    @property
    def ready(self) -> list[Present]:
        """Wants to be in the next round."""
        return [
            one
            for one in self.members.values()
            if self.usable(one)
            and (one.record.holds is None or one.record.left >= one.record.holds.round)
            and (not self.seated(one) or self.has_left(one))
        ]

    @property
    def survivors(self) -> list[Present]:
        """Of the table, and able to go on."""
        return [one for one in self.members.values() if self.usable(one) and self.seated(one)]

    @property
    def stragglers(self) -> list[Present]:
        """Survivors that still run the head's round."""
        return [one for one in self.survivors if not self.has_left(one)]

    @property
    def newcomers(self) -> list[Present]:
        """Ready, and not of the table."""
        return [one for one in self.ready if not self.seated(one)]

    @property
    def lost(self) -> list[RankEntry]:
        """Lines whose member is gone without being done."""
        seated = {one.id for one in self.members.values() if self.seated(one)}
        return [line for id, line in self.lines.items() if id not in seated and not line.done]

    @property
    def some_done(self) -> bool:
        """Somebody of the table is done, here or gone."""
        here = any(one.record.done for one in self.members.values() if self.seated(one))
        return here or any(line.done for line in self.lines.values())

    def size_of(self, count: int) -> int:
        """How large a round of `count` members would be; 0: none."""
        if self.settings is None:
            return 0
        size = min(count, self.settings.max_nodes) // self.settings.unit * self.settings.unit
        return size if size >= self.settings.min_nodes else 0

    # ---- what is owed: a name and the longest time it may take, or None

    def owed(self) -> tuple[str, float] | None:
        """What the leader must do before long, given this state and nothing else happening."""
        settings, head = self.settings, self.head
        if settings is None or not self.members:
            return None
        if head is not None and head.phase is Phase.CLOSED:
            return None
        if head is not None and head.phase is Phase.SEALED:
            return self._owed_sealed(settings, head)
        count = len(self.ready)
        if not self.size_of(count):
            return None
        if self.stragglers:
            return "evict stragglers", settings.regroup + settings.last_call
        if count >= self.size_of(settings.max_nodes):
            told = any(one.record.holds or one.record.heard for one in self.members.values())
            # Two debts, each with its own time: until somebody has begun again, and from then on.
            return ("go on: full", 3.0) if told and head is None else ("seal: full", 0.0)
        if head is not None and head.call is Call.REGROUP:
            return "seal: regrouped", settings.replace_wait
        return "seal: last call", settings.last_call + 3.0

    def _owed_sealed(self, settings: RunSettings, head: Head) -> tuple[str, float] | None:
        if self.lost or any(self.has_left(one) for one in self.survivors):
            return "break: a member of the table is gone or has left", 0.0
        leaving = any(
            self.seated(one) and (one.record.drain or one.id in self.asked) and not one.record.done
            for one in self.members.values()
        )
        if leaving and self.size_of(len(self.survivors) + len(self.newcomers)):
            return "break: a member drains", settings.drain_settle
        grows = settings.grow != "never" and not settings.grow_every and not head.flaps and not self.some_done
        if grows and self.size_of(len(self.survivors) + len(self.newcomers)) > head.size:
            return "break: let newcomers in", 0.0 if settings.grow == "now" else settings.settle
        return None
