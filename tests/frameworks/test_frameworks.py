"""Runs the commands and programs of docs/frameworks.md with the real frameworks, each in an environment of its own."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from support.own_environment import OwnEnvironment
from support.ports import free_port
from support.torchrun_jobs import children_of, wait_for

PAGE = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
LINES = (
    "accelerate launch",
    "torchrun --rdzv-backend=rdzv --rdzv-endpoint=node1:29400 --rdzv-id=job --nnodes=1:2 ",
    "torchx run",
    "torchrun --rdzv-backend=rdzv --rdzv-endpoint=node1:29400 --rdzv-id=job --nnodes=2 ",
    "rdzv run node1:29400 --run-id serve --nnodes 2 --max-restarts 100 -- sh -c 'exec vllm serve ",
    "rdzv run node1:29400 --run-id serve --nnodes 2 --max-restarts 100 -- sh -c 'exec python3 -m sglang.launch_server ",
)
ACCELERATE, LIGHTNING, TORCHX, DEEPSPEED, VLLM, SGLANG = LINES
"""The beginnings of all commands of the page."""
LAUNCHER = "rdzv run --nnodes 1 --nproc-per-node 2 -- python"
"""Starts any program of the page, as docs/launcher.md says."""
LONG_S = 600.0
"""A busy machine needs many seconds to import a framework, and minutes to compile what DeepSpeed needs."""
TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("rank", dist.get_rank(), "of", int(total.item()), flush=True)
dist.destroy_process_group()
"""


def command(start):
    """Return the one command of the page with that beginning."""
    (found,) = [line for line in shown() if line.startswith(start)]
    return found


def shown():
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def program(name):
    """Return the program of the page with that name."""
    (found,) = re.findall(rf"^```python\n(# {name}\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return found


class Node:
    """One command of a user, with all processes that it starts."""

    def __init__(self, folder, words, number, **environ):
        self.out = folder / f"{number}.out"
        with self.out.open("ab") as out:
            self.process = subprocess.Popen(
                words, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=environ
            )

    @property
    def text(self):
        return self.out.read_text(errors="replace")

    def kill(self):
        """Kill all processes, as if the node had lost power."""
        family, looked = [self.process.pid], 0
        while looked < len(family):
            family += children_of(family[looked])
            looked += 1
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(LONG_S)

    def ends(self):
        try:
            return self.process.wait(LONG_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.text[-4000:]) from None


class Nodes:
    """Nodes that run a framework of one environment."""

    def __init__(self, folder, environment=None):
        self.folder = folder
        self.port = free_port()
        self.started = []
        binaries = environment.python.parent if environment else folder / "bin"
        binaries.mkdir(exist_ok=True)
        self.binaries = binaries
        python = environment.python if environment else sys.executable
        self.tool("torchrun", f'exec {python} -m torch.distributed.run "$@"')
        self.tool("rdzv", f'exec {python} -m rdzv "$@"')
        self.environ = {
            "PATH": f"{binaries}:{os.environ['PATH']}", "HOME": str(folder), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": str(folder / "extensions"), "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def tool(self, name, script):
        file = self.binaries / name
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def start(self, shown, **environ):
        """Start a command of the page, with this machine's name and a free port in it."""
        here = shown.replace("node1", "127.0.0.1").replace("29400", str(self.port))
        node = Node(self.folder, shlex.split(here), len(self.started), **self.environ, **environ)
        self.started.append(node)
        return node

    def report(self):
        return "\n".join(f"---- {node.out.name} {node.process.poll()}\n{node.text[-4000:]}" for node in self.started)

    def clear(self):
        for node in self.started:
            node.kill()


@pytest.fixture
def nodes(tmp_path):
    with ExitStack() as stack:

        def make(*packages, options=()):
            environment = OwnEnvironment(tmp_path, *packages, torch=True, options=options) if packages else None
            made = Nodes(tmp_path, environment)
            stack.callback(made.clear)
            return made

        yield make


def test_every_command_and_program_of_the_page_is_run_here():
    assert sorted(map(command, LINES)) == sorted(shown())
    named = re.findall(r"^```python\n# (\w+\.py)$", PAGE, re.MULTILINE)
    assert len(named) == PAGE.count("```python\n")
    assert [name for name in named if f'program("{name}")' not in Path(__file__).read_text()] == []


def succeed(started, report):
    codes = [node.ends() for node in started]
    assert set(codes) == {0}, report()


@pytest.mark.soak
def test_accelerate_launches_on_two_machines_and_without_elasticity_waits_for_a_replacement(nodes):
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    made = nodes("accelerate")
    (made.folder / "train_accelerate.py").write_text(program("train_accelerate.py"))
    line = command(ACCELERATE)
    first = made.start(line)
    # It must be the one that serves: on one machine, Accelerate would find the port of another in use.
    wait_for(lambda: "serving run" in first.text, "the first serves", LONG_S, made.report)
    lost = made.start(line.replace("--machine_rank 0", "--machine_rank 1"))
    wait_for(lambda: "round 1: rank" in first.text and "round 1: rank" in lost.text, "a round", LONG_S, made.report)
    lost.kill()
    again = made.start(line.replace("--machine_rank 0", "--machine_rank 1"))
    succeed([first, again], made.report)
    assert {"all: [0, 1]" in node.text for node in (first, again)} == {True}, made.report()

    with_torchrun = "torchrun --rdzv-backend=rdzv --nnodes=2:4 --max-restarts=100 train_accelerate.py"
    assert f"`{with_torchrun}`" in PAGE
    elastic = with_torchrun.replace("2:4", "1:1")
    alone = made.start(elastic)
    succeed([alone], made.report)
    assert "rank 0 of 1, all: [0]" in alone.text

    launched = made.start(f"{LAUNCHER} train_accelerate.py")
    succeed([launched], made.report)
    assert launched.text.count("of 2, all: [0, 1]") == 2, made.report()

    refused = made.start(line.replace("accelerate launch", "accelerate launch --same_network"))
    assert refused.ends() != 0
    assert "no variable names the first node" in refused.text


@pytest.mark.soak
def test_lightning_goes_on_with_fewer_nodes_from_its_checkpoint(nodes):
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    made = nodes("lightning")
    (made.folder / "train_lightning.py").write_text(program("train_lightning.py"))
    line = command(LIGHTNING)
    first, second = made.start(line, EPOCHS="14"), made.start(line, EPOCHS="14")
    both = (first, second)
    wait_for(lambda: all(re.search(r"epoch [3-9]: rank \d of 2", node.text) for node in both), "epoch 3", LONG_S, made.report)
    second.kill()
    succeed([first], made.report)
    alone = [int(epoch) for epoch in re.findall(r"epoch (\d+): rank 0 of 1", first.text)]
    assert alone[0] >= 2, "it went on from its checkpoint"
    assert alone[-1] == 13, made.report()

    launched = made.start(f"{LAUNCHER} train_lightning.py", EPOCHS="16")
    succeed([launched], made.report)
    assert sorted(re.findall(r"epoch 15: rank (\d) of 2", launched.text)) == ["0", "1"], made.report()


@pytest.mark.soak
def test_torchx_starts_a_job(nodes):
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    made = nodes("torchx")
    (made.folder / "train.py").write_text(TRAIN)
    line = command(TORCHX).replace("--rdzv_backend rdzv", f"--rdzv_backend rdzv --rdzv_port {made.port}")
    node = made.start(line)
    succeed([node], made.report)
    assert sorted(re.findall(r"\[0\]:rank (\d+) of 2$", node.text, re.MULTILINE)) == ["0", "1"], made.report()
    assert re.search(r"\[train-\w+\] round 1: rank 0 of 2", node.text), "the run has torchx's id"


@pytest.mark.soak
def test_deepspeed_trains_under_torchrun(nodes):
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    if shutil.which("g++") is None:
        pytest.skip("NOT TESTED with DeepSpeed: it compiles its operators, and g++ is not installed")
    made = nodes("deepspeed", "setuptools", options=("--no-build-isolation",))
    (made.folder / "train_deepspeed.py").write_text(program("train_deepspeed.py"))
    line = command(DEEPSPEED)
    succeed([made.start(line), made.start(line)], made.report)
    said = "".join(node.text for node in made.started)
    assert sorted(re.findall(r"^rank (\d+) of 2$", said, re.MULTILINE)) == ["0", "1"], made.report()


@pytest.mark.parametrize(("start", "program"), [(VLLM, "vllm"), (SGLANG, "python3")], ids=["vllm", "sglang"])
def test_the_line_for_an_inference_server_gives_it_rank_size_and_address(nodes, start, program):
    """The servers themselves need GPUs. A program in their place shows what they are given."""
    made = nodes()
    made.tool(program, 'echo "given: $*"')
    line = command(start)
    succeed([made.start(line, MODEL="a/model"), made.start(line, MODEL="a/model")], made.report)
    given = sorted(re.findall(r"given: (.*)", "".join(node.text for node in made.started)))
    assert len(given) == 2, made.report()
    for rank, words in enumerate(sorted(given, key=lambda words: "--node-rank 1" in words)):
        assert "a/model" in words
        assert f"--nnodes 2 --node-rank {rank}" in words
        assert ("--headless" in words) == (start == VLLM and rank == 1)
    addresses = {tuple(re.findall(r"127\.0\.0\.1(?::| --master-port )\d+", words)) for words in given}
    assert len(addresses) == 1, given
    assert len(addresses.pop()) == 1
