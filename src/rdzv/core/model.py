"""The records of a run: all that the engine stores, and all that members know of each other.

Everything here is a frozen value. `keys.py` says which key holds which record, `wire.py` how it is encoded, and
`rules.py` when and why it is written. Field names are part of the stored format.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class Phase(str, Enum):
    """The state of the run's head."""

    OPEN = "open"
    SEALED = "sealed"
    BROKEN = "broken"
    CLOSED = "closed"


OPEN, SEALED, BROKEN, CLOSED = Phase  # Names of their own: before Python 3.12, reading a member of an enum is slow.


class Call(str, Enum):
    """The timer that a head write started. Each member measures its age from the moment it saw that write."""

    NONE = "none"
    LAST = "last"
    REGROUP = "regroup"
    SETTLE = "settle"
    NOTICE = "notice"


class CauseKind(str, Enum):
    """The kinds of cause, for programs and metrics; people read the text beside it."""

    LOST = "lost"
    LEFT = "left"
    RESTARTED = "restarted"
    DRAINED = "drained"
    BANNED = "banned"
    GAVE_UP = "gave_up"
    STALLED = "stalled"
    FUTILE = "futile"
    GROWTH = "growth"
    RETOLD = "retold"
    SUCCESS = "success"
    CLOSED = "closed"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """Base of all records: refuses unknown fields, omits defaults.

    `gc=False`: a record cannot be part of a reference cycle. With the collector, a third of the time of a thousand
    members in one process went into it.
    """


class Era(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """The line of heads that a round was sealed under; a head restored on an emptied engine begins a new one.

    The level is above every level that was reported when that head was made. The id is random and made with the head.
    recovery.py says why both are needed.
    """

    level: int = 0
    id: str = ""


class RoundId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """The position of a round in the order of all rounds of a run: era first, then number."""

    era: Era = Era()
    number: int = 0


NO_ROUND = RoundId()


class WorkerRanks(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The ranks of one member's workers among all workers of a round, and among those of its role."""

    first: int
    """Rank of the member's first worker; the others follow it."""
    total: int
    role_first: int
    role_total: int


class Cause(Record, frozen=True, kw_only=True):
    """Why a round was broken or a run closed."""

    kind: CauseKind
    text: str
    members: tuple[str, ...] = ()
    """Names of the members concerned, at most CAUSE_MEMBERS_MAX."""


class DrainNotice(Record, frozen=True, kw_only=True):
    """A notice to all workers of the round: it will end because members drain. Only with the setting `drain_notice`."""

    reason: str
    limit_s: float
    """How long the workers have to save, from the write that set the call."""
    drains: int
    """For how many members of the table that drain it was given. If more do later, there is another notice."""


class Reach(Record, frozen=True, kw_only=True):
    """How far the workers of the run have ever got. Only with the setting `futile_rounds`."""

    step: int
    """The highest step that a worker has told in any round."""
    rounds: int = 0
    """Rounds in a row that failed since, and in which no worker got further."""
    cause: str = ""
    """Why the round that got there ended, or if that did not fail, the first that failed since."""


# Bounds that keep the head small: every change of it goes to every member (H21).
CAUSE_MEMBERS_MAX = 8
FLAPS_MAX = 16
BEHIND_MAX = 8
"""Ranks of workers that a record names."""


class Head(Record, frozen=True, kw_only=True, tag="head"):
    """R/round: what the run agreed on last. Its size does not grow with the run, because every member watches it."""

    run: str
    """Random id of this incarnation of the run id, made with the first head."""
    era: Era
    number: int = 0
    """Number of the last sealed round, 0 before the first."""
    phase: Phase = Phase.OPEN
    table: str = ""
    """Random id of the rank table. A table is written once and its id never reused."""
    size: int = 0
    digest: str = ""
    """Fingerprint of the member list, to check a table that is fetched later."""
    boot: str = ""
    """Bootstrap address: host:port of the socket that rank 0 has bound."""
    seen: int = 0
    """Revision of the view that the seal was decided on."""
    fence: int = 0
    """The fence of the round, for what its workers write elsewhere. No rule reads it (fence.py)."""
    call: Call = Call.NONE
    call_seq: int = 0
    """`seq` of the write that set `call`. The age of the call is measured from that write."""
    waited: float = 0.0
    """How long a quorum had been there when the head was made: that time is part of the last call."""
    seq: int = 1
    """Number of writes of this head; also numbers the journal."""
    came: tuple[str, ...] = ()
    """Names of the members that were not in the round before, if they are at most CAUSE_MEMBERS_MAX."""
    cause: Cause | None = None
    """Why the round is broken or the run closed. In a sealed head: why the round before it was broken."""
    adopted: bool = False
    """The head was restored on an emptied engine for members that hold its round; no other member is given it."""
    next_era: Era
    """Era of the next seal; differs from `era` only if this head was restored."""
    top: int = 0
    """Largest size sealed so far: coming back to it is a replacement, going beyond it is growth."""
    grown: int = 0
    """Number of the last round that was growth, 0 if none was."""
    flaps: dict[str, int] = {}
    """How often members of each name were lost soon after the growth that they caused. At most FLAPS_MAX names."""
    flapped: tuple[str, ...] = ()
    """Names of members of the present round that `flaps` counts already, at most FLAPS_MAX."""
    incarnation: int = 0
    """Set by the user: a higher one may begin anew after a close."""
    notice: DrainNotice | None = None
    """The last notice of this round. It runs while the call is `notice`; after that, the workers have had their time."""
    reach: Reach | None = None

    @property
    def round(self) -> RoundId:
        """The round that this head names."""
        return RoundId(self.era, self.number)


class RoundReport(Record, frozen=True, kw_only=True):
    """A member's report to an emptied engine: the round it holds, or the newest head it heard of."""

    run: str
    era: Era
    number: int
    table: str
    phase: Phase = Phase.SEALED
    size: int = 0
    rank: int = -1
    """The reporter's rank in that table; -1 if it is not in it or never learned."""
    digest: str = ""
    boot: str = ""
    top: int = 0
    grown: int = 0
    incarnation: int = 0
    next_era: Era
    cause: Cause | None = None
    left: RoundId = NO_ROUND
    """Highest round of that run that the reporter has given up. The next seal must be above it, or the reporter could
    never take that round."""

    @property
    def round(self) -> RoundId:
        """The round that is reported."""
        return RoundId(self.era, self.number)


class StallReport(Record, frozen=True, kw_only=True):
    """A member's report that workers of its own get no further."""

    table: str
    """The rank table of the round that they work in."""
    step: int
    """The lowest step of those that stopped."""
    ranks: tuple[int, ...]
    """Ranks of those at that step, at most BEHIND_MAX."""
    for_s: float
    """How long they have been there, by the member's own clock."""
    furthest: int = 0
    """The highest step of the member's workers."""


class MemberRecord(Record, frozen=True, kw_only=True, tag="member"):
    """R/members/<id>: leased presence. Only the member itself writes it; a leader may delete it."""

    name: str
    """Stable over restarts (host, and slot if given), so that the member keeps its rank. Need not be unique."""
    host: str
    addr: str = ""
    pid: int = 0
    order: str = ""
    """Sort key for the first ranks."""
    topology: str = ""
    """Path of the node in the network, such as block/rack/host; empty: not known."""
    version: str = ""
    info: dict[str, str] = {}
    boot: str = ""
    """host:port of a socket that the member bound before it became ready, in case it gets rank 0."""
    same_port: bool = False
    """No port was free but the one of the round before, so the two rounds may have the same address."""
    left: RoundId = NO_ROUND
    """Highest round given up: no worker of it or of an earlier one runs. Names the round, because a plain "ready" flag
    let a round be sealed over running workers (H2)."""
    role: str = ""
    """The role of the workers that the member would start."""
    workers: int = 0
    """How many workers the member would start; 0: it does not say."""
    drain: str = ""
    """Why the member is about to go; empty if it is not."""
    grace: float = 0.0
    """How long its workers have to save before it goes; 0: as long as `drain_notice`, with which alone it is written."""
    saved: int = 0
    """`call_seq` of the notice that all its workers have answered; 0: none."""
    reached: int = -1
    """The highest step of its workers in the round given up last, if the run has `futile_rounds`; -1: not known."""
    unhealthy: str = ""
    """Why the check of the member's node does not let it take part; empty: it may."""
    done: bool = False
    stalled: StallReport | None = None
    """Workers of the member have not moved for `stall` seconds; only with that setting, which all members share."""
    holds: RoundReport | None = None
    """The round that the member brought to an emptied engine, with its workers running."""
    heard: RoundReport | None = None
    fence: int = 0
    """The highest fence that the member knew of when it came."""
    fence_place: str = ""
    """Where the engine ran that had it."""


class RankEntry(Record, frozen=True, kw_only=True, tag="entry"):
    """R/ranks/<table>/<id>: one entry of a rank table. The leader writes it; its member marks it when it leaves."""

    rank: int
    created: int = 0
    """Create revision of the member's key; 0 if both were put in one transaction, as on an emptied engine."""
    name: str
    host: str
    order: str = ""
    topology: str = ""
    """Path of the member's node, to find a replacement that is near."""
    sealed_as: str
    """Member id at the seal. Ids change at every join, so the digest covers this one."""
    since: int = 0
    """Number of the round in which this member came in."""
    workers: WorkerRanks | None = None
    """Ranks of the member's workers; None: some member of the round did not say how many workers it has."""
    done: bool = False
    gave_up: str = ""
    """Why the member failed for good; empty if it did not."""
    went: str = ""
    """Why the member left without having failed."""


class ProgressReport(Record, frozen=True, kw_only=True, tag="progress"):
    """R/progress/<id>: how far the workers of one member are. No rule reads it."""

    table: str
    """The rank table of the round that they work in."""
    low: int
    """The lowest step of its workers."""
    high: int
    rate: float = 0.0
    """Steps per second of the lowest, over the last minute."""
    slowest: tuple[int, ...] = ()
    """Ranks of its workers at the lowest step, at most BEHIND_MAX."""
    workers: int = 0
    """How many workers have told a step."""
    since_s: float = 0.0
    """How long ago, when this was written, the lowest step was reached."""
    stamp: str = ""
    """The writer's wall clock, from which people are told how old this is. No rule computes with it."""


class QuarantineLimit(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How many rounds a host may break within which time before it is kept out, and for how long the first time."""

    strikes: int
    within_s: float
    for_s: float = 600.0

    def __str__(self) -> str:
        return f"{self.strikes}/{self.within_s:g}s/{self.for_s:g}s"  # As a user may write it.


class RunSettings(Record, frozen=True, kw_only=True, tag="settings"):
    """R/settings: the settings that all members must share, because any of them may lead. Times in seconds."""

    min_nodes: int
    max_nodes: int
    last_call: float = 30.0
    regroup: float = 75.0
    lease: float = 10.0
    settle: float = 2.0
    grow: str = "settle"
    unit: int = 1
    segment: int = 1
    grow_every: float = 60.0
    replace_wait: float = 0.0
    drain_settle: float = 1.0
    stall: float = 0.0
    drain_notice: float = 0.0
    futile_rounds: int = 0
    on_failure: str = "close"
    closed_for: float = 60.0
    quarantine: QuarantineLimit | None = None


class DrainRequest(Record, frozen=True, kw_only=True, tag="ask"):
    """R/asks/<id>: an operator asks a member to drain."""

    reason: str


class Ban(Record, frozen=True, kw_only=True, tag="ban"):
    """R/ban/<host>: an operator bans a host."""

    reason: str


class Strike(Record, frozen=True, kw_only=True, tag="strike"):
    """R/strikes/<host>/<table>: the host broke the round of that table, and `count` - 1 others before it (quarantine.py)."""

    count: int = 1
    reason: str = ""
    """Why that round was broken, for an operator who reads the record."""


class Quarantine(Record, frozen=True, kw_only=True, tag="quarantine"):
    """R/quarantine/<host>: the leader keeps a host out while this record lives, unless quorum needs it."""

    reason: str


class JournalEntry(Record, frozen=True, kw_only=True, tag="journal"):
    """R/journal/<n>: one head write, for a post-mortem, written in the same transaction as the head."""

    seq: int
    run: str
    era: Era
    number: int
    phase: Phase
    size: int
    call: Call
    by: str
    reason: str
    cause: Cause | None = None
    came: tuple[str, ...] = ()
    """For a seal: names of members that were not in the round before, at most CAUSE_MEMBERS_MAX."""
    gone: tuple[str, ...] = ()
    """For a seal: names of members that were in the round before and no longer are, at most CAUSE_MEMBERS_MAX."""
    lasted_s: float | None = None
    """How long the replaced head had stood, by the writer's own clock; None if the writer had not seen it begin."""
    stamp: str = ""
    """The writer's wall clock, to compare with other logs. A text, because nothing may be computed from it."""


STALL_GATHER_S = 5.0
"""How long the leader waits for other members to report their stall too, so that the cause names the ranks that are behind.
All stop in the same collective, so they report within a look and the time that stacks take."""
BACK_S = 3.0
"""How long the leader of an engine that may have come back empty waits for members to come back too. Members that lost
their engine redial at least every half second, so this leaves several attempts."""
FOLLOW_S = 8.0
"""The same for a first head on a server at a declared place, if `last_call` is as long. Members that come from another machine
learn its new address late, and ask after the former server first."""
JOURNAL_MAX = 256
"""Journal entries kept; the newest overwrites the oldest."""
