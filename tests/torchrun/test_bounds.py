"""Every public call ends within its documented time while the engine is stopped, killed or was never there.

All scenarios run at once, because they mostly wait. Each call is timed in a thread of its own.
"""

from __future__ import annotations

import fcntl
import inspect
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousTimeoutError,
)

import rdzv
from rdzv import blocking
from rdzv.member.member import CONNECT_S, LEAVE_S, STOP_S
from rdzv.member.run_status import EXPLAIN_S
from rdzv.torchrun import plugin
from rdzv.torchrun.rendezvous import (
    C10dRendezvousBackend,
    c10d_rendezvous_backend,
    create_handler,
    etcd_rendezvous_backend,
)
from rdzv.torchrun.rendezvous.etcd_client import EtcdClient
from rdzv.torchrun.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend
from rdzv.torchrun.rendezvous.etcd_store import EtcdStore
from support.etcd_cluster import Cluster
from support.ports import free_port
from support.torchrun_jobs import ServeProcess

READ_S = 1.0
"""`read_timeout`, and the time that each call is given which takes one."""
AT_ONCE_S = 0.0
LEFT_S = LEAVE_S + STOP_S + 2.0
"""Goodbye, the end of the member's task, and the end of a register's threads."""
SLACK_S = 3.0
"""What a busy machine may add."""
QUICK = {"last_call": "0", "lease": "3", "read_timeout": "1", "outage_grace": "2", "join_timeout": "1", "close_timeout": "1"}
SERVER = """
import sys, time
from torch.distributed import PrefixStore, Store, TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
print("serves", flush=True)
time.sleep(600)
"""


class Call(NamedTuple):
    """A call of the API, and the longest time that its documentation allows."""

    bound_s: float
    run: Callable[[], Any]


class Timed(NamedTuple):
    """A call that was made: its bound, how long it took, and its result or error."""

    bound_s: float
    took_s: float
    result: Any


def make_calls(calls: dict[str, Call]) -> dict[str, Timed]:
    """Make all calls at once."""

    def timed(call: Call) -> Timed:
        began_at = time.monotonic()
        try:
            result: Any = call.run()
        except Exception as error:  # noqa: BLE001
            result = error
        return Timed(call.bound_s, time.monotonic() - began_at, result)

    with ThreadPoolExecutor(len(calls)) as pool:
        return dict(zip(calls, pool.map(timed, calls.values()), strict=True))


# ---- engines that can be broken


class Engine(NamedTuple):
    """An engine in another process: its endpoint for `rdzv`, how to make a handler of torch's, and how to break it."""

    endpoint: str
    handler: Callable[[str], RendezvousHandler]
    stop: Callable[[], object]
    kill: Callable[[], object]
    others: Callable[[], dict[str, Call]]
    """Calls of torch's other names on this engine."""


def parameters(backend: str, endpoint: str, run_id: str, **more: str) -> RendezvousParameters:
    return RendezvousParameters(backend, endpoint, run_id, 1, 1, "127.0.0.1", **QUICK, **more)


def no_others() -> dict[str, Call]:
    return {}


@contextmanager
def embedded(_: Path) -> Iterator[Engine]:
    with ServeProcess() as server:

        def handler(run_id: str) -> RendezvousHandler:
            return plugin.create_rdzv(parameters("rdzv", server.endpoint, run_id, is_host="false"))

        yield Engine(server.endpoint, handler, lambda: server.signal(signal.SIGSTOP), server.kill, no_others)


@contextmanager
def etcd(_: Path) -> Iterator[Engine]:
    with Cluster(1) as cluster:
        client = EtcdClient(cluster.endpoint(), read_timeout_s=READ_S)
        store, backend = EtcdStore(client, "bounds"), EtcdRendezvousBackend(client, "bounds")
        store.set("k", "v")
        backend.set_state(b"x")

        def handler(run_id: str) -> RendezvousHandler:
            return plugin.create_etcd_v3(parameters("etcd-v3", cluster.endpoint(), run_id))

        def others() -> dict[str, Call]:
            return {
                "EtcdRendezvousBackend.get_state": Call(READ_S + CONNECT_S, backend.get_state),
                "EtcdRendezvousBackend.set_state": Call(READ_S + CONNECT_S, lambda: backend.set_state(b"y")),
                **store_calls("EtcdStore", store),
            }

        yield Engine(cluster.endpoint(), handler, cluster.nodes[0].stop, cluster.nodes[0].kill, others)
        client.close()


def store_calls(label: str, store: Store) -> dict[str, Call]:
    """Return all calls of a store of torch."""
    limit = timedelta(seconds=READ_S)
    store.set_timeout(limit)
    local: dict[str, Callable[[], Any]] = {
        "set_timeout": lambda: store.set_timeout(limit),
        "timeout": lambda: store.timeout,
        "has_extended_api": store.has_extended_api,
        "clone": store.clone,
    }
    remote: dict[str, Callable[[], Any]] = {
        "set": lambda: store.set("k", "v"),
        "get": lambda: store.get("missing"),
        "wait": lambda: store.wait(["missing"], limit),
        "add": lambda: store.add("n", 1),
        "append": lambda: store.append("k", "v"),
        "check": lambda: store.check(["k"]),
        "compare_set": lambda: store.compare_set("k", "v", "w"),
        "delete_key": lambda: store.delete_key("k"),
        "multi_get": lambda: store.multi_get(["missing"]),
        "multi_set": lambda: store.multi_set(["k"], ["v"]),
        "num_keys": store.num_keys,
        "list_keys": store.list_keys,
        "queue_push": lambda: store.queue_push("queue", "v"),
        "queue_pop": lambda: store.queue_pop("queue"),
        "queue_len": lambda: store.queue_len("queue"),
        "barrier": lambda: store.barrier("all", 2, limit),
    }
    bounds = ((AT_ONCE_S, local), (READ_S, remote))
    return {f"{label}.{name}": Call(bound_s, run) for bound_s, calls in bounds for name, run in calls.items()}


@contextmanager
def c10d(_: Path) -> Iterator[Engine]:
    port = free_port()
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "serves\n"

        def handler(run_id: str) -> RendezvousHandler:
            store = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
            return create_handler(store, C10dRendezvousBackend(store, run_id), parameters("c10d", "", run_id))

        def others() -> dict[str, Call]:
            given = parameters("c10d", f"127.0.0.1:{port}", "new", is_host="false")
            return {"create_backend": Call(READ_S + 1.0, lambda: c10d_rendezvous_backend.create_backend(given))}

        def stop() -> None:
            server.send_signal(signal.SIGSTOP)

        yield Engine(f"c10d://127.0.0.1:{port}?is_host=false", handler, stop, server.kill, others)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


@contextmanager
def file(folder: Path) -> Iterator[Engine]:
    """A file has no process. But a process that is stopped may hold its lock."""
    path = folder / "run"
    with ExitStack() as held:

        def lock() -> None:
            descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT)
            held.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)

        def handler(run_id: str) -> RendezvousHandler:
            return plugin.create_rdzv(parameters("rdzv", f"file://{path}", run_id))

        yield Engine(f"file://{path}", handler, lock, lock, no_others)


ENGINES = {"embedded": embedded, "etcd": etcd, "c10d": c10d, "file": file}
FAULTS = [(name, fault) for name in ENGINES for fault in ("stopped", "killed") if (name, fault) != ("file", "killed")]


ABSENT = ["127.0.0.1:{port}", "etcd://127.0.0.1:{port}", "c10d://127.0.0.1:{port}?is_host=false"]


def member(endpoint: str, run_id: str) -> rdzv.Rendezvous:
    options = {key: value for key, value in QUICK.items() if key != "close_timeout"}
    where, _, conf = endpoint.partition("?")
    own = dict([conf.split("=")]) if conf else {}
    if "://" not in where:
        own = {"is_host": "false"}
    return rdzv.Rendezvous(where, run_id=run_id, min_nodes=1, max_nodes=1, slot=run_id, **options, **own)


def member_calls(held: rdzv.Rendezvous, world: blocking.World, fresh: list[rdzv.Rendezvous]) -> dict[str, Call]:
    """Return all calls but `join` and `leave` of a member that holds a round, and some of members that come now."""
    store = world.store
    given = {
        "Rendezvous.prepare": Call(AT_ONCE_S, fresh[0].prepare),
        "Rendezvous.wait_changed": Call(READ_S, lambda: held.wait_changed(READ_S)),
        "Rendezvous.status": Call(READ_S, held.status),
        "Rendezvous.serve_workers": Call(AT_ONCE_S, held.serve_workers),
        "Rendezvous.done": Call(READ_S, lambda: held.done(READ_S)),
        "Rendezvous.drain": Call(READ_S, lambda: held.drain("bounds", READ_S)),
        "Rendezvous.saved": Call(AT_ONCE_S, held.saved),
        "Rendezvous.wait_drained": Call(AT_ONCE_S, held.wait_drained),
        "Rendezvous.close_run": Call(READ_S, lambda: held.close_run("bounds", READ_S)),
        "World.members": Call(READ_S, world.members),
        "World.take_bootstrap_socket": Call(AT_ONCE_S, lambda: world.take_bootstrap_socket().close()),
        "Store.set_timeout": Call(AT_ONCE_S, lambda: store.set_timeout(READ_S)),
        "Store.set": Call(READ_S, lambda: store.set("k", "v")),
        "Store.multi_set": Call(READ_S, lambda: store.multi_set({"k": "v"})),
        "Store.get": Call(READ_S, lambda: store.get("missing", READ_S)),
        "Store.multi_get": Call(READ_S, lambda: store.multi_get(["missing"], READ_S)),
        "Store.wait": Call(READ_S, lambda: store.wait(["missing"], READ_S)),
        "Store.check": Call(READ_S, lambda: store.check(["k"])),
        "Store.add": Call(READ_S, lambda: store.add("n", 1)),
        "Store.append": Call(READ_S, lambda: store.append("k", "v")),
        "Store.compare_set": Call(READ_S, lambda: store.compare_set("k", "v", "w")),
        "Store.delete": Call(READ_S, lambda: store.delete("k")),
        "Store.num_keys": Call(READ_S, store.num_keys),
        "Store.list_keys": Call(READ_S, store.list_keys),
    }
    return {**given, **fresh_calls(fresh)}


def fresh_calls(fresh: list[rdzv.Rendezvous]) -> dict[str, Call]:
    return {
        "Rendezvous.join of a newcomer": Call(READ_S + EXPLAIN_S, lambda: fresh[1].join(READ_S)),
        "Rendezvous.status of a newcomer": Call(READ_S + CONNECT_S, fresh[2].status),
    }


def handler_calls(handler: RendezvousHandler, store: Store) -> dict[str, Call]:
    """Return all calls of a handler but the two that end its round, and those of its store."""
    return {
        "Handler.get_backend": Call(AT_ONCE_S, handler.get_backend),
        "Handler.get_run_id": Call(AT_ONCE_S, handler.get_run_id),
        "Handler.use_agent_store": Call(AT_ONCE_S, lambda: handler.use_agent_store),
        "Handler.num_nodes_waiting": Call(AT_ONCE_S, handler.num_nodes_waiting),
        "Handler.is_closed": Call(READ_S, handler.is_closed),
        "Handler.set_closed": Call(READ_S, handler.set_closed),
        **store_calls("info.store", store),
        "PrefixStore.add": Call(READ_S, lambda: PrefixStore("p", store).add("n", 1)),
    }


def leave_all(members: list[rdzv.Rendezvous]) -> dict[str, Call]:
    return {f"Rendezvous.leave {index}": Call(LEFT_S, one.leave) for index, one in enumerate(members)}


def first_round(handler: RendezvousHandler) -> RendezvousInfo:
    """Join as often as it takes: the time that is measured later is short for a machine on which all walks begin at once."""
    for _ in range(9):
        with suppress(RendezvousTimeoutError):
            return handler.next_rendezvous()
    return handler.next_rendezvous()


def walk(name: str, fault: str, folder: Path) -> dict[str, Timed]:
    """Form rounds, break the engine, and make every call."""
    with ENGINES[name](folder) as engine:
        held = member(engine.endpoint, "held")
        fresh = [member(engine.endpoint, f"fresh{n}") for n in range(3)]
        handler = engine.handler("handler")
        world = held.join(10.0)
        world.store.set_timeout(READ_S)
        info = first_round(handler)
        (engine.stop if fault == "stopped" else engine.kill)()
        made = make_calls({**member_calls(held, world, fresh), **handler_calls(handler, info.store), **engine.others()})
        again = {
            "Rendezvous.join": Call(READ_S + EXPLAIN_S, lambda: held.join(READ_S)),
            "Handler.next_rendezvous": Call(READ_S + EXPLAIN_S, handler.next_rendezvous),
        }
        made |= make_calls(again)
        made |= make_calls({**leave_all([held, *fresh]), "Handler.shutdown": Call(LEFT_S, handler.shutdown)})
    return made


def walk_without_an_engine(endpoint: str) -> dict[str, Timed]:
    where = endpoint.format(port=free_port())
    fresh = [member(where, f"absent{n}") for n in range(3)]
    handlers = [absent_handler(where, f"absent handler {n}") for n in range(3)]
    calls = {
        "Rendezvous.prepare": Call(AT_ONCE_S, fresh[0].prepare),
        "Handler.next_rendezvous": Call(READ_S + EXPLAIN_S, handlers[0].next_rendezvous),
        "Handler.is_closed": Call(READ_S + CONNECT_S, handlers[1].is_closed),
        "Handler.set_closed": Call(READ_S, handlers[1].set_closed),
        "Handler.num_nodes_waiting": Call(AT_ONCE_S, handlers[2].num_nodes_waiting),
    }
    if where.startswith("etcd"):
        given = parameters("etcd-v2", where.partition("://")[2], "absent")
        calls["create_backend"] = Call(READ_S + CONNECT_S, lambda: etcd_rendezvous_backend.create_backend(given))
    made = make_calls({**calls, **fresh_calls(fresh)})
    ends = {f"Handler.shutdown {n}": Call(LEFT_S, one.shutdown) for n, one in enumerate(handlers)}
    return made | make_calls({**leave_all(fresh), **ends})


def absent_handler(endpoint: str, run_id: str) -> RendezvousHandler:
    where = endpoint.partition("?")[0]
    if where.startswith("etcd"):
        return plugin.create_etcd_v3(parameters("etcd-v3", where.partition("://")[2], run_id))
    return plugin.create_rdzv(parameters("rdzv", where, run_id, is_host="false"))


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Timed]]:
    with ThreadPoolExecutor(len(FAULTS) + len(ABSENT)) as pool:
        walking = {
            (name, fault): pool.submit(walk, name, fault, tmp_path_factory.mktemp(f"{name}-{fault}")) for name, fault in FAULTS
        }
        walking |= {(endpoint, "absent"): pool.submit(walk_without_an_engine, endpoint) for endpoint in ABSENT}
        return {key: future.result() for key, future in walking.items()}


def late(made: dict[str, Timed]) -> dict[str, Timed]:
    return {name: one for name, one in made.items() if one.took_s > one.bound_s + SLACK_S}


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_every_call_ends_in_time_while_the_engine_is_away(walks, name, fault):
    assert late(walks[name, fault]) == {}


@pytest.mark.parametrize(("name", "fault"), FAULTS)
def test_the_engine_was_really_away(walks, name, fault):
    """Calls that need an answer have failed, and a member that could not say goodbye says so."""
    made = walks[name, fault]
    failed = {call for call, one in made.items() if isinstance(one.result, Exception)}
    assert {"Store.set", "Store.add", "Rendezvous.done", "Handler.set_closed", "Handler.next_rendezvous"} <= failed
    assert made["Handler.shutdown"].result is False
    assert made["Rendezvous.leave 0"].result is False


@pytest.mark.parametrize("endpoint", ABSENT)
def test_calls_end_in_time_if_there_never_was_an_engine(walks, endpoint):
    made = walks[endpoint, "absent"]
    assert late(made) == {}
    assert isinstance(made["Rendezvous.join of a newcomer"].result, rdzv.errors.JoinTimeout)
    assert isinstance(made["Rendezvous.status of a newcomer"].result, rdzv.errors.Unreachable)
    assert isinstance(made["Handler.next_rendezvous"].result, RendezvousTimeoutError)
    assert made["Handler.num_nodes_waiting"].result == 0


def test_the_walk_leaves_no_public_call_out(walks):
    public = {
        f"{label}.{name}"
        for label, kind in (("Rendezvous", rdzv.Rendezvous), ("World", blocking.World), ("Store", blocking.Store))
        for name, _ in inspect.getmembers(kind, inspect.isfunction)
        if name[0] != "_"
    }
    public |= {f"Handler.{name}" for name in dir(RendezvousHandler) if name[0] != "_"}
    public |= {f"{label}.{name}" for label in ("info.store", "EtcdStore") for name in dir(Store) if name[0] != "_"}
    walked = {name.partition(" ")[0] for name in walks["etcd", "stopped"]}
    assert public <= walked
