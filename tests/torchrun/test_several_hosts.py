"""Agents on several hosts (network namespaces): one is cut off and comes back; the serving one is lost for good."""

from __future__ import annotations

import time

import pytest

from support.network_hosts import Host
from support.torchrun_jobs import Job

QUICK = {"last_call": 10, "settle": 0.5, "lease": 3, "grow_every": 0}


@pytest.fixture
def hosts(network) -> list[Host]:
    return [network.host(name) for name in "abc"]


def form(job, hosts: list[Host], **conf: object) -> Job:
    """One agent on each host; the first serves, because the endpoint is its address."""
    training: Job = job("1:3", endpoint=f"{hosts[0].address}:29400", **QUICK, **conf)
    for host in hosts:
        training.agent(host.name, netns=host.space)
    rows = training.world("abc", 3)
    assert training.server() == "a"
    addresses = {host.address for host in hosts}
    assert {row.master.rpartition(":")[0] for row in rows.values()} <= addresses, "an address that all can reach"
    return training


def test_a_host_that_is_cut_off_is_lost_and_comes_back_when_healed(job, hosts):
    """Meanwhile it trains on in its old round: it cannot tell whether it or the engine is away."""
    training = form(job, hosts)
    (first,) = training.rows("start", node="c")
    cut_at = time.monotonic()
    hosts[2].cut()
    without = training.world("ab", 2, after=cut_at)
    assert {row.round for row in without.values()} == {first.round + 1}
    assert training.rows("start", node="c") == [first]
    healed_at = time.monotonic()
    hosts[2].heal()
    training.world("abc", 3, after=healed_at)
    training.finish_all("abc")


def test_training_goes_on_when_the_serving_host_is_lost_and_the_error_names_the_remedy(job, hosts):
    """After `outage_grace` the agents end, and their error says what happened and what would have helped."""
    training = form(job, hosts, outage_grace=3, join_timeout=3, read_timeout=2)
    hosts[0].cut()
    killed_at = training.agents["a"].kill()
    for node in "bc":
        told = training.row("told", node)
        assert told.at - killed_at > 3 - 1, "not before the grace is over"
        assert len(training.rows("start", node=node)) == 1
    for node in "bc":
        assert training.agents[node].ends() == 1
        last = training.agents[node].out.rstrip().splitlines()[-1]
        assert last.startswith("torch.distributed.elastic.rendezvous.api.Rendezvous"), last
        assert f"{hosts[0].address}:29400" in last, last
        assert "etcd" in last
