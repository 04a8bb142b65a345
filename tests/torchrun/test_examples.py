"""The examples do what they say: they go on from where they were when a node is lost."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from support.ports import free_port
from support.torchrun_jobs import LONG_S, children_of, wait_for

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def test_the_example_without_torch_goes_on_when_a_node_is_killed(tmp_path):
    """Two nodes, then one: the sum is as right as if nothing had happened."""
    progress, endpoint = tmp_path / "pi.json", f"127.0.0.1:{free_port()}"
    program = [sys.executable, str(EXAMPLES / "without_torch.py"), "--progress", str(progress), "--slices", "80"]
    command = [
        sys.executable, "-m", "rdzv", "run", endpoint, "--run-id", "pi", "--nnodes", "1:2", "--max-restarts", "5", "--conf",
        "last_call=2", "--", *program,
    ]  # fmt: skip
    outs = [tmp_path / "first.out", tmp_path / "second.out"]
    nodes = []
    try:
        for out in outs:
            with out.open("wb") as file:
                nodes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True))
        pieces = lambda: json.loads(progress.read_text())[0] if progress.exists() else 0  # noqa: E731
        wait_for(lambda: pieces() >= 10, "the tenth slice", report=lambda: "".join(out.read_text() for out in outs))
        # The node that does not write the progress down is the one to go, with its program.
        kept = 0 if "world of 2" in outs[0].read_text() else 1
        lost = nodes[1 - kept]
        for pid in [lost.pid, *children_of(lost.pid)]:
            os.kill(pid, signal.SIGKILL)
        assert nodes[kept].wait(LONG_S) == 0, outs[kept].read_text()
    finally:
        for node in nodes:
            with suppress(ProcessLookupError):
                os.killpg(node.pid, signal.SIGTERM)
            node.wait(LONG_S)
    said = re.findall(r"world of (\d) in round (\d), from slice (\d+)", outs[kept].read_text())
    (size, number, first), (later_size, later_number, later_first) = said
    assert (size, number, first, later_size, later_number) == ("2", "1", "0", "1", "2")
    assert int(later_first) >= 10
    assert f"done in a world of 1: {math.pi:.8f}" in outs[kept].read_text()


def test_elastic_data_parallel_training_goes_on_when_a_node_is_killed(job, tmp_path):
    """Stock code under stock torchrun: two nodes train, one is lost, the other ends with the model that was asked for."""
    checkpoint = tmp_path / "model.pt"
    training = job("1:2", last_call=5)
    program = [str(EXAMPLES / "elastic_ddp.py"), "--checkpoint", str(checkpoint), "--steps", "60", "--save-every", "5"]
    first, second = training.start("a", "b", program=program)
    wait_for(checkpoint.exists, "the first checkpoint", 2 * LONG_S, training.report)
    rank0, other = (first, second) if "world of 2" in first.out else (second, first)
    assert "world of 2, from step 0" in rank0.out
    other.kill()
    assert rank0.ends() == 0, training.report()
    resumed = int(re.findall(r"world of 1, from step (\d+)", rank0.out)[0])
    assert resumed >= 5
    assert resumed % 5 == 0
    loss = float(re.findall(r"done at step 60 in a world of 1, loss ([\d.]+)", rank0.out)[0])
    assert loss < 1.0, "it began at 8, which is the variance of the targets"
