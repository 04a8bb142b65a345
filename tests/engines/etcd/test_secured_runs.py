"""Runs on clusters that demand certificates, or a user name and a password."""

from __future__ import annotations

import time

from support.certificates import ca_file, issue
from support.etcd_cluster import Cluster
from support.etcd_members import EtcdRun


def test_a_run_on_a_cluster_with_certificates_survives_the_loss_of_etcds_leader():
    with Cluster(tls=True) as cluster, EtcdRun(cluster, 2, 2, tls_ca=ca_file(), **issue()._asdict()) as run:
        processes = [run.start("a"), run.start("b")]
        assert run.wait_world(*processes) == 1
        leader = cluster.leader()
        leader.kill()
        processes[0].tell("fail")
        assert run.wait_world(*processes, above=1) == 2
        leader.start()
        assert run.wrong() == []


def test_a_user_with_a_password_joins_below_its_prefix_and_outlives_its_token(tmp_path):
    password = tmp_path / "password"
    password.write_text("secret one\n")
    with Cluster(1, extra=["--auth-token-ttl=1"]) as cluster:
        cluster.add_user("ann", "secret one", "team/")
        cluster.enable_auth("secret of root")
        endpoint = cluster.endpoint("team", "user=ann&plaintext=true")
        # Without a write log: its token would expire, too. The test checks what the members are told.
        with EtcdRun(cluster, 2, 2, record=False, token_file=str(password)) as run:
            processes = [run.start("a", endpoint=endpoint), run.start("b", endpoint=endpoint)]
            assert run.wait_world(*processes) == 1
            time.sleep(3.0)
            processes[0].tell("fail")
            assert run.wait_world(*processes, above=1) == 2
            assert run.evicted() == []
