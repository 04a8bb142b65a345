"""The command that checks a node: its verdict, its time limit, and what it leaves behind."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from pathlib import Path

import pytest

from rdzv.system.check_command import TAIL_MAX, run_check


def verdict(script, timeout_s=30.0):
    return asyncio.run(run_check(f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}", timeout_s))


@pytest.mark.parametrize(("script", "expected"), [
    ("print('all is well')", ""),
    ("raise SystemExit(3)", "the check failed with exit code 3"),
    ("import sys; print('gpu 0 ok'); print('gpu 1: 12 remapped rows', file=sys.stderr); sys.exit(1)",
     "the check failed with exit code 1: gpu 1: 12 remapped rows"),
    ("import os; os.kill(os.getpid(), 9)", "the check was ended by signal 9"),
])  # fmt: skip
def test_exit_code_0_passes(script, expected):
    assert verdict(script) == expected


def test_much_output_does_not_hold_it_up_and_the_last_line_is_kept():
    said = verdict(f"print('x' * {50 * TAIL_MAX}); print('the end'); raise SystemExit(1)")
    assert said == "the check failed with exit code 1: the end"


@pytest.mark.parametrize(("command", "words"), [("no-such-command-anywhere", "No such file"), ("''", "cannot be run")])
def test_a_command_that_cannot_be_run_fails(command, words):
    assert words in asyncio.run(run_check(command, 1.0))


def test_a_check_that_hangs_is_ended_with_its_children(tmp_path):
    pid_file = tmp_path / "pid"
    script = (
        "import subprocess, sys, time; print('probing', flush=True); "
        f"child = subprocess.Popen(['sleep', '600']); open({str(pid_file)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )

    assert verdict(script, 6.0) == "the check did not end within 6 s: probing"
    child, deadline = int(pid_file.read_text()), time.monotonic() + 20
    while is_alive(child):
        assert time.monotonic() < deadline, "its child lives on"
        time.sleep(0.02)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_check_that_is_cancelled_leaves_nothing_behind(tmp_path):
    """A join that runs out of time cancels it."""
    started = tmp_path / "pid"
    script = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    async def scenario():
        checking = asyncio.ensure_future(run_check(f"{shlex.quote(sys.executable)} -c {shlex.quote(script)}", 600.0))
        deadline = time.monotonic() + 20
        while not (started.exists() and started.read_text()):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        checking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await checking

    asyncio.run(scenario())
    deadline = time.monotonic() + 20
    while is_alive(int(started.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.02)
