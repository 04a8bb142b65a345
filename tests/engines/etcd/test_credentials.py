"""Runs on clusters that want to know who comes: by certificate, or by name and password."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.etcd_certificates import Certificates
from support.etcd_cluster import Cluster
from support.etcd_members import Troupe

# ---- certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def secured(certificates: Certificates) -> Iterator[Cluster]:
    with Cluster(tls=certificates) as cluster:
        yield cluster


def rights(certificates: Certificates) -> dict[str, str]:
    return {"tls_ca": certificates.ca, "tls_cert": certificates.client_cert, "tls_key": certificates.client_key}


def test_a_run_on_a_cluster_that_wants_certificates_survives_the_loss_of_its_leader(secured, certificates):
    with Troupe(secured, 2, 2, **rights(certificates)) as troupe:
        agents = [troupe.start("a"), troupe.start("b")]
        assert troupe.wait_world(*agents) == 1
        leader = secured.leader()
        leader.kill()
        agents[0].tell("fail")
        assert troupe.wait_world(*agents, above=1) == 2
        leader.start()
        assert troupe.wrong() == []


# ---- users


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    """Ann may write below team/ and nowhere else; her tokens last for a second."""
    with Cluster(1, extra=["--auth-token-ttl=1"]) as cluster:
        cluster.add_user("ann", "secret one", "team/")
        cluster.enable_auth("secret of root")
        yield cluster


def password(folder: Path, text: str) -> dict[str, str]:
    file = folder / f"password of {text}"
    file.write_text(text + "\n")
    return {"token_file": str(file)}


def test_a_user_with_a_password_joins_below_its_prefix_and_outlives_its_token(guarded, tmp_path):
    options = password(tmp_path, "secret one")
    endpoint = guarded.endpoint("team", "user=ann")
    # The recorder's token would run out too: what is judged here is what the agents are told.
    with Troupe(guarded, 2, 2, record=False, **options) as troupe:
        agents = [troupe.start("a", endpoint=endpoint), troupe.start("b", endpoint=endpoint)]
        assert troupe.wait_world(*agents) == 1
        time.sleep(3.0)
        agents[0].tell("fail")
        assert troupe.wait_world(*agents, above=1) == 2
        assert troupe.evicted() == []
