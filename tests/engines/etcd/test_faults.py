"""Faults of etcd do not disturb a run: clusters of three, members in processes, SIGKILL and SIGSTOP."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest

from rdzv.config.settings import Settings
from rdzv.core import wire
from rdzv.core.model import Phase
from rdzv.drivers import open_driver
from rdzv.engines.port import Get, Session
from rdzv.errors import Unreachable
from rdzv.testing.history import Acted, Given
from support.etcd_cluster import Cluster, Node, base64_of, sound_etcd, until
from support.etcd_members import QUICK, EtcdRun

LEASE_S = QUICK["lease"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster(binary=sound_etcd()) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """The cluster of all tests of this file, healed before each."""
    shared.heal()
    yield shared
    for node in shared.nodes:
        if node.is_stopped:
            node.cont()


def run_id() -> str:
    return f"job-{secrets.token_hex(4)}"


def replace_leader(cluster: Cluster) -> Node:
    """Kill etcd's leader, wait until another leads, and return the one that was killed."""
    old = cluster.leader()
    old.kill()
    cluster.leader()
    return old


def test_the_checkers_notice_a_different_world_a_bad_rank_and_a_forged_head(cluster):
    with EtcdRun(cluster, 2, 2, run_id=run_id()) as run:
        run.wait_world(run.start("a", "b"))
        assert run.wrong() == []
        true = run.of(Given)[-1]
        run.add(msgspec.structs.replace(true, at=time.monotonic(), digest="another", rank=5))
        found = {problem.partition(" at ")[0] for problem in run.wrong()}
        assert {"G1 agreement", "G2 ranks", "G3 order"} <= found
        key, head = run.keys.head, run.head_writes()[-1][1]
        forged = wire.encode(msgspec.structs.replace(head, number=head.number - 1))
        cluster.call("kv/put", {"key": base64_of(key), "value": base64_of(forged)})
        found = {problem.partition(" at ")[0] for problem in run.wrong()}
        assert {"G8 fencing", "G3 order"} <= found


def assert_undisturbed(run: EtcdRun, number: int, size: int) -> None:
    """Every member was given that round once and nothing since: no eviction, no restart."""
    assert run.disturbed() == []
    assert [(one.number, one.size) for one in run.of(Given)] == [(number, size)] * size
    assert run.wrong() == []


def test_losing_etcds_leader_while_a_round_gathers_costs_no_member(cluster):
    with EtcdRun(cluster, 3, 3, run_id=run_id()) as run:
        first = run.start("a", "b")
        run.write_log.until_written(run.keys.members, 2)
        replace_leader(cluster).start()
        second = run.start("c")
        assert run.wait_world(first, second) == 1
        assert_undisturbed(run, 1, 3)


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_losing_etcds_leader_during_the_seal_seals_the_round_once(cluster, delay_s):
    with EtcdRun(cluster, 3, 3, run_id=run_id()) as run:
        leader = cluster.leader()
        first = run.start("a", "b")
        run.write_log.until_written(run.keys.members, 2)
        second = run.start("c")
        run.write_log.until_written(run.keys.members, 3)
        time.sleep(delay_s)
        leader.kill()
        assert run.wait_world(first, second) == 1
        assert_undisturbed(run, 1, 3)
        assert [head.phase for _, head, _ in run.head_writes()].count(Phase.SEALED) == 1


def test_losing_etcds_leader_and_then_every_member_in_turn_restarts_no_worker(cluster):
    with EtcdRun(cluster, 3, 3, run_id=run_id()) as run:
        processes = [run.start("a"), run.start("b", "c")]
        assert run.wait_world(*processes) == 1
        replace_leader(cluster).start()
        for node in cluster.nodes:
            cluster.wait_healthy()
            node.restart()
        cluster.wait_healthy()
        # After a third of the lease every member has renewed at least once, and knows whether its lease was lost.
        time.sleep(LEASE_S / 3 + 1.0)
        assert_undisturbed(run, 1, 3)
        processes[0].tell("fail")
        assert run.wait_world(*processes, above=1) == 2, "the run still works"
        assert run.wrong() == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_forty_lost_leaders_of_etcd_evict_nobody(cluster):
    with EtcdRun(cluster, 6, 6, run_id=run_id()) as run:
        processes = [run.start("a", "b", "c", "d"), run.start("e"), run.start("f")]
        assert run.wait_world(*processes) == 1
        for count in range(40):
            lost = replace_leader(cluster)
            assert run.disturbed() == [], f"after the loss of {count} leaders"
            lost.start()
            cluster.wait_healthy()
        time.sleep(LEASE_S * 1.5)
        assert_undisturbed(run, 1, 6)


@pytest.mark.parametrize("lasts_s", [LEASE_S, pytest.param(20.0, marks=pytest.mark.soak)])
def test_without_a_quorum_of_etcd_training_goes_on_and_a_join_waits(cluster, lasts_s):
    with EtcdRun(cluster, 2, 3, run_id=run_id(), settle=0) as run:
        processes = [run.start("a", "b")]
        assert run.wait_world(*processes) == 1
        gone = cluster.nodes[1:]
        for node in gone:
            node.kill()
        lost_at = time.monotonic()
        processes.append(run.start("c"))
        run.until(lambda: [one for one in run.of(Acted) if one.actor == processes[1].name], "the newcomer has begun")
        time.sleep(max(0.0, lost_at + lasts_s - time.monotonic()))
        assert run.disturbed() == []
        assert len(run.of(Given)) == 2
        for node in gone:
            node.start()
        assert run.wait_world(*processes, above=1) == 2
        assert {one.reason for one in run.disturbed()} == {"c came to join"}
        assert run.wrong() == []


def test_a_paused_leader_is_evicted_and_writes_nothing_although_etcds_leader_changed(cluster):
    with EtcdRun(cluster, 2, 3, run_id=run_id()) as run:
        paused = run.start("paused")
        run.write_log.until_written(run.keys.members, 1)
        others = run.start("b", "c")
        assert run.wait_world(paused, others) == 1
        run.write_log.until_written(run.keys.head, 1)
        assert {by for _, _, by in run.head_writes()} == {"paused"}, "the first member leads"
        paused.stop()
        run.fault("pause", paused.name)
        replace_leader(cluster).start()
        assert run.wait_world(others, above=1) == 2
        written = len(run.head_writes())
        paused.cont()
        run.fault("pause", paused.name, stop=True)
        run.until(lambda: [one.actor for one in run.evicted()] == [paused.name], "the paused member is told")
        assert run.wait_world(paused, others, above=2) == 3
        later = run.head_writes()[written:]
        assert later
        assert "paused" not in {by for _, _, by in later}, "none of its writes took effect"
        assert run.wrong() == []


@pytest.mark.soak
def test_a_frozen_member_costs_less_than_2_s(cluster):
    gaps = sorted(longest_gap(cluster, 3) for _ in range(5))
    assert gaps[2] < 2.0, gaps


def longest_gap(cluster: Cluster, times: int) -> float:
    """Freeze the member in use several times. Return the longest time in which no transaction was answered."""

    async def send(session: Session, answered: list[float]) -> None:
        while True:
            with suppress(Unreachable):
                await session.txn(then=[Get("probe")])
                answered.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def main() -> float:
        answered: list[float] = []
        settings = Settings.make(cluster.endpoint(), run_id="probe", min_nodes=1, max_nodes=1, read_timeout=10)
        session = await open_driver(settings).connect()
        sending = asyncio.create_task(send(session, answered))
        for _ in range(times):
            await asyncio.to_thread(cluster.wait_healthy)
            seen = len(answered)
            port = session.client.cluster.current.address[1]
            node = next(one for one in cluster.nodes if one.port == port)
            node.stop()
            stopped_at = time.monotonic()
            await asyncio.to_thread(
                until,
                lambda seen=seen, at=stopped_at: sending.done() or (len(answered) > seen + 20 and answered[-1] > at + 0.5),
                "answers",
            )
            assert not sending.done(), sending
            node.cont()
        sending.cancel()
        await asyncio.wait([sending])
        await session.close()
        return max(b - a for a, b in itertools.pairwise(answered))

    return asyncio.run(main())
