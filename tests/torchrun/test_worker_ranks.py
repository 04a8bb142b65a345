"""No worker starts in a world that was not sealed: real agents, stopped inside torch's `_assign_worker_ranks`, and killed."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from support.ports import free_port
from support.timing import within
from support.torchrun_jobs import LONG_S, Job, Row, ServeProcess, wait_for

QUICK = {"last_call": 1, "settle": 0.3, "grow_every": 0, "drain_settle": 0.2}
TOGETHER = {**QUICK, "last_call": 10}
"""Long enough for all to be in the first round."""


@pytest.fixture(params=["embedded", "etcd"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """The endpoint of an etcd, or none: then an agent serves."""
    if request.param == "embedded":
        yield ""
        return
    from rdzv.torchrun.rendezvous import EtcdServer

    with EtcdServer() as server:
        yield f"etcd://{server.get_endpoint()}"


def check_worlds(training: Job, workers: dict[str, int]) -> dict[int, list[Row]]:
    """Check every worker that was ever started: one world per round, each rank once, of the size that was sealed.

    `workers`: how many each node starts. Returns the rows by round.
    """
    rounds: dict[int, list[Row]] = {}
    for row in training.rows("start"):
        rounds.setdefault(row.round, []).append(row)
    nodes = {row.round: row.size for row in training.rows("joined")}
    masters = {}
    for number, rows in rounds.items():
        told = "\n".join(f"{row.node} {row.fields}" for row in rows)
        assert len({(row.size, row.master) for row in rows}) == 1, f"several worlds in round {number}:\n{told}"
        assert len({row.rank for row in rows}) == len(rows), f"a rank twice in round {number}:\n{told}"
        masters[number] = rows[0].master
        if set(workers.values()) == {1}:
            assert rows[0].size == nodes[number], f"round {number} was sealed with {nodes[number]} nodes:\n{told}"
    for number, master in masters.items():
        assert masters.get(number - 1) != master, f"rounds {number - 1} and {number} share {master}"
    return rounds


def all_of(training: Job, size: int, workers: dict[str, int], after: float = 0.0) -> int:
    """Wait until all workers of these nodes run in one world of that size. Return its round."""

    def look() -> int | None:
        newest = {(row.node, row.rank): row for row in training.rows("start", after=after) if row.node in workers}
        number = max((row.round for row in newest.values()), default=0)
        mine = [row for row in newest.values() if row.round == number]
        full = all(sum(row.node == node for row in mine) == count for node, count in workers.items())
        return number if mine and full and {row.size for row in mine} == {size} else None

    return wait_for(look, f"{workers} in a world of {size}", LONG_S, training.report)


@pytest.mark.timeout(180)
def test_unequal_agents_start_the_workers_that_were_sealed_after_loss_growth_and_drain(job, endpoint):
    """8, 4 and 2 workers; in each round one agent is stopped until the round is over."""
    training = job("2:3", endpoint=endpoint, max_restarts=0, **TOGETHER)
    workers = {"a": 8, "b": 4, "c": 2}
    training.hold("b")
    for rank, (node, count) in enumerate(workers.items()):
        training.agent(node, order=rank, workers=count)
    training.row("held", "b")
    all_of(training, 14, {"a": 8, "c": 2})
    killed_at = training.agents["b"].kill()  # A loss.
    all_of(training, 10, {"a": 8, "c": 2}, after=killed_at)
    training.hold("c")
    training.agent("d", order=3, workers=4)  # Growth.
    training.row("held", "c", after=killed_at)
    all_of(training, 14, {"a": 8, "d": 4}, after=killed_at)
    drained_at = training.agents["d"].signal(signal.SIGTERM)  # A drain, while c is still held.
    training.row("told", "a", after=drained_at)
    training.release("c")
    all_of(training, 10, {"a": 8, "c": 2}, after=drained_at)
    check_worlds(training, workers)
    starts = [row for row in training.rows("start") if row.node in "ac"]
    assert {row.restarts for row in starts} == {0}
    training.finish_all("ac")


@pytest.mark.timeout(180)
def test_a_late_worker_of_one_round_does_not_meet_the_next(job, endpoint):
    """An agent is paused before it starts its workers; a spare takes its rank; then the agent goes on.

    The workers complete a collective before they say that they have started.
    """
    low = free_port()
    conf = {"lease": 3, "bootstrap_port": f"{low}-{low + 8}"}
    training = job("2:2", endpoint=endpoint, mode="collectives", **conf)
    training.hold("b")
    training.agent("a", order=0)
    if not endpoint:
        wait_for(lambda: training.server() == "a", "a serves", report=training.report)
    training.agent("b", order=1)
    training.row("held", "b")
    training.agents["b"].signal(signal.SIGSTOP)
    training.agent("c", order=2)
    rows = training.world("ac", 2)
    training.release("b")
    resumed_at = training.agents["b"].signal(signal.SIGCONT)
    training.row("joins", "b", after=resumed_at)
    time.sleep(1)
    late = [row for row in training.rows("start") if row.node == "b"]
    assert late == [], "its worker completed a collective with workers of another round"
    assert {row.round for row in rows.values()} == {2}
    ports = {int(row.master.rpartition(":")[2]) for row in rows.values()}
    assert len(ports) == 1
    assert ports < set(range(low, low + 9)) - {low}
    training.finish_all("ac")
    assert training.agents["b"].ends() == 0


def lengths(short_s: int, long_s: int) -> list[Any]:
    """Return the two lengths of a test: that of every run, and that of `make soak`."""
    # A mark of the function would count more than these.
    short = pytest.param(short_s, marks=pytest.mark.timeout(short_s + 200), id="short")
    return [short, pytest.param(long_s, marks=[pytest.mark.soak, pytest.mark.timeout(long_s + 300)], id="long")]


@contextmanager
def served(kind: str) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """Yield the endpoint of an engine in a process of its own, and functions that take it away and bring it back."""
    if kind == "embedded":
        with ServeProcess() as server:  # It comes back empty.
            yield server.endpoint, server.kill, server.start
        return
    from rdzv.torchrun.rendezvous import EtcdServer

    with EtcdServer() as etcd:
        pid = etcd.pid
        yield (
            f"etcd://{etcd.get_endpoint()}", lambda: os.kill(pid, signal.SIGSTOP), lambda: os.kill(pid, signal.SIGCONT),
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["embedded", "etcd"])
@pytest.mark.parametrize("away_s", lengths(3, 360))
def test_ranks_are_handed_out_while_the_engine_is_away(job, kind, away_s):
    """Two agents have a world and not yet its ranks when the engine goes. torch waits 300 s for ranks, ours not at all."""
    with served(kind) as (endpoint, take_away, bring_back):
        training = job("2:2", endpoint=endpoint, max_restarts=0, **TOGETHER, read_timeout=2)
        workers = {"a": 3, "b": 1}
        for rank, (node, count) in enumerate(workers.items()):
            training.hold(node)
            training.agent(node, order=rank, workers=count)
        for node in workers:
            training.row("held", node)
        take_away()
        training.release("a")
        all_of(training, 4, {"a": 3})
        time.sleep(away_s)
        released_at = time.monotonic()
        training.release("b")
        all_of(training, 4, {"b": 1})
        within(time.monotonic() - released_at, 5, "it asks nobody")
        first = [(row.node, row.rank, row.round) for row in training.rows("start")]
        assert sorted(first) == [("a", 0, 1), ("a", 1, 1), ("a", 2, 1), ("b", 3, 1)]
        bring_back()
        # After more than a lease, etcd may end it, and then the two form another round.
        time.sleep(min(away_s, 5))
        all_of(training, 4, workers)
        rounds = check_worlds(training, workers)
        assert kind == "etcd" or set(rounds) == {1}, "nobody is disturbed by a server that comes back empty"
        training.finish_all(workers)


KILLED_IN_S = 2.0
"""The median time from a kill until all agents of the next round have its world. It was 1.3 s under a load of 10.

Ten minutes have a median; the few kills of the short test show facts only.
"""


@pytest.mark.parametrize("lasts_s", lengths(12, 600))
def test_under_random_kills_every_worker_is_in_the_world_that_was_sealed(job, endpoint, lasts_s, record_property):
    """8 agents; every few seconds one of them is killed, and soon started again."""
    rng = random.Random(f"{endpoint} {lasts_s}")
    # On etcd only the end of its lease tells that an agent was killed. An etcd grants 1.5 election timeouts at least, rounded
    # up to seconds: 1 s here, 2 s by default.
    # A member that is lost soon after it came in waits twice as long as `settle` next time, then four times, and so on.
    conf = {**QUICK, "settle": 0.05} | ({"lease": 1} if endpoint else {})
    training = job("2:8", endpoint=endpoint, **conf)
    workers = {f"n{index}": 1 for index in range(8)}
    killed: dict[str, float] = {}
    kills: list[tuple[float, bool]] = []
    for node in workers:
        training.agent(node, slot=node)
    all_of(training, 8, workers)
    ends_at = time.monotonic() + lasts_s
    while time.monotonic() < ends_at or len(kills) < 3:  # On a busy machine a kill may take seconds.
        node = rng.choice([node for node in workers if node not in killed])
        served_run = not endpoint and training.server() == node
        assert training.agents[node].code is None, f"{node} has ended by itself\n{training.report()}"
        killed[node] = training.agents[node].kill()
        kills.append((killed[node], served_run))
        training.agents[node].ends()
        time.sleep(rng.uniform(0.5, 4.5))
        for back in [one for one, since in killed.items() if time.monotonic() - since > 2.0]:
            del killed[back]
            training.agent(back, slot=back)
    for node in killed:
        training.agent(node, slot=node)
    all_of(training, 8, workers)
    rounds = check_worlds(training, workers)
    waits = waits_for_a_world(training, [at for at, _ in kills])
    of_servers = [wait for wait, (_, served_run) in zip(waits, kills, strict=True) if served_run]
    found = {"kills": len(kills), "rounds": len(rounds), "median_s": statistics.median(waits), "worst_s": max(waits)}
    if of_servers:
        found |= {"kills_of_the_server": len(of_servers), "median_of_those_s": statistics.median(of_servers)}
    for name, figure in found.items():
        record_property(name, figure)
    if lasts_s >= 600:
        within(found["median_s"], KILLED_IN_S, found)
    training.finish_all(workers)


def waits_for_a_world(training: Job, times: list[float]) -> list[float]:
    """Return the time from each of these until all agents of the next round had its world."""
    given: dict[int, list[Row]] = {}
    for row in training.rows("joined"):
        given.setdefault(row.round, []).append(row)
    complete = sorted(max(row.at for row in rows) for rows in given.values() if len(rows) == rows[0].size)
    return [next(at for at in complete if at > since) - since for since in times]
