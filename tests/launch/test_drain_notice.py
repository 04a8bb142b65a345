"""`rdzv run` with a notice before a drain: real nodes and workers, which agree on a step by files."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import time
from contextlib import ExitStack

import pytest

from rdzv.cli.exit_codes import ExitCode
from support.cli_commands import QUICK, rdzv, running, served
from support.torchrun_jobs import wait_for

LONG_S = 60.0

SAVES = """
import json, os, signal, sys, time
from pathlib import Path
from rdzv import worker

signal.alarm(300)  # If the test is killed, nobody else ends it.
rank, size, number, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["RDZV_ROUND"], Path(sys.argv[1])

def any_of_all(step, mine):
    # As a collective would, over a yes or no.
    (folder / f"{number}-{step}-{rank}-{'yes' if mine else 'no'}").touch()
    said = {}
    while len(said) < size:
        for other in set(range(size)) - said.keys():
            for word in ("no", "yes"):
                if (folder / f"{number}-{step}-{other}-{word}").exists():
                    said[other] = word
        time.sleep(0.01)
    return "yes" in said.values()

for step in range(100000):
    time.sleep(0.05)
    worker.progress(step)
    if any_of_all(step, worker.notice() is not None):
        while (notice := worker.notice()) is None:
            time.sleep(0.005)
        told = {"step": step, "reason": notice.reason, "seconds": notice.seconds}
        (folder / f"saved-{number}-{rank}").write_text(json.dumps(told))
        if not (folder / "silent").exists() or rank:
            worker.saved()
    if step == 1:
        (folder / f"up-{number}-{rank}").touch()
"""


class Nodes:
    """Nodes of one run at a server of its own."""

    def __init__(self, stack, folder, nnodes, *conf):
        (folder / "program.py").write_text(SAVES)
        self.folder = folder
        self.place = stack.enter_context(served())
        # A full round is sealed at once, so the last call is only for a machine that is too busy to start all together.
        given = ("last_call=60", "settle=0.2", "lease=3", *conf)
        self._words = ["--run-id", "t", "--nnodes", nnodes, *(word for one in given for word in ("--conf", one))]
        self._stack = stack
        self.nodes = {}

    def start(self, *names):
        command = ["--", sys.executable, str(self.folder / "program.py"), str(self.folder)]
        for name in names:
            words = ["run", self.place, *self._words, "--conf", f"slot={name}", *command]
            self.nodes[name] = self._stack.enter_context(running(*words))
            if name == names[0]:
                wait_for(lambda: rdzv("status", self.place, "--run-id", "t").returncode == 0, "the first, which leads")
        self.up(1, len(names))

    def up(self, number, size):
        wait_for(lambda: len(list(self.folder.glob(f"up-{number}-*"))) == size, f"round {number} of {size}")

    def saved(self, number):
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob(f"saved-{number}-*"))]

    def log(self, name):
        return self.nodes[name].communicate(timeout=LONG_S)[1]


@pytest.fixture
def run(tmp_path):
    with ExitStack() as stack:
        yield lambda nnodes, *conf: Nodes(stack, tmp_path, nnodes, *conf)


def test_the_leader_gets_sigterm_and_all_workers_save_in_the_same_step_before_the_round_ends(run):
    nodes = run("2:3", "drain_notice=40")
    nodes.start("a", "b", "c")
    nodes.nodes["a"].send_signal(signal.SIGTERM)
    assert nodes.nodes["a"].wait(LONG_S) == 128 + signal.SIGTERM
    nodes.up(2, 2)
    told = nodes.saved(1)
    assert len(told) == 3
    assert len({one["step"] for one in told}) == 1, told
    assert all("/a draining: SIGTERM received" in one["reason"] and 30 < one["seconds"] <= 40 for one in told)
    for name in "bc":
        nodes.nodes[name].send_signal(signal.SIGTERM)  # Both go: nobody remains, and the workers save all the same.
    logs = {name: nodes.log(name) for name in "bc"}
    assert len({one["step"] for one in nodes.saved(2)}) == 1
    assert len(nodes.saved(2)) == 2, logs
    assert all("/a draining: SIGTERM received; all workers have saved" in log for log in logs.values()), logs


def test_an_operator_drains_a_node_whose_worker_does_not_answer(run, tmp_path):
    (tmp_path / "silent").touch()
    nodes = run("2:3", "drain_notice=3")
    nodes.start("a", "b", "c")
    at = time.monotonic()
    asked = rdzv("drain", f"{socket.gethostname()}/c", nodes.place, "--run-id", "t")
    assert asked.returncode == 0, asked.stderr
    nodes.up(2, 2)
    assert time.monotonic() - at >= 3
    assert nodes.nodes["c"].wait(LONG_S) != 0
    for name in "ab":
        nodes.nodes[name].send_signal(signal.SIGKILL)
    assert re.search(r"/c draining: .*; the workers of \S+/\w have not saved within 3 s", nodes.log("b"))


def test_a_second_signal_ends_a_node_at_once_and_so_does_its_death(run, tmp_path):
    (tmp_path / "silent").touch()
    nodes = run("1:3", "drain_notice=600", "linger=0.2")
    nodes.start("a", "b", "c")
    nodes.nodes["c"].send_signal(signal.SIGTERM)
    wait_for(lambda: len(nodes.saved(1)) == 3, "all are told")
    time.sleep(1.2)  # A second signal within a second counts as the first.
    nodes.nodes["c"].send_signal(signal.SIGTERM)
    nodes.nodes["c"].wait(LONG_S)
    nodes.up(2, 2)
    nodes.nodes["b"].send_signal(signal.SIGTERM)
    wait_for(lambda: len(nodes.saved(2)) == 2, "both are told")
    nodes.nodes["b"].kill()
    nodes.up(3, 1)


FAILS = """
import os, sys, time
from pathlib import Path
from rdzv import worker
for step in range(3, 8):
    worker.progress(step)
time.sleep(0.1)
raise SystemExit("no further")
"""


def test_a_run_that_gets_no_further_than_before_is_closed_with_the_first_cause_and_the_step(run, tmp_path):
    (tmp_path / "fails.py").write_text(FAILS)
    with served() as place:
        command = ["run", place, "--run-id", "t", "--nnodes", "1", "--max-restarts", "50", *QUICK, "--conf", "futile_rounds=3"]
        done = rdzv(*command, "--", sys.executable, str(tmp_path / "fails.py"))
        assert done.returncode == ExitCode.CLOSED, done.stderr
        assert re.search(
            r"3 rounds in a row got no further than step 7; first cause: the workers of \S+ stopped\b", done.stderr
        ), done.stderr
        assert done.stderr.count("no further than") <= 4
