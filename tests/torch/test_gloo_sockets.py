"""gloo's connections are found by what the kernel tells, and a thread that waits for them is freed."""

from __future__ import annotations

import os
import socket
import stat
import threading
import time
from datetime import timedelta

import pytest

from support.torchrun_jobs import wait_for

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")
state = pytest.importorskip("rdzv.torch.state")
gloo_sockets = pytest.importorskip("rdzv.torch.gloo_sockets")
GlooSockets = gloo_sockets.GlooSockets

LONG = timedelta(seconds=120)
ESTABLISHED = 1  # Of the kernel's states of a TCP connection.


def make_groups():
    """Make two ranks of a gloo group within this process."""
    store, groups = dist.HashStore(), {}

    def make(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, LONG)

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return groups


@pytest.fixture
def pair(monkeypatch):
    """Two ranks, and the sockets that were found."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    sockets = GlooSockets()
    groups = make_groups()
    yield sockets, groups
    sockets.stop_reads()
    groups.clear()
    sockets.close()


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


def test_a_group_that_has_the_descriptors_of_a_former_one_is_found(pair):
    """The former group is freed while the next is made, so that numbers are used again."""
    _, groups = pair
    numbers = {number for number, _ in pair[0].descriptors()}
    sockets = GlooSockets()
    groups.clear()
    groups.update(make_groups())
    assert numbers & {number for number, _ in sockets.descriptors()}, "the test is void if no number is used again"
    assert len(sockets.descriptors()) == 4
    assert sockets.stop_reads() >= 1
    sockets.close()


def test_the_peer_sees_no_end_of_a_stopped_connection_until_it_is_closed(pair):
    """A write that meets a closed connection makes gloo wait for its timeout."""
    sockets, _ = pair
    connections = [number for number, inode in sockets.descriptors() if not is_listening(number)]
    assert len(connections) == 2
    assert sockets.stop_reads() == 2
    wait_for(lambda: not any(is_watched(sockets, number) for number in connections), "gloo closes its own")
    kept = sockets.in_use() - {number for number, _ in sockets.descriptors()}
    assert [tcp_state(number) for number in kept] == [ESTABLISHED] * 2
    sockets.close()
    assert not any(is_socket(number) for number in kept)


def is_listening(number):
    with socket.socket(fileno=os.dup(number)) as one:
        return bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def is_watched(sockets, number):
    return number in {watched for watched, _ in sockets.descriptors()}


def tcp_state(number):
    with socket.socket(fileno=os.dup(number)) as one:
        return one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[0]


def is_socket(number):
    try:
        return stat.S_ISSOCK(os.fstat(number).st_mode)
    except OSError:
        return False


@pytest.mark.parametrize("same_inode", [False, True])
def test_no_copy_is_left_of_a_number_that_stands_for_another_file_by_now(tmp_path, monkeypatch, same_inode):
    """Inodes are numbered per file system, so that a file may have that of a socket."""
    copies, real = [], os.dup
    monkeypatch.setattr(os, "dup", lambda number: copies.append(real(number)) or copies[-1])
    with (tmp_path / "file").open("wb") as file:
        inode = os.fstat(file.fileno()).st_ino
        with pytest.raises(OSError, match="Socket operation on non-socket" if same_inode else "was closed meanwhile"):
            gloo_sockets._copy(file.fileno(), inode if same_inode else inode + 1)
    assert len(copies) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(copies[0])


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_forked_child_lets_go_of_the_connections(pair, stopped):
    sockets, _ = pair
    assert len(sockets.descriptors()) == 4, "two connections and two listening sockets"
    if stopped:
        sockets.stop_reads()
    numbers = sockets.in_use()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"%d" % sum(is_socket(number) for number in numbers))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read() == "0"
    os.waitpid(child, 0)


def test_a_large_tensor_is_sent_in_pieces_that_share_its_memory():
    whole = torch.arange(200_000, dtype=torch.float64).view(400, 500)
    pieces = state._pieces(whole)
    assert max(piece.nbytes for piece in pieces) <= state.PIECE_BYTES < whole.nbytes
    for piece, doubled in zip(pieces, state._pieces(whole * 2), strict=True):
        piece.copy_(doubled)
    assert torch.equal(whole, torch.arange(200_000, dtype=torch.float64).view(400, 500) * 2)
    assert [piece.tolist() for piece in state._pieces(torch.ones((), dtype=torch.int16))] == [[1, 0]]
