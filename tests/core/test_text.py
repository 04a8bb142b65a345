"""Texts from outside fit in a record, whatever is in them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core import wire
from rdzv.core.acts import because, journal_line
from rdzv.core.model import CAUSE_MEMBERS_MAX, FLAPS_MAX, CauseKind, Era, Head, Phase, RankEntry
from rdzv.core.text import NAME_MAX, REASON_MAX, clip

WORST = ["x", "é", "\U0001f600", '"', "\\", "\n", "\x00", "\ud800"]


@given(st.text(st.characters(), max_size=3000), st.integers(8, 1200))
def test_what_is_clipped_takes_at_most_so_many_bytes(text, size_max):
    clipped = clip(text, size_max)
    assert len(msgspec.json.encode(clipped)) - 2 <= size_max
    assert clipped.isprintable()


@given(st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=100))
def test_what_fits_is_left_alone(text):
    assert clip(text) == text


def test_what_is_cut_ends_with_dots():
    assert clip("y" * 2000).endswith("y…")
    assert clip("two\nlines") == "two lines"


def test_the_largest_head_and_journal_entry_can_be_written():
    """A leader that cannot write its record would give up its lease, and then each of its successors."""
    for sign in WORST:
        name, reason = clip(sign * 500, NAME_MAX), clip(sign * 5000)
        assert len(msgspec.json.encode(reason)) - 2 <= REASON_MAX
        cause = because(CauseKind.GAVE_UP, f"{name} gave up: {reason}; 1 of at least 2 nodes remain", [name] * 20)
        assert len(cause.members) == CAUSE_MEMBERS_MAX
        era = Era(999_999, "f" * 16)
        head = Head(
            run="f" * 16, era=era, next_era=era, phase=Phase.CLOSED, table="f" * 16, digest="f" * 32, boot=name,
            cause=cause, flaps={clip(f"{index}{name}", NAME_MAX): 30 for index in range(FLAPS_MAX)},
            number=10**9, size=10_000, seq=10**9, call_seq=10**9, seen=10**12,
        )  # fmt: skip
        wire.encode(head)
        crowd = [name] * 20
        wire.encode(journal_line(head, name, f"round 5 broken: {cause.text}", came=crowd, gone=crowd, lasted_s=1e6))
        wire.encode(RankEntry(rank=9_999, created=10**12, name=name, host=name, order=name, sealed_as="f" * 16, gave_up=reason))
