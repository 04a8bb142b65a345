"""A partition that leaves the run's leader alone with one member of etcd: there is one world, on the other side."""

from __future__ import annotations

from rdzv.testing.history import Given
from support.etcd_cluster import Cluster
from support.etcd_members import Troupe
from support.network_hosts import Host


def test_a_leader_that_is_cut_off_with_one_member_of_etcd_keeps_its_workers_and_makes_no_world(network):
    hosts = [network.host(name) for name in "abc"]
    with Cluster(places=[(host.address, host.on) for host in hosts]) as cluster:
        # Whoever judges stands on the other side, where things go on.
        hosts[1].do(lambda: split(hosts, cluster))


def split(hosts: list[Host], cluster: Cluster) -> None:
    cluster.wait_healthy()
    with Troupe(cluster, 1, 3) as troupe:
        alone = troupe.start("alone", within=hosts[0].on)
        troupe.recorder.until_written(troupe.keys.members, 1)
        others = [troupe.start(f"other{index}", within=hosts[index].on) for index in (1, 2)]
        number = troupe.wait_world(alone, *others)
        assert troupe.head_writes()[-1][2] == "alone", "who came first leads"
        hosts[0].cut()
        troupe.fault("cut", alone.name)
        assert troupe.wait_world(*others, above=number) == number + 1
        written = troupe.head_writes()
        assert [one.number for one in troupe.of(Given) if one.actor == alone.name][-1] == number
        assert troupe.holders()[alone.name].number == number, "it cannot tell an outage from being cut off: it trains on"
        hosts[0].heal()
        troupe.fault("cut", alone.name, stop=True)
        troupe.wait_world(alone, *others, above=number + 1)
        assert [one.actor for one in troupe.evicted()] == [alone.name]
        assert "alone" not in {by for _, _, by in troupe.head_writes()[len(written) :]}
        assert troupe.wrong() == []
