"""A checkpoint before a node goes, under stock torchrun: all workers save in the same step, and only then the round ends."""

from __future__ import annotations

import json
import re
import signal

import pytest

from support.torchrun_jobs import wait_for

SAVES = """
import json, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import rdzv.torch
from rdzv import worker

dist.init_process_group("gloo")
folder, rank, number = Path(sys.argv[1]), dist.get_rank(), os.environ["RDZV_ROUND"]
if len(sys.argv) > 2 and os.environ["JOB_NODE"] == sys.argv[2]:
    worker.saved = lambda: None  # It never answers.
for step in range(5000):
    time.sleep(0.02)
    dist.all_reduce(torch.ones(1))
    worker.progress(step)
    notice = rdzv.torch.notice()
    if notice:
        told = {"step": step, "reason": notice.reason, "seconds": notice.seconds, "at": time.monotonic()}
        (folder / f"saved-{number}-{rank}.part").write_text(json.dumps(told))
        (folder / f"saved-{number}-{rank}.part").rename(folder / f"saved-{number}-{rank}")
        worker.saved()
    if step == 20:
        (folder / f"up-{number}-{rank}").touch()
    if (folder / "finish").exists() and step % 50 == 0:
        break
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def saving(job, tmp_path):
    """Start agents whose workers save when they are told to, and wait until all of them train."""
    program = tmp_path / "saves.py"
    program.write_text(SAVES)

    def start(nodes, nnodes, *more, **conf):
        training = job(nnodes, last_call=3, **conf)
        training.start(*nodes, program=[str(program), str(tmp_path), *more])
        up(1, len(nodes), training)
        return training

    def up(number, size, training):
        wait_for(lambda: len(list(tmp_path.glob(f"up-{number}-*"))) == size, f"round {number}", report=training.report)

    def saved(number):
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob(f"saved-{number}-?"))]

    start.up, start.saved, start.finish = up, saved, (tmp_path / "finish").touch
    return start


def test_all_workers_save_in_the_same_step_before_the_agent_that_got_sigterm_stops_its_own(saving):
    training = saving("abc", "2:3", drain_notice=50)
    gone, _ = training.other_than_server("abc")
    others = "abc".replace(gone, "")
    training.agents[gone].signal(signal.SIGTERM)
    assert training.agents[gone].ends() != 0, "it ended by a signal"
    saving.up(2, 2, training)
    told = saving.saved(1)
    assert len(told) == 3, training.report()
    assert len({one["step"] for one in told}) == 1, told
    assert all("draining: SIGTERM received" in one["reason"] and 40 < one["seconds"] <= 50 for one in told)
    for node in others:
        assert re.search(r"round 1 broken after [\d.]+ s: \S+ draining: SIGTERM received; all workers have saved", (
            training.agents[node].out)), training.report()  # fmt: skip
    assert "failed" not in training.agents[gone].out.lower().replace("signalexception", ""), training.report()
    saving.finish()
    training.check_success(others)


def test_a_worker_that_does_not_answer_keeps_the_agent_no_longer_than_the_notice(saving):
    training = saving("abc", "2:3", "b", drain_notice=4)
    gone, _ = training.other_than_server("abc")
    at = training.agents[gone].signal(signal.SIGTERM)
    saving.up(2, 2, training)
    training.agents[gone].ends()
    told = saving.saved(1)
    assert len({one["step"] for one in told}) > 1, "one that does not answer is told again in the next step"
    assert max(one["at"] for one in told) - at < 30
    other = "abc".replace(gone, "")[0]
    assert "have not saved within 4 s" in training.agents[other].out, training.report()
    saving.finish()
    training.check_success("abc".replace(gone, ""))


def test_when_the_whole_job_is_told_to_go_all_workers_save_and_a_second_signal_is_not_held_back(saving):
    """Too few would remain, so that the round is not broken."""
    training = saving("ab", "2", drain_notice=50)
    for agent in training.agents.values():
        agent.signal(signal.SIGTERM)
    for agent in training.agents.values():
        assert agent.ends() != 0
    told = saving.saved(1)
    assert len(told) == 2
    assert len({one["step"] for one in told}) == 1, told
