"""Real torch under `rdzv run`: `env://`, and the names by which torch knows an elastic launcher."""

from __future__ import annotations

import sys

import pytest

from support.cli_commands import rdzv

pytest.importorskip("torch", reason="NOT TESTED with torch: it is not installed")
PROGRAM = """
import time, torch, torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    print("sum", int(total), "elastic", dist.is_torchelastic_launched(), "local", dist.get_node_local_rank(), flush=True)
    dist.barrier()
    if dist.get_rank() == 1:
        raise ValueError("bad")
    time.sleep(600)

main()
"""


def test_workers_meet_by_env_and_a_recorded_exception_is_the_reason():
    done = rdzv("run", "--nnodes", "1", "--nproc-per-node", "2", "--", sys.executable, "-c", PROGRAM)
    shown = [f"[rank {rank}] sum 3 elastic True local {rank}" for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == shown, done.stderr
    assert done.returncode == 1
    assert "the program failed: rank 1: exit code 1: ValueError: bad (local rank 1, pid " in done.stderr
