"""The contract of torch's `RendezvousBackend`, on every backend; and the rest of the c10d backend."""

from __future__ import annotations

import base64
import socket
import threading
import time
from datetime import timedelta

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from torch.distributed import FileStore, HashStore, TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend as TorchC10d

from rdzv.engines.register.file import FileBackend
from rdzv.torchrun.rendezvous import (
    C10dRendezvousBackend,
    EtcdRendezvousBackend,
    RendezvousBackend,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    create_backend,
)
from rdzv.torchrun.rendezvous.c10d_rendezvous_backend import (
    DEFAULT_PORT,
    STATE_MAX,
    ReconnectingBackend,
    connect,
    is_local,
)
from support.sqlite_backend import SqliteBackend


def tcp_store(**options):
    return TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, **options)


def client(server):
    return TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)


BACKENDS = {
    "c10d-tcp": lambda tmp_path, store=None: C10dRendezvousBackend(store or tcp_store(), "run"),
    "c10d-file": lambda tmp_path: C10dRendezvousBackend(FileStore(str(tmp_path / "store")), "run"),
    "c10d-hash": lambda tmp_path: C10dRendezvousBackend(HashStore(), "run"),
    "sqlite": lambda tmp_path: SqliteBackend(str(tmp_path / "db"), "run"),
    "file": lambda tmp_path: FileBackend(str(tmp_path / "file")),
}


@pytest.fixture(params=[*BACKENDS, "etcd"])
def backend(request, tmp_path):
    if request.param == "etcd":
        return EtcdRendezvousBackend(request.getfixturevalue("etcd_client"), "run", key_prefix=tmp_path.name)
    return BACKENDS[request.param](tmp_path)


def test_a_state_can_be_set_where_there_is_none_and_only_there(backend):
    assert backend.get_state() is None
    state, token, won = backend.set_state(b"one\x00\xff")
    assert (state, won) == (b"one\x00\xff", True)
    assert backend.get_state() == (b"one\x00\xff", token)
    assert backend.set_state(b"two") == (b"one\x00\xff", token, False)
    assert backend.get_state() == (b"one\x00\xff", token)


def test_a_fresh_token_replaces_the_state_and_is_stale_then(backend):
    _, first, _ = backend.set_state(b"one")
    state, second, won = backend.set_state(b"two", first)
    assert (state, won) == (b"two", True)
    assert backend.set_state(b"three", first) == (b"two", second, False)
    assert backend.set_state(b"three", second)[2]
    assert backend.get_state()[0] == b"three"


def test_one_of_many_swaps_wins(backend):
    _, token, _ = backend.set_state(b"start")
    wins = []

    def swap(number):
        wins.append(backend.set_state(b"%d" % number, token)[2])

    threads = [threading.Thread(target=swap, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(wins) == [False] * 7 + [True]


@pytest.mark.parametrize("kind", ["c10d-tcp", "c10d-file", "c10d-hash"])
def test_a_corrupt_state_is_said_to_be_one(kind, tmp_path):
    backend = BACKENDS[kind](tmp_path)
    backend._store.set("torch.rendezvous.run", b"not base64!")
    with pytest.raises(RendezvousStateError, match=r"'torch\.rendezvous\.run' is corrupt: it begins with b'not base64!'"):
        backend.get_state()
    backend._store.set("torch.rendezvous.run", b"A" * (STATE_MAX + 4))
    with pytest.raises(RendezvousStateError, match=f"has {STATE_MAX + 4} bytes, at most {STATE_MAX} are allowed"):
        backend.get_state()


# ---- c10d


def test_c10d_needs_a_run_id():
    with pytest.raises(ValueError, match="the run id is empty"):
        C10dRendezvousBackend(HashStore(), "")
    assert C10dRendezvousBackend(HashStore(), "run").name == "c10d"
    assert issubclass(C10dRendezvousBackend, RendezvousBackend)


def test_c10d_and_torchs_own_see_the_same_state():
    store = HashStore()
    theirs = TorchC10d(store, "run")
    ours = C10dRendezvousBackend(store, "run")
    assert ours.get_state() is None
    _, token, won = ours.set_state(b"state")
    assert won
    assert theirs.get_state() == (b"state", token)
    assert theirs.set_state(b"next", token)[2]
    assert ours.get_state()[0] == b"next"


def test_c10d_treats_a_token_of_another_kind_as_stale():
    backend = C10dRendezvousBackend(HashStore(), "run")
    assert backend.set_state(b"x", 5) is None
    _, token, _ = backend.set_state(b"x")
    assert backend.set_state(b"y", 5) == (b"x", token, False)
    backend._store.delete_key("torch.rendezvous.run")
    assert backend.set_state(b"y", token) is None


def test_c10d_waits_until_the_state_it_knows_is_replaced():
    server = tcp_store()
    one, other = (C10dRendezvousBackend(client(server), "run") for _ in range(2))
    _, token, _ = one.set_state(b"1")
    woken = []
    waiting = threading.Thread(target=lambda: woken.append(other.wait_state(token, 60.0)))
    waiting.start()
    time.sleep(0.1)
    assert waiting.is_alive()
    _, token, _ = one.set_state(b"2", token)
    waiting.join(20)
    assert woken == [None]
    waiting = threading.Thread(target=lambda: woken.append(other.wait_state(token, 60.0)))
    waiting.start()
    deadline = time.monotonic() + 20
    while waiting.is_alive() and time.monotonic() < deadline:
        other.stop_waiting()
        time.sleep(0.01)
    assert woken == [None, None]
    assert C10dRendezvousBackend(HashStore(), "run").wait_state is None


def test_c10d_keeps_few_marks_of_replaced_states():
    server = tcp_store()
    backend = C10dRendezvousBackend(client(server), "run")
    _, token, _ = backend.set_state(b"0")
    for number in range(1, 50):
        _, token, won = backend.set_state(b"%d" % number, token)
        assert won
    assert server.num_keys() < 25


@pytest.mark.parametrize("kind", ["c10d-tcp", "c10d-file", "c10d-hash"])
def test_c10d_counts_beats_beside_the_state(kind, tmp_path):
    backend = BACKENDS[kind](tmp_path)
    assert backend.read_beats(["a", "b"]) == [0, 0]
    backend.beat("a")
    backend.beat("a")
    assert backend.read_beats(["a", "b"]) == [2, 0]
    backend.beat("b")
    assert backend.read_beats(["b", "a"]) == [1, 2]
    backend.drop_beat("a")
    assert backend.read_beats(["b", "a"]) == [1, 0]


def test_c10d_says_so_when_its_store_is_gone():
    server = tcp_store()
    backend = C10dRendezvousBackend(client(server), "run")
    backend.set_state(b"x")
    del server
    with pytest.raises(RendezvousConnectionError, match="the store does not answer: "):
        backend.get_state()


def test_a_c10d_endpoint_connects_again_after_an_error():
    servers = [tcp_store()]
    backend = ReconnectingBackend(lambda: client(servers[0]), "run")
    backend.set_state(b"x")
    servers[0] = tcp_store()
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()
    assert backend.get_state() is None


# ---- create_backend


def parameters(endpoint="localhost:0", **config):
    return RendezvousParameters("c10d", endpoint, "run", 1, 1, **config)


@pytest.mark.parametrize("kind", ["tcp", " TCP "])
def test_create_backend_makes_a_tcp_store(kind):
    backend, store = create_backend(parameters(store_type=kind, read_timeout="7"))
    assert isinstance(store, TCPStore)
    assert store.timeout == timedelta(seconds=7)
    assert backend.name == "c10d"
    assert backend.set_state(b"x")[2]
    assert base64.b64decode(store.get("torch.rendezvous.run")) == b"x"


def test_create_backend_makes_a_file_store(tmp_path):
    backend, store = create_backend(parameters(str(tmp_path / "x"), store_type="File"))
    assert isinstance(store, FileStore)
    assert store.path == str(tmp_path / "x")
    assert backend.set_state(b"x")[2]
    _, elsewhere = create_backend(parameters("", store_type="file"))
    assert elsewhere.path


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"store_type": "dummy"}, "store_type is 'dummy': it must be 'tcp' or 'file'"),
        ({"read_timeout": "0"}, "read_timeout is 0: it must be a whole number of seconds above 0"),
        ({"read_timeout": "-1"}, "read_timeout is -1"),
        ({"read_timeout": "soon"}, "read_timeout"),
        ({"is_host": "maybe"}, "is_host"),
    ],
)
def test_create_backend_refuses_what_cannot_be_meant(config, problem):
    with pytest.raises(ValueError, match=problem):
        create_backend(parameters(**config))


def test_create_backend_needs_a_file_that_can_be_used(tmp_path):
    with pytest.raises(RendezvousConnectionError, match="cannot be used as a store"):
        create_backend(parameters(str(tmp_path / "missing" / "x"), store_type="file"))


def test_the_first_on_the_right_machine_serves_and_the_others_connect():
    first = connect("127.0.0.1", 0, 5, None)
    second = connect("127.0.0.1", first.port, 5, None)
    third = connect("127.0.0.1", first.port, 5, False)
    first.set("k", b"v")
    assert second.get("k") == third.get("k") == b"v"
    assert DEFAULT_PORT == 29400


def test_a_node_that_must_serve_and_cannot_says_so():
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RendezvousConnectionError, match=f"127.0.0.1:{port} could not be served within 1 s: "):
            connect("127.0.0.1", port, 1, True)


def test_a_store_that_nobody_serves_is_said_to_be_unreachable():
    with pytest.raises(RendezvousConnectionError, match=r"the store at 127.0.0.1:1 could not be reached within 1 s: "):
        connect("127.0.0.1", 1, 1, False)


def test_a_machine_knows_its_own_addresses_by_binding_them():
    assert is_local("localhost")
    assert is_local("127.0.0.1")
    assert is_local("127.9.9.9")
    assert not is_local("192.0.2.1")
    assert not is_local("no.such.host.invalid")
