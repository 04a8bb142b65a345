"""`rdzv run --stay` with real processes: workers stay, spares take over, a crashed worker alone is started again."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import rdzv
from support.torchrun_jobs import ServeProcess, wait_for

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")

WORKER = Path(__file__).parent.parent / "support" / "staying_worker.py"
CONF = ("last_call=20", "settle=0.1", "grow_every=0", "drain_settle=0.1", "join_timeout=120")
LONG_S = 90.0


class Node:
    """One `rdzv run --stay`, and the lines of its workers."""

    def __init__(self, name: str, endpoint: str, folder: Path, workers: int, nnodes: str, *conf: str) -> None:
        self.name, self._out, self._err = name, folder / f"{name}.out", folder / f"{name}.err"
        words = ["run", endpoint, "--run-id", "job", "--nnodes", nnodes, "--nproc-per-node", str(workers), "--stay"]
        words += ["--no-prefix", "--max-restarts", "2"]
        words += [word for one in (*CONF, f"slot={name}", *conf) for word in ("--conf", one)]
        environ = {**os.environ, "PYTHONPATH": str(Path(rdzv.__file__).parent.parent), "TEST_NODE": name}
        program = [sys.executable, str(WORKER), str(folder / "done")]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            command = [sys.executable, "-m", "rdzv", *words, "--", *program]
            self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environ)

    def rows(self, *events: str) -> list[SimpleNamespace]:
        lines = self._out.read_text().splitlines(keepends=True) if self._out.exists() else []
        rows = [SimpleNamespace(**json.loads(line)) for line in lines if line.endswith("\n")]
        return [row for row in rows if row.event in events]

    def until(self, event: str, count: int, **fields: object) -> list[SimpleNamespace]:
        """Wait for so many rows with these fields."""

        def look() -> list[SimpleNamespace] | None:
            found = [row for row in self.rows(event) if all(getattr(row, name) == value for name, value in fields.items())]
            return found if len(found) >= count else None

        return wait_for(look, f"{self.name}: {event} {fields}", LONG_S, self.report)

    def report(self) -> str:
        return f"{self.name}: {self._out.read_text()[-3000:]}\n{self.log[-4000:]}"

    @property
    def log(self) -> str:
        return self._err.read_text()

    def ends(self) -> int:
        return self.process.wait(LONG_S)


@pytest.fixture
def nodes(tmp_path):
    server, made = ServeProcess(), []
    server.start()

    def start(name: str, workers: int, nnodes: str, *conf: str) -> Node:
        made.append(Node(name, server.endpoint, tmp_path, workers, nnodes, *conf))
        return made[-1]

    start.endpoint, start.done = server.endpoint, tmp_path / "done"
    yield start
    for node in made:  # Their workers are killed with them.
        node.process.kill()
        node.process.wait()
    server.kill()


def status(endpoint: str) -> dict:
    command = [sys.executable, "-m", "rdzv", "status", endpoint, "--run-id", "job", "--json"]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_workers_stay_while_nodes_are_lost_replaced_restarted_and_drained(nodes):
    a = nodes("a", 2, "1:2")
    b = nodes("b", 1, "1:2")
    first = a.until("step", 2, size=3) + b.until("step", 1, size=3)
    round = first[0].round
    pids = {row.pid for row in a.rows("begins")}
    assert {tuple(row.environ) for row in a.rows("world")} == {("0", "3", str(round)), ("1", "3", str(round))}

    # A spare has started its worker, built its model, and waits. It takes over the rank of a node that is lost.
    c = nodes("c", 1, "1:2")
    c.until("begins", 1)
    wait_for(lambda: [one for one in status(nodes.endpoint)["members"] if one["state"] == "spare"], "c is spare", LONG_S)
    lost_rank = b.rows("world")[-1].rank
    b.process.kill()
    a.until("step", 2, round=round + 1, size=3)
    (taken,) = c.until("world", 1, round=round + 1)
    assert (taken.rank, taken.step > 0) == (lost_rank, True)
    assert {row.weights for row in (*a.rows("world")[-2:], taken)} == {taken.weights}

    # One worker of a node is killed: the other nodes go on, and the node comes back with one new process.
    stays, killed = sorted(pids)
    os.kill(killed, signal.SIGKILL)
    c.until("step", 1, round=round + 2, size=1)
    both = a.until("step", 2, round=round + 3, size=3)
    assert len({row.pid for row in both} & pids) == 1
    assert stays in {row.pid for row in both}
    assert "killed by SIGKILL" in a.log
    assert "restart 1 of 2" in a.log
    wait_for(lambda: (status(nodes.endpoint)["progress"] or {}).get("workers") == 3, "the progress of all workers", LONG_S)

    # A drained node ends with the code of the signal, and the others stay.
    c.process.send_signal(signal.SIGTERM)
    a.until("step", 2, round=round + 4, size=2)
    assert c.ends() == 128 + signal.SIGTERM
    assert len(c.rows("begins")) == 1

    nodes.done.touch()
    assert a.ends() == 0
    assert len(a.rows("end")) == 2
    assert len(a.rows("begins")) == 3
    assert status(nodes.endpoint)["phase"] == "closed"


def test_a_program_that_fails_too_often_ends_the_node_with_its_code_and_reason(nodes, tmp_path):
    """Its own error is shown, and a worker that does not leave its round is killed, too."""
    program = tmp_path / "bad.py"
    program.write_text("import sys, rdzv.torch\nfor world in rdzv.torch.rounds():\n    with world:\n        sys.exit(7)\n")
    words = ["run", nodes.endpoint, "--run-id", "bad", "--nnodes", "1", "--stay", "--max-restarts", "1"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rdzv", *words, "--", sys.executable, str(program)],
        capture_output=True, text=True, timeout=LONG_S, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(rdzv.__file__).parent.parent)},
    )  # fmt: skip
    assert (done.returncode, "the program failed: rank 0: exit code 7" in done.stderr) == (7, True), done.stderr
    assert "restart 1 of 1" in done.stderr
    assert time.monotonic() - began < LONG_S


def test_workers_that_stay_save_in_the_same_step_before_their_node_goes(nodes, monkeypatch):
    monkeypatch.setenv("TEST_SAVES", "1")
    a, b = nodes("a", 2, "1:2", "drain_notice=50"), nodes("b", 1, "1:2", "drain_notice=50")
    round = a.until("step", 2, size=3)[0].round
    b.process.send_signal(signal.SIGTERM)
    assert b.ends() == 128 + signal.SIGTERM
    a.until("step", 2, round=round + 1, size=2)
    saved = a.until("saved", 2, round=round) + b.until("saved", 1, round=round)
    assert len({row.step for row in saved}) == 1, f"{a.report()}\n{b.report()}"
    assert a.rows("world")[-1].reason.endswith("; all workers have saved"), a.report()
