"""The judgements of a member about one head: T3, T4, T10, and the return to an emptied engine (T13, T15).

These functions are level, not edge: each looks at the present head only. A member that missed some heads in between, or
reads the same one twice, comes to the same result.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from .model import NO_ROUND, CauseKind, Head, Phase, RankEntry, RoundId, RoundReport


class Change(msgspec.Struct, frozen=True):
    """The member's world no longer stands: stop the workers and join again (or leave, if the run is closed)."""

    kind: ChangeKind
    reason: str


class ChangeKind(str, Enum):
    """The kinds of change."""

    ROUND = "round"
    """The round is broken or a later one exists."""
    EVICTED = "evicted"
    CLOSED = "closed"
    OUTAGE = "outage"
    """The engine has been away for longer than outage_grace, or another one answers."""
    REFUSED = "refused"
    """This member may not or cannot take part any more: banned, other settings, another version, a defect."""


class WaitingStep(Enum):
    """The next step of a waiting member, for one head."""

    WAIT = "wait"
    EXAMINE = "examine"
    """Read, in one transaction, whether its rank table has an entry of this member."""


class TakeResult(Enum):
    """The result of that transaction."""

    GIVEN = "given"
    GIVE_UP = "give up"
    """Broken before the member took it: it runs nothing of it, and says so, so that the others need not wait for it."""
    NOT_OURS = "not ours"
    LOOK_AGAIN = "look again"


def waiting_step(head: Head | None, left: RoundId, examined: str) -> WaitingStep:
    """T3.1: examine a table once, and only if its round is above all that the member gave up."""
    if head is None or head.adopted or head.phase not in (Phase.SEALED, Phase.BROKEN):
        return WaitingStep.WAIT
    if head.table == examined or head.round <= left:
        return WaitingStep.WAIT
    return WaitingStep.EXAMINE


def take_result(head: Head | None, table: str, entry: RankEntry | None, created: int) -> TakeResult:
    """T3 and T4: judge the head and the member's own entry in `table`, as one transaction read them."""
    if head is None or head.table != table:
        return TakeResult.LOOK_AGAIN
    if entry is None or entry.created != created or head.adopted:
        return TakeResult.NOT_OURS
    if head.phase is Phase.SEALED:
        return TakeResult.GIVEN
    return TakeResult.GIVE_UP if head.phase is Phase.BROKEN else TakeResult.LOOK_AGAIN


def change_for(holds: RoundReport, head: Head | None) -> Change | None:
    """T10: the change that a head is for the holder of a round. None: its world stands."""
    if head is None:
        return None
    if head.phase is Phase.CLOSED:
        # Success is no news, unless it is that of others, which went on without this member (seed 225123).
        if head.cause is not None and head.cause.kind is CauseKind.SUCCESS and head.table == holds.table:
            return None
        text = head.cause.text if head.cause else "no reason was given"
        return Change(ChangeKind.CLOSED, f"the run was closed: {text}")
    if head.run != holds.run:
        return Change(ChangeKind.EVICTED, "the run id has begun a new life without us")
    if head.phase is Phase.BROKEN and head.table == holds.table:
        return Change(ChangeKind.ROUND, head.cause.text if head.cause else f"round {head.number} is broken")
    if head.round != holds.round or head.table != holds.table:
        return Change(ChangeKind.ROUND, f"round {head.number} has replaced round {holds.number}")
    return None


def still_ours(holds: RoundReport, head: Head | None) -> bool:
    """T15.6: whether a holder that came back to an emptied engine may go on. Otherwise it is evicted."""
    return head is None or head.phase is Phase.CLOSED or (head.run == holds.run and head.table == holds.table)


def report(head: Head, rank: int, left: RoundId = NO_ROUND) -> RoundReport:
    """Make the report of this head for an emptied engine (T13)."""
    return RoundReport(
        run=head.run,
        era=head.era,
        number=head.number,
        table=head.table,
        phase=head.phase,
        size=head.size,
        rank=rank,
        digest=head.digest,
        boot=head.boot,
        top=head.top,
        grown=head.grown,
        incarnation=head.incarnation,
        next_era=head.next_era,
        cause=head.cause,
        left=left,
    )
