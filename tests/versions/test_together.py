"""Members, servers and commands of the previous release and of today's code in one run."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.etcd_cluster import Cluster
from support.member_processes import ProcessSet
from support.ports import free_port
from support.releases import NEW, OLD, OTHER, MixedRun, on


@pytest.fixture(scope="module")
def etcd() -> Iterator[Cluster]:
    with Cluster(1) as made:
        yield made


@pytest.mark.parametrize("server", [OLD, NEW])
def test_members_of_both_releases_share_a_run_on_a_server_of_either(processes: ProcessSet, server: str):
    _, endpoint = processes.serve(on=on(server))
    live_through_a_run(MixedRun(processes, endpoint, "1:3"), OTHER[server])


def test_members_of_both_releases_share_a_run_on_etcd(processes: ProcessSet, etcd: Cluster):
    live_through_a_run(MixedRun(processes, etcd.endpoint("both"), "1:3"), OLD)


def live_through_a_run(run: MixedRun, leader: str) -> None:
    """Form, grow, drain, lose the leader, replace it, close: the leader is of either release in turn."""
    other = OTHER[leader]
    run.member("a", leader)
    first = run.round("a")
    run.member("b", other)
    second = run.round("a", "b", after=first)
    c = run.member("c", other)
    third = run.round("a", "b", "c", after=second)
    shown = {release: run.status(release) for release in (OLD, NEW)}
    assert leads(shown[OLD], "a")
    assert said_by_both(shown[OLD], shown[NEW]) == said_by_both(shown[NEW], shown[OLD])

    run.command(leader, "drain", f"{host_of(shown[NEW])}/c", "--reason", "maintenance")
    assert "maintenance" in c.until(lambda line: line["event"] == "drained", "that it was drained")["reason"]
    fourth = run.round("a", "b", after=third)

    run.members["a"].kill()
    fifth = run.round("b", after=fourth)
    run.member("d", leader)
    run.round("b", "d", after=fifth)
    assert leads(run.status(leader), "b")

    run.command(other, "close", "--reason", "enough")
    for name in ("b", "d"):
        assert "enough" in run.members[name].until(lambda line: line["event"] == "closed", "that the run is closed")["reason"]


def leads(status: dict, slot: str) -> bool:
    return status["leader"].endswith(f"/{slot}")


def host_of(status: dict) -> str:
    return status["leader"].rpartition("/")[0]


def said_by_both(status: dict, other: dict) -> dict:
    """Return the fields that both know and that do not depend on the moment."""
    moments = {"age_s", "changed_s", "events", "served_by"}
    fields = {name: value for name, value in status.items() if name in other and name not in moments}
    known = set(other["members"][0])
    fields["members"] = [{name: value for name, value in one.items() if name in known} for one in status["members"]]
    return fields


@pytest.mark.parametrize("first", [OLD, NEW])
def test_a_run_is_done_when_the_members_of_both_releases_are(processes: ProcessSet, first: str):
    """The first one hosts the server, too."""
    run = MixedRun(processes, f"127.0.0.1:{free_port()}", "2:2")
    run.member("a", first)
    run.member("b", OTHER[first])
    run.round("a", "b")
    for name in "ab":
        run.members[name].send(signal.SIGUSR1)
    for name in "ab":
        run.members[name].until(lambda line: line["event"] == "notice" and line["kind"] == "closed", "that the run is closed")
        assert run.members[name].said(lambda line: "all 2 members of round 1 are done" in line.get("reason", ""))
