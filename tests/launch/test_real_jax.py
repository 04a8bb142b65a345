"""Real JAX on CPUs under `rdzv run`. If JAX is not installed, it is installed into a folder of its own first."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from support.ports import free_port
from support.torchrun_jobs import children_of, wait_for

pytestmark = pytest.mark.soak
ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "elastic_jax.py"
INSTALL_S = 600.0
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def jax_path(tmp_path_factory):
    """The folder that JAX is in; empty if it is installed."""
    if importlib.util.find_spec("jax") is not None:
        return ""
    folder = tmp_path_factory.mktemp("jax")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder), "jax"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"NOT TESTED with JAX: it was not installed within {INSTALL_S:g} s")
    if done.returncode:
        pytest.skip(f"NOT TESTED with JAX: it cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    return str(folder)


class Node:
    """One `rdzv run` with its output in a file."""

    def __init__(self, process, file):
        self.process = process
        self.file = file

    @property
    def said(self):
        return self.file.read_text()

    def kill(self):
        """Kill it with its workers, as the loss of a node does."""
        for pid in [self.process.pid, *children_of(self.process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)


@pytest.fixture
def start(jax_path, tmp_path):
    """Start nodes of one run; all are killed at the end of the test."""
    endpoint = f"127.0.0.1:{free_port()}"
    environ = {**os.environ, "PYTHONPATH": jax_path, "JAX_PLATFORMS": "cpu"}

    @contextmanager
    def running(name, *words, **more):
        file = tmp_path / f"{name}.out"
        command = [sys.executable, "-m", "rdzv", "run", endpoint, "--run-id", "jax", "-c", f"slot={name}", *words]
        with file.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**environ, **more})
        node = Node(process, file)
        try:
            yield node
        finally:
            node.kill()

    with ExitStack() as nodes:
        yield lambda *words, **more: nodes.enter_context(running(*words, **more))


def test_three_processes_train_one_is_killed_and_the_job_goes_on_from_its_checkpoint(start, tmp_path):
    """The node that joins then makes a new round too: the healthy workers stop on SIGTERM, without being killed."""
    checkpoint = tmp_path / "model.npz"
    options = ["--nnodes", "2:3", "--max-restarts", "5", "-c", "last_call=20", "-c", "settle=0.5", "-c", "grow_every=0"]
    program = ["--", sys.executable, str(EXAMPLE), "--checkpoint", str(checkpoint), "--steps", "400", "--step-s", "0.1"]
    nodes = [start(name, *options, *program) for name in "abc"]

    def report():
        return "\n".join(node.said for node in nodes)

    wait_for(checkpoint.exists, "the first checkpoint", LIMIT_S, report)
    # The node that serves must stay. So must process 0, because its output tells the story.
    first = next(node for node in nodes if "world of 3 in round 1, from step 0" in node.said)
    lost = next(node for node in nodes if node is not first and "serving run" not in node.said)
    lost.kill()
    # On a busy machine another process may take the port before JAX binds it. The program is then started again.
    shrunk = re.compile(r"world of 2 in round [2-4], from step (\d+)")
    resumed = int(wait_for(lambda: shrunk.search(first.said), "a round of two", LIMIT_S, report)[1])
    assert resumed >= 10
    assert resumed % 10 == 0
    nodes.append(start("d", *options, *program))
    wait_for(lambda: re.search(r"world of 3 in round [3-9], from step", first.said), "growth", LIMIT_S, report)
    for node in nodes:
        if node is not lost:
            assert node.process.wait(LIMIT_S) == 0, report()
    assert float(re.search(r"done at step 400 in a world of 3, loss ([\d.]+)", first.said)[1]) < 0.001
    assert "did not stop within" not in report()


def test_the_program_of_the_page_runs_on_two_nodes(start, tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "jax.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    nodes = [start(name, "--nnodes", "2", "--", sys.executable, str(tmp_path / "train.py")) for name in "ab"]
    assert [node.process.wait(LIMIT_S) for node in nodes] == [0, 0], "\n".join(node.said for node in nodes)
    assert sorted(re.findall(r"^process .*", "".join(node.said for node in nodes), re.MULTILINE)) == [
        "process 0 of 2", "process 1 of 2",
    ]  # fmt: skip


def test_jax_itself_finds_the_launcher_even_in_a_job_of_slurm(start):
    """Two workers of one node, whose program calls only JAX's own function."""
    program = """
import jax, rdzv.jax
jax.distributed.initialize()
print("process", jax.process_index(), "of", jax.process_count())
"""
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "9", "SLURM_PROCID": "5", "SLURM_LOCALID": "3", "SLURM_STEP_NODELIST": "n1"}
    node = start("a", "--nnodes", "1", "--nproc-per-node", "2", "--", sys.executable, "-c", program, **slurm)
    assert node.process.wait(LIMIT_S) == 0, node.said
    assert sorted(re.findall(r"^\[rank \d\] process .*", node.said, re.MULTILINE)) == [
        "[rank 0] process 0 of 2", "[rank 1] process 1 of 2",
    ]  # fmt: skip


def test_an_exception_of_one_process_ends_the_job_at_once(start):
    """Without `rdzv.jax`, the process would wait 300 s for the others, which wait for it."""
    program = """
import jax, numpy, rdzv.jax
from jax.experimental import multihost_utils
rdzv.jax.initialize()
multihost_utils.process_allgather(numpy.ones(1))
if jax.process_index() == 1:
    raise ValueError("bad")
multihost_utils.process_allgather(numpy.ones(1))
"""
    node = start("a", "--nnodes", "1", "--nproc-per-node", "2", "--", sys.executable, "-c", program)
    assert node.process.wait(LIMIT_S) in (1, 128 + signal.SIGABRT), node.said
    assert "ValueError: bad" in node.said
    assert "the program failed: rank " in node.said
