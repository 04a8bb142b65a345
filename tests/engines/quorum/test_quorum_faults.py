"""Long stories of faults on quorums of real etcd: whole hosts die, freeze, are cut off and emptied. Never two clusters."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from contextlib import suppress

import pytest

from support.etcd_cluster import until
from support.guarded_process import pid_of_sentinel
from support.member_processes import is_change, is_world
from support.quorum_hosts import QuorumHosts, pids_of

pytest.importorskip("grpc", reason="grpcio is not installed: the extra `quorum` brings it")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

LEASE_S = 4.0  # That of `member_processes.QUICK`.
WAITS_S = 8.0
"""How long a host that must not form anything is watched: several elections and leases."""


@pytest.fixture
def hosts(network, tmp_path):
    with QuorumHosts(network, "abcd", tmp_path / "state") as made:
        yield made


def freeze(hosts: QuorumHosts, name: str, number: signal.Signals = signal.SIGSTOP) -> None:
    for pid in pids_of(hosts.hosts[name]):
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def thaw(hosts: QuorumHosts, name: str) -> None:
    freeze(hosts, name, signal.SIGCONT)


def stays_without_world(hosts: QuorumHosts, names: str, after: int) -> None:
    """Check for a while that no member of these hosts gets a world."""
    began_at = time.monotonic()
    while time.monotonic() < began_at + WAITS_S:
        for name in names:
            assert not hosts.members[name].said(is_world(after=after), began_at), hosts.members[name].report()
        assert len(hosts.clusters()) <= 1
        time.sleep(0.5)


def restart_empty(hosts: QuorumHosts, name: str) -> None:
    hosts.kill_host(name)
    hosts.empty(name)
    hosts.start(name)


def knows(hosts: QuorumHosts, name: str) -> None:
    until(lambda: "no vote until" in hosts.members[name].errors(), f"{name} knows that it has no vote")


def test_a_frozen_voter_an_emptied_one_and_a_third_make_no_second_cluster(hosts):
    """The first interleaving: a majority without memory bootstrapped beside the frozen voter."""
    hosts.start(*"abcd")
    number = hosts.world("abcd")
    hosts.kill_host("c")
    number = hosts.world("abd", number)
    (cluster,) = hosts.clusters()
    freeze(hosts, "b")
    restart_empty(hosts, "a")
    hosts.start("c")
    knows(hosts, "a")
    stays_without_world(hosts, "acd", number)
    thaw(hosts, "b")
    hosts.world("abcd", number)
    assert hosts.clusters() == {cluster}
    hosts.close_run("d")


def test_every_host_emptied_in_turn_ends_in_waiting_and_a_restart_of_all_begins_anew(hosts):
    """The second and third interleaving: the last voter keeps its data and waits; then even that is lost."""
    del hosts.hosts["d"]
    hosts.start(*"abc")
    number = hosts.world("abc")
    (cluster,) = hosts.clusters()
    restart_empty(hosts, "c")
    knows(hosts, "c")
    number = hosts.world("abc", number)
    assert hosts.clusters() == {cluster}
    restart_empty(hosts, "a")
    knows(hosts, "a")
    stays_without_world(hosts, "abc", number)
    assert hosts.etcd("b")
    assert not hosts.etcd("a") + hosts.etcd("c")
    restart_empty(hosts, "b")
    knows(hosts, "b")
    stays_without_world(hosts, "abc", 0)
    assert hosts.clusters() == set()
    # Nothing is left of the cluster: all agents are started anew, and it is a new life of the run.
    for name in "abc":
        hosts.kill_host(name)
    hosts.begin_anew()
    hosts.start(*"abc")
    hosts.world("abc")
    assert cluster not in hosts.clusters()
    hosts.close_run("a")


def test_hosts_that_die_while_they_agree_agree_in_the_end(hosts):
    drawn = random.Random(7)
    for _ in range(12):
        name = drawn.choice("abc")
        hosts.kill_host(name)
        hosts.start(name)
        time.sleep(drawn.uniform(0.2, 1.2))
    for name in "abcd":
        if not pids_of(hosts.hosts[name]):
            hosts.start(name)
    hosts.world("abcd")
    until(lambda: all(map(hosts.etcd, "abc")), "all three vote")
    assert len(hosts.clusters()) == 1
    hosts.close_run("d")


def test_a_host_cut_off_for_a_minute_forms_nothing_and_comes_back(hosts):
    hosts.start(*"abcd")
    number = hosts.world("abcd")
    cut = hosts.leader()
    left = [name for name in "abcd" if name != cut]
    cut_at = time.monotonic()
    hosts.hosts[cut].cut()
    number = hosts.world(left, number)
    time.sleep(max(0.0, cut_at + 60 - time.monotonic()))
    # A machine that stood still may have lost and found a member just before the cut; that world is of all four.
    formed = hosts.members[cut].said(is_world(), cut_at + LEASE_S)
    assert not formed, f"its side never forms a round of its own\n{hosts.members[cut].report()}"
    hosts.hosts[cut].heal()
    hosts.world("abcd", number)
    assert len(hosts.clusters()) == 1
    hosts.close_run("d")


def test_with_two_of_three_gone_members_go_on_and_say_so_and_one_back_is_enough(hosts):
    hosts.start(*"abcd")
    number = hosts.world("abcd")
    for name in "ab":
        hosts.kill_host(name)
    stays_without_world(hosts, "cd", number)
    assert hosts.members["c"].lives
    assert hosts.members["d"].lives
    told = hosts.rdzv("d", "status", hosts.endpoint, "--run-id", hosts.run_id).stderr
    assert "no quorum" in told, told
    hosts.start("a")
    number = hosts.world("acd", number)
    hosts.start("b")
    hosts.world("abcd", number)
    hosts.close_run("d")


def test_five_hosts_go_on_without_any_two_that_are_lost_for_good(network, tmp_path):
    with QuorumHosts(network, "abcde", tmp_path / "state", listed=5) as hosts:
        hosts.start(*"abcde")
        number = hosts.world("abcde")
        until(lambda: all(map(hosts.status, "abcde")), "all five have started")
        (cluster,) = hosts.clusters()
        left = list("abcde")
        for _ in range(2):
            lost = hosts.leader()
            left.remove(lost)
            hosts.kill_host(lost)
            hosts.empty(lost)
            number = hosts.world(left, number)
        new = [name for name in "abcde" if name not in left]
        hosts.start(*new)
        hosts.world("abcde", number)
        for name in new:
            knows(hosts, name)
            assert not hosts.etcd(name)
        assert hosts.clusters() == {cluster}
        hosts.close_run(left[0])


def test_twenty_killed_agents_are_noticed_long_before_their_lease_ends(hosts, record_property):
    """A second is promised for the median. This limit leaves room for a machine with more work than cores."""
    drawn = random.Random(20)
    own = ["lease=10"]
    on = dict(zip("abcd", "abcd", strict=True))  # The member of each host.
    hosts.start(*"abcd", settings=own)
    number = hosts.world("abcd")
    took = []
    for turn in range(20):
        host = drawn.choice("abcd")
        victim = hosts.members[on[host]]
        left = [on[name] for name in "abcd" if name != host]
        pid_of_sentinel(victim.pid)
        killed_at = victim.kill()
        number = hosts.world(left, number)
        told = [hosts.members[name].said(is_change("round"), killed_at)[0]["at"] for name in left]
        took.append(max(told) - killed_at)
        # One that comes back under its name would be waited for longer each time.
        on[host] = f"{host}{turn}"
        hosts.start(host, slot=on[host], settings=own)
        number = hosts.world(on.values(), number)
    shown = ", ".join(f"{one:.2f}" for one in sorted(took))
    median = statistics.median(took)
    record_property("explored", f"quorum: a killed agent is noticed after {median:.2f} s (median of {shown})")
    assert median < 3.0, shown
    hosts.close_run("d")


def test_twenty_random_faults_of_whole_hosts_leave_one_cluster_and_no_stuck_run(hosts, record_property):
    drawn = random.Random(int(os.environ.get("RDZV_SEED", "21")))
    hosts.start(*"abcd")
    number = hosts.world("abcd")
    (cluster,) = hosts.clusters()
    took: dict[str, list[float]] = {}
    for _ in range(20):
        fault, name = drawn.choice(["kill", "kill", "cut", "freeze", "etcd"]), drawn.choice("abcd")
        if fault in ("kill", "cut") and drawn.random() < 0.5:
            name = hosts.leader()
        left = [one for one in "abcd" if one != name]
        began_at = time.monotonic()
        if fault == "etcd":
            for pid in hosts.etcd(name):
                os.kill(pid, signal.SIGKILL)
            until(lambda one=name: one == "d" or hosts.status(one), f"the etcd of {name} runs again")
        else:
            if fault == "kill":
                hosts.kill_host(name)
            elif fault == "cut":
                hosts.hosts[name].cut()
            else:
                freeze(hosts, name)
            number = hosts.world(left, number)
            took.setdefault(fault, []).append(time.monotonic() - began_at)
            healed_at = time.monotonic()
            if fault == "kill":
                hosts.start(name)
            elif fault == "cut":
                hosts.hosts[name].heal()
            else:
                thaw(hosts, name)
            number = hosts.world("abcd", number)
            took.setdefault("back", []).append(time.monotonic() - healed_at)
        assert hosts.clusters() == {cluster}
    for fault, times in took.items():
        ordered = sorted(times)
        middle = ordered[len(times) // 2]
        record_property("explored", f"{fault}: {len(times)} times, median {middle:.1f} s, longest {ordered[-1]:.1f} s")
    hosts.close_run("d")
