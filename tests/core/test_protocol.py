"""docs/protocol.md and these tests belong together: each sentence of the rules has a test that cites it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rdzv.core import flaps, rules
from rdzv.core.model import BACK_S, CAUSE_MEMBERS_MAX, FLAPS_MAX, JOURNAL_MAX, Call, Head, Phase

HERE = Path(__file__).parent
PROTOCOL = (HERE.parent.parent / "docs" / "protocol.md").read_text()
NUMBER = r"[TWRS]\d+(?:\.\d+)?"
SENTENCES = dict(re.findall(rf"^- \*\*({NUMBER})\*\*(†?) ", PROTOCOL, re.MULTILINE))
"""Number of each sentence, and its mark: † is kept by the code around the rules, and tested there."""

TESTS = {file: ast.parse(file.read_text()) for folder in (HERE, HERE.parent / "sim") for file in folder.glob("test_*.py")}
TEXTS = [
    node.value
    for file, tree in TESTS.items()
    if file.parent == HERE and file != Path(__file__)
    for node in ast.walk(tree)
    if isinstance(node, ast.Constant) and isinstance(node.value, str)
]
"""Docstrings of tests and names of rows in their tables. Those that cite a sentence begin with its number."""
CITED = {
    number for text in TEXTS if re.match(NUMBER, text) for number in re.findall(rf"\b{NUMBER}\b", text.split(":")[0])
}


def test_every_sentence_that_the_core_keeps_has_a_test_that_cites_it():
    assert sorted(number for number, mark in SENTENCES.items() if not mark and number not in CITED) == []


def test_every_citation_is_of_a_sentence_that_the_core_keeps():
    assert sorted(number for number in CITED if SENTENCES.get(number, "none") != "") == []


def test_every_hole_of_a_draft_has_a_test_that_names_it():
    """As `test_h17_...`, here or in tests/sim, or as H17 in the name of a row."""
    rows = dict(re.findall(r"^\| H(\d+)(†?) \|", PROTOCOL, re.MULTILINE))
    assert list(rows) == [str(number) for number in range(1, 34)]
    functions = {
        int(number)
        for tree in TESTS.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for number in re.findall(r"^test_h(\d+)_", node.name)
    }
    named = {int(number) for text in TEXTS for number in re.findall(r"\bH(\d+)\b", text)}
    assert {int(number) for number, mark in rows.items() if not mark} <= functions | named


def test_sentences_are_numbered_in_order_and_once():
    numbers = re.findall(rf"^- \*\*({NUMBER})\*\*", PROTOCOL, re.MULTILINE)
    assert len(numbers) == len(set(numbers))
    for letter in "TWRS":
        mine = [tuple(int(part) for part in number[1:].split(".")) for number in numbers if number[0] == letter]
        assert mine == sorted(mine)
    assert {number.split(".")[0] for number in numbers if number[0] == "T"} == {f"T{index}" for index in range(1, 18)}


def test_whatever_is_referred_to_exists():
    known = {*SENTENCES, *(number.split(".")[0] for number in SENTENCES)}
    assert sorted(set(re.findall(rf"\b{NUMBER}\b", PROTOCOL)) - known) == []


def test_the_guarantees_are_all_there():
    assert re.findall(r"^- \*\*(G\d+)\*\* ", PROTOCOL, re.MULTILINE) == [f"G{index}" for index in range(1, 11)]


def test_every_field_of_the_head_is_explained():
    table = PROTOCOL[PROTOCOL.index("**Head**") : PROTOCOL.index("**Member**")]
    explained = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.+?) \|", table, re.MULTILINE)))
    assert sorted(explained) == sorted(Head.__struct_fields__)


def test_every_phase_and_call_is_named():
    words = set(re.findall(r"\w+", PROTOCOL))
    assert {one.value for one in (*Phase, *Call)} <= words


ORDER = {
    "T14.1": "restore_closed",
    "T14.3": "restore_sealed",
    "T15": "restore_broken",
    "T2": "first_head",
    "T8.2": "evict_banned",
    "T11.1": "close_after_success",
    "T11.2": "close_after_failure",
    "T7.14": "name_root_cause",
    "T5.2": "stop_call",
    "T8.1": "evict_stragglers",
    "T8.5": "evict_away",
    "T6": "seal",
    "T5.1": "start_call",
    "T12.1": "sweep",
    "T5.5": "keep_waiting",
    "T7.1": "break_round",
    "T7.3": "break_round",
    "T7.15": "break_for_stall",
    "T7.4": "break_for_drains",
    "T7.17": "break_for_drains",
    "T7.7": "grow",
    "T11.5": "stay_closed",
}


@pytest.mark.parametrize("phase", [None, *Phase])
def test_rules_are_asked_in_the_order_of_the_document(phase):
    shown = "no head" if phase is None else phase.value
    row = next(line for line in PROTOCOL.splitlines() if re.match(rf"\| [\w, ]*\b{shown}\b[\w, ]* \| T", line))
    listed = dict.fromkeys(ORDER[number] for number in re.findall(NUMBER, row))
    assert [rule.__name__ for rule in rules.RULES[phase]] == list(listed)


def test_the_numbers_of_the_document_are_those_of_the_code():
    assert f"for less than {BACK_S:g} s" in PROTOCOL
    assert f"up to {CAUSE_MEMBERS_MAX} members" in PROTOCOL
    assert f"less than {flaps.FLAP_WINDOW_S:g} s ago" in PROTOCOL.replace("\n  ", " ")
    assert f"at most {flaps.FLAP_WAIT_MAX_S:g} s" in PROTOCOL.replace("\n  ", " ")
    assert f"The {FLAPS_MAX} worst" in PROTOCOL.replace("\n  ", " ")
    assert f"the last {JOURNAL_MAX} head writes" in PROTOCOL
