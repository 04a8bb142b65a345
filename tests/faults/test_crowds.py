"""200 real members on each engine while processes, connections and the engine fail at random, for half an hour.

RDZV_STORM_S makes it shorter, to try it: RDZV_STORM_S=60.
"""

from __future__ import annotations

import os
import sys

import pytest

from support.crowds import Crowd, EngineFaults, EtcdFaults, ServerFaults, Storm
from support.etcd_cluster import PATIENT, Cluster, sound_etcd
from support.member_processes import ProcessSet

STORM_S = float(os.environ.get("RDZV_STORM_S", "1800"))
SEED = int(os.environ.get("RDZV_SEED", "22"))
pytestmark = [pytest.mark.soak, pytest.mark.timeout(STORM_S + 600)]


def check_storm(endpoint: str, engine: EngineFaults, record_property, **options: object) -> None:
    with Crowd(endpoint, **options) as crowd:
        crowd.whole()
        storm = Storm(crowd, engine, SEED)
        try:
            storm.rage(STORM_S)
        finally:
            wrong = crowd.wrong()
            assert wrong == [], f"seed {SEED}"
        record_property("explored", storm.report())
        assert sum(storm.faults.values()) >= STORM_S / 20, "a wave with its recovery takes longer than it should"
        assert crowd.told, "no member was told of a change"
        crowd.close_run()


def test_half_an_hour_of_faults_splits_no_world_of_200_members_on_the_embedded_server(record_property):
    with ProcessSet() as processes:
        engine = ServerFaults(processes)
        check_storm(engine.place, engine, record_property)


def test_half_an_hour_of_faults_splits_no_world_of_200_members_on_three_members_of_etcd(record_property):
    pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")
    with Cluster(3, binary=sound_etcd(), extra=PATIENT) as cluster:
        try:
            check_storm(cluster.endpoint(), EtcdFaults(cluster), record_property)
        except AssertionError:
            sys.stderr.write(cluster.standing())
            raise
