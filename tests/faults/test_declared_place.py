"""Network namespaces as pods: pod 0, which serves, is deleted and started elsewhere (T16.4)."""

from __future__ import annotations

import logging
import time

from support.member_processes import is_change, is_notice, is_world
from support.network_hosts import Network
from support.timing import within

logger = logging.getLogger(__name__)
PORT = 29400
IMPATIENT = "read_timeout=2"
"""Shorter than the lease, so that a cut is felt soon."""
PLACE = "place=pod-0"
PATIENCE = 3
"""How many times slower a machine may be that runs other tests beside this one. Under a load of 27 it took 5 s."""


class Pods:
    """A stateful set: pods with names that stay, addresses that do not, and one command line for all."""

    def __init__(self, network: Network, processes, *settings: str, nnodes: str = "2:3") -> None:
        self._network = network
        self._processes = processes
        self._words = (f"head:{PORT}", nnodes, PLACE, IMPATIENT, *settings)
        self.born = 0
        self.fence = 0
        """The fence of the first world."""

    def pod(self, name: str):
        """Make the network of a pod."""
        self.born += 1
        host = self._network.host(f"h{self.born}")
        host.name = name  # The name that processes see; that of the namespace is another one for each pod.
        return host

    def point_to(self, host) -> None:
        """Make the name `head` mean that pod, as the platform's name service does."""
        for other in self._network.all.values():
            other.hosts({"head": host.address})

    def start(self, host, name: str, *settings: str):
        """Start the pod's only process."""
        endpoint, nnodes, *words = self._words
        return self._processes.member(name, endpoint, nnodes, *words, f"slot={host.name}", *settings, on=host.on)

    def form(self):
        """Start three pods, and return their hosts and processes."""
        hosts = [self.pod(f"pod-{number}") for number in range(3)]
        self.point_to(hosts[0])
        members = [self.start(host, host.name) for host in hosts]
        worlds = [member.world(3) for member in members]
        assert len({line["digest"] for line in worlds}) == 1
        self.fence = worlds[0]["fence"]
        return hosts, members


def next_world(*members, above):
    """Wait until all are in one world, whose fence is above that one, and return when the last was given it."""

    def is_next(line):
        return line["event"] == "world" and line["fence"] > above and line["size"] == len(members)

    worlds = [member.until(is_next, "the next world") for member in members]
    assert len({(line["digest"], line["bootstrap"], line["fence"]) for line in worlds}) == 1
    assert sorted(line["rank"] for line in worlds) == list(range(len(members)))
    return max(line["at"] for line in worlds)


def refusals(member):
    return member.until(lambda line: "answers now" in line.get("reason", ""), "the new server is refused")["reason"]


def test_pod_0_is_deleted_and_started_elsewhere_and_the_others_go_on_without_an_operator(network, processes):
    pods = Pods(network, processes)
    hosts, (first, *others) = pods.form()
    first.kill()
    moved = pods.pod("pod-0")
    hosts[0].cut()  # The former address is nobody's: no packet comes back.
    pods.point_to(moved)
    started_at = time.monotonic()
    again = pods.start(moved, "again")
    took_s = next_world(again, *others, above=pods.fence) - started_at
    logger.info("the next world came %.2f s after the new pod was started", took_s)
    within(took_s, 10.0 * PATIENCE)
    assert not any(member.said(is_change("outage", "refused")) for member in others)


def test_the_promise_of_a_lost_node_is_made_by_the_person_who_replaces_its_pod(network, processes):
    """No connection ends when the node is lost. Nobody replaces the pod, so the others go on training."""
    pods = Pods(network, processes)
    hosts, (first, *others) = pods.form()
    hosts[0].cut()
    first.kill()
    for member in others:
        member.until(is_notice("engine away"), "the engine is away")
        assert not member.said(is_change("round", "evicted", "outage", "refused"))
    moved = pods.pod("pod-0")
    pods.point_to(moved)
    again = pods.start(moved, "again")
    next_world(again, *others, above=pods.fence)


def test_a_second_pod_0_is_refused_while_the_first_one_answers_and_both_are_named(network, processes):
    """Forced deletion: the platform starts the second before the first has ended."""
    pods = Pods(network, processes)
    hosts, (first, second, third) = pods.form()
    forced = pods.pod("pod-0")
    pods.point_to(forced)
    again = pods.start(forced, "again")
    again.until(is_notice("present"), "it serves itself")
    hosts[2].cut()
    third.until(is_notice("engine away"), "the engine is away")
    hosts[2].heal()
    reason = refusals(third)
    assert f"the former server of place 'pod-0' still answers at {hosts[0].address}:{PORT}" in reason
    assert f"and the new one is at {forced.address}:{PORT}" in reason
    assert first.lives
    assert not again.said(is_world()), "alone it is no quorum, and nobody followed"
    again.kill()  # A person ends one of the two: here the second.
    pods.point_to(hosts[0])
    next_world(first, second, third, above=pods.fence)


def test_a_paused_server_has_not_ended(network, processes):
    """The kernel accepts connections for it: something is there that keeps silent."""
    pods = Pods(network, processes)
    _, (first, *others) = pods.form()
    first.pause()
    forced = pods.pod("pod-0")
    pods.point_to(forced)
    again = pods.start(forced, "again")
    for member in others:
        assert "still answers at" in refusals(member)
    assert not again.said(is_world())


def test_a_pod_that_gets_the_address_of_pod_0_does_not_serve_in_its_name(network, processes):
    """The name service is stale: it leads to the address that another pod has now."""
    pods = Pods(network, processes)
    hosts, (first, *others) = pods.form()
    first.kill()
    for member in others:
        member.until(is_notice("engine away"), "the engine is away")
    reused = pods.start(_renamed(hosts[0], "pod-3"), "pod-3", "join_timeout=2")
    assert reused.wait() == 3
    assert "only 'pod-0' serves (place), and the platform named this node 'pod-3'" in reused.errors()
    moved = pods.pod("pod-0")
    pods.point_to(moved)
    again = pods.start(moved, "again")
    next_world(again, *others, above=pods.fence)


def _renamed(host, name):
    host.name = name
    return host
