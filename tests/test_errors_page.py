"""docs/errors.md: every code has its entry, and every entry its code."""

from __future__ import annotations

import re
from pathlib import Path

from rdzv import errors
from rdzv.errors import RdzvError
from rdzv.operate import doctor
from rdzv.operate.doctor import PROBLEMS

PAGE = (Path(__file__).parents[1] / "docs" / "errors.md").read_text()
ENTRIES = re.findall(r"^### (RDZV-[EP]\d\d) ([^\n]+)\n\n(.+?)(?=\n\n##|\Z)", PAGE, re.MULTILINE | re.DOTALL)
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RdzvError)]


def test_every_error_has_a_code_of_its_own_and_an_entry_under_it():
    named = {code: title for code, title, _ in ENTRIES if code.startswith("RDZV-E")}
    assert named == {kind.code: kind.__name__ for kind in KINDS}
    assert len({kind.code for kind in KINDS}) == len(KINDS)


def test_every_problem_of_the_doctor_has_its_entry_and_is_raised_somewhere():
    assert {code: title for code, title, _ in ENTRIES if code.startswith("RDZV-P")} == PROBLEMS
    raised = re.findall(r'problem\("(RDZV-P\d\d)"', Path(doctor.__file__).read_text())
    assert set(raised) == set(PROBLEMS)


def test_no_code_is_explained_twice_and_no_entry_is_empty():
    codes = [code for code, _, _ in ENTRIES]
    assert len(codes) == len(set(codes))
    assert all(len(text) > 60 for _, _, text in ENTRIES)
