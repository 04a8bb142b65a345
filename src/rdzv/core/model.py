"""The records of a run: what the engine keeps, and the only things members know of each other.

Everything here is a frozen value. Which key holds which record is in `keys.py`, how it becomes bytes in `wire.py`, and who
may write it, when and why in `rules.py`.
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


class Call(str, Enum):
    """The timer that a head write started; its age is measured by each member from the moment it saw that write."""

    NONE = "none"
    LAST = "last"
    REGROUP = "regroup"
    SETTLE = "settle"


class CauseKind(str, Enum):
    """The kinds of cause; programs and metrics use these, people read the text beside it."""

    LOST = "lost"
    LEFT = "left"
    RESTARTED = "restarted"
    DRAINED = "drained"
    BANNED = "banned"
    GAVE_UP = "gave_up"
    GROWTH = "growth"
    RETOLD = "retold"
    SUCCESS = "success"
    CLOSED = "closed"


class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False
):
    """Base of all that is written: strict in what it reads, short in what it writes, and never part of a cycle."""


class Era(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Under which making of the head a round was sealed: its level is above all told then, its id made with that head."""

    level: int = 0
    id: str = ""


class RoundId(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """A round's place in the order of all rounds of a run: era first, then number."""

    era: Era = Era()
    number: int = 0


NO_ROUND = RoundId()


class Cause(Record, frozen=True, kw_only=True):
    """Why a round was broken or a run closed."""

    kind: CauseKind
    text: str
    members: tuple[str, ...] = ()
    """Names of the members it is about; at most CAUSE_MEMBERS_MAX."""


CAUSE_MEMBERS_MAX = 8
FLAPS_MAX = 16


class Head(Record, frozen=True, kw_only=True, tag="head"):
    """R/round: what the run agreed on last. Of constant size, because everybody watches it."""

    run: str
    """Random, made with the head: this incarnation of the run id."""
    era: Era
    number: int = 0
    """Last sealed round, 0 = none yet."""
    phase: Phase = Phase.OPEN
    table: str = ""
    """Random id of the rank table; a table is written once and never reused."""
    size: int = 0
    digest: str = ""
    """Of the member list, so that whoever fetches it later can check it."""
    boot: str = ""
    """host:port of rank 0's bound socket."""
    seen: int = 0
    """Revision of the listing the seal was decided on."""
    call: Call = Call.NONE
    call_seq: int = 0
    """`seq` of the write that set `call`: what ages are measured from."""
    seq: int = 1
    """Counts the writes of this head; numbers the journal."""
    cause: Cause | None = None
    adopted: bool = False
    """Re-made on an emptied engine for those who hold it; nobody else is given it."""
    next_era: Era
    top: int = 0
    """Largest size sealed so far: coming back to it is a replacement, going beyond it a growth."""
    grown: int = 0
    """Number of the last round that was a growth, 0 = none."""
    flaps: dict[str, int] = {}
    """Hosts lost soon after the growth they caused, and how often: they wait longer. At most FLAPS_MAX."""
    incarnation: int = 0

    @property
    def round(self) -> RoundId:
        """The round this head speaks of."""
        return RoundId(self.era, self.number)


class RoundReport(Record, frozen=True, kw_only=True):
    """What a member tells an emptied engine of the round it holds, or of the newest head it heard of."""

    run: str
    era: Era
    number: int
    table: str
    phase: Phase = Phase.SEALED
    size: int = 0
    rank: int = -1
    """Own rank in that table; -1: not in it, or never learned."""
    digest: str = ""
    boot: str = ""
    top: int = 0
    grown: int = 0
    incarnation: int = 0
    next_era: Era
    cause: Cause | None = None
    left: RoundId = NO_ROUND
    """Highest round of that run which the teller has given up: whatever is sealed next must be above it, or it could never
    take it."""

    @property
    def round(self) -> RoundId:
        """The round told of."""
        return RoundId(self.era, self.number)


class MemberRecord(Record, frozen=True, kw_only=True, tag="member"):
    """R/members/<id>: leased presence. Only the member itself writes it; anyone leading may delete it."""

    name: str
    """Stable over restarts (host, and slot if given): keeps the rank. Need not be unique."""
    host: str
    addr: str = ""
    pid: int = 0
    order: str = ""
    """Sort key for the first ranks."""
    topology: str = ""
    version: str = ""
    info: dict[str, str] = {}
    boot: str = ""
    """host:port of a socket bound for this ready put."""
    left: RoundId = NO_ROUND
    """Highest round given up."""
    drain: str = ""
    """Why it is about to go; empty: it is not."""
    done: bool = False
    holds: RoundReport | None = None
    heard: RoundReport | None = None


class RankEntry(Record, frozen=True, kw_only=True, tag="entry"):
    """R/ranks/<table>/<id>: one line of a rank table. The leader writes it; its member marks it when it goes."""

    rank: int
    created: int = 0
    """Create revision of the member's key; 0: both were put in one transaction (an emptied engine is being re-told)."""
    name: str
    host: str
    order: str = ""
    sealed_as: str
    """The id under which it was sealed; ids are new at every join, so this is what the digest covers."""
    since: int = 0
    """Round in which this member came in."""
    done: bool = False
    gave_up: str = ""
    """Why it failed for good."""
    went: str = ""
    """Why it left, without having failed."""


class RunSettings(Record, frozen=True, kw_only=True, tag="settings"):
    """R/settings: what all members of a run must agree on, because any of them may lead. Times in seconds."""

    min_nodes: int
    max_nodes: int
    last_call: float = 30.0
    regroup: float = 75.0
    lease: float = 10.0
    settle: float = 2.0
    grow: str = "settle"
    unit: int = 1
    grow_every: float = 60.0
    replace_wait: float = 0.0
    drain_settle: float = 1.0
    on_failure: str = "close"
    closed_for: float = 60.0


class DrainRequest(Record, frozen=True, kw_only=True, tag="ask"):
    """R/asks/<id>: an operator asks a member to drain."""

    reason: str


class Ban(Record, frozen=True, kw_only=True, tag="ban"):
    """R/ban/<host>: an operator does not want that host."""

    reason: str


class JournalEntry(Record, frozen=True, kw_only=True, tag="journal"):
    """R/journal/<n>: one head write, for a post-mortem. Written in the same transaction as the head."""

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
    """A seal: who is in and was not in the round before; at most CAUSE_MEMBERS_MAX names."""
    gone: tuple[str, ...] = ()
    """A seal: who was in the round before and is not any more; at most CAUSE_MEMBERS_MAX names."""
    lasted_s: float | None = None
    """How long the head that this one replaced had stood, by the writer's own clock; None: the writer had not seen it begin."""
    stamp: str = ""
    """The writer's wall clock, for people who compare it with other logs. A text, because nothing may be computed from it."""


BACK_S = 3.0
"""How long an engine that may have come back empty is given for its members to come back too."""
FLAP_WINDOW_S = 60.0
"""A host lost this soon after the growth it caused is flapping."""
FLAP_WAIT_MAX_S = 600.0
JOURNAL_MAX = 256
"""Entries kept; the newest overwrites the oldest."""
