"""Fences on etcd: they grow over all lives of a run id."""

from __future__ import annotations

from rdzv import Rendezvous
from support.etcd_cluster import Cluster


def test_fences_grow_over_rounds_and_over_lives_of_the_run_id():
    fences = []
    with Cluster(1) as cluster:
        for life in range(3):
            one = {"run_id": "job", "min_nodes": 1, "max_nodes": 1, "incarnation": life, "closed_for": 60}
            with Rendezvous(cluster.endpoint(), **one) as member:
                fences += [member.join().fence for _ in range(3)]
                member.close_run("the next life begins")
    assert fences == sorted(set(fences))
    assert len(fences) == 9
