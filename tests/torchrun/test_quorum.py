"""torchrun on a quorum, on four hosts of which three are listed: any one of them dies, the one of etcd's leader included."""

from __future__ import annotations

import random
import statistics
import time

import pytest

from support.quorum_hosts import QuorumHosts, kill_all

pytest.importorskip("grpc", reason="grpcio is not installed: the extra `quorum` brings it")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

QUICK = {"last_call": 10, "settle": 0.5, "grow_every": 0, "serve_on": 20}


@pytest.mark.parametrize("lease", [10, 3])
def test_any_listed_host_may_die_and_come_back_and_then_another(job, forker, network, tmp_path, record_property, lease):
    forker.wait_ready()
    with QuorumHosts(network, "abcd", tmp_path / "state") as hosts:
        training = job("1:4", endpoint=hosts.endpoint, state_dir=hosts.state, lease=lease, **QUICK)

        def start(*names: str) -> None:
            for name in names:
                training.agent(name, netns=hosts.hosts[name].space)

        began_at = time.monotonic()
        start(*"abcd")
        rows = training.world("abcd", 4)
        first_s = max(row.at for row in rows.values()) - began_at
        record_property("explored", f"quorum, lease {lease} s: first world {first_s:.1f} s")
        drawn = random.Random(lease)
        lost, back = [], []
        for turn in range(5):
            name = hosts.leader() if turn % 2 == 0 else drawn.choice("abc")
            left = [one for one in "abcd" if one != name]
            killed_at = time.monotonic()
            kill_all(hosts.hosts[name])
            rows = training.world(left, 3, after=killed_at)
            lost.append(max(row.at for row in rows.values()) - killed_at)
            started_at = time.monotonic()
            start(name)
            rows = training.world("abcd", 4, after=started_at)
            back.append(max(row.at for row in rows.values()) - started_at)
            assert len(hosts.clusters()) == 1
        for what, times in (("trains again after", lost), ("is complete again after", back)):
            shown = ", ".join(f"{one:.1f}" for one in times)
            record_property("explored", f"quorum, lease {lease} s: {what} {statistics.median(times):.1f} s (median of {shown})")
        training.finish_all("abcd")
        assert list(hosts.state.iterdir()) == []
