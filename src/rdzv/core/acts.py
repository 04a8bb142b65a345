"""The acts that a verdict may ask for. The leader's runner adds the guards that make each one safe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from .model import (
    CAUSE_MEMBERS_MAX,
    Call,
    Cause,
    CauseKind,
    Head,
    JournalEntry,
    Phase,
    Quarantine,
    RankEntry,
    Strike,
)
from .text import clip


class WriteHead(msgspec.Struct, frozen=True):
    """Replace the head (or make it, if there is none)."""

    head: Head


def must_overlook_nobody(head: Head, former: Head | None) -> bool:
    """T11.9, T15.7: whether the write of this head also compares that no member has come since the leader's view."""
    # A close is final, and a member that came meanwhile could have made up the quorum (seed 1216). And a round that is broken
    # because members have not come back to an emptied engine goes on if they have: on a slow engine the view is old when it
    # is judged (steered seed 192011546).
    return head.phase is Phase.CLOSED or (head.phase is Phase.BROKEN and former is None)


class Seal(msgspec.Struct, frozen=True):
    """Write the rank table, then the head that names it, and delete the former table with its store."""

    # The head comes last because members act on it: whoever reads it finds the whole table.

    head: Head
    entries: Mapping[str, RankEntry]
    first: str
    """Id of rank 0, whose bound socket the head announces."""
    former_table: str


class Evict(msgspec.Struct, frozen=True):
    """Delete the keys of these members, in this order."""

    ids: tuple[str, ...]
    away_s: float | None = None
    """Only the first of them whose process ended at least so long ago, as the engine judges; None: all."""


class Sweep(msgspec.Struct, frozen=True):
    """Delete these rank tables."""

    tables: tuple[str, ...]


class StrikeHost(msgspec.Struct, frozen=True):
    """Note that a host broke the head's round, under a lease that nobody renews, and keep it out if that was too often."""

    host: str
    strike: Strike
    lasts_s: float
    replaced: tuple[str, ...] = ()
    """Tables of earlier strikes of the host, which this one includes."""
    quarantine: Quarantine | None = None
    quarantine_s: float = 0.0


Act = WriteHead | Seal | Evict | Sweep | StrikeHost


class Verdict(msgspec.Struct, frozen=True):
    """One decision of the leader."""

    act: Act | None
    reason: str
    """A sentence for people. Logs, status, dashboards and JoinTimeout show it as it is."""
    look_again_s: float | None = None
    """How long the verdict stays the same without an event. None: only an event changes it."""
    rule: str = ""
    """Name of the rule that decided, as `lead` adds it."""


def because(kind: CauseKind, text: str, members: Iterable[str] = ()) -> Cause:
    """Return a cause that fits in a head, however long the names and reasons in it are."""
    return Cause(kind=kind, text=clip(text), members=tuple(sorted(members)[:CAUSE_MEMBERS_MAX]))


def with_call(head: Head, call: Call) -> Head:
    """Return the next head, with that call."""
    # `call_seq` changes only with the call itself. If any write restarted it, each new leader or newcomer could put the
    # end of the wait off, and it might never come (H19).
    seq = head.seq + 1
    if call is head.call:
        return msgspec.structs.replace(head, seq=seq)
    return msgspec.structs.replace(head, seq=seq, call=call, call_seq=seq, waited=0.0)


def close_head(head: Head, cause: Cause) -> Head:
    """Return the last head of an incarnation: it keeps round, table and era, so that holders know which round ended."""
    return msgspec.structs.replace(with_call(head, Call.NONE), phase=Phase.CLOSED, cause=cause)


def journal_line(
    head: Head, by: str, reason: str, *,
    came: Iterable[str] = (), gone: Iterable[str] = (), lasted_s: float | None = None, stamp: str = "",
) -> JournalEntry:  # fmt: skip
    """Return the journal's record of a head write."""
    # All texts are cut to size: a record too large to write would stop the leader, and then each of its successors.
    return JournalEntry(
        seq=head.seq, run=head.run, era=head.era, number=head.number, phase=head.phase, size=head.size, call=head.call,
        by=by, reason=clip(reason),
        # A sealed head has the cause of the break before it, which has an entry of its own.
        cause=None if head.phase is Phase.SEALED else head.cause,
        came=tuple(sorted(came)[:CAUSE_MEMBERS_MAX]), gone=tuple(sorted(gone)[:CAUSE_MEMBERS_MAX]),
        lasted_s=None if lasted_s is None else round(lasted_s, 3), stamp=stamp,
    )  # fmt: skip
