"""torch's names on etcd v3: EtcdStore, EtcdRendezvousBackend, EtcdRendezvousHandler, EtcdClient and EtcdServer.

test_dist_store.py and test_c10d_rendezvous_backend.py test the contracts that stores and backends share.
"""

from __future__ import annotations

import gc
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from rdzv.engines.etcd.driver import EtcdDriver
from rdzv.engines.etcd.server import EtcdServer as Server
from rdzv.engines.port import List, Put
from rdzv.errors import SettingsError, Unreachable
from rdzv.system.portal import Portal
from rdzv.torchrun.rendezvous import etcd_rendezvous, etcd_rendezvous_backend, etcd_store
from rdzv.torchrun.rendezvous.etcd_client import EtcdClient, client_of
from rdzv.torchrun.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend
from rdzv.torchrun.rendezvous.etcd_server import EtcdServer, find_free_port, stop_etcd
from rdzv.torchrun.rendezvous.etcd_store import EtcdSpace, EtcdStore
from support.ports import free_port
from support.strikes import STRIKE
from support.timing import within
from support.torchrun_jobs import wait_for

DEADLINE_S = 60.0


@pytest.fixture
def server(etcd_server):
    return etcd_server


@pytest.fixture
def client(etcd_client):
    return etcd_client


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    return request.node.name


def requests(server: EtcdServer) -> int:
    """How many reads and writes etcd was asked for, as it counts them itself."""
    with urllib.request.urlopen(f"http://{server.get_endpoint()}/metrics", timeout=DEADLINE_S) as page:
        text = page.read().decode()
    counts = re.findall(r'^grpc_server_started_total\{grpc_method="(?:Txn|Range|Put)".*\} (\S+)$', text, re.MULTILINE)
    return int(sum(map(float, counts)))


# ---- the store


def test_ten_thousand_keys_are_written_waited_for_and_counted(client, prefix):
    store = EtcdStore(client, prefix, timedelta(seconds=60))
    names = [f"key/{n}" for n in range(10_000)]
    store.multi_set(names, [name.encode() * 2 for name in names])
    assert store.num_keys() == 10_000
    assert EtcdStore(client, prefix + "2").num_keys() == 0
    assert store.multi_get(names) == [name.encode() * 2 for name in names]
    store.wait(names)


def test_a_wait_is_woken_by_a_watch_and_asks_nothing_meanwhile(server, client, prefix):
    store = EtcdStore(client, prefix, timedelta(seconds=60))
    store.set("already", "there")
    before = requests(server)
    with ThreadPoolExecutor(8) as pool:
        waits = [pool.submit(store.multi_get, ["already", f"later{n % 2}"]) for n in range(8)]
        time.sleep(1.5)
        # Each reads once before it watches; the driver may ask a few times for the revision that is reached.
        assert requests(server) - before <= 3 * len(waits)
        began_at = time.monotonic()
        other = EtcdStore(server.get_client(), prefix)
        other.multi_set(["later0", "later1"], ["0", "1"])
        assert [wait.result(DEADLINE_S)[1] for wait in waits] == [b"%d" % (n % 2) for n in range(8)]
        within(time.monotonic() - began_at, 3 * 1.0)
    other.client.close()


def test_a_timeout_is_torchs_error_and_names_the_store_and_the_key(client, prefix):
    store = EtcdStore(client, prefix, timedelta(seconds=0.3))
    for wait in (lambda: store.get("absent"), lambda: store.wait(["absent"], timedelta(seconds=0.3))):
        with pytest.raises(DistStoreError) as caught:
            wait()
        assert str(caught.value).startswith(f"etcd store {prefix!r}: 'absent' not set within 0.3 s; ")


def test_many_writers_count_each_other_exactly_once(client, prefix):
    store = EtcdStore(client, prefix, timedelta(seconds=60))
    with ThreadPoolExecutor(16) as pool:
        counts = sorted(pool.map(lambda _: store.add("n", 1), range(100)))
    assert counts == list(range(1, 101))


def test_a_store_that_nobody_uses_any_more_expires(server, client, prefix):
    """While somebody uses it, it stays for longer than its time."""
    short = server.get_client()
    space = EtcdSpace(short, prefix, ttl_s=2)
    space.multi_set({"k": "v"})

    async def keys() -> int:
        session = await client.session()
        return len((await session.txn(then=[List(f"rdzv/store/{prefix}".replace("[", "%5B"))])).reads[0])

    time.sleep(3.5)
    assert space.multi_get(["k"]) == [b"v"]
    assert client.run(keys()) >= 2
    short.close()
    wait_for(lambda: not client.run(keys()), "the keys expire")


def test_an_etcd_that_comes_back_empty_is_told_and_then_used(prefix):
    port = free_port()
    server = Server(port=port)
    server.start()
    client = EtcdClient(server.url, read_timeout_s=1)
    store, backend = EtcdStore(client, prefix, timedelta(seconds=1)), EtcdRendezvousBackend(client, prefix)
    store.set("k", "v")
    assert backend.set_state(b"x")[2]
    server.stop()
    server.start()
    with pytest.raises(DistNetworkError):
        store.get("k")
    with pytest.raises(DistStoreError, match="not set within"):
        store.get("k")
    store.set("k", "again")
    assert store.get("k") == b"again"
    assert until_answered(backend.get_state) is None
    assert until_answered(lambda: backend.set_state(b"y"))[2]
    client.close()
    server.stop()


def until_answered(ask: Callable[[], Any]) -> Any:
    """The first attempt may still be one on the old connection."""
    try:
        return ask()
    except RendezvousConnectionError:
        return ask()


FORK = """
import os, signal, sys, threading
from datetime import timedelta
from rdzv.system.portal import Portal
from rdzv.torchrun.rendezvous.etcd_client import EtcdClient
from rdzv.torchrun.rendezvous.etcd_store import EtcdStore

store = EtcdStore(EtcdClient(sys.argv[1]), sys.argv[2], timedelta(seconds=60))
leased = store._space._handle
store.add("n", 1)
parents = leased.id, leased._renewal
forked = threading.Event()

def hold():
    with Portal._gate:
        held.set()
        forked.wait()

held = threading.Event()
thread = threading.Thread(target=hold)  # Another thread is in a call when the child is forked.
thread.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    print(store.add("n", 1), leased.id == parents[0], leased._renewal is parents[1], flush=True)
    os._exit(0)
ended = os.waitpid(child, 0)[1]
forked.set()
print(ended, store.add("n", 1))
store.client.close()
"""


def test_a_forked_child_goes_on_with_the_store_on_its_own_connection(server, prefix):
    """As a process of its own: its writes have another id, and it renews the lease, too."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, server.get_endpoint(), prefix],
        capture_output=True, text=True, timeout=2 * DEADLINE_S, check=True,
    )  # fmt: skip
    assert done.stdout == "2 False False\n0 3\n"


# ---- the client


def test_a_client_that_was_closed_refuses_every_call_at_once_and_does_not_connect_again(server, prefix):
    client = server.get_client()
    store, backend = EtcdStore(client, prefix), EtcdRendezvousBackend(client, prefix)
    store.set("k", "v")
    assert backend.set_state(b"x")[2]
    client.close()
    client.close()
    threads = {thread.name for thread in threading.enumerate()}
    began_at = time.monotonic()
    for call, error in (
        (client.connect, Unreachable),
        (lambda: store.get("k"), DistNetworkError), (lambda: store.set("k", "w"), DistNetworkError),
        (backend.get_state, RendezvousConnectionError), (lambda: backend.set_state(b"y"), RendezvousConnectionError),
    ):  # fmt: skip
        with pytest.raises(error, match="this client was closed; make a new EtcdClient"):
            call()
    within(time.monotonic() - began_at, 1.0)
    assert {thread.name for thread in threading.enumerate()} <= threads


def test_a_client_that_is_collected_ends_its_use_of_the_portal():
    async def nothing() -> None:
        pass

    def users() -> int:
        return sum(len(portal._users) for portal in Portal._current.values())

    before = users()
    client = EtcdClient("127.0.0.1:1")
    client.run(nothing())
    client.itself = client
    assert users() == before + 1
    del client
    gc.collect()
    wait_for(lambda: users() == before, "the client's use of the portal ends")


STRUCK = """
import time
from rdzv.errors import Unreachable
from rdzv.torchrun.rendezvous.etcd_client import EtcdClient

async def nothing():
    pass

def run(client):
    try:
        client.run(nothing())
    except Unreachable:
        pass

def life():
    run(client)
    client.drop_session()
    client.close()

signal.signal(signal.SIGUSR1, lambda *_: act(client))
for act in (run, EtcdClient.drop_session, EtcdClient.close):
    place = left = 0
    while True:
        place += 1
        client = EtcdClient("127.0.0.1:1")
        steps = strike(place, life, ("etcd_client.py", "portal.py"))
        while Portal._running:
            time.sleep(0.001)
        left += len(Portal._current)
        if steps < place:
            break
    print(place > 100, left)
"""


def test_a_signal_handler_can_use_the_client_at_any_moment():
    done = subprocess.run(
        [sys.executable, "-c", STRIKE + STRUCK], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False
    )
    assert (done.stdout, done.stderr) == ("True 0\n" * 3, "")


# ---- the backend


def test_a_backend_of_another_run_or_a_foreign_token_has_no_effect(client, prefix):
    backend = EtcdRendezvousBackend(client, "run", key_prefix=prefix)
    assert backend.name == "etcd-v2"
    assert backend.set_state(b"x", token=7) is None, "there is no state, so no token can match"
    state, token, _ = backend.set_state(b"first")
    assert backend.set_state(b"late", "no token") == (state, token, False)
    assert EtcdRendezvousBackend(client, "run2", key_prefix=prefix).get_state() is None


def test_a_backend_refuses_what_cannot_be_right(client, prefix):
    with pytest.raises(ValueError, match="run id"):
        EtcdRendezvousBackend(client, "")
    backend = EtcdRendezvousBackend(client, "run", key_prefix=prefix)
    with pytest.raises(RendezvousStateError):
        backend.set_state(bytes(2_000_000))

    async def spoil(state: bytes) -> None:
        await (await client.session()).txn(then=[Put(f"rdzv/state/{prefix}/run", state)])

    for state in (b"garbage", b"\x92\xa1\xff\xc4\x00"):
        client.run(spoil(state))
        with pytest.raises(RendezvousStateError):
            backend.get_state()


def test_a_backend_whose_etcd_is_away_raises_torchs_error(monkeypatch):
    monkeypatch.setitem(EtcdDriver.__init__.__kwdefaults__, "connect_timeout_s", 1.0)
    client = EtcdClient("127.0.0.1:1", read_timeout_s=1)
    backend = EtcdRendezvousBackend(client, "run")
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(backend.get_state), pool.submit(backend.set_state, b"x")]
        for call in calls:
            with pytest.raises(RendezvousConnectionError) as caught:
                call.result(DEADLINE_S)
            assert str(caught.value).startswith("engine etcd://127.0.0.1:1 is unreachable after 1 s: ")
    client.close()


def test_a_backend_is_made_only_where_etcd_answers(monkeypatch):
    monkeypatch.setitem(EtcdDriver.__init__.__kwdefaults__, "connect_timeout_s", 1.0)
    with pytest.raises(RendezvousConnectionError, match=r"engine etcd://127\.0\.0\.1:1 is unreachable"):
        etcd_rendezvous_backend.create_backend(RendezvousParameters("etcd-v2", "127.0.0.1:1", "run", 1, 1))


def test_helpers_with_torchs_names(tmp_path):
    with find_free_port() as held, socket.socket() as one:
        assert one.connect_ex(held.getsockname()) == 0
    folder = tmp_path / "data"
    folder.mkdir()
    process = subprocess.Popen(["sleep", "60"])
    stop_etcd(process, str(folder))
    assert (process.returncode, folder.exists()) == (-15, False)
    stop_etcd(process)
    stop_etcd(None)
    began_at = time.monotonic()
    etcd_store.cas_delay()
    within(time.monotonic() - began_at, 1.0)


def parameters(server: EtcdServer, run_id: str, **config: object) -> RendezvousParameters:
    return RendezvousParameters("etcd", server.get_endpoint(), run_id, 2, 2, local_addr="127.0.0.1", **config)


def both(calls: list[Callable[[], object]]) -> list[object]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(DEADLINE_S) for future in futures]


def test_torchs_own_dynamic_rendezvous_runs_on_the_backend(server, prefix):
    """The code that users have today, with only the import of the backend changed."""
    made = [etcd_rendezvous_backend.create_backend(parameters(server, prefix)) for _ in range(2)]
    handlers = [
        DynamicRendezvousHandler.from_backend(prefix, store, backend, 2, 2, local_addr="127.0.0.1") for backend, store in made
    ]
    found = both([handler.next_rendezvous for handler in handlers])
    assert sorted((info.rank, info.world_size) for info in found) == [(0, 2), (1, 2)]
    found[0].store.set("k", "v")
    assert found[1].store.get("k") == b"v"
    assert all(handler.shutdown() for handler in handlers)
    for backend, _ in made:
        backend._client.close()


# ---- the handler


def test_the_etcd_rendezvous_gives_ranks_a_store_and_extra_data(server, prefix):
    handlers = [etcd_rendezvous.create_rdzv_handler(parameters(server, prefix)) for _ in range(2)]
    assert {handler.get_backend() for handler in handlers} == {"etcd"}
    assert {handler.get_run_id() for handler in handlers} == {prefix}
    found = both([handler.next_rendezvous for handler in handlers])
    assert sorted((info.rank, info.world_size) for info in found) == [(0, 2), (1, 2)]
    assert len({(info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in found}) == 1
    implementations = [handler._rdzv_impl for handler in handlers]
    assert implementations[0].get_rdzv_state()["status"] == "final"
    version = int(implementations[0].get_rdzv_state()["version"])
    implementations[0].store_extra_data(version, "k", "left for you")
    assert implementations[1].load_extra_data(version, "k", timeout=DEADLINE_S) == "left for you"
    implementations[0].setup_kv_store(version).set("x", "y")
    assert implementations[1].setup_kv_store(version).get("x") == b"y"
    assert [handler.num_nodes_waiting() for handler in handlers] == [0, 0]
    assert [handler.is_closed() for handler in handlers] == [False, False]
    assert both([handler.shutdown for handler in handlers]) == [True, True]


def test_waiting_members_are_counted_and_a_closed_run_refuses(server, client, prefix):
    members = [etcd_rendezvous.EtcdRendezvous(client, "/torchelastic/p2p", prefix, 1, 1, 30, 0.1) for _ in range(2)]
    assert members[0].get_rdzv_state()["status"] == "setup"
    version, rank, size = members[0].rendezvous_barrier()
    assert (version, rank, size) == (1, 0, 1)
    pool = ThreadPoolExecutor(1)
    waiting = pool.submit(members[1].rendezvous_barrier)
    wait_for(lambda: members[0].get_rdzv_state()["num_workers_waiting"] == 1, "the second member waits")
    members[0].set_closed()
    with pytest.raises(RendezvousClosedError):
        waiting.result(DEADLINE_S)
    pool.shutdown()
    assert members[0].get_rdzv_state()["status"] == "closed"
    for member in members:
        member.member.leave()


def test_a_barrier_without_enough_members_times_out_with_torchs_error(client, prefix):
    alone = etcd_rendezvous.EtcdRendezvous(client, "p", prefix, 2, 2, 0.5, 0.1)
    with pytest.raises(RendezvousTimeoutError, match="waiting for 1 more"):
        alone.rendezvous_barrier()
    alone.member.leave()


# ---- the client and the server


def test_torchs_keys_say_where_and_by_which_right(tmp_path):
    found = client_of(
        RendezvousParameters("etcd", "h1:1,h2", "run", 1, 1, protocol="https", ca_cert="ca.pem", read_timeout="7")
    )
    assert (found.endpoint, found.read_timeout_s, found.options) == ("etcds://h1:1,h2:2379", 7.0, {"tls_ca": "ca.pem"})
    with pytest.raises(SettingsError, match="protocol is 'ftp'"):
        client_of(RendezvousParameters("etcd", "h1", "run", 1, 1, protocol="ftp"))
    with pytest.raises(SettingsError, match="is not an etcd's"):
        EtcdClient("memory://x")


def test_the_server_takes_torchs_arguments_and_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ETCD_BINARY_PATH", str(tmp_path / "absent"))
    with pytest.raises(SettingsError, match="it must be a program"):
        EtcdServer().start(timeout=5)
    monkeypatch.delenv("TORCHELASTIC_ETCD_BINARY_PATH")
    server = EtcdServer(data_dir=str(tmp_path / "data"))
    server.start(timeout=60, num_retries=3, stderr=subprocess.DEVNULL)
    assert server.get_endpoint() == f"{server.get_host()}:{server.get_port()}"
    server.stop()
