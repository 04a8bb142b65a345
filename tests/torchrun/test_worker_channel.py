"""Workers of stock torchrun tell how far they are, and a deadlocked collective is named, shown and ended."""

from __future__ import annotations

import re

from support.torchrun_jobs import wait_for

DEADLOCK = """
import os
import torch, torch.distributed as dist
from rdzv import worker

dist.init_process_group("gloo")
rank, tensor = dist.get_rank(), torch.ones(1)
dist.all_reduce(tensor)
for step in range(8):
    worker.progress(step)
    if os.environ["RDZV_ROUND"] == "1" and step == 5:
        dist.recv(tensor, 1 - rank)  # Both wait for the other.
    dist.all_reduce(tensor)
dist.destroy_process_group()
"""


def test_a_deadlocked_collective_is_named_with_the_stacks_of_all_ranks_and_the_next_round_succeeds(job, tmp_path):
    program = tmp_path / "deadlock.py"
    program.write_text(DEADLOCK)
    training = job("2", last_call=5, stall=6)
    agents = training.start("a", "b", program=[str(program)])
    training.check_success("ab")
    for agent in agents:
        assert re.search(r"rank \d \(pid \d+\) has been at step 5 for \d+ s: its stacks follow", agent.out), (
            training.report()
        )
        assert re.search(r"rank \d: .*deadlock\.py.* in <module>", agent.out), training.report()
        assert re.search(r"rank \d: .* in recv", agent.out), training.report()
    broken = wait_for(lambda: re.search(r"no progress for \d+ s: .* at step 5", "".join(one.out for one in agents)))
    assert re.search(r"ranks 0, 1 at step 5", broken[0]), training.report()
