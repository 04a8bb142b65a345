"""A running job is upgraded from the previous release to today's code, one process after another."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.etcd_cluster import Cluster
from support.member_processes import ProcessSet, is_change
from support.ports import free_port
from support.releases import NEW, OLD, OTHER, MixedRun, on

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def etcd() -> Iterator[Cluster]:
    with Cluster(1) as made:
        yield made


def upgrade_each(run: MixedRun) -> None:
    """Replace each member by one of today's code. The others go on without it, and with it again."""
    for name in NAMES:
        run.member(name, OLD)
    number = run.round(*NAMES)
    for name in NAMES:
        others = [other for other in NAMES if other != name]
        old = run.members[name]
        old.leave()
        number = run.round(*others, after=number)
        run.member(name, NEW)
        number = run.round(*NAMES, after=number)
        assert old.wait() == 0, old.report()
    for name in NAMES:
        assert not run.members[name].said(is_change("evicted", "refused", "outage")), run.members[name].report()


def test_a_job_that_hosts_its_own_server_is_upgraded_one_by_one(processes: ProcessSet):
    """Its server moves with each member that hosts it. A store is empty after that, and the rounds stand: so nobody uses it."""
    upgrade_each(MixedRun(processes, f"127.0.0.1:{free_port()}", "2:3", "serve_on=1", "store=no"))


def test_a_job_on_etcd_is_upgraded_one_by_one(processes: ProcessSet, etcd: Cluster):
    upgrade_each(MixedRun(processes, etcd.endpoint("upgraded"), "2:3"))


@pytest.mark.parametrize("before", [OLD, NEW])
def test_a_server_is_upgraded_or_rolled_back_in_place_under_a_round_that_stands(processes: ProcessSet, before: str):
    port = free_port()
    server, endpoint = processes.serve(f"127.0.0.1:{port}", on=on(before))
    run = MixedRun(processes, endpoint, "2:3")
    run.member("a", OLD)
    run.member("b", NEW)
    first = run.round("a", "b")
    server.send(signal.SIGTERM)
    server.wait()
    processes.serve(f"127.0.0.1:{port}", on=on(OTHER[before]))
    run.member("c", OLD)
    second = run.round("a", "b", "c", after=first)
    assert second == first + 1, "the round of a and b was not kept over the restart"
    for name in ("a", "b"):
        changes = [line["reason"] for line in run.members[name].said(is_change("round", "evicted", "outage"))]
        assert len(changes) == 1, changes
