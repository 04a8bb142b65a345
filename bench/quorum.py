"""Measures a quorum: its first world, the time until a killed agent is noticed (on etcd, too), and the loss of a whole host.

python bench/quorum.py [--first 5] [--kills 20] [--lost 5] [--out FOLDER]

Four hosts are network namespaces, which need root; three of them are listed.

  took      four torchrun agents are started (torch is imported, etcd does not run) until all workers are in the first world
  ready     last agent ready (it called `next_rendezvous`), until all workers are in the first world
  told      SIGKILL of one agent, until the last of the others is told, with a lease of 10 s
  shrunk    SIGKILL of every process of the host whose etcd leads, until the others train again
  whole     agent started again on that host, until all four train together
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import Book

from support.etcd_cluster import Cluster
from support.guarded_process import pid_of_sentinel
from support.member_processes import Process, ProcessSet, is_change
from support.network_hosts import Network, why_not
from support.quorum_hosts import QuorumHosts, kill_all
from support.torchrun_jobs import Job

NODES = "abcd"
LEASE_S = 10
CONF = {"last_call": 10, "settle": 0.5, "grow_every": 0, "serve_on": 20, "lease": LEASE_S}
"""All four are in the first round, however long the import of torch takes on each."""


def torchrun_job(turns: int) -> dict[str, list[float]]:
    """Start a job, lose the host of etcd's leader so many times, and end it."""
    took: dict[str, list[float]] = {"took_s": [], "ready_s": [], "shrunk_s": [], "whole_s": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(Network())
        hosts = stack.enter_context(QuorumHosts(network, NODES, folder / "state"))
        conf = {**CONF, "state_dir": hosts.state}
        job = stack.enter_context(Job(folder / "job", "1:4", endpoint=hosts.endpoint, max_restarts=50, **conf))
        began_at = time.monotonic()
        for node in NODES:
            job.agent(node, wrap=hosts.hosts[node].on)
        rows = job.world(NODES, 4)
        formed_at = max(row.at for row in rows.values())
        took["took_s"].append(formed_at - began_at)
        took["ready_s"].append(formed_at - max(row.at for row in job.rows("joins")))
        for _ in range(turns):
            lost = hosts.leader()
            left = [node for node in NODES if node != lost]
            killed_at = time.monotonic()
            kill_all(hosts.hosts[lost])
            rows = job.world(left, 3, after=killed_at)
            took["shrunk_s"].append(max(row.at for row in rows.values()) - killed_at)
            started_at = time.monotonic()
            job.agent(lost, wrap=hosts.hosts[lost].on)
            rows = job.world(NODES, 4, after=started_at)
            took["whole_s"].append(max(row.at for row in rows.values()) - started_at)
        job.finish_all(NODES)
    return took


def kill_members(
    kills: int, members: dict[str, Process], start: Callable[[str, str], object], world: Callable[[Iterable[str], int], int]
) -> list[float]:
    """Kill one member after the other, each replaced by another, and return when the last of the others was told."""
    drawn = random.Random(20)
    on = {node: node for node in NODES}
    for node in NODES:
        start(node, node)
    number = world(NODES, 0)
    took = []
    for turn in range(kills):
        host = drawn.choice(NODES)
        victim = members[on[host]]
        left = [on[node] for node in NODES if node != host]
        pid_of_sentinel(victim.pid)
        killed_at = victim.kill()
        number = world(left, number)
        took.append(max(members[name].said(is_change("round"), killed_at)[0]["at"] for name in left) - killed_at)
        on[host] = f"{host}{turn}"  # One that comes back under its name would be waited for longer each time.
        start(host, on[host])
        number = world(on.values(), number)
    return took


def on_quorum(kills: int) -> list[float]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = stack.enter_context(QuorumHosts(stack.enter_context(Network()), NODES, Path(folder) / "state"))

        def start(host: str, name: str) -> None:
            hosts.start(host, slot=name, settings=[f"lease={LEASE_S}"])

        took = kill_members(kills, hosts.members, start, hosts.world)
        hosts.close_run("d")
        return took


def on_etcd(kills: int) -> list[float]:
    members: dict[str, Process] = {}
    with Cluster(3) as cluster, ProcessSet() as processes:

        def start(_: str, name: str) -> None:
            members[name] = processes.member(name, cluster.endpoint(), "1:4", f"lease={LEASE_S}")

        def world(names: Iterable[str], after: int) -> int:
            names = list(names)
            rounds = {members[name].world(len(names), after)["round"] for name in names}
            assert len(rounds) == 1, rounds
            return rounds.pop()

        return kill_members(kills, members, start, world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=5, help="jobs that are started from nothing")
    parser.add_argument("--kills", type=int, default=20, help="agents that are killed on each engine")
    parser.add_argument("--lost", type=int, default=5, help="times that a whole host is lost")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    if problem := why_not():
        print(f"a quorum is not measured here: {problem}")
        return
    book = Book("quorum", args.out)
    jobs = [torchrun_job(args.lost if turn == 0 else 0) for turn in range(args.first)]
    parts = {name: [one for job in jobs for one in job[name]] for name in ("took_s", "ready_s", "shrunk_s", "whole_s")}
    book.add(what="ours", engine="quorum", n=4, mode=f"torchrun, lease {LEASE_S} s", **parts)
    for engine, kill in (("quorum", on_quorum), ("etcd", on_etcd)):
        if args.kills:
            book.add(what="ours", engine=engine, n=4, mode="killed agent", told_s=kill(args.kills))


if __name__ == "__main__":
    main()
