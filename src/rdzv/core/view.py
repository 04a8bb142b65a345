"""What the leader sees: the run at one revision, and who counts as what in it.

The words are those of the protocol. Each is defined once, here, and every rule uses these definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cached_property

import msgspec

from .model import BACK_S, NO_ROUND, Head, MemberRecord, RankEntry, RoundId, RoundReport, RunSettings
from .ranks import Candidate


class LiveMember(msgspec.Struct, frozen=True, gc=False):
    """A member whose key exists."""

    id: str
    record: MemberRecord
    created: int
    modified: int


class View(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The run at one revision, with ages by the observer's own clock. `dict=True` gives cached_property its room."""

    settings: RunSettings
    me: str
    durable: bool = True
    known_s: float = 0.0
    """How long this engine instance has been known to me."""
    revision: int = 0
    head: Head | None = None
    head_modified: int = 0
    members: Mapping[str, LiveMember] = {}
    entries: Mapping[str, RankEntry] = {}
    """Lines of the head's rank table by member id; none without a head."""
    orphans: Collection[str] = ()
    """Rank tables that the head does not name."""
    asked: Mapping[str, str] = {}
    banned: Mapping[str, str] = {}
    call_age_s: float = 0.0
    sealed_age_s: float = 0.0
    grown_age_s: float = 0.0
    drain_age_s: float = 0.0
    """Since the first of the present drains in the table was seen."""
    late: bool = False
    """The present timer had begun before the observer looked, so that its ages are too small."""
    incarnation: int = 0
    fresh: str = ""
    """A random id, drawn by whoever asks, for a head or table that this decision may make."""

    # ---- words

    @property
    def young(self) -> bool:
        """The engine may have come back empty, and its members have not had the time to come back too."""
        return not self.durable and self.known_s < BACK_S

    @cached_property
    def in_table(self) -> dict[str, LiveMember]:
        """Live members with a line in the table. The create revision tells a member from a former life of its key."""
        entries = self.entries
        found = {}
        for live in self.members.values():
            line = entries.get(live.id)
            if line is not None and line.created == live.created:
                found[live.id] = live
        return found

    @cached_property
    def lost(self) -> dict[str, RankEntry]:
        """Lines whose member is gone and was not done."""
        return {id: line for id, line in self.entries.items() if id not in self.in_table and not line.done}

    def is_draining(self, live: LiveMember) -> bool:
        """It is about to go, by itself or because it was asked to."""
        return bool(live.record.drain) or live.id in self.asked

    def is_ready(self, live: LiveMember) -> bool:
        """It wants to be in the next round and runs no workers of the present one."""
        record = live.record
        if not self._stays(live):
            return False
        if record.holds is not None and record.left < record.holds.round:
            # It came to an emptied engine with its workers running. Whatever the head is by now, it must first learn what
            # became of its round: without this it was sealed into another while they ran.
            return False
        return live.id not in self.in_table or record.left >= self.round

    @property
    def round(self) -> RoundId:
        """The head's round."""
        return NO_ROUND if self.head is None else self.head.round

    @cached_property
    def ready(self) -> list[LiveMember]:
        """Those who would be in a round sealed now, if there is room."""
        return [live for live in self.members.values() if self.is_ready(live)]

    @cached_property
    def newcomers(self) -> list[LiveMember]:
        """Ready and not in the table."""
        return [live for live in self.ready if live.id not in self.in_table]

    @cached_property
    def survivors(self) -> list[LiveMember]:
        """Those of the table that can be in the next round."""
        return [live for live in self.in_table.values() if self._stays(live)]

    @cached_property
    def former(self) -> list[LiveMember]:
        """The survivors, and those who told an emptied engine that they had been in the table before they gave it up.

        The latter have no line in it here, so they count as newcomers; but a round that lost its server and a member together
        is re-formed by them, and need not wait for others as a first round does.
        """
        told = {live.id for live, told in self.told if self.head and told.table == self.head.table and told.rank >= 0}
        return [live for live in self.members.values() if (live.id in self.in_table or live.id in told) and self._stays(live)]

    @cached_property
    def stragglers(self) -> list[LiveMember]:
        """Those of the table that can be in the next round but still run workers of this one."""
        return [live for live in self.survivors if live.record.left < self.round]

    @cached_property
    def candidates(self) -> list[LiveMember]:
        """All who can be in some later round: ready, straggling, spare or waiting."""
        return [live for live in self.members.values() if self._stays(live)]

    @cached_property
    def drains(self) -> list[LiveMember]:
        """Those of the table that are about to go."""
        return [live for live in self.in_table.values() if self.is_draining(live) and not live.record.done]

    @cached_property
    def restarted(self) -> list[LiveMember]:
        """Those of the table that have given its round up."""
        return [live for live in self.survivors if live.record.left >= self.round]

    @cached_property
    def gave_up(self) -> dict[str, RankEntry]:
        """Lines of members that failed for good."""
        return {id: line for id, line in self.entries.items() if line.gave_up}

    @cached_property
    def done(self) -> set[str]:
        """Ids of those in the table whose work succeeded, gone or not."""
        marked = {id for id, line in self.entries.items() if line.done}
        return marked | {live.id for live in self.in_table.values() if live.record.done}

    def _stays(self, live: LiveMember) -> bool:
        return not (self.is_draining(live) or live.record.done or live.record.host in self.banned)

    # ---- sizes

    def fitting(self, count: int) -> int:
        """How many of `count` members a round could have: at most max_nodes, in whole units. Below min_nodes: none."""
        unit = self.settings.unit
        size = min(count, self.settings.max_nodes) // unit * unit
        return size if size >= self.settings.min_nodes else 0

    @property
    def capacity(self) -> int:
        """The largest size a round can have."""
        return self.fitting(self.settings.max_nodes)

    @property
    def is_full(self) -> bool:
        """As many as a round can hold are ready."""
        return len(self.ready) >= self.capacity

    @property
    def here(self) -> str:
        """How far along we are, as every reason begins."""
        low, high = self.settings.min_nodes, self.settings.max_nodes
        wanted = f"{low}" if low == high else f"{low}..{high}"
        return f"{len(self.ready)} of {wanted} nodes"

    # ---- what members tell an emptied engine

    @cached_property
    def told(self) -> list[tuple[LiveMember, RoundReport]]:
        """Every round told of by somebody live, held or heard."""
        return [
            (live, told)
            for live in self.members.values()
            for told in (live.record.holds, live.record.heard)
            if told is not None
        ]


def candidate(live: LiveMember) -> Candidate:
    """The member as rank assignment sees it."""
    record = live.record
    return Candidate(live.id, record.name, record.host, record.order or record.topology, live.created)


def names(lives: Collection[LiveMember] | Collection[RankEntry], limit: int = 3) -> str:
    """A few names for people: 'a, b and 4 more'."""
    get: Callable[[LiveMember | RankEntry], str] = lambda one: one.record.name if isinstance(one, LiveMember) else one.name  # noqa: E731
    listed = sorted(get(one) for one in lives)
    if len(listed) > limit:
        return f"{', '.join(listed[:limit])} and {len(listed) - limit} more"
    return " and ".join(listed) if len(listed) < 3 else f"{', '.join(listed[:-1])} and {listed[-1]}"
