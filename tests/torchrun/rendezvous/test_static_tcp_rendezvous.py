"""The static rendezvous returns the rank and size that it was given."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from rdzv.torchrun.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    StaticTCPRendezvous,
    create_rdzv_handler,
)


def params(endpoint, **config):
    return RendezvousParameters("static", endpoint, "run", 1, 2, **config)


@pytest.mark.parametrize(
    ("endpoint", "config", "problem"),
    [
        ("h:1", {}, "the rank of this node is missing"),
        ("", {"rank": 0}, "the endpoint is missing"),
        ("h", {"rank": 0}, "endpoint 'h' has no port"),
        ("h:1", {"rank": 2}, "rank is 2, of 2 nodes the last has 1"),
        ("h:1", {"rank": -1}, "rank is -1"),
        ("h:1", {"rank": 0, "timeout": "x"}, "timeout"),
    ],
)
def test_static_says_what_is_missing(endpoint, config, problem):
    with pytest.raises(ValueError, match=problem):
        create_rdzv_handler(params(endpoint, **config))


def test_static_gives_out_what_it_was_told(free_port):
    one, two = (create_rdzv_handler(params(f"127.0.0.1:{free_port}", rank=rank, timeout=30)) for rank in "01")
    infos = {}
    threads = [threading.Thread(target=lambda h=h: infos.__setitem__(h.rank, h.next_rendezvous())) for h in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [(infos[rank].rank, infos[rank].world_size) for rank in (0, 1)] == [(0, 2), (1, 2)]
    infos[0].store.set("k", b"v")
    assert infos[1].store.get("k") == b"v"
    assert isinstance(infos[0], RendezvousInfo)
    assert infos[1].bootstrap_store_info == RendezvousStoreInfo("127.0.0.1", free_port)
    assert one.next_rendezvous().store.get("k") == b"v"
    one.set_closed()
    facts = (one.get_backend(), one.get_run_id(), one.is_closed(), one.num_nodes_waiting(), one.use_agent_store)
    assert facts == ("static", "run", False, 0, True)
    assert one.timeout == timedelta(seconds=30)
    assert one.shutdown() is True


def test_static_says_where_it_could_not_connect():
    with pytest.raises(RendezvousConnectionError, match=r"rank 1 of run 'run' could not reach rank 0 at 127\.0\.0\.1:1: "):
        StaticTCPRendezvous("127.0.0.1", 1, 1, 2, "run", 1).next_rendezvous()
