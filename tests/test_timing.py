"""Tests that were too slow are run again, and no others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
WAYS = {
    "itself": "from support.timing import within",
    "by_a_module_of_support": "from support.torchrun_jobs import wait_for\ndef within(*_): wait_for(lambda: None, 'it', 0.0)",
    "by_a_fixture": "from support import timing\nfrom fixtures import within",
}
FIXTURE = """
import pytest
from support.timing import within as check
@pytest.fixture
def within(): return check
"""
PROGRAM = """
import pathlib
{import_}
def count(name):
    with open(pathlib.Path(__file__).parent / f"{way}.{{name}}", "a") as file:
        file.write("x")
    return pathlib.Path(file.name).stat().st_size
def test_slow_twice_is_green({fixture}):
    if count("twice") < 3: within(2.0, 1.0)
def test_slow_three_times_is_red({fixture}):
    count("thrice")
    within(2.0, 1.0)
def test_plain_assert_is_never_run_again({fixture}):
    count("plain")
    assert count("unused") < 0, "it took too long, says this sentence, but not as TooSlow"
"""


def test_only_a_test_that_was_too_slow_is_run_again_however_it_measures(tmp_path: Path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "fixtures.py").write_text(FIXTURE)
    for way, import_ in WAYS.items():
        text = PROGRAM.format(import_=import_, fixture="within" if way == "by_a_fixture" else "", way=way)
        (folder / f"test_{way}.py").write_text(text)
    # The settings and hooks of the real tests, with jobs as `make` has them.
    command = [
        sys.executable, "-m", "pytest", "-c", str(TESTS.parent / "pyproject.toml"), "-p", "conftest", "-n", "1",
        "-p", "no:cacheprovider", f"--basetemp={tmp_path / 'base'}", str(folder),
    ]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{folder}"}
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert "6 failed, 3 passed, 12 rerun" in done.stdout, done.stdout + done.stderr
    for way in WAYS:
        times = [(folder / f"{way}.{name}").stat().st_size for name in ("twice", "thrice", "plain")]
        assert times == [3, 3, 1], way


def test_few_tests_are_marked_because_each_costs_a_question_to_a_socket(request: pytest.FixtureRequest):
    assert request.node.get_closest_marker("flaky") is None


def test_a_time_is_imported_at_the_top_of_a_module_where_it_is_looked_for():
    paths = set(TESTS.rglob("*.py")) - {Path(__file__)}
    hidden = [path.name for path in paths if " from support.timing import" in path.read_text()]
    assert hidden == []
