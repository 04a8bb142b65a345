"""Acts: how a head counts its writes, and what the journal keeps of one."""

from __future__ import annotations

import msgspec
import pytest

from rdzv.core.acts import close_head, journal_line, must_overlook_nobody, with_call
from rdzv.core.model import Call, Cause, CauseKind, JournalEntry, Phase
from support.views import sealed

CAUSE = Cause(kind=CauseKind.CLOSED, text="enough (by ops)")


def test_h19_a_write_that_changes_the_call_starts_its_age_anew():
    """T5.4: everybody measures from the write that `call_seq` names."""
    head = with_call(sealed("a").head, Call.SETTLE)
    assert (head.call, head.call_seq, head.seq) == (Call.SETTLE, 8, 8)


@pytest.mark.parametrize("call", list(Call))
def test_h19_a_write_that_leaves_the_call_leaves_its_age(call):
    """T5.4."""
    head = with_call(sealed("a", call=call).head, call)
    assert (head.call, head.call_seq, head.seq) == (call, 5, 8)


def test_nothing_else_changes_with_the_call():
    """T5.4."""
    before = sealed("a", flaps={"x": 1}).head
    after = with_call(before, Call.SETTLE)
    assert msgspec.structs.replace(after, seq=before.seq, call=before.call, call_seq=before.call_seq) == before


@pytest.mark.parametrize(("call", "call_seq"), [(Call.NONE, 5), (Call.LAST, 8)])
def test_closing_stops_the_call_and_names_the_cause(call, call_seq):
    """T11.11."""
    before = sealed("a b", call=call).head
    assert close_head(before, CAUSE) == msgspec.structs.replace(
        before, phase=Phase.CLOSED, cause=CAUSE, call=Call.NONE, call_seq=call_seq, seq=8
    )


def test_the_journal_keeps_what_a_post_mortem_needs():
    head = sealed("a b", call=Call.SETTLE, cause=CAUSE).head
    assert journal_line(head, "a", "c waiting to come in") == JournalEntry(
        seq=7, run="r1", era=head.era, number=3, phase=Phase.SEALED, size=2, call=Call.SETTLE, by="a",
        reason="c waiting to come in",
    )  # fmt: skip
    broken = msgspec.structs.replace(head, phase=Phase.BROKEN)
    assert journal_line(broken, "a", "why").cause == CAUSE, "the cause has its place in the entry of the break"


def test_a_seal_names_some_of_those_who_came_and_went_and_how_long_the_former_head_stood():
    """Bounded, whatever is given; the stamp is shown and no more."""
    head = sealed("a b").head
    many = [f"n{number}" for number in range(9)]
    line = journal_line(head, "a", "full", came=many[::-1], gone=["x"], lasted_s=1.23456, stamp="2026-01-01T00:00:00Z")
    assert (line.came, line.gone, line.lasted_s) == (tuple(many[:8]), ("x",), 1.235)
    assert line.stamp == "2026-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("phase", "is_first", "expected"),
    [
        (Phase.CLOSED, False, True),
        (Phase.CLOSED, True, True),
        (Phase.BROKEN, True, True),
        (Phase.BROKEN, False, False),
        (Phase.SEALED, True, False),
        (Phase.OPEN, True, False),
    ],
)
def test_a_close_and_a_break_after_an_empty_restart_overlook_nobody(phase, is_first, expected):
    """T11.9, T15.7."""
    former = sealed("a").head
    assert must_overlook_nobody(msgspec.structs.replace(former, phase=phase), None if is_first else former) is expected
