"""What commands print: lines without escapes for people, and JSON that loses nothing for programs."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from rdzv.cli.output import complain, json_text, say


@given(st.dictionaries(st.text(), st.text()))
def test_json_is_printable_and_comes_back_as_it_was(value):
    text = json_text(value)
    assert text.isprintable()
    assert json.loads(text) == value


def test_signs_beyond_16_bits_are_escaped_as_two():
    assert json_text(["\U000e0001", "\x9b", "é"]) == '["\\udb40\\udc01","\\u009b","é"]'


def test_lines_are_clean(capsys):
    say("one\x1b[2J\ntwo\r")
    complain("three\nfour")
    assert capsys.readouterr() == ("one [2J\ntwo \n", "rdzv: three four\n")
