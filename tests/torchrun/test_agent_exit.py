"""Agents that get a signal, fail for good, or are killed alone: what the others are told, and how soon."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from support.timing import within
from support.torchrun_jobs import Job, children_of, wait_for

TOGETHER = {"last_call": 10}
TOLD_S = 20.0
"""Less than the 30 s after which torch ends workers that ignore SIGTERM."""


def form(training: Job, nodes, **options):
    training.start(*nodes, **options)
    return training.world(nodes, len(nodes))


def test_the_others_hear_of_sigterm_while_the_workers_ignore_it(job):
    """torch takes 30 s to end such an agent, and would tell nobody before that."""
    training = job("1:3", **TOGETHER)
    form(training, "abc", mode="ignores SIGTERM")
    going, _ = training.other_than_server("abc")
    others = [node for node in "abc" if node != going]
    sent_at = training.agents[going].signal(signal.SIGTERM)
    for node in others:
        told = training.row("told", node, after=sent_at, timeout_s=TOLD_S)
        within(told.at - sent_at, TOLD_S)
    assert training.agents[going].code is None, "it is still stopping its workers"


def test_sigterm_to_all_at_once_starts_no_round_that_could_not_last(job):
    training = job("1:3", **TOGETHER)
    rows = form(training, "abc")
    for agent in training.agents.values():
        agent.signal(signal.SIGTERM)
    assert {agent.ends() for agent in training.agents.values()} == {1}, "torch's own code for it"
    assert len(training.rows("joins")) == 3, "none asked for another round"
    assert len(training.rows("start")) == len(rows)
    assert {row.node for row in training.rows("stop")} == set("abc"), "all workers were stopped in order"


def test_sigterm_ends_an_agent_that_waits_as_process_1(job):
    """For process 1 of a container the kernel ignores SIGTERM unless there is a handler."""
    training = job("2:2")
    agent = training.agent("a", container="node")
    training.row("joins", "a")
    (inside,) = children_of(agent.pid)
    time.sleep(0.5)
    os.kill(inside, signal.SIGTERM)
    assert agent.ends(TOLD_S) != 0


def test_sigterm_ends_an_agent_in_the_last_barrier_at_once_and_disturbs_nobody(job):
    """The workers of that agent have succeeded, so it counts as done however it ends."""
    training = job("1:2", **TOGETHER)
    form(training, "ab")
    done, left = training.other_than_server()
    training.order(done)
    training.row("order", done)
    time.sleep(0.5)
    training.agents[done].signal(signal.SIGTERM)
    training.agents[done].ends(TOLD_S)
    time.sleep(1.5)  # Longer than the others need to notice a lost connection.
    training.finish_all(left)
    assert training.rows("told") == []


def test_an_agent_killed_alone_is_lost_and_its_workers_are_orphans(job):
    """torch does not end script workers with their agent. They run on at the old address, and harm nobody."""
    training = job("1:2", **TOGETHER)
    rows = form(training, "ab")
    lost, left = training.other_than_server()
    killed_at = training.agents[lost].signal(signal.SIGKILL)
    after = training.world([left], 1, after=killed_at)[left]
    orphan = Path(f"/proc/{rows[lost].pid}")
    assert orphan.exists()
    assert after.master != rows[left].master
    training.finish_all(left)
    wait_for(lambda: not orphan.exists(), "the orphan ends by itself")


@pytest.mark.parametrize("nnodes", ["2:2", "1:2"])
def test_the_other_of_two_is_told_which_rank_failed_or_goes_on_if_one_is_enough(job, nnodes):
    """A node of 2:2 would otherwise wait for a quorum that cannot come."""
    training = job(nnodes, max_restarts=0, **TOGETHER)
    rows = form(training, "ab")
    failing, left = training.other_than_server()
    training.order(failing, 17)
    failed_at = training.row("order", failing).at
    assert training.agents[failing].ends() == 1
    if nnodes == "2:2":
        assert training.agents[left].ends(3 * 10) == 1
        within(time.monotonic() - failed_at, 3 * 10)
        assert f"rank {rows[failing].rank} failed: exit code 17" in training.agents[left].out
    else:
        assert training.world([left], 1, after=failed_at)[left].restarts == 0
        training.finish_all(left)
