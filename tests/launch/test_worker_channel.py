"""`rdzv run` and what its workers tell: real processes, the command line, and workers that hang."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from support.cli_commands import QUICK, rdzv, running
from support.ports import free_port
from support.torchrun_jobs import wait_for

PAGE = Path(__file__).parents[2] / "docs" / "workers.md"
LONG_S = 60.0

HANGS = """
import os, signal, sys, time
from pathlib import Path
from rdzv import worker

signal.alarm(300)  # If the test is killed, nobody else ends it.
rank, number, folder = int(os.environ["RANK"]), os.environ["RDZV_ROUND"], Path(sys.argv[1])

def meets_the_others(step):
    # As a collective would.
    (folder / f"{number}-{step}-{rank}").touch()
    while not all((folder / f"{number}-{step}-{other}").exists() for other in range(3)):
        time.sleep(0.01)

def was_stopped():
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(600)

def loops():
    while True:
        pass

meets_the_others("start")
for step in range(12):
    if number == "1" and step == 10 and rank > 0:
        was_stopped() if rank == 1 else loops()
    worker.progress(step)
    meets_the_others(step)
"""


def test_a_worker_that_was_stopped_and_one_that_loops_are_named_with_their_stacks_and_the_next_round_succeeds(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HANGS)
    command = [
        "run", f"127.0.0.1:{free_port()}", "--run-id", "t", "--nnodes", "1", "--nproc-per-node", "3", *QUICK,
        "--conf", "stall=3", "--", sys.executable, str(program), str(tmp_path),
    ]  # fmt: skip
    with running(*command) as agent:
        log = agent.communicate(timeout=LONG_S)[1]
    assert agent.returncode == 0, log
    assert re.search(
        r"rank 1 \(pid \d+\) has been at step 9 for \d+ s, and is stopped \(SIGSTOP\): its stacks follow", log
    ), log
    assert re.search(r"rank 2 \(pid \d+\) has been at step 9 for \d+ s: its stacks follow", log), log
    assert re.search(r"rank 1: .*program\.py.* in was_stopped", log), log
    assert re.search(r"rank 2: .*program\.py.* in loops", log), log
    assert "rank 0 (pid" not in log, "it is further, and only waits"
    assert re.search(r"no progress for \d+ s: ranks 1, 2 at step 9, others at 10", log), log
    first_stack, broken = log.index("in was_stopped"), log.index("no progress for")
    assert first_stack < broken, "the stacks are shown before the round is broken"
    assert any(tmp_path.glob("*-11-0"))


def test_the_example_of_the_page_shows_its_progress_in_the_status(tmp_path):
    (example, _) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = re.findall(r"^progress: .*$", PAGE.read_text(), re.MULTILINE)
    program = tmp_path / "train.py"
    program.write_text(example)
    place = f"127.0.0.1:{free_port()}"
    command = [
        "run",
        place,
        "--run-id",
        "t",
        "--nnodes",
        "1",
        "--nproc-per-node",
        "2",
        *QUICK,
        "--",
        sys.executable,
        str(program),
    ]
    pattern = re.compile(
        r"^progress: steps? \d+(?: to \d+)?, [\d.]+ per second, \d+ s ago, told by 2 workers", re.MULTILINE
    )
    assert pattern.match(shown)
    with running(*command) as agent:
        told = wait_for(
            lambda: pattern.search(rdzv("status", place, "--run-id", "t").stdout), "the progress in the status"
        )
        as_json = rdzv("status", place, "--run-id", "t", "--json").stdout
        agent.terminate()
        agent.wait(LONG_S)
    assert told
    assert '"progress":{"step":' in as_json.replace(" ", "")
