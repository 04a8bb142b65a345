"""Texts of others, made fit to be shown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rdzv.printable import SHOWN_MAX, clean, shown


@given(st.text(st.characters()))
def test_what_is_clean_is_printable_and_as_long_as_before(text):
    assert clean(text).isprintable()
    assert len(clean(text)) == len(text)
    assert clean(clean(text)) == clean(text)


def test_what_is_printable_is_left_alone():
    assert clean("grüezi, 世界 (ok)") == "grüezi, 世界 (ok)"
    assert clean("\x1b[31mred\n\x00\x9b\u202e\ud800") == " [31mred     "


def test_what_is_long_is_cut():
    assert shown("x" * SHOWN_MAX) == "x" * SHOWN_MAX
    assert len(shown("x" * (SHOWN_MAX + 1))) == SHOWN_MAX
    assert shown("abcdef", 4) == "abc…"
