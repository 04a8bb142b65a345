"""A type checker accepts right programs and the examples, and reports each mistake at its line. One run of mypy for all."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
    readme = tmp_path_factory.mktemp("typing") / "readme.py"
    (readme_block,) = blocks(ROOT / "README.md", "python")
    readme.write_text(readme_block)
    files = [RIGHT, WRONG, readme, *EXAMPLES]
    command = [sys.executable, "-m", "mypy", "--strict", *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[str, dict[int, str]] = {}
    for line in done.stdout.splitlines():
        told = re.match(r"(.+?):(\d+): error: (.+)", line)
        if told:
            lines = found.setdefault(Path(told[1]).name, {})
            lines[int(told[2])] = f"{lines.get(int(told[2]), '')}{told[3]} "
    return found


@pytest.mark.parametrize("name", ["right.py", "readme.py", *(example.name for example in EXAMPLES)])
def test_a_right_program_is_accepted(reported, name):
    assert reported.get(name, {}) == {}


@pytest.mark.parametrize(("line", "text"), MISTAKES.items(), ids=list(MISTAKES.values()))
def test_a_mistake_is_reported_at_its_line(reported, line, text):
    assert text in reported["wrong.py"].get(line, "nothing")


def test_nothing_else_is_reported(reported):
    assert len(MISTAKES) > 15
    assert set(reported["wrong.py"]) == set(MISTAKES)
