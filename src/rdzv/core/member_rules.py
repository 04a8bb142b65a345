"""The judgements of a member about one head: T3, T4, T10, and the return to an emptied engine (T13, T15)."""

from __future__ import annotations

from enum import Enum

import msgspec

from .model import BROKEN, CLOSED, NO_ROUND, SEALED, CauseKind, Head, MemberRecord, RankEntry, RoundId, RoundReport


class Change(msgspec.Struct, frozen=True):
    """The member's world no longer stands: stop the workers and join again (or leave, if the run is closed)."""

    kind: ChangeKind
    """The kind of change, for programs."""
    reason: str
    """Why, for people."""
    newcomers: int = 0
    """How many members came to join, if that is the reason. At most CAUSE_MEMBERS_MAX are counted."""


class ChangeKind(str, Enum):
    """The kinds of change."""

    ROUND = "round"
    """The round is broken or a later one exists."""
    EVICTED = "evicted"
    """The others went on without this member: stop the workers and join again."""
    CLOSED = "closed"
    """The run is over: the next `join` raises Closed, which says by whom and why."""
    OUTAGE = "outage"
    """The engine has been away for longer than outage_grace, or another one answers."""
    REFUSED = "refused"
    """This member may not or cannot take part any more: banned, other settings, another version, a defect."""
    LEFT = "left"
    """This member has left: every other call raises LeftAlready."""


def left_change(run_id: str) -> Change:
    """The change that a member's own leave is to its holder."""
    return Change(ChangeKind.LEFT, f"this member has left run {run_id!r}")


class TakeResult(Enum):
    """The result of reading, in one transaction, the head and the member's entry in its table."""

    GIVEN = "given"
    GIVE_UP = "give up"
    """Broken before the member took it: it runs nothing of it, and says so, so that the others need not wait for it."""
    NOT_OURS = "not ours"
    LOOK_AGAIN = "look again"


GIVEN, GIVE_UP, NOT_OURS, LOOK_AGAIN = TakeResult


def worth_examining(head: Head, left: RoundId, examined: str) -> bool:
    """T3.1: a waiting member examines a table once, and only if its round is above all that the member gave up."""
    may_be_given = (head.phase is SEALED or head.phase is BROKEN) and not head.adopted
    return may_be_given and head.table != examined and head.round > left


def shares_address(announced: MemberRecord, head: Head) -> bool:
    """T4.5: whether the member announces the bootstrap address of the head's round although it could bind another."""
    return bool(announced.boot) and announced.boot == head.boot and not announced.same_port


def take_result(head: Head | None, table: str, entry: RankEntry | None, created: int) -> TakeResult:
    """T3 and T4: judge the head and the member's own entry in `table`, as one transaction read them."""
    if head is None or head.table != table:
        return LOOK_AGAIN
    if entry is None or entry.created != created or head.adopted:
        return NOT_OURS
    if head.phase is SEALED:
        return GIVEN
    return GIVE_UP if head.phase is BROKEN else LOOK_AGAIN


def change_for(holds: RoundReport, head: Head | None) -> Change | None:
    """T10: the change that a head is for the holder of a round. None: its world stands."""
    if head is None:
        return None
    if head.phase is CLOSED:
        # Success is no news, unless it is that of others, which went on without this member (seed 225123).
        if head.cause is not None and head.cause.kind is CauseKind.SUCCESS and head.table == holds.table:
            return None
        text = head.cause.text if head.cause else "no reason was given"
        return Change(ChangeKind.CLOSED, f"the run was closed: {text}")
    if head.run != holds.run:
        return Change(ChangeKind.EVICTED, "the run id has begun a new life without us")
    if head.phase is BROKEN and head.table == holds.table:
        if head.cause is None:
            return Change(ChangeKind.ROUND, f"round {head.number} is broken")
        newcomers = len(head.cause.members) if head.cause.kind is CauseKind.GROWTH else 0
        return Change(ChangeKind.ROUND, head.cause.text, newcomers)
    if head.round != holds.round or head.table != holds.table:
        return Change(ChangeKind.ROUND, f"round {head.number} has replaced round {holds.number}")
    return None


def still_ours(holds: RoundReport, head: Head | None) -> bool:
    """T15.6: whether a holder that came back to an emptied engine may go on. Otherwise it is evicted."""
    return head is None or head.phase is CLOSED or (head.run == holds.run and head.table == holds.table)


def report(head: Head, rank: int, left: RoundId = NO_ROUND) -> RoundReport:
    """Make the report of this head for an emptied engine (T13)."""
    return RoundReport(
        run=head.run, era=head.era, number=head.number, table=head.table, phase=head.phase, size=head.size, rank=rank,
        digest=head.digest, boot=head.boot, top=head.top, grown=head.grown, incarnation=head.incarnation,
        next_era=head.next_era, cause=head.cause, left=left,
    )  # fmt: skip
