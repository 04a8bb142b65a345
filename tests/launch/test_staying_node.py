"""`rdzv run --stay` with real workers that do without torch: what happens when they end or stay at the wrong moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rdzv
from support.ports import free_port
from support.timing import within
from support.torchrun_jobs import ServeProcess

SRC = Path(rdzv.__file__).parent.parent
LONG_S = 60.0

LINK = """
import os, signal, socket, sys, time
from rdzv.core import stay_messages as messages

local, life = int(os.environ["LOCAL_RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["RDZV_STAY"])
stream = link.makefile("rb")

def say(*words):
    os.write(1, (" ".join(map(str, (local, life, *words))) + "\\n").encode())  # At once: two workers share the file.

def send(message):
    link.sendall(messages.encode(message))

def hear():
    header = stream.read(messages.SIZE_BYTES)
    if not header:
        sys.exit(9)
    return messages.decode(messages.FromAgent, stream.read(messages.size_of(header)))

def join(left=0):
    send(messages.WorkerReady(local, left))
    while True:
        said = hear()
        if isinstance(said, messages.GivenRank):
            say("given", said.round)
            return said.round
        if isinstance(said, messages.RunEnded):
            sys.exit(0 if said.success else 4)
"""


class Node:
    """One `rdzv run --stay` that serves its own run, and what its workers say."""

    def __init__(self, folder: Path, port: int, program: str, *words: str, nnodes: str = "1", workers: int = 2) -> None:
        (folder / "worker.py").write_text(LINK + program)
        self._out, self._err = folder / "out", folder / "err"
        command = [sys.executable, "-m", "rdzv", "run", f"127.0.0.1:{port}", "--run-id", "job", "--nnodes", nnodes]
        command += ["--nproc-per-node", str(workers), "--stay", "--no-prefix", "--conf", "last_call=0.2", *words, "--"]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, sys.executable, str(folder / "worker.py")], stdout=out, stderr=err,
                env={**os.environ, "PYTHONPATH": str(SRC)},
            )  # fmt: skip

    @property
    def said(self) -> str:
        return self._out.read_text()

    @property
    def log(self) -> str:
        return self._err.read_text()

    def until(self, words: str) -> None:
        deadline = time.monotonic() + LONG_S
        while words not in self.said:
            assert time.monotonic() < deadline, (words, self.said, self.log)
            time.sleep(0.05)

    def ends(self) -> int:
        try:
            return self.process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it has not ended: {self.said}\n{self.log}")


@pytest.fixture
def node(tmp_path):
    made = []

    def start(program, *words, **more):
        made.append(Node(tmp_path, free_port(), program, *words, **more))
        return made[-1]

    yield start
    for one in made:  # Its workers are killed with it.
        one.process.kill()
        one.process.wait()


@pytest.mark.parametrize("holds_output", [False, True], ids=["at once", "while a child holds its output"])
def test_a_worker_that_fails_after_another_has_succeeded_starts_both_again(node, holds_output):
    """It failed at its last save, perhaps. The next round needs all workers of the node."""
    program = """
join()
if local == 0:
    if holds_output:
        import subprocess
        subprocess.Popen(["sleep", "3"], start_new_session=True)
    sys.exit(0)
if life == 0:
    time.sleep(0.7)
    sys.exit(3)
"""
    one = node(f"holds_output = {holds_output}\n{program}", "--max-restarts", "1")
    assert one.ends() == 0, one.log
    assert "0 1 given" in one.said
    assert "1 1 given" in one.said


def test_a_worker_in_a_call_of_the_store_leaves_a_round_that_a_failure_ended(node):
    """It waited there until it was killed, as one that does not stop, and that counted as a second failure."""
    program = """
round = join()
if local == 0:
    if life == 0:
        send(messages.StoreCall(1, round, "wait", [["never"], 600.0]))
        while not isinstance(said := hear(), messages.StoreAnswer):
            pass
        say("freed", said.error)
        join(round)
    sys.exit(0)
if life == 0:
    time.sleep(0.5)
    sys.exit(3)
"""
    one = node(program, "--max-restarts", "1", "--stop-timeout", "50")
    one.until("0 0 freed over")
    assert one.ends() == 0, one.log
    assert "did not stop" not in one.log


def test_a_signal_that_comes_while_workers_leave_a_round_lets_them_save(node):
    """They were killed at once, with the words that they had not stopped in time."""
    program = """
def save(*_):
    say("saved")
    os._exit(0)

signal.signal(signal.SIGTERM, save)
round = join()
if local == 1:
    time.sleep(0.5)
    join(round)
while not isinstance(hear(), messages.RoundEnded):
    pass
say("leaves")
time.sleep(20)
"""
    one = node(program)
    one.until("0 0 leaves")
    one.process.send_signal(signal.SIGTERM)
    assert one.ends() == 128 + signal.SIGTERM, one.log
    assert "0 0 saved" in one.said
    assert "did not stop" not in one.log


def test_sigterm_stops_the_workers_soon_although_the_engine_is_away(tmp_path):
    with ServeProcess() as server:
        one = Node(tmp_path, int(server.endpoint.rpartition(":")[2]), "join()\ntime.sleep(600)\n", "--conf", "is_host=false")
        try:
            one.until("0 0 given")
            server.kill()
            one.process.send_signal(signal.SIGTERM)
            began_at = time.monotonic()
            assert one.ends() == 128 + signal.SIGTERM, one.log
            within(time.monotonic() - began_at, 15.0)
        finally:
            one.process.kill()
            server.start()  # For the end of the block.


def test_a_node_that_gives_up_while_it_waits_for_a_round_shows_the_failure_only(node):
    program = "send(messages.WorkerReady(local, 0))\ntime.sleep(1)\nsys.exit(3)\n"
    one = node(program, "--max-restarts", "0", nnodes="2", workers=1)
    assert one.ends() == 3, one.log
    assert "never retrieved" not in one.log
    assert "Traceback" not in one.log
