"""What happens to etcd must not happen to the run: real clusters of three, real agents, SIGKILL and SIGSTOP for real."""

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
from support.etcd_cluster import Cluster, Node, base64_of, until
from support.etcd_members import QUICK, Troupe

LEASE_S = QUICK["lease"]


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: Cluster) -> Iterator[Cluster]:
    """One for all tests of this file, whole again for each of them."""
    shared.heal()
    yield shared
    for node in shared.nodes:
        if node.is_stopped:
            node.cont()


def run_id() -> str:
    return f"job-{secrets.token_hex(4)}"


def replace_leader(cluster: Cluster) -> Node:
    """Kill etcd's leader; another leads when this returns. The one that was killed."""
    old = cluster.leader()
    old.kill()
    cluster.leader()
    return old


def test_the_judges_of_such_histories_would_notice(cluster):
    """A world that differs, a rank given twice, a head written by one who does not lead: what they are there to find."""
    with Troupe(cluster, 2, 2, run_id=run_id()) as troupe:
        troupe.wait_world(troupe.start("a", "b"))
        assert troupe.wrong() == []
        true = troupe.of(Given)[-1]
        troupe.add(msgspec.structs.replace(true, at=time.monotonic(), digest="another", rank=5))
        found = {problem.partition(" at ")[0] for problem in troupe.wrong()}
        assert {"G1 agreement", "G2 ranks", "G3 order"} <= found
        key, head = troupe.keys.head, troupe.head_writes()[-1][1]
        forged = wire.encode(msgspec.structs.replace(head, number=head.number - 1))
        cluster.call("kv/put", {"key": base64_of(key), "value": base64_of(forged)})
        found = {problem.partition(" at ")[0] for problem in troupe.wrong()}
        assert {"G8 fencing", "G3 order"} <= found


def assert_undisturbed(troupe: Troupe, number: int, size: int) -> None:
    """Everybody was given that round once and nothing since: no eviction, no restart."""
    assert troupe.disturbed() == []
    assert [(one.number, one.size) for one in troupe.of(Given)] == [(number, size)] * size
    assert troupe.wrong() == []


def test_etcd_losing_its_leader_while_a_round_gathers_costs_no_member(cluster):
    with Troupe(cluster, 3, 3, run_id=run_id()) as troupe:
        first = troupe.start("a", "b")
        troupe.recorder.until_written(troupe.keys.members, 2)
        replace_leader(cluster).start()
        second = troupe.start("c")
        assert troupe.wait_world(first, second) == 1
        assert_undisturbed(troupe, 1, 3)


@pytest.mark.parametrize("delay_s", [0.0, 0.02])
def test_etcd_losing_its_leader_as_a_round_is_sealed_seals_it_once(cluster, delay_s):
    with Troupe(cluster, 3, 3, run_id=run_id()) as troupe:
        leader = cluster.leader()
        first = troupe.start("a", "b")
        troupe.recorder.until_written(troupe.keys.members, 2)
        second = troupe.start("c")
        troupe.recorder.until_written(troupe.keys.members, 3)
        time.sleep(delay_s)
        leader.kill()
        assert troupe.wait_world(first, second) == 1
        assert_undisturbed(troupe, 1, 3)
        assert [head.phase for _, head, _ in troupe.head_writes()].count(Phase.SEALED) == 1


def test_no_worker_is_restarted_while_etcd_loses_its_leader_and_then_every_member_in_turn(cluster):
    with Troupe(cluster, 3, 3, run_id=run_id()) as troupe:
        agents = [troupe.start("a"), troupe.start("b", "c")]
        assert troupe.wait_world(*agents) == 1
        replace_leader(cluster).start()
        for node in cluster.nodes:
            cluster.wait_healthy()
            node.restart()
        cluster.wait_healthy()
        # Whoever lost its lease meanwhile knows it by now: each has asked for a renewal at least once.
        time.sleep(LEASE_S / 3 + 1.0)
        assert_undisturbed(troupe, 1, 3)
        agents[0].tell("fail")
        assert troupe.wait_world(*agents, above=1) == 2, "and it still is a working run"
        assert troupe.wrong() == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_forty_lost_leaders_of_etcd_evict_nobody(cluster):
    with Troupe(cluster, 6, 6, run_id=run_id()) as troupe:
        agents = [troupe.start("a", "b", "c", "d"), troupe.start("e"), troupe.start("f")]
        assert troupe.wait_world(*agents) == 1
        for count in range(40):
            lost = replace_leader(cluster)
            assert troupe.disturbed() == [], f"after {count} leaders"
            lost.start()
            cluster.wait_healthy()
        time.sleep(LEASE_S * 1.5)
        assert_undisturbed(troupe, 1, 6)


def without_quorum(cluster: Cluster, lasts_s: float) -> None:
    """Training goes on, a join waits, and then succeeds."""
    with Troupe(cluster, 2, 3, run_id=run_id(), settle=0) as troupe:
        agents = [troupe.start("a", "b")]
        assert troupe.wait_world(*agents) == 1
        gone = cluster.nodes[1:]
        for node in gone:
            node.kill()
        lost_at = time.monotonic()
        agents.append(troupe.start("c"))
        troupe.until(lambda: [one for one in troupe.of(Acted) if one.actor == agents[1].name], "the newcomer has begun")
        time.sleep(max(0.0, lost_at + lasts_s - time.monotonic()))
        assert troupe.disturbed() == []
        assert len(troupe.of(Given)) == 2
        for node in gone:
            node.start()
        assert troupe.wait_world(*agents, above=1) == 2
        assert {one.reason for one in troupe.disturbed()} == {"c came to join"}
        assert troupe.wrong() == []


def test_without_a_quorum_of_etcd_training_goes_on_and_a_join_waits(cluster):
    without_quorum(cluster, LEASE_S)


@pytest.mark.soak
def test_without_a_quorum_of_etcd_for_20_s_training_goes_on_and_a_join_waits(cluster):
    without_quorum(cluster, 20.0)


def test_a_paused_leader_is_evicted_and_writes_nothing_although_etcds_leader_changed_too(cluster):
    """Its lease ends while etcd elects: whoever is last to know, there is one world at a time."""
    with Troupe(cluster, 2, 3, run_id=run_id()) as troupe:
        paused = troupe.start("paused")
        troupe.recorder.until_written(troupe.keys.members, 1)
        others = troupe.start("b", "c")
        assert troupe.wait_world(paused, others) == 1
        assert {by for _, _, by in troupe.head_writes()} == {"paused"}, "who came first leads"
        paused.stop()
        troupe.fault("pause", paused.name)
        replace_leader(cluster).start()
        assert troupe.wait_world(others, above=1) == 2
        written = len(troupe.head_writes())
        paused.cont()
        troupe.fault("pause", paused.name, stop=True)
        troupe.until(lambda: [one.actor for one in troupe.evicted()] == [paused.name], "the paused one is told")
        assert troupe.wait_world(paused, others, above=2) == 3
        later = troupe.head_writes()[written:]
        assert later
        assert "paused" not in {by for _, _, by in later}, "what it meant to write took effect nowhere"
        assert troupe.wrong() == []


def test_a_frozen_member_in_use_is_left_for_another(cluster):
    gap_s = longest_gap(cluster, 1)
    assert gap_s < 3 * 2.0


@pytest.mark.soak
def test_a_frozen_member_in_use_is_left_for_another_within_2_s(cluster):
    gaps = sorted(longest_gap(cluster, 3) for _ in range(5))
    assert gaps[2] < 2.0, gaps


def longest_gap(cluster: Cluster, times: int) -> float:
    """Freeze the member in use for a while, so many times; the longest time in which no transaction was answered."""
    async def ask(session: Session, answered: list[float]) -> None:
        while True:
            with suppress(Unreachable):
                await session.txn(then=[Get("probe")])
                answered.append(time.monotonic())
            await asyncio.sleep(0.01)

    async def main() -> float:
        answered: list[float] = []
        settings = Settings.make(cluster.endpoint(), run_id="probe", min_nodes=1, max_nodes=1, read_timeout=10)
        session = await open_driver(settings).connect()
        asking = asyncio.create_task(ask(session, answered))
        for _ in range(times):
            await asyncio.to_thread(cluster.wait_healthy)
            seen = len(answered)
            port = session.client.cluster.current.address[1]
            node = next(one for one in cluster.nodes if one.port == port)
            node.stop()
            stopped_at = time.monotonic()
            await asyncio.to_thread(
                until,
                lambda seen=seen, at=stopped_at: asking.done() or (len(answered) > seen + 20 and answered[-1] > at + 0.5),
                "answers",
            )
            assert not asking.done(), asking
            node.cont()
        asking.cancel()
        await asyncio.wait([asking])
        await session.close()
        return max(b - a for a, b in itertools.pairwise(answered))

    return asyncio.run(main())
