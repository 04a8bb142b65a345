"""Leases are revoked by hand-written frames: on every etcd that is found, and with peers that are none."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import rdzv
from rdzv.engines.etcd.bare_revoke import LEASES_MAX, revoke
from support.engine_contract import MORE_ETCDS
from support.etcd_cluster import Cluster
from support.ports import free_port

SOON_S = 10.0


@pytest.fixture(scope="module", params=["", *MORE_ETCDS])
def cluster(request) -> Iterator[Cluster]:
    with Cluster(1, binary=request.param) as made:
        yield made


def where(cluster: Cluster) -> list[tuple[str, int]]:
    return [(node.host, node.port) for node in cluster.nodes]


def granted(cluster: Cluster, count: int) -> list[int]:
    return [int(cluster.call("lease/grant", {"TTL": "600"})["ID"]) for _ in range(count)]


def left(cluster: Cluster) -> set[int]:
    return {int(one["ID"]) for one in cluster.call("lease/leases", {}).get("leases", [])}


def test_leases_are_revoked_and_no_other(cluster):
    mine, other = granted(cluster, 60), granted(cluster, 1)
    assert revoke(where(cluster), mine, 5.0, 0.1, SOON_S)
    assert left(cluster) == set(other)
    assert revoke(where(cluster), other, 5.0, 0.1, SOON_S)


def test_a_lease_that_is_gone_and_too_many_are_left_to_the_real_client(cluster):
    (lease,) = granted(cluster, 1)
    assert revoke(where(cluster), [lease], 5.0, 0.1, SOON_S)
    assert not revoke(where(cluster), [lease], 5.0, 0.1, SOON_S), "etcd refuses"
    assert not revoke(where(cluster), list(range(LEASES_MAX + 1)), 5.0, 0.1, SOON_S)


def test_members_that_are_dead_or_say_nothing_cost_no_time(cluster):
    (lease,) = granted(cluster, 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        others = [("127.0.0.1", free_port()), silent.getsockname()]
        began_at = time.monotonic()
        assert revoke([*others, *where(cluster)], [lease], 5.0, 0.1, SOON_S)
        assert time.monotonic() - began_at < 4.0, "it waited for a member that says nothing"
    assert lease not in left(cluster)


def test_an_etcd_that_comes_back_in_time_is_asked_again(cluster):
    (lease,) = granted(cluster, 1)
    (node,) = cluster.nodes
    node.kill()
    back = threading.Timer(1.0, node.start)
    back.start()
    assert revoke(where(cluster), [lease], 1.0, 0.1, 3 * SOON_S)
    back.join()
    assert lease not in left(cluster)


@pytest.mark.parametrize("says", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0" * 9, b"\xff" * 100_000, b""])
def test_a_server_that_speaks_something_else_is_given_up(says):
    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.sendall(says)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        began_at = time.monotonic()
        assert not revoke([listener.getsockname()], [7], 0.3, 0.1, 1.0)
        assert time.monotonic() - began_at < SOON_S
        listener.shutdown(socket.SHUT_RDWR)


def test_nothing_is_imported_for_it_that_takes_long():
    source = str(Path(rdzv.__file__).parents[1])
    program = f"import sys; sys.path.append({source!r}); import rdzv.engines.etcd.bare_revoke; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert not {"grpc", "asyncio", "msgspec", "ssl"} & set(done.stdout.split())
