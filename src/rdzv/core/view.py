"""The leader's view: the run at one revision, and what each member counts as in it."""

# All records that a view is made of lie under one key prefix, so one listing or watch shows them in the order of
# revisions (see keys.py). A view is therefore the run as it really was at `revision`, on every engine.
#
# The terms (ready, survivor, straggler, newcomer ...) are those of docs/protocol.md, section 3. Each is defined once,
# here, and all rules use these definitions. `testing/replay.py` defines them a second time, for the checkers.

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import chain

import msgspec

from .member_rules import shares_address
from .model import (
    BACK_S,
    FOLLOW_S,
    NO_ROUND,
    SEALED,
    Call,
    Head,
    MemberRecord,
    ProgressReport,
    RankEntry,
    RoundId,
    RoundReport,
    RunSettings,
)
from .ranks import Candidate
from .topology import in_segments


class LiveMember(msgspec.Struct, frozen=True, gc=False):
    """A member whose key exists, with the revisions that created and last changed the key."""

    id: str
    record: MemberRecord
    created: int
    modified: int


class View(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # A dict for cached_property.
    """The run at one revision, with ages by the observer's own clock."""

    settings: RunSettings
    me: str
    durable: bool = True
    known_s: float = 0.0
    """How long the observer has known this engine instance."""
    place: str = ""
    """Where the engine runs."""
    promised: bool = False
    """The server is at a declared place, so members of an earlier round may come from one on another machine (T16.4)."""
    fence_floor: int | None = 0
    """Fences count from above this on an engine of this start; None: the engine's revisions never begin again."""
    wall_s: int = 0
    """The observer's wall clock in seconds since 2020. It serves fences only, which decide nothing."""
    revision: int = 0
    head: Head | None = None
    head_modified: int = 0
    members: Mapping[str, LiveMember] = {}
    entries: Mapping[str, RankEntry] = {}
    """Entries of the head's rank table by member id; empty without a head."""
    orphans: Collection[str] = ()
    """Rank tables that the head does not name."""
    asked: Mapping[str, str] = {}
    """Reason by member id: an operator asked the member to drain."""
    banned: Mapping[str, str] = {}
    """Reason by host."""
    strikes: Mapping[str, Mapping[str, int]] = {}
    """By host, and by the table of the round that it broke: how many rounds the strike stands for."""
    quarantined: Mapping[str, str] = {}
    """Reason by host: the leader keeps it out for a time."""
    progress: Mapping[str, ProgressReport] = {}
    """How far the workers of each member are, if the observer has read that. For people; no rule reads it."""
    call_age_s: float = 0.0
    sealed_age_s: float = 0.0
    grown_age_s: float = 0.0
    drain_age_s: float = 0.0
    """Time since the observer saw the first of the present drains in the table."""
    stall_age_s: float = 0.0
    """Time since the observer saw the first of the present stalls."""
    linger_s: float = 0.0
    """How long a member whose connection is lost has to come back; 0: the engine does not see the end of a process."""
    away_asked_s: float = math.inf
    """Time since the observer last asked the engine whether stragglers are away."""
    quorum_age_s: float = 0.0
    """Without a head: time since the observer saw that the ready members are a quorum."""
    late: bool = False
    """The present call began before the observer looked, so its ages are too small and waits are upper bounds."""
    incarnation: int = 0
    fresh: str = ""
    """A random id for a head or table that this decision may make. The caller draws it, so that the rules stay pure."""

    # ---- terms

    @property
    def young(self) -> bool:
        """The engine may have come back empty a moment ago, so its members may not be back yet."""
        return not self.durable and self.known_s < BACK_S

    @property
    def first_wait_s(self) -> float:
        """How long a first head waits for members that may come back. Beyond BACK_S, it waits out part of the last call."""
        return max(BACK_S, min(FOLLOW_S, self.settings.last_call)) if self.promised else BACK_S

    @property
    def may_be_followed(self) -> bool:
        """The engine is young, or at a declared place to which members of an earlier round may still be on their way."""
        return self.young or (self.promised and self.known_s < self.first_wait_s)

    @cached_property
    def in_table(self) -> dict[str, LiveMember]:
        """Live members with an entry in the head's table."""
        entries = self.entries
        found = {}
        for live in self.members.values():
            entry = entries.get(live.id)
            # A member that came again under its id is another member: its workers are new. The create revision tells
            # the two lives of the key apart (H5).
            if entry is not None and entry.created == live.created:
                found[live.id] = live
        return found

    @cached_property
    def lost(self) -> dict[str, RankEntry]:
        """Entries whose member is gone and was not done."""
        return {id: entry for id, entry in self.entries.items() if id not in self.in_table and not entry.done}

    def is_draining(self, live: LiveMember) -> bool:
        """Whether the member is about to go, by itself or because an operator asked it to."""
        # The request counts from the moment it is made. The operator must not write the member's record: each key has
        # one writer (H22).
        return bool(live.record.drain) or live.id in self.asked

    @cached_property
    def candidates(self) -> dict[str, LiveMember]:
        """Members that can be in some later round: ready, straggling, spare or waiting."""
        return {id: live for id, live in self.members.items() if self.stays(live)}

    def is_ready(self, live: LiveMember) -> bool:
        """Whether the member may be in the next round and runs no workers of an earlier one."""
        return self._wants_in(live) and live.id not in self.kept_out

    def _wants_in(self, live: LiveMember) -> bool:
        record = live.record
        if live.id not in self.candidates:
            return False
        if record.holds is not None and record.left < record.holds.round:
            # The member brought a round to an emptied engine, with its workers running. Whatever the head is by now,
            # the member must first learn what became of its round. Seed 57: it was sealed into the next round in the
            # milliseconds before it could say that it holds one.
            return False
        if self.head is not None and shares_address(record, self.head):
            # A newcomer bound the port of the round that is over, whose server is gone. Late workers of that round
            # could meet those of the next one there (H32). The member announces another port as soon as it sees the head.
            return False
        return live.id not in self.in_table or record.left >= self.round

    @cached_property
    def round(self) -> RoundId:
        """The head's round, or `NO_ROUND`."""
        return NO_ROUND if self.head is None else self.head.round

    @cached_property
    def ready(self) -> list[LiveMember]:
        """Members that would be in a round sealed now, if there is room."""
        return [live for live in self.members.values() if self.is_ready(live)]

    @cached_property
    def kept_out(self) -> dict[str, LiveMember]:
        """Members that would be ready, but are on quarantined hosts that quorum does not need."""
        # The others that count are those that are ready without them: a straggler may never be. In a running round its
        # survivors count, because the question there is whether it could go on.
        if not self.quarantined:
            return {}
        runs = self.head is not None and self.head.phase is SEALED
        others = self.survivors if runs else []
        wanting = [one for one in self.members.values() if self._wants_in(one) and not (runs and one.id in self.in_table)]
        free = [one for one in wanting if one.record.host not in self.quarantined]
        held = sorted(
            (one for one in wanting if one.record.host in self.quarantined),
            key=lambda one: (sum(self.strikes.get(one.record.host, {}).values()), one.created),
        )
        needed = 0
        while needed < len(held) and not self.fits(others, free, held[:needed]):
            needed += 1
        return {one.id: one for one in held[needed:]}

    @cached_property
    def newcomers(self) -> list[LiveMember]:
        """Members that are ready and not in the table."""
        return [live for live in self.ready if live.id not in self.in_table]

    @cached_property
    def survivors(self) -> list[LiveMember]:
        """Members of the table that can be in the next round."""
        return [live for id, live in self.in_table.items() if id in self.candidates]

    @cached_property
    def former(self) -> list[LiveMember]:
        """The survivors, and members that reported having been in the table before they gave its round up."""
        # The latter have no entry on an emptied engine, so they count as newcomers there. But if a round loses its
        # server and a member together, they re-form it, and need not wait for others as a first round does.
        head = self.head
        reported = {live.id for live, one in self.reports if head and one.table == head.table and one.rank >= 0}
        reported |= self.in_table.keys()
        return [live for id, live in self.candidates.items() if id in reported]

    @cached_property
    def vanished(self) -> list[RankEntry]:
        """Entries of lost members that had not said that they would go, and that no operator banned."""
        return [one for one in self.lost.values() if not (one.gave_up or one.went or one.host in self.banned)]

    @cached_property
    def may_return(self) -> int:
        """How many lost members may be about to come back as others did, after their connections were cut."""
        back = [live for live in self.former if live.id not in self.in_table]
        return max(0, len(self.vanished) - len(back)) if back else 0

    @cached_property
    def stragglers(self) -> list[LiveMember]:
        """Survivors that still run workers of the head's round."""
        return [live for live in self.survivors if live.record.left < self.round]

    @cached_property
    def drains(self) -> list[LiveMember]:
        """Members of the table that are about to go."""
        return [live for live in self.in_table.values() if self.is_draining(live) and not live.record.done]

    @cached_property
    def stalled(self) -> list[LiveMember]:
        """Members of the table that report that workers of the head's round get no further."""
        table = "" if self.head is None else self.head.table
        return [
            live for live in self.in_table.values()
            if live.record.stalled is not None and live.record.stalled.table == table and not live.record.done
        ]  # fmt: skip

    @cached_property
    def unhealthy(self) -> list[LiveMember]:
        """Members that would take part if the check of their node let them."""
        return [
            live for live in self.members.values()
            if live.record.unhealthy and not (self.is_draining(live) or live.record.host in self.banned)
        ]  # fmt: skip

    @cached_property
    def restarted(self) -> list[LiveMember]:
        """Members of the table that have given up the head's round, and want to be in the next one."""
        wanting = self.candidates.keys() | {live.id for live in self.unhealthy}
        return [live for id, live in self.in_table.items() if id in wanting and live.record.left >= self.round]

    @cached_property
    def gave_up(self) -> dict[str, RankEntry]:
        """Entries of members that failed for good."""
        return {id: entry for id, entry in self.entries.items() if entry.gave_up}

    @cached_property
    def done(self) -> set[str]:
        """Ids of members in the table whose work succeeded, gone or not."""
        marked = {id for id, entry in self.entries.items() if entry.done}
        return marked | {live.id for live in self.in_table.values() if live.record.done}

    def stays(self, live: LiveMember) -> bool:
        """Whether the member can be in some later round."""
        record = live.record
        return not (self.is_draining(live) or record.done or record.unhealthy or record.host in self.banned)

    # ---- sizes

    def fitting(self, count: int) -> int:
        """The size of a round of `count` members: at most max_nodes, in whole units; 0 if that is below min_nodes."""
        step = self.step
        size = min(count, self.settings.max_nodes) // step * step
        return size if size >= self.settings.min_nodes else 0

    @property
    def step(self) -> int:
        """The number that every size is a multiple of. One of unit and segment is a multiple of the other."""
        return max(self.settings.unit, self.settings.segment)

    def usable(self, *lives: Collection[LiveMember]) -> int:
        """How many of these members can be in one round: all, or those in whole segments of neighbours."""
        segment = self.settings.segment
        if segment == 1:
            return sum(map(len, lives))
        return in_segments((live.record.topology for live in chain(*lives)), segment)

    def fits(self, *lives: Collection[LiveMember]) -> int:
        """The size of a round of these members; 0 if they are no quorum."""
        return self.fitting(self.usable(*lives))

    @property
    def capacity(self) -> int:
        """The largest size a round can have."""
        return self.fitting(self.settings.max_nodes)

    @property
    def is_full(self) -> bool:
        """Whether as many members are ready as a round can hold."""
        return self.usable(self.ready) >= self.capacity

    @property
    def missing(self) -> int:
        """How many members must become ready before a round can be sealed without more waiting; 0: that is not known."""
        return len(self.stragglers) or max(0, self.capacity - self.usable(self.ready))

    @property
    def first_call(self) -> tuple[Call, float]:
        """The call of a head of no round that is made now, and how much of its time has passed already."""
        # A quorum need not wait twice: for members that may come back to an emptied engine, and then for a last call.
        if not self.fits(self.ready):
            return Call.NONE, 0.0
        return Call.LAST, round(min(self.quorum_age_s, self.first_wait_s), 3)

    @property
    def here(self) -> str:
        """The beginning of every reason about a forming round: "3 of 2..8 nodes"."""
        low, high = self.settings.min_nodes, self.settings.max_nodes
        wanted = f"{low}" if low == high else f"{low}..{high}"
        return f"{len(self.ready)} of {wanted} nodes"

    # ---- reports to an emptied engine

    @cached_property
    def reports(self) -> list[tuple[LiveMember, RoundReport]]:
        """Every report of a live member: the round it holds, and the newest head it heard of."""
        return [
            (live, report)
            for live in self.members.values()
            for report in (live.record.holds, live.record.heard)
            if report is not None
        ]


def candidate(live: LiveMember) -> Candidate:
    """Return the member as rank assignment sees it."""
    record = live.record
    return Candidate(live.id, record.name, record.host, record.order, live.created, record.topology)


def name_of(one: LiveMember | RankEntry) -> str:
    return one.record.name if isinstance(one, LiveMember) else one.name


def names(lives: Collection[LiveMember] | Collection[RankEntry], limit: int = 3) -> str:
    """Return a few names for people: 'a, b and 4 more'."""
    listed = sorted(map(name_of, lives))
    if len(listed) > limit:
        return f"{', '.join(listed[:limit])} and {len(listed) - limit} more"
    return " and ".join(listed) if len(listed) < 3 else f"{', '.join(listed[:-1])} and {listed[-1]}"
