"""Several hosts: network namespaces with names, addresses and links of their own, which are cut and healed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from support.member_processes import ENVIRON, LONG_S, is_change, is_notice, is_world
from support.network_hosts import Network

PORT = 29400
IMPATIENT = "read_timeout=2"
"""Shorter than the lease, so that a cut is felt soon."""
ANY_CHANGE = is_change("round", "evicted", "closed", "outage", "refused")
long_too = pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.soak)])


def one_round(worlds):
    """Check that all worlds are of one round, and return its number."""
    assert len({(line["round"], line["bootstrap"], line["digest"]) for line in worlds}) == 1
    assert sorted(line["rank"] for line in worlds) == list(range(worlds[0]["size"]))
    return worlds[0]["round"]


def point_head_to(network, target):
    """Make the name `head` mean that host, on every host."""
    names = {host.name: host.address for host in network.all.values()}
    for host in network.all.values():
        host.hosts({**names, "head": target.address})


def rdzv(host, *words):
    """Run a command on that host to its end."""
    command = [*host.on, sys.executable, "-m", "rdzv", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, check=False, env=ENVIRON)


# ---- links that are cut


def test_a_host_that_is_cut_off_is_missed_and_comes_back_when_the_link_is_healed(network, processes):
    hosts = [network.host(name) for name in "abc"]
    a, b, c = members = [processes.member(host.name, f"a:{PORT}", "2:3", IMPATIENT, on=host.on) for host in hosts]
    round = one_round([member.world(3) for member in members])
    hosts[2].cut()
    for member in (a, b):
        assert "c/c lost" in member.until(is_notice("broken"), "c is missed")["reason"]
    assert one_round([member.world(2) for member in (a, b)]) == round + 1
    c.until(is_notice("engine away"), "the engine is away")
    assert not c.said(ANY_CHANGE), "it cannot tell an outage from being cut off, so its workers go on"
    hosts[2].heal()
    assert c.until(is_change("evicted", "round"), "that it was evicted")["kind"] == "evicted"
    assert one_round([member.world(3) for member in members]) > round + 1


@long_too
def test_a_server_that_nobody_can_reach_for_a_while_disturbs_nobody(network, processes, long):
    server_host, *hosts = [network.host(name) for name in "sabc"]
    processes.serve(f"*:{PORT}", on=server_host.on)
    members = [processes.member(host.name, f"s:{PORT}", "2:3", IMPATIENT, on=host.on) for host in hosts]
    round = one_round([member.world(3) for member in members])
    server_host.cut()
    for member in members:
        member.until(is_notice("engine away"), "the engine is away")
    time.sleep(20.0 if long else 1.0)
    server_host.heal()
    for member in members:
        member.until(is_notice("engine back", "present"), "the engine is back")
        assert not member.said(ANY_CHANGE), member.report()
    members.pop().kill()
    assert one_round([member.world(2) for member in members]) == round + 1


def test_a_host_without_power_leaves_half_a_connection_and_is_missed_all_the_same(network, processes):
    """No packet tells the server: the lease ends."""
    hosts = [network.host(name) for name in "abc"]
    members = [processes.member(host.name, f"a:{PORT}", "2:3", on=host.on) for host in hosts]
    round = one_round([member.world(3) for member in members])
    hosts[2].cut()
    at = members.pop().kill()
    for member in members:
        line = member.until(is_notice("broken"), "c is missed")
        assert line["at"] - at < 3 * (4.0 + 1.0), "a lease, and a second to judge it"
    hosts[2].heal()
    again = processes.member("c2", f"a:{PORT}", "2:3", on=hosts[2].on)
    assert one_round([member.world(3) for member in (*members, again)]) > round


def test_members_with_half_a_connection_to_a_server_that_was_restarted_go_on(network, processes):
    """The server's host lost power: members notice the dead connections only with their next request."""
    server_host, *hosts = [network.host(name) for name in "sab"]
    server, _ = processes.serve(f"*:{PORT}", on=server_host.on)
    members = [processes.member(host.name, f"s:{PORT}", "2:2", IMPATIENT, on=host.on) for host in hosts]
    round = one_round([member.world(2) for member in members])
    server_host.cut()
    server.kill()
    processes.serve(f"*:{PORT}", on=server_host.on)
    server_host.heal()
    for member in members:
        line = member.until(is_notice("sealed"), "the round is kept")
        assert (line["round"], line["reason"]) == (round, "kept after the engine came back")
        assert not member.said(ANY_CHANGE)


# ---- two servers


@pytest.mark.parametrize(("first_is", "second"), [("alive", "agent"), ("paused", "serve"), ("cut off", "agent")])
def test_a_second_server_under_the_same_name_is_refused_and_never_makes_a_second_world(network, processes, first_is, second):
    first_host, second_host, *hosts = [network.host(name) for name in "stabc"]
    point_head_to(network, first_host)
    first, _ = processes.serve(f"*:{PORT}", on=first_host.on)
    members = [processes.member(host.name, f"head:{PORT}", "2:4", IMPATIENT, "last_call=2", on=host.on) for host in hosts]
    rounds = [member.world(3)["round"] for member in members]
    point_head_to(network, second_host)
    if second == "serve":
        processes.serve(f"*:{PORT}", on=second_host.on)
    stranger = processes.member("t", f"head:{PORT}", "2:4", IMPATIENT, "last_call=2", on=second_host.on)
    stranger.until(is_notice("present"), "it found the second server")
    led_astray = members[:1] if first_is == "alive" else members
    if first_is == "alive":
        hosts[0].cut()  # Until it has to reconnect.
        led_astray[0].until(is_notice("engine away"), "the engine is away")
        hosts[0].heal()
    elif first_is == "paused":
        first.pause()
    else:
        first_host.cut()
    for member in led_astray:
        line = member.until(lambda line: "answers now" in line.get("reason", ""), "the second server is refused")
        assert line["reason"].startswith("run 'job' was kept by the engine at ")
        assert "rdzv adopt --force" in line["reason"]
    point_head_to(network, first_host)
    first.resume()
    first_host.heal()
    assert one_round([member.world(3, after=max(rounds)) for member in members]) > max(rounds)
    assert not stranger.said(is_world()), "alone it is no quorum, and nobody else followed"


def test_an_operator_lets_the_members_follow_to_another_server(network, processes):
    first_host, second_host, *hosts = [network.host(name) for name in "stabc"]
    point_head_to(network, first_host)
    first, _ = processes.serve(f"*:{PORT}", on=first_host.on)
    # Three degrees of patience: one is told in time to be helped, one need not be told, one is told and goes.
    graces = {"a": "outage_grace=6", "b": "outage_grace=900", "c": "outage_grace=1"}
    a, b, c = members = [
        processes.member(host.name, f"head:{PORT}", "2:3", IMPATIENT, "last_call=3", graces[host.name], on=host.on)
        for host in hosts
    ]
    round = max(member.world(3)["round"] for member in members)
    formed_at = time.monotonic()
    processes.serve(f"*:{PORT}", on=second_host.on)
    point_head_to(network, second_host)
    first.kill()
    refused = b.until(lambda line: "answers now" in line.get("reason", ""), "another engine answers")["reason"]
    places = refused.partition(" at ")[2].partition(" answers now")[0].split(", but ")
    assert len(set(places)) == 2
    assert all(place.endswith(f"/*:{PORT}") for place in places)
    assert c.until(is_change("outage"), "another engine answers")["reason"] == refused
    assert c.wait() == 5
    assert c.errors() == f"rdzv: {refused} [RDZV-E04]\n"

    asked = rdzv(second_host, "adopt", f"head:{PORT}", "--run-id", "job")
    assert asked.returncode == 2, asked.stderr
    assert f"to the engine at {places[1]}" in asked.stderr
    assert "then give --force" in asked.stderr
    assert asked.stderr.count("\n") == 1

    assert a.until(is_change("outage"), "another engine answers")["reason"] == refused
    assert not b.said(ANY_CHANGE, formed_at)
    forced = rdzv(second_host, "adopt", f"head:{PORT}", "--run-id", "job", "--force")
    assert (forced.returncode, forced.stderr) == (0, "")
    assert forced.stdout == f"members of run 'job' may follow to {places[1]} for 3600 s from now\n"
    assert one_round([member.world(2, after=round) for member in (a, b)]) == round + 1


def test_members_that_all_follow_in_time_go_on_in_their_round(network, processes):
    first_host, second_host, *hosts = [network.host(name) for name in "stab"]
    point_head_to(network, first_host)
    processes.serve(f"*:{PORT}", on=first_host.on)
    members = [processes.member(host.name, f"head:{PORT}", "2:2", IMPATIENT, on=host.on) for host in hosts]
    round = one_round([member.world(2) for member in members])
    first_host.cut()
    processes.serve(f"*:{PORT}", on=second_host.on)
    point_head_to(network, second_host)
    for member in members:
        member.until(lambda line: "answers now" in line.get("reason", ""), "the second server is refused")
    assert rdzv(hosts[0], "adopt", f"head:{PORT}", "--run-id", "job", "--force").returncode == 0
    for member in members:
        line = member.until(is_notice("sealed"), "the round is kept")
        assert (line["round"], line["reason"]) == (round, "kept after the engine came back")
        assert not member.said(ANY_CHANGE)


# ---- names and addresses


def check_bootstrap(hosts, members, prefix):
    """Check that all are in one round, and that every host reaches its bootstrap address."""
    worlds = [member.world(2) for member in members]
    one_round(worlds)
    assert worlds[0]["bootstrap"].startswith(prefix)
    assert [host.name for host in hosts if not host.reaches(worlds[0]["bootstrap"])] == []


def test_the_address_told_to_others_is_of_the_interface_that_works(network, processes):
    """The names resolve to the first interface, whose link is cut."""
    network.bridge("br1")
    hosts = [network.host(name) for name in "ab"]
    for host in hosts:
        host.plug("eth1", f"q{host.number}", f"10.98.0.{host.number}/24", bridge="br1")
        host.cut()
    members = [processes.member(host.name, f"10.98.0.1:{PORT}", "2:2", on=host.on) for host in hosts]
    check_bootstrap(hosts, members, "10.98.0.")


def test_hosts_with_ipv6_only_meet(network, processes):
    hosts = [network.host(name, ipv4=False, ipv6=True) for name in "ab"]
    members = [
        processes.member(host.name, endpoint, "2:2", on=host.on)
        for host, endpoint in zip(hosts, (f"a:{PORT}", f"[fd99::1]:{PORT}"), strict=True)
    ]
    check_bootstrap(hosts, members, "[fd99::")


def test_two_jobs_on_one_port_are_told_apart_and_what_to_do(network, processes):
    a, b = [network.host(name) for name in "ab"]
    mine = [processes.member(host.name, f"a:{PORT}", "2:2", on=host.on) for host in (a, b)]
    one_round([member.world(2) for member in mine])
    theirs = processes.member("other", f"a:{PORT}", "1:1", "join_timeout=3", run_id="theirs", on=b.on)
    assert theirs.wait() == 3
    assert (
        "this server is hosted by an agent of run 'job' and serves that run only, not 'theirs': give one of the runs "
        "another port, or start a server for both with `rdzv serve`"
    ) in theirs.errors()
    assert not theirs.said(is_world())
    assert not any(member.said(ANY_CHANGE) for member in mine)


def test_two_jobs_share_the_port_of_a_server_that_stands_by_itself(network, processes):
    hosts = [network.host(name) for name in "ab"]
    processes.serve(f"*:{PORT}", on=hosts[0].on)
    runs = {
        run_id: [processes.member(host.name + run_id, f"a:{PORT}", "2:2", run_id=run_id, on=host.on) for host in hosts]
        for run_id in ("mine", "theirs")
    }
    for run_id, members in runs.items():
        worlds = [member.world(2) for member in members]
        one_round(worlds)
        assert {line["run"] for line in worlds} == {run_id}
    runs["mine"][0].kill()
    runs["mine"][1].until(is_notice("broken"), "its other half is lost")
    assert not any(member.said(ANY_CHANGE) for member in runs["theirs"])


# ---- the hosts themselves


def test_a_cut_host_is_out_of_reach_until_it_is_healed(network, processes):
    a, b = network.host("a"), network.host("b")
    processes.serve(f"*:{PORT}", on=a.on)
    assert b.reaches(f"a:{PORT}")
    b.cut()
    assert not b.reaches(f"a:{PORT}", 0.5)
    b.heal()
    assert b.reaches(f"a:{PORT}")


def test_networks_do_not_outlive_their_test(network_allowed):
    with Network() as made:
        host = made.host("a")
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert host.space in listed
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert host.space not in listed
