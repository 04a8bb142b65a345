"""Behaviours of torch's public rendezvous API, written so that they run on torch's package and on ours.

A behaviour is a function of a `Stage`: it uses handlers as their users do, and returns what it observed. `KITS` says how
handlers are made: by torch's package over c10d, which is the reference, and by ours over each engine.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, HashStore, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from support.ports import free_port
from support.torchrun_jobs import ServeProcess

TORCH = "torch.distributed.elastic.rendezvous"
OURS = "rdzv.torchrun.rendezvous"
LONG_S = 60.0
SOON_S = 10.0
"""How long an observation may take to come about on a busy machine."""
COMMON = {
    "join_timeout": 20, "last_call_timeout": 1, "close_timeout": 2, "keep_alive_interval": 1, "keep_alive_max_attempt": 3,
    "read_timeout": 3,
}  # fmt: skip
"""Keys of torch's, in the values that both packages get."""
ENVIRONMENT = {"TORCH_CPP_LOG_LEVEL": "FATAL", "RES_OPTIONS": "timeout:1 attempts:1"}
"""A TCPStore looks up the name of every address that it connects to or accepts, the server in its only thread.

Where the name server loses a query, all clients of the store wait for glibc's timeout, which is 5 s twice if nobody changes it.
"""
TCP_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
QUICK = {"grow_every": "0"}
"""Settings of ours that torch does not have."""


def outcome(call: Callable[[], Any]) -> Any:
    """Return the call's result, or the name of its exception's class."""
    try:
        return call()
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return type(error).__name__


def outcome_and_text(call: Callable[[], Any]) -> tuple[str, bool]:
    """Return the name of the exception's class, and whether it has a message."""
    try:
        return str(call()), True
    except (Exception, SystemExit) as error:  # noqa: BLE001
        return type(error).__name__, bool(str(error))


def took_at_most(limit_s: float, call: Callable[[], Any]) -> bool:
    began_at = time.monotonic()
    outcome(call)
    return time.monotonic() - began_at <= limit_s


def soon(look: Callable[[], Any], wanted: Any, limit_s: float = SOON_S) -> Any:
    """Poll until the result is the wanted one, and return the last result."""
    deadline = time.monotonic() + limit_s
    while (found := outcome(look)) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def place(info: Any) -> Any:
    """Return rank and size, or the name of the exception that came instead."""
    return info if isinstance(info, str) else (info.rank, info.world_size)


def bootstraps(infos: list[Any]) -> int:
    """Return how many different bootstrap addresses the nodes of one round were given."""
    given = [info.bootstrap_store_info for info in infos if not isinstance(info, str)]
    return len({(one.master_addr, one.master_port) for one in given})


# ---- kits


class Kit:
    """A package and the place where its runs are kept."""

    def __init__(self, name: str, package: str, backend: str, endpoint: str, config: dict[str, Any]) -> None:
        self.name = name
        self.package = package
        self.backend = backend
        self.endpoint = endpoint
        self.config = {**COMMON, **config}

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.package}.{name}")

    def handler(self, run_id: str, address: str, low: int, high: int, **config: Any) -> Any:
        given = {**self.config, **config}
        if self.package == TORCH:
            given = {key: value for key, value in given.items() if key not in QUICK}
        elif self.backend != "c10d":
            # These order their first ranks by host name, and the nodes of a test share one host.
            given |= {"order": address, "spare_exit": "error"}
        endpoint = self.endpoint.format(run_id=run_id)
        params = RendezvousParameters(self.backend, endpoint, run_id, low, high, address, **given)
        if self.backend == "rdzv":
            return importlib.import_module("rdzv.torchrun.plugin").create_rdzv(params)
        if self.backend == "c10d":
            backend, store = self.module("c10d_rendezvous_backend").create_backend(params)
            return self.module("dynamic_rendezvous").create_handler(store, backend, params)
        return self.module("registry").get_rendezvous_handler(params)


class Servers:
    """The servers of all engines. Use in a `with` block."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stack = ExitStack()

    def __enter__(self) -> Servers:  # noqa: PYI034  Self came with 3.11.
        from rdzv.torchrun.rendezvous import EtcdServer

        port = self._serve_a_tcp_store()
        served = self._stack.enter_context(ServeProcess())
        etcd = EtcdServer()
        etcd.start()
        self._stack.callback(etcd.stop)
        tcp, client = f"127.0.0.1:{port}", {"is_host": "false"}
        self.kits = [
            Kit("torch", TORCH, "c10d", tcp, client),
            Kit("embedded", OURS, "rdzv", served.endpoint, {**QUICK, **client}),
            Kit("c10d", OURS, "c10d", tcp, {**QUICK, **client}),
            Kit("file", OURS, "c10d", f"{self.folder}/{{run_id}}", {**QUICK, "store_type": "file"}),
            Kit("etcd", OURS, "etcd-v2", etcd.get_endpoint(), QUICK),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _serve_a_tcp_store(self) -> int:
        """Start a TCPStore in a process of its own, because glibc reads ENVIRONMENT only when a process starts."""
        command = [sys.executable, "-c", TCP_SERVER]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **ENVIRONMENT})
        self._stack.callback(server.communicate)
        assert server.stdout is not None
        return int(server.stdout.readline())


class NodeForker:
    """A process that was forked before this one had threads, and forks nodes that can be killed."""

    def __init__(self) -> None:
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.setsid()
            os.close(self._commands)
            for line in os.fdopen(commands):
                if os.fork() == 0:
                    self._live(answers, *json.loads(line))
            os.killpg(0, signal.SIGKILL)  # The nodes, too: they hold this process's output open.

    def _live(self, answers: int, about: dict[str, Any], node: dict[str, Any]) -> None:
        """Be a node: join, say how that ended, and wait to be killed."""
        found = place(outcome(lambda: Kit(**about).handler(**node).next_rendezvous()))
        os.write(answers, json.dumps([os.getpid(), found]).encode() + b"\n")
        time.sleep(600)
        os._exit(0)

    def start(self, kit: Kit, **node: Any) -> None:
        """Start a node, which joins the run."""
        about = {"name": kit.name, "package": kit.package, "backend": kit.backend, "endpoint": kit.endpoint}
        os.write(self._commands, json.dumps([{**about, "config": kit.config}, node]).encode() + b"\n")

    def kill(self) -> None:
        """Kill the node, once it has joined."""
        readable, _, _ = select.select([self._answers], [], [], LONG_S)
        assert readable, f"the node has not joined within {LONG_S:g} s"
        pid, found = json.loads(os.read(self._answers, 200))
        os.kill(pid, signal.SIGKILL)
        assert not isinstance(found, str), f"the node did not join: {found}"

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


class Stage:
    """One run of one kit, and its nodes."""

    def __init__(self, kit: Kit, forker: NodeForker, folder: Path, behaviour: str) -> None:
        self.kit = kit
        self.forker = forker
        self.folder = folder
        self.run_id = f"{kit.name}-{behaviour}"
        self._handlers: list[Any] = []
        self._pool = ThreadPoolExecutor(8)

    def node(self, address: str = "127.0.0.1", low: int = 1, high: int = 2, **config: Any) -> Any:
        self._handlers.append(self.kit.handler(self.run_id, address, low, high, **config))
        return self._handlers[-1]

    def start(self, call: Callable[[], Any]) -> Future[Any]:
        """Make a call in a thread. Its result is an `outcome`."""
        return self._pool.submit(outcome, call)

    def form(self, *handlers: Any) -> list[Any]:
        """Let the nodes meet, and return what each is given."""
        calls = [self.start(handler.next_rendezvous) for handler in handlers]
        return [call.result(LONG_S) for call in calls]

    def close(self) -> None:
        list(self._pool.map(lambda handler: outcome(handler.shutdown), self._handlers))
        self._pool.shutdown()


# ---- behaviours of handlers


def a_full_run(stage: Stage) -> dict[str, Any]:
    """Two nodes of two meet, share a store and a bootstrap address, and meet again."""
    one, two = nodes = stage.node("127.0.0.1", 2, 2), stage.node("127.0.0.2", 2, 2)
    seen: dict[str, Any] = {"is_closed() before the first round": one.is_closed()}
    infos = stage.form(two, one)[::-1]
    infos[0].store.set("key", "value")
    seen |= {
        "places by address": [place(info) for info in infos],
        "bootstrap addresses": bootstraps(infos),
        "a key that another node set": infos[1].store.get("key"),
        "num_nodes_waiting()": [node.num_nodes_waiting() for node in nodes],
        "is_closed()": [node.is_closed() for node in nodes],
        "get_run_id()": one.get_run_id() == stage.run_id,
        "get_backend()": one.get_backend() == stage.kit.backend,
        "use_agent_store": one.use_agent_store,
    }
    again = stage.form(*nodes)
    seen |= {"places in the next round": [place(info) for info in again], "bootstrap addresses then": bootstraps(again)}
    seen["shutdown(), twice"] = [one.shutdown(), one.shutdown()]
    return seen


def late_nodes(stage: Stage) -> dict[str, Any]:
    """One node forms a round after the last call, and two more come later."""
    one = stage.node("127.0.0.1", 1, 3)
    at_once = took_at_most(0.9, lambda: stage.form(one))
    late = [stage.node(f"127.0.0.{n}", 1, 3) for n in (2, 3)]
    joining = [stage.start(node.next_rendezvous) for node in late]
    waiting = soon(one.num_nodes_waiting, 2)
    first = stage.form(one)[0]
    rest = [call.result(LONG_S) for call in joining]
    return {
        "a round that is not full, before the last call": at_once,
        "num_nodes_waiting() of two": waiting,
        "the place of the first": place(first),
        "the places of the late ones": sorted(place(info) for info in rest),
    }


def a_newcomer_that_sorts_first(stage: Stage) -> dict[str, Any]:
    """A node with a smaller address joins a running round."""
    old, new = stage.node("127.0.0.5"), stage.node("127.0.0.1")
    stage.form(old)
    joining = stage.start(new.next_rendezvous)
    soon(old.num_nodes_waiting, 1)
    infos = [*stage.form(old), joining.result(LONG_S)]
    return {"places of the old and the new node": [place(info) for info in infos], "bootstrap addresses": bootstraps(infos)}


def a_redundant_node(stage: Stage) -> dict[str, Any]:
    """A node beyond the maximum waits, and learns that the run is over."""
    one = stage.node("127.0.0.1", 1, 1)
    stage.form(one)
    spare = stage.node("127.0.0.2", 1, 1)
    waiting = stage.start(spare.next_rendezvous)
    time.sleep(2.5)
    seen = {"num_nodes_waiting()": one.num_nodes_waiting(), "still waits": not waiting.done()}
    one.set_closed()
    return {**seen, "its error when the run is closed": waiting.result(LONG_S)}


def a_closed_run(stage: Stage) -> dict[str, Any]:
    """A member closes the run, once and again, while another node waits to come in."""
    one = stage.node("127.0.0.1")
    stage.form(one)
    waiting = stage.start(stage.node("127.0.0.2").next_rendezvous)
    soon(one.num_nodes_waiting, 1)
    seen = {"set_closed(), twice": [outcome(one.set_closed), outcome(one.set_closed)]}
    seen["is_closed()"] = soon(one.is_closed, True)
    seen["error of a node that waited"] = waiting.result(LONG_S)
    closed, newcomer = outcome_and_text(one.next_rendezvous), outcome(stage.node("127.0.0.3").next_rendezvous)
    return {**seen, "error of a member": closed[0], "it has a message": closed[1], "error of a newcomer": newcomer}


def closed_before_the_first_round(stage: Stage) -> dict[str, Any]:
    """A handler closes a run that nobody has joined."""
    one, two = stage.node("127.0.0.1", 1, 1), stage.node("127.0.0.2", 1, 1, join_timeout=2)
    return {
        "set_closed()": outcome(one.set_closed),
        "is_closed() there": soon(one.is_closed, True, 2.0),
        "is_closed() of another handler": soon(two.is_closed, True, 2.0),
        "next_rendezvous() there": place(outcome(one.next_rendezvous)),
    }


def too_few_nodes(stage: Stage) -> dict[str, Any]:
    """One node of two waits for its join timeout."""
    one = stage.node("127.0.0.1", 2, 2, join_timeout=1)
    seen: list[tuple[str, bool]] = []
    in_time = took_at_most(1 + SOON_S, lambda: seen.append(outcome_and_text(one.next_rendezvous)))
    return {"error": seen[0][0], "it has a message": seen[0][1], "in time": in_time}


def a_node_that_leaves(stage: Stage) -> dict[str, Any]:
    """One of two nodes shuts down; the other looks, and joins again."""
    one, two = stage.node("127.0.0.1", 2, 2, join_timeout=3), stage.node("127.0.0.2", 2, 2, join_timeout=3)
    stage.form(one, two)
    seen = {"shutdown()": one.shutdown()}
    seen["num_nodes_waiting() of the other"] = soon(two.num_nodes_waiting, 1, 3.0)
    seen["is_closed() of the other"] = soon(two.is_closed, True, 2.0)
    return {**seen, "next_rendezvous() of the other": place(outcome(two.next_rendezvous))}


def a_node_that_is_killed(stage: Stage) -> dict[str, Any]:
    """The process of one of two nodes is killed."""
    one = stage.node("127.0.0.1", 2, 2)
    stage.forker.start(stage.kit, run_id=stage.run_id, address="127.0.0.2", low=2, high=2)
    seen = {"places": place(stage.form(one)[0])}
    stage.forker.kill()
    return {**seen, "num_nodes_waiting() of the other": soon(one.num_nodes_waiting, 1, SOON_S)}


def the_store_of_a_round(stage: Stage) -> dict[str, Any]:
    """`info.store` is a Store of torch: every call of it, directly and from C++ through a PrefixStore."""
    store = stage.form(stage.node("127.0.0.1", 1, 1))[0].store
    seen: dict[str, Any] = {"it is a Store": isinstance(store, Store)}
    seen["its underlying_store is a Store"] = isinstance(store.underlying_store, Store)
    for label, one in (("store", store), ("PrefixStore over it", PrefixStore("deep", store))):
        one.set_timeout(timedelta(seconds=SOON_S))

        def in_vain(call: Callable[[], Any], one: Any = one) -> Any:
            """Make a call that ends with the store's own timeout. All others must not, however busy the machine is."""
            one.set_timeout(timedelta(seconds=0.3))
            try:
                return call()
            finally:
                one.set_timeout(timedelta(seconds=SOON_S))

        calls: dict[str, Callable[[], Any]] = {
            "timeout": lambda one=one: one.timeout.total_seconds(),
            "set, get": lambda one=one: (one.set("a", "text"), one.set("b", b"bytes"), one.get("a"), one.get("b")),
            "add": lambda one=one: (one.add("n", 2), one.add("n", -3), one.get("n")),
            "compare_set": lambda one=one: [one.compare_set("c", *pair) for pair in ("xy", ("", "1"), "23", "12")],
            "check": lambda one=one: (one.check(["a", "b"]), one.check(["a", "missing"])),
            "delete_key": lambda one=one: (one.delete_key("b"), one.delete_key("b"), one.check(["b"])),
            "append": lambda one=one: (one.append("d", "1"), one.append("d", "2"), one.get("d")),
            "multi_set, multi_get": lambda one=one: (one.multi_set(["e", "f"], ["1", "2"]), one.multi_get(["f", "e"])),
            "has_extended_api": one.has_extended_api,
            "get of a missing key": lambda one=one, late=in_vain: late(lambda: one.get("missing")),
            "wait for a missing key": lambda one=one: one.wait(["missing"], timedelta(seconds=0.1)),
            "wait": lambda one=one: one.wait(["a"]),
            "clone": lambda one=one: one.clone().get("a"),
            "num_keys": lambda one=one: one.num_keys() > 3,
            "barrier of one": lambda one=one: one.barrier("all", 1),
            "barrier of two": lambda one=one: one.barrier("both", 2, timedelta(seconds=0.1)),
            "list_keys": lambda one=one: "a" in one.list_keys(),
            "queues": lambda one=one: (
                one.queue_push("q", "1"), one.queue_push("q", "2"), one.queue_len("q"), one.queue_pop("q"), one.queue_pop("q"),
                one.queue_len("q"),
            ),
            "queue_pop of an empty queue": lambda one=one: one.queue_pop("empty", False),
            "queue_pop that waits": lambda one=one, late=in_vain: late(lambda: one.queue_pop("empty")),
        }  # fmt: skip
        seen |= {f"{label}: {name}": outcome(call) for name, call in calls.items()}
    return seen


HANDLERS = (
    a_full_run, the_store_of_a_round, late_nodes, a_newcomer_that_sorts_first, a_redundant_node, a_closed_run,
    closed_before_the_first_round, too_few_nodes, a_node_that_leaves, a_node_that_is_killed,
)  # fmt: skip


# ---- behaviours over a backend of the user's, and of functions: one kit of each package


class UsersBackend(RendezvousBackend):
    """A backend as a user writes it: a state with a number for its token. It can be away, forget, and hold anything."""

    name = "users"

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.state: bytes | None = None
        self.version = 0
        self.is_away = False
        self.forgets = False

    def get_state(self) -> Any:
        self._check()
        with self.lock:
            return None if self.state is None else (self.state, self.version)

    def set_state(self, state: bytes, token: Any = None) -> Any:
        self._check()
        if self.forgets:
            return None
        with self.lock:
            won = self.state is None if token is None else token == self.version
            if won:
                self.state, self.version = state, self.version + 1
            return (self.state, self.version, won)

    def _check(self) -> None:
        if self.is_away:
            raise RendezvousConnectionError("away")


def users_handler(stage: Stage, backend: UsersBackend, high: int = 1) -> Any:
    dynamic = stage.kit.module("dynamic_rendezvous")
    times = [timedelta(seconds=seconds) for seconds in (1, 1, 1)]
    made = dynamic.DynamicRendezvousHandler.from_backend(
        stage.run_id, HashStore(), backend, 1, high, "127.0.0.1", dynamic.RendezvousTimeout(*times), 1, 3
    )
    stage._handlers.append(made)
    return made


def a_backend_that_is_away(stage: Stage) -> dict[str, Any]:
    """A backend of the user's fails after the first round."""
    backend = UsersBackend()
    node, fresh = users_handler(stage, backend), users_handler(stage, backend)
    stage.form(node)
    backend.is_away = True
    time.sleep(1.1)  # torch remembers the last state for a second.
    at_once: list[Any] = []
    quick = took_at_most(0.9, lambda: at_once.append(outcome(node.set_closed)))
    return {
        "is_closed()": outcome(node.is_closed),
        "num_nodes_waiting()": outcome(node.num_nodes_waiting),
        "set_closed()": at_once[0],
        "set_closed() at once": quick,
        "next_rendezvous()": place(outcome(node.next_rendezvous)),
        "shutdown()": node.shutdown(),
        "shutdown() of a handler that never joined": fresh.shutdown(),
    }


def a_backend_that_keeps_nothing(stage: Stage) -> dict[str, Any]:
    """`set_state` of the user's backend returns None and stores nothing."""
    backend = UsersBackend()
    backend.forgets = True
    return {"next_rendezvous()": place(outcome(users_handler(stage, backend).next_rendezvous))}


executed: list[str] = []
"""The packages that have executed a pickle from a backend."""


class Executed:
    """An object whose pickle notes that it was executed."""

    def __init__(self, package: str) -> None:
        self.package = package

    def __reduce__(self) -> Any:
        return note_execution, (self.package,)


def note_execution(package: str) -> str:
    executed.append(package)
    return package


def a_foreign_state(stage: Stage) -> dict[str, Any]:
    """The backend's key holds bytes that no handler has written."""
    seen: dict[str, Any] = {}
    evil = pickle.dumps(Executed(stage.kit.package))
    for label, state in (("garbage", b"garbage"), ("nothing", b""), ("a foreign pickle", evil)):
        backend = UsersBackend()
        backend.state = state
        seen[f"next_rendezvous() with {label}"] = place(outcome(users_handler(stage, backend).next_rendezvous))
    return {**seen, "the pickle was executed": stage.kit.package in executed}


def endpoints(stage: Stage) -> dict[str, Any]:
    """`parse_rendezvous_endpoint` with all kinds of text."""
    parse = stage.kit.module("utils").parse_rendezvous_endpoint
    texts = [
        None, "", " ", "host", "host:1234", "[::1]:1234", "[::1]", "h-1.example", "h:", "h:x", "h:70000", "h:0", "[::1", "a/b",
        "::1", "fe80::1:29400", "h:123456", "127.0.0.1:65535",
    ]  # fmt: skip
    return {f"parse_rendezvous_endpoint({text!r})": outcome(lambda text=text: parse(text, 7)) for text in texts}


def wrong_parameters(stage: Stage) -> dict[str, Any]:
    """`create_handler` and `create_backend` with values that cannot be meant, and with unknown keys."""
    dynamic, c10d = stage.kit.module("dynamic_rendezvous"), stage.kit.module("c10d_rendezvous_backend")

    def handler(**config: Any) -> str:
        made = dynamic.create_handler(HashStore(), UsersBackend(), RendezvousParameters("users", "", "run", 1, 1, **config))
        stage._handlers.append(made)
        return "a handler"

    def backend(endpoint: str = "127.0.0.1:0", **config: Any) -> str:
        made, store = c10d.create_backend(RendezvousParameters("c10d", endpoint, "run", 1, 1, **config))
        return f"{made.name} on a {type(store).__name__}"

    configs: list[dict[str, Any]] = [
        {"join_timeout": "0"}, {"join_timeout": "-1"}, {"join_timeout": "soon"}, {"last_call_timeout": "0"},
        {"close_timeout": "-1"}, {"heartbeat_timeout": "x"}, {"keep_alive_interval": "x"}, {"keep_alive_max_attempt": "x"},
        {"keep_alive_interval": "-1"}, {"no_such_key": "1"}, {"join_timeout": "5"},
    ]  # fmt: skip
    seen = {f"create_handler({one})": outcome(lambda one=one: handler(**one)) for one in configs}
    backends: list[dict[str, Any]] = [
        {"store_type": "disk"}, {"store_type": " TCP "}, {"store_type": "file", "endpoint": ""}, {"read_timeout": "0"},
        {"read_timeout": "x"}, {"is_host": "perhaps"}, {"endpoint": "h:x"},
        {"endpoint": f"127.0.0.1:{free_port()}", "is_host": "false", "read_timeout": "1"},
    ]  # fmt: skip
    return seen | {
        f"create_backend({ {**one, 'endpoint': 'nobody'} if one.get('is_host') == 'false' else one })": outcome(
            lambda one=one: backend(**one)
        )
        for one in backends
    }


def a_backend_in_a_store(stage: Stage) -> dict[str, Any]:
    """The contract of `C10dRendezvousBackend` over each of torch's stores."""
    kind = stage.kit.module("c10d_rendezvous_backend").C10dRendezvousBackend
    seen: dict[str, Any] = {"an empty run id": outcome(lambda: kind(HashStore(), ""))}
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    file = FileStore(str(stage.folder / f"{stage.run_id}.store"))
    for label, store in (("HashStore", HashStore()), ("TCPStore", server), ("FileStore", file)):
        backend = kind(store, "run")
        steps = [backend.name, backend.get_state()]
        state, first, won = backend.set_state(b"one")
        steps += [state, won, backend.set_state(b"two")[::2], backend.get_state()[0]]
        state, second, won = backend.set_state(b"three", first)
        steps += [state, won, backend.set_state(b"four", first)[::2], backend.set_state(b"x", "token")[::2]]
        steps.append(backend.set_state(b"five", second)[::2])
        seen[f"steps on a {label}"] = steps
    broken = HashStore()
    broken.set("torch.rendezvous.run", "%%%not base64%%%")
    seen["get_state() of a damaged value"] = outcome(kind(broken, "run").get_state)
    return seen


def a_static_run(stage: Stage) -> dict[str, Any]:
    """Static rendezvous: its parameters, and a run of two."""
    create = stage.kit.module("static_tcp_rendezvous").create_rdzv_handler

    def make(endpoint: str, **config: Any) -> Any:
        return create(RendezvousParameters("static", endpoint, "run", 1, 2, **config))

    seen = {
        f"create_rdzv_handler({endpoint!r}, {config})": outcome(lambda e=endpoint, c=config: type(make(e, **c)).__name__)
        for endpoint, config in (
            ("h:1", {}), ("", {"rank": 0}), ("h", {"rank": 0}), ("h:1", {"rank": "x"}), ("h:1", {"rank": 0}),
            ("h:1", {"rank": 2}),
        )
    }  # fmt: skip
    where = f"127.0.0.1:{free_port()}"
    nodes = [make(where, rank=rank, timeout=30) for rank in (0, 1)]
    infos = stage.form(*nodes)
    infos[0].store.set("k", "v")
    one = nodes[0]
    return seen | {
        "places": [place(info) for info in infos],
        "bootstrap addresses": bootstraps(infos),
        "a key that another node set": infos[1].store.get("k"),
        "the rest": [
            one.is_closed(), one.set_closed(), one.is_closed(), one.num_nodes_waiting(), one.get_run_id(), one.get_backend(),
            one.use_agent_store, one.shutdown(),
        ],
    }  # fmt: skip


FUNCTIONS = (
    a_backend_that_is_away, a_backend_that_keeps_nothing, a_foreign_state, endpoints, wrong_parameters, a_backend_in_a_store,
    a_static_run,
)  # fmt: skip


# ---- running them


def observe_all(kit: Kit, folder: Path) -> dict[str, dict[str, Any]]:
    """Run all behaviours of a kit, those with several nodes at once, and return what was observed."""
    forker = NodeForker()

    def observe(behaviour: Callable[[Stage], dict[str, Any]]) -> dict[str, Any]:
        stage = Stage(kit, forker, folder, behaviour.__name__)
        try:
            return behaviour(stage)
        finally:
            stage.close()

    try:
        with ThreadPoolExecutor(len(HANDLERS)) as pool:
            found = dict(zip([one.__name__ for one in HANDLERS], pool.map(observe, HANDLERS), strict=True))
        if kit.name in FUNCTION_KITS:
            found |= {one.__name__: observe(one) for one in FUNCTIONS}
        return found
    finally:
        forker.close()


FUNCTION_KITS = ("torch", "c10d")


def start(kit: Kit, folder: Path) -> subprocess.Popen[str]:
    """Run all behaviours of a kit in a process of its own: torch's errors hold up all threads of a process for seconds."""
    about = [kit.name, kit.package, kit.backend, kit.endpoint, kit.config, str(folder)]
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-m", "support.conformance", json.dumps(about)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": path},
    )  # fmt: skip


def main() -> None:
    *about, folder = json.loads(sys.argv[1])
    found = observe_all(Kit(*about), Path(folder))
    sys.stdout.write(json.dumps(found, default=lambda value: value.decode() if isinstance(value, bytes) else repr(value)))
    sys.stdout.flush()
    os._exit(0)  # torch's threads may sit in calls that do not return.


if __name__ == "__main__":
    main()
