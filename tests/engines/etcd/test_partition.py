"""A partition that isolates the run's leader with one member of etcd: only the other side makes a world."""

from __future__ import annotations

from rdzv.testing.history import Given
from support.etcd_cluster import Cluster
from support.etcd_members import EtcdRun
from support.network_hosts import Host


def test_a_leader_isolated_with_one_member_of_etcd_keeps_its_workers_and_makes_no_world(network):
    hosts = [network.host(name) for name in "abc"]
    with Cluster(places=[(host.address, host.on) for host in hosts]) as cluster:
        # The checks run on the other side of the partition, where the run goes on.
        hosts[1].do(lambda: split(hosts, cluster))


def split(hosts: list[Host], cluster: Cluster) -> None:
    cluster.wait_healthy()
    # The default lease: the cut may take the leader of etcd, and a busy node needs more than 5 s to notice, elect and renew.
    with EtcdRun(cluster, 1, 3, lease=10) as run:
        alone = run.start("alone", within=hosts[0].on)
        run.write_log.until_written(run.keys.members, 1)
        others = [run.start(f"other{index}", within=hosts[index].on) for index in (1, 2)]
        number = run.wait_world(alone, *others)
        run.write_log.until_written(run.keys.head, 1)
        assert run.head_writes()[-1][2] == "alone", "the first member leads"
        hosts[0].cut()
        run.fault("cut", alone.name)
        assert run.wait_world(*others, above=number) == number + 1
        written = run.head_writes()
        assert [one.number for one in run.of(Given) if one.actor == alone.name][-1] == number
        assert run.holders()[alone.name].number == number, "it cannot distinguish an outage from a partition, so it trains on"
        hosts[0].heal()
        run.fault("cut", alone.name, stop=True)
        run.wait_world(alone, *others, above=number + 1)
        assert [one.actor for one in run.evicted()] == [alone.name]
        assert "alone" not in {by for _, _, by in run.head_writes()[len(written) :]}
        assert run.wrong() == []
