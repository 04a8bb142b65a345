"""Losing and gaining nodes under torchrun: which nodes go on, in which world, and how soon.

Each limit is three times the promised time, because the test machine may be busy. `bench/recover.py` measures.
"""

from __future__ import annotations

import signal

import pytest

import rdzv
from support.guarded_process import pid_of_sentinel
from support.timing import within
from support.torchrun_jobs import Job

TOLD_S = 3 * 1.5
RETURNED_S = 3 * 0.2
TRAINING_S = 3 * 6.0
TRAINING_AFTER_SERVER_S = 3 * 10.0

NODES = ("a", "b", "c")
QUICK = {"last_call": 1, "settle": 0.5}


def form(training: Job, nodes=NODES):
    training.start(*nodes)
    return training.world(nodes, len(nodes))


def lose(training: Job, victim: str) -> list[str]:
    """Kill a node and check that the others go on without it, in time."""
    survivors = [node for node in training.agents if node != victim and training.agents[node].code is None]
    limit_s = TRAINING_AFTER_SERVER_S if training.server() == victim else TRAINING_S
    before = training.world([*survivors, victim], len(survivors) + 1)
    killed_at = training.agents[victim].kill()
    after = training.world(survivors, len(survivors), after=killed_at, timeout_s=limit_s)
    assert {row.round for row in after.values()} == {before[victim].round + 1}
    assert all(row.restarts == before[row.node].restarts for row in after.values()), "no restart is spent on a loss"
    told = {row.node: row.at - killed_at for row in training.rows("told", after=killed_at)}
    assert set(told) == set(survivors)
    if limit_s == TRAINING_S:
        within(max(told.values()), TOLD_S)
        joins, joined = training.rows("joins", after=killed_at), training.rows("joined", after=killed_at)
        within(joined[-1].at - joins[-1].at, RETURNED_S)
    return survivors


def test_the_others_go_on_when_a_node_is_killed_and_a_fresh_one_comes_in(job):
    """The victim is neither rank 0 nor the server. No worker uses collectives, so only the rendezvous can notice."""
    training = job("2:3", **QUICK)
    rows = form(training)
    server = training.server()
    victim = next(node for node in NODES if rows[node].rank > 0 and node != server)
    survivors = lose(training, victim)
    fresh = training.agent("fresh")
    after = training.world([*survivors, "fresh"], 3, after=fresh.started_at)
    assert after["fresh"].rank == 2
    between = {row.node: row.rank for row in training.rows("start", after=rows[victim].at) if row.size == 2}
    assert {node: after[node].rank for node in survivors} == between, "ranks stay when a job grows"
    training.finish_all([*survivors, "fresh"])


def test_all_survivors_agree_on_the_new_address_when_rank_0_is_killed_and_when_the_server_is(job):
    """One after the other, until one is left; the last loss is surely the server's."""
    training = job("1:3", **QUICK)
    rows = form(training)
    rank0 = next(node for node in NODES if rows[node].rank == 0)
    survivors = lose(training, rank0)
    again = training.world(survivors, 2)
    assert {row.master for row in again.values()}.isdisjoint({rows[rank0].master})
    server = training.server()
    assert server in survivors
    survivors = lose(training, server)
    assert training.server() == survivors[0], "it has taken over the endpoint"
    training.finish_all(survivors)


def test_on_etcd_the_others_go_on_long_before_the_lease_of_a_killed_agent_ends(job, etcd_server):
    training = job("2:3", endpoint=f"etcd://{etcd_server.get_endpoint()}", run_id="killed", lease=120, **QUICK)
    rows = form(training)
    victim = next(node for node in NODES if rows[node].rank == 0)
    survivors = [node for node in NODES if node != victim]
    pid_of_sentinel(training.agents[victim].pid)
    killed_at = training.agents[victim].signal(signal.SIGKILL)
    after = training.world(survivors, 2, after=killed_at)
    assert all(row.restarts == 0 and row.reason.endswith(" lost") for row in after.values())
    training.finish_all(survivors)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("conf", [{"last_call": 1}, pytest.param({}, marks=pytest.mark.soak)])
def test_a_job_grows_with_the_default_settings(job, conf):
    """The last call of a first round that is not full is 30 s by default, so only the soak waits for it."""
    training = job("1:2", **conf)
    training.start("a")
    alone = training.world("a", 1)["a"]
    training.start("b")
    both = training.world("ab", 2, after=alone.at)
    assert (both["a"].rank, both["a"].restarts) == (0, 0)
    assert both["a"].master != alone.master, "no address of a former round is used again"
    assert both["a"].reason.endswith(" came to join")
    assert both["b"].reason == "this node came to join"
    training.finish_all("ab")


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_workers_that_use_collectives_go_on_too(job):
    """A failed collective costs one restart, because torch looks at failed workers before it asks the rendezvous.

    Only in the soak, because the test of examples/elastic_ddp.py shows the same.
    """
    training = job("2:3", mode="collectives", **QUICK)
    rows = form(training)
    victim = next(node for node in NODES if rows[node].rank > 0 and node != training.server())
    survivors = [node for node in NODES if node != victim]
    killed_at = training.agents[victim].kill()
    after = training.world(survivors, 2, after=killed_at, timeout_s=TRAINING_S)
    assert all(row.restarts <= 1 for row in after.values())


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("engine", "conf"),
    [
        ("embedded", {"linger": 10}),
        ("etcd", {"lease": 120}),
        pytest.param("etcd", {"lease": 6, "sentinel": "false"}, marks=pytest.mark.soak),
    ],
    ids=["embedded", "etcd", "etcd-without-sentinel"],
)
def test_the_reason_names_the_killed_node_and_not_the_collectives_that_failed(job, request, engine, conf):
    """The workers of the others fail at once, and their agents break the round. The loss is noticed later.

    It may be noticed first: by etcd's sentinel, or because the one that would break the round, the leader, is lost itself.
    """
    where = {}
    if engine == "etcd":
        server = request.getfixturevalue("etcd_server")
        where = {"endpoint": f"etcd://{server.get_endpoint()}", "run_id": f"culprit{conf['lease']}"}
    training = job("2:3", mode="collectives", **where, **conf, **QUICK)
    for node in NODES:
        training.agent(node, slot=node)
    rows = training.world(NODES, 3)
    serving, leader = ("", "") if where else (training.server(), leader_of(training))
    victim = next(node for node in NODES if rows[node].rank > 0 and node != serving)
    survivors = [node for node in NODES if node != victim]
    killed_at = training.agents[victim].kill()
    after = training.world(survivors, 2, after=killed_at)
    reasons = {row.reason for row in after.values()}
    assert len(reasons) == 1, "all workers of a round are told the same"
    (reason,) = reasons
    lost, _, consequence = reason.partition("; as a consequence the workers of ")
    assert lost.endswith(f"/{victim} lost")
    noticed_first = engine == "etcd" or leader.endswith(f"/{victim}")
    assert consequence.endswith(" stopped") or (noticed_first and not consequence), f"led by {leader}"


def leader_of(training: Job) -> str:
    """Return the name of the leading member, as one that does not take part sees it."""
    with rdzv.Rendezvous(training.endpoint, run_id=training.run_id, min_nodes=2, max_nodes=3, is_host=False) as outside:
        return outside.status().leader


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_nothing_is_lost_in_twenty_repetitions(job):
    """The victim is another one each time, so that rank 0 and the server are among them."""
    training = job("2:3", grow_every=0, **QUICK)
    form(training)
    nodes = list(NODES)
    for turn in range(20):
        victim = nodes.pop(turn % 3)
        assert lose(training, victim) == nodes
        fresh = training.agent(f"fresh{turn}")
        nodes.append(fresh.node)
        training.world(nodes, 3, after=fresh.started_at, timeout_s=TRAINING_S)
    training.finish_all(nodes)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_twenty_four_agents_form_within_three_seconds_of_the_last_ones_call(job):
    names = [f"n{number}" for number in range(24)]
    training = job("24:24")
    training.start(*names)
    training.world(names, 24, timeout_s=120)
    joins, joined = training.rows("joins"), training.rows("joined")
    assert joined[-1].at - joins[-1].at < 3.0
    training.finish_all(names)
