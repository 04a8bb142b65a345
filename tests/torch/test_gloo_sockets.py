"""gloo's connections are found by what the kernel tells, and a thread that waits for them is freed."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
GlooSockets = pytest.importorskip("rdzv.torch.gloo_sockets").GlooSockets

LONG = timedelta(seconds=120)


@pytest.fixture
def pair(monkeypatch):
    """Two ranks of a gloo group within this process, and the sockets that were found."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sockets, store, groups = GlooSockets(), dist.HashStore(), {}

    def make(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, LONG)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    yield sockets, groups
    sockets.stop_reads()
    groups.clear()


def test_a_thread_that_waits_for_a_peer_is_freed_long_before_its_timeout(pair):
    sockets, groups = pair
    errors = []

    def wait():
        try:
            groups[0].allreduce([torch.ones(1)], dist.AllreduceOptions()).wait()
        except RuntimeError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive(), "the other rank takes no part"
    assert sockets.stop_reads() >= 1, "each rank has one connection, and the end of one may end the other"
    waiting.join(60)
    assert len(errors) == 1
    assert "gloo/transport" in errors[0]


def test_connections_of_other_threads_are_left_alone(pair):
    sockets, _ = pair
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as mine:
        theirs, _ = listener.accept()
        with theirs:
            assert sockets.stop_reads() >= 1
            theirs.sendall(b"still here")
            assert mine.recv(64) == b"still here"


def test_groups_from_before_are_left_alone(pair):
    _, groups = pair
    assert GlooSockets().stop_reads() == 0
    works = [groups[rank].allreduce([torch.ones(1)], dist.AllreduceOptions()) for rank in range(2)]
    for work in works:
        work.wait()


def test_a_forked_child_lets_go_of_the_connections(pair):
    sockets, _ = pair
    assert len(sockets.descriptors()) == 4, "two connections and two listening sockets"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        left = [number for number, _ in sockets.descriptors()]
        os.write(writer, b"%d" % len(left))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "0"
    os.waitpid(child, 0)
