"""What a verdict may ask for. The guards that make each act safe are added by whoever carries it out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from .model import CAUSE_MEMBERS_MAX, Call, Cause, CauseKind, Head, JournalEntry, Phase, RankEntry
from .text import clip


class WriteHead(msgspec.Struct, frozen=True):
    """Replace the head (or make it, if there is none)."""

    head: Head


class Seal(msgspec.Struct, frozen=True):
    """Write the rank table, then the head that names it; the former table and its store go with that."""

    head: Head
    lines: Mapping[str, RankEntry]
    first: str
    """Id of rank 0, whose bound socket the head announces."""
    former_table: str


class Evict(msgspec.Struct, frozen=True):
    """Delete these members' keys, in this order."""

    ids: tuple[str, ...]


class Sweep(msgspec.Struct, frozen=True):
    """Delete these rank tables."""

    tables: tuple[str, ...]


Act = WriteHead | Seal | Evict | Sweep


class Verdict(msgspec.Struct, frozen=True):
    """One decision."""

    act: Act | None
    reason: str
    """In plain words; shown as it is by logs, status, dashboards and JoinTimeout."""
    look_again_s: float | None = None
    """Without an event, nothing changes before then. None: only an event changes it."""


def because(kind: CauseKind, text: str, members: Iterable[str] = ()) -> Cause:
    """A cause that fits in a head, whatever names and reasons it is put together from."""
    return Cause(kind=kind, text=clip(text), members=tuple(sorted(members)[:CAUSE_MEMBERS_MAX]))


def call_for(head: Head, call: Call) -> Head:
    """The next head, with that timer: started anew by this write, unless it runs already."""
    seq = head.seq + 1
    if call is head.call:
        return msgspec.structs.replace(head, seq=seq)
    return msgspec.structs.replace(head, seq=seq, call=call, call_seq=seq)


def close_head(head: Head, cause: Cause) -> Head:
    """The last head of an incarnation."""
    return msgspec.structs.replace(call_for(head, Call.NONE), phase=Phase.CLOSED, cause=cause)


def journal_line(
    head: Head,
    by: str,
    reason: str,
    *,
    came: Iterable[str] = (),
    gone: Iterable[str] = (),
    lasted_s: float | None = None,
    stamp: str = "",
) -> JournalEntry:
    """What the journal keeps of a head write."""
    return JournalEntry(
        seq=head.seq,
        run=head.run,
        era=head.era,
        number=head.number,
        phase=head.phase,
        size=head.size,
        call=head.call,
        by=by,
        reason=clip(reason),
        cause=head.cause,
        came=tuple(sorted(came)[:CAUSE_MEMBERS_MAX]),
        gone=tuple(sorted(gone)[:CAUSE_MEMBERS_MAX]),
        lasted_s=None if lasted_s is None else round(lasted_s, 3),
        stamp=stamp,
    )
