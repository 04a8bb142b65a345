"""Agents on several hosts, which are network namespaces: lost, cut off and back, and the one that serves gone for good."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from agent_hosts import NET, Lan
from agents import Job

QUICK = {"last_call": 10, "settle": 0.5, "lease": 3, "grow_every": 0}


@pytest.fixture
def lan() -> Iterator[Lan]:
    try:
        made = Lan(3).__enter__()
    except OSError as error:
        pytest.skip(f"torchrun on several hosts is NOT tested: {error}")
    yield made
    made.__exit__()


def form(job, lan: Lan, **conf: object) -> Job:
    """One agent on each host; the first serves, because the endpoint is its address."""
    training: Job = job("1:3", endpoint=f"{lan.address(1)}:29400", **QUICK, **conf)
    for number, node in enumerate("abc", 1):
        training.agent(node, netns=lan.space(number))
    rows = training.world("abc", 3)
    assert training.server() == "a"
    assert {row.master.rpartition(".")[0] for row in rows.values()} == {NET}, "an address that all can reach"
    return training


def finish(training: Job, nodes) -> None:
    training.finish()
    assert {node: training.agents[node].ends() for node in nodes} == dict.fromkeys(nodes, 0), training.tell()


def test_a_host_that_is_cut_off_is_lost_and_comes_back_when_healed(job, lan):
    """Meanwhile it trains on in its old round: it cannot tell whether it or the engine is away."""
    training = form(job, lan)
    (first,) = training.rows("start", node="c")
    cut_at = time.monotonic()
    lan.cut(3)
    without = training.world("ab", 2, after=cut_at)
    assert {row.round for row in without.values()} == {first.round + 1}
    assert training.rows("start", node="c") == [first]
    healed_at = time.monotonic()
    lan.heal(3)
    training.world("abc", 3, after=healed_at)
    finish(training, "abc")


def test_a_host_that_is_lost_for_good_is_done_without(job, lan):
    """Nobody closes its connection: it is the lease that ends."""
    training = form(job, lan)
    lan.cut(3)
    killed_at = training.agents["c"].kill()
    training.world("ab", 2, after=killed_at)
    finish(training, "ab")


def test_training_goes_on_when_the_serving_host_is_lost_and_the_error_names_the_remedy(job, lan):
    """Until `outage_grace` nobody hears of it. Then the agents end, and say what happened and what would have helped."""
    training = form(job, lan, outage_grace=3, join_timeout=3, read_timeout=2)
    lan.cut(1)
    killed_at = training.agents["a"].kill()
    for node in "bc":
        told = training.row("told", node)
        assert told.at - killed_at > 3 - 1, "not before the grace is over"
        assert len(training.rows("start", node=node)) == 1
    for node in "bc":
        assert training.agents[node].ends() == 1
        last = training.agents[node].out.rstrip().splitlines()[-1]
        assert last.startswith("torch.distributed.elastic.rendezvous.api.Rendezvous"), last
        assert f"{lan.address(1)}:29400" in last, last
        assert "etcd" in last
