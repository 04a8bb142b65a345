"""Quorums on real hosts (network namespaces) with real etcd: they form, lose hosts, and leave nothing behind."""

from __future__ import annotations

import pytest

from support.etcd_cluster import until
from support.quorum_hosts import QuorumHosts, parent_of

pytest.importorskip("grpc", reason="grpcio is not installed: the extra `quorum` brings it")


@pytest.fixture
def hosts(network, tmp_path):
    with QuorumHosts(network, "abcd", tmp_path / "state") as made:
        yield made


def test_a_quorum_waits_for_all_its_hosts_survives_its_leader_and_leaves_nothing_behind(hosts):
    hosts.start("a", "b", "d")
    # The first start needs all: nobody can tell a host that never came from one that has voted and is frozen.
    until(lambda: hosts.record_if_any("a") and hosts.record_if_any("b"), "a and b exchange numbers")
    waiting = hosts.rdzv("d", "status", hosts.endpoint, "--run-id", hosts.run_id)
    assert f"waits for {hosts.hosts['c'].address}:29400" in waiting.stderr
    assert "needs all 3 hosts" in waiting.stderr
    assert not hosts.etcd("a")
    hosts.start("c")
    number = hosts.world("abcd")
    until(lambda: all(map(hosts.status, "abc")), "all three have started")
    shown = hosts.rdzv("d", "status", hosts.endpoint, "--run-id", hosts.run_id).stdout
    assert (shown.count(": follows, etcd"), shown.count(": leads, etcd")) == (2, 1), shown

    lost = hosts.leader()
    left = [name for name in "abcd" if name != lost]
    hosts.kill_host(lost)
    number = hosts.world(left, number)
    hosts.start(lost)
    hosts.world("abcd", number)
    until(lambda: hosts.status(lost), "its etcd is back, on its own data")
    assert len(hosts.clusters()) == 1
    hosts.close_run("d")


@pytest.mark.soak
def test_another_agent_of_the_host_takes_etcd_over_and_an_emptied_host_never_votes_again(hosts):
    hosts.start("a", "b", "c")
    hosts.start("a", slot="a2")
    number = hosts.world(["a", "b", "c", "a2"])
    before = hosts.record("a")
    (former,) = hosts.etcd("a")
    supervisor = parent_of(former)
    first = next(name for name in ("a", "a2") if hosts.members[name].pid == parent_of(supervisor))
    hosts.members[first].kill()
    until(lambda: former not in hosts.etcd("a") and hosts.etcd("a") and hosts.status("a"), "etcd runs again on a")
    number = hosts.world(["b", "c", "a2" if first == "a" else "a"], number)
    assert hosts.record("a") == before

    hosts.kill_host("b")
    hosts.empty("b")
    number = hosts.world(["c", "a2" if first == "a" else "a"], number)
    hosts.start("b")
    hosts.world(["b", "c", "a2" if first == "a" else "a"], number)
    until(lambda: "no vote until the run is over" in hosts.members["b"].errors(), "b says that it has no vote")
    assert not hosts.etcd("b")
    shown = hosts.rdzv("d", "status", hosts.endpoint, "--run-id", hosts.run_id).stdout
    assert f"quorum  {hosts.hosts['b'].address}:29400: it came back without its data, and has no vote" in shown, shown
    assert len(hosts.clusters()) == 1
    hosts.close_run("c")
