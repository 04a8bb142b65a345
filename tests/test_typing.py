"""A type checker accepts right programs and the examples, and reports each mistake at its line. One run of mypy for all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.once import made_once
from test_docs import blocks

ROOT = Path(__file__).parents[1]
RIGHT, WRONG = ROOT / "tests" / "typing" / "right.py", ROOT / "tests" / "typing" / "wrong.py"
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MISTAKES = {
    number: line.partition("# E: ")[2] for number, line in enumerate(WRONG.read_text().splitlines(), 1) if "# E: " in line
}


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """All errors by file name and line."""
    told = (made_once(tmp_path_factory, "typing", check) / "told").read_text()
    found: dict[str, dict[int, str]] = {}
    for line in told.splitlines():
        error = re.match(r"(.+?):(\d+): error: (.+)", line)
        if error:
            lines = found.setdefault(Path(error[1]).name, {})
            lines[int(error[2])] = f"{lines.get(int(error[2]), '')}{error[3]} "
    return found


def check(folder):
    readme = folder / "readme.py"
    (block,) = blocks(ROOT / "README.md", "python")
    readme.write_text(block)
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, (RIGHT, WRONG, readme, *EXAMPLES))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    (folder / "told").write_text(done.stdout)


@pytest.mark.parametrize("name", ["right.py", "readme.py", *(example.name for example in EXAMPLES)])
def test_a_right_program_is_accepted(reported, name):
    assert reported.get(name, {}) == {}


@pytest.mark.parametrize(("line", "text"), MISTAKES.items(), ids=list(MISTAKES.values()))
def test_a_mistake_is_reported_at_its_line(reported, line, text):
    assert text in reported["wrong.py"].get(line, "nothing")


def test_nothing_else_is_reported(reported):
    assert len(MISTAKES) > 15
    assert set(reported["wrong.py"]) == set(MISTAKES)
