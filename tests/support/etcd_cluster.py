"""Real etcd clusters on loopback or in network namespaces, and all that can be done to one.

Everything here talks to etcd through its own JSON gateway and the standard library: what the tests conclude must not depend on
the client that they test.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rdzv.engines.etcd.server import SupervisedProcess, find_etcd, free_ports
from support.etcd_certificates import Certificates

T = TypeVar("T")

LONG_S = 60.0
"""No wait of a test is longer: one that is has failed."""
CALL_S = 3.0
UNAVAILABLE = (4, 14)
"""What gRPC calls a deadline exceeded, and a service that is unavailable: no leader, or not yet."""
HEARTBEAT_MS = 50
ELECTION_MS = 500
"""Ten heartbeats, as etcd advises: quick enough for tests, and slow enough for two busy cores."""


def binaries() -> list[str]:
    """Every etcd to test on: the one that is found by itself, and those that RDZV_TEST_ETCD names, separated by colons."""
    return [find_etcd(), *filter(None, os.environ.get("RDZV_TEST_ETCD", "").split(":"))]


def until(holds: Callable[[], T], what: str, limit_s: float = LONG_S, every_s: float = 0.02) -> T:
    """Look until it is so, where there is nothing to wait on."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(every_s)
    return found


def base64_of(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def end_of(prefix: str) -> bytes:
    """The first key behind all those with that prefix."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


class Refused(Exception):
    """etcd answered, and said no."""


class Node:
    """One member of a cluster."""

    def __init__(self, cluster: Cluster, name: str, host: str, ports: tuple[int, int], within: Sequence[str] = ()) -> None:
        self.cluster = cluster
        self.name = name
        self.host = host
        self.port, self.peer_port = ports
        self.within = within
        """The command that puts a program where this member lives; nothing: it lives where we do."""
        self.guarded: SupervisedProcess | None = None
        self.is_stopped = False

    def __repr__(self) -> str:
        return f"<{self.name} at {self.host}:{self.port}>"

    @property
    def is_up(self) -> bool:
        return self.guarded is not None and not self.is_stopped

    def start(self) -> None:
        assert self.guarded is None, f"{self} runs already"
        self.guarded = SupervisedProcess([*self.within, self.cluster.binary, *self.cluster.arguments(self)])

    def kill(self) -> None:
        """As kill -9 does: it says nothing to anybody."""
        if self.guarded is not None:
            self.guarded.kill()
            self.guarded.stop()
        self.guarded, self.is_stopped = None, False

    def stop(self) -> None:
        """Freeze it: its sockets stay open, and nobody answers."""
        assert self.guarded is not None
        pid = self.guarded.pid
        self.guarded.kill(signal.SIGSTOP)
        self.is_stopped = True
        # The signal is sent, but its threads stop one by one: until the last has, it may still answer.
        until(lambda: _is_frozen(pid), f"etcd (pid {pid}) has stopped", every_s=0.001)

    def cont(self) -> None:
        if self.guarded is not None:
            self.guarded.kill(signal.SIGCONT)
        self.is_stopped = False

    def restart(self) -> None:
        """With the data it had."""
        self.kill()
        self.start()

    def connect(self, timeout_s: float = CALL_S) -> http.client.HTTPConnection:
        if self.cluster.tls is not None:
            return http.client.HTTPSConnection(
                self.host, self.port, timeout=timeout_s, context=self.cluster.tls.context()
            )
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def call(self, path: str, body: dict[str, Any], timeout_s: float = CALL_S) -> dict[str, Any]:
        """Ask its gateway; OSError if it cannot answer (yet), Refused if it says no."""
        connection = self.connect(timeout_s)
        headers = {"Authorization": self.cluster.token} if self.cluster.token else {}
        try:
            connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (http.client.HTTPException, ValueError) as error:
            raise OSError(str(error)) from error
        finally:
            connection.close()
        if answer.get("code") in UNAVAILABLE:
            raise OSError(answer.get("message"))
        if response.status != http.client.OK:
            raise Refused(answer.get("message") or answer.get("error"))
        return dict(answer)

    def status(self) -> dict[str, Any] | None:
        try:
            return self.call("maintenance/status", {}, 1.0)
        except (OSError, Refused):
            return None


class Cluster:
    """So many members, started together; ended and swept away with the `with` block."""

    def __init__(
        self,
        size: int = 3,
        *,
        binary: str = "",
        tls: Certificates | None = None,
        places: Sequence[tuple[str, Sequence[str]]] = (),
        extra: Sequence[str] = (),
    ) -> None:
        self.binary = find_etcd(binary)
        self.tls = tls
        self.extra = extra
        self.token = ""
        self._folder = Path(tempfile.mkdtemp(prefix="rdzv-cluster-"))
        where = places or [("127.0.0.1", ())] * size
        ports = free_ports(2 * len(where))
        self.nodes = [
            Node(self, f"etcd{index}", host, (ports[2 * index], ports[2 * index + 1]), within)
            for index, (host, within) in enumerate(where)
        ]

    def __enter__(self):
        try:
            for node in self.nodes:
                node.start()
            if not self.nodes[0].within:
                self.wait_healthy()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def scheme(self) -> str:
        return "http" if self.tls is None else "https"

    def endpoint(self, prefix: str = "", query: str = "") -> str:
        """As rdzv takes it."""
        hosts = ",".join(f"{node.host}:{node.port}" for node in self.nodes)
        return f"{'etcd' if self.tls is None else 'etcds'}://{hosts}{prefix and '/' + prefix}{query and '?' + query}"

    def arguments(self, node: Node) -> list[str]:
        client, peer = (f"{self.scheme}://{node.host}:{port}" for port in (node.port, node.peer_port))
        all_peers = ",".join(f"{one.name}={self.scheme}://{one.host}:{one.peer_port}" for one in self.nodes)
        return [
            f"--name={node.name}",
            f"--data-dir={self._folder / node.name}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={all_peers}",
            f"--initial-cluster-token={self._folder.name}",
            f"--heartbeat-interval={HEARTBEAT_MS}",
            f"--election-timeout={ELECTION_MS}",
            "--logger=zap",
            "--log-outputs=stderr",
            "--log-level=error",
            *(self.tls.arguments() if self.tls is not None else ()),
            *self.extra,
        ]

    def heal(self) -> None:
        """Everybody up again, and agreed."""
        for node in self.nodes:
            if node.guarded is None:
                node.start()
            elif node.is_stopped:
                node.cont()
        self.wait_healthy()

    # ---- asking it

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask whichever member answers."""

        def ask() -> dict[str, Any] | None:
            for node in self.nodes:
                if node.is_up:
                    with contextlib.suppress(OSError):
                        return node.call(path, body)
            return None

        return until(ask, f"some member answers {path}")

    def leader(self) -> Node:
        """The member that leads now, as a majority sees it."""

        def agreed() -> Node | None:
            said = [(node, node.status()) for node in self.nodes if node.is_up]
            votes = [status.get("leader") for _, status in said if status is not None]
            for node, status in said:
                if status is not None and votes.count(status["header"]["member_id"]) > len(self.nodes) // 2:
                    return node
            return None

        return until(agreed, "the members agree on a leader")

    def follower(self) -> Node:
        leader = self.leader()
        return next(node for node in self.nodes if node is not leader)

    def wait_healthy(self) -> None:
        """Every member is up, has joined in, and answers reads that the majority agreed on."""

        def answers() -> bool:
            try:
                for node in self.nodes:
                    node.call("kv/range", {"key": base64_of("x")}, 1.0)
            except OSError:
                return False
            return True

        until(answers, "all members answer")

    def revision(self) -> int:
        return int(self.call("kv/range", {"key": base64_of("x")})["header"]["revision"])

    def compact(self, revision: int) -> None:
        """Forget what was before; that it is forgotten already is fine."""
        with contextlib.suppress(Refused):
            self.call("kv/compaction", {"revision": str(revision)})

    # ---- users

    def add_user(self, name: str, password: str, prefix: str = "") -> None:
        """One who may read and write below the prefix."""
        self.call("auth/user/add", {"name": name, "password": password})
        self.call("auth/role/add", {"name": f"role-{name}"})
        if prefix:
            permission = {"permType": "READWRITE", "key": base64_of(prefix), "range_end": base64_of(end_of(prefix))}
            self.call("auth/role/grant", {"name": f"role-{name}", "perm": permission})
        self.call("auth/user/grant", {"user": name, "role": f"role-{name}"})

    def enable_auth(self, root_password: str) -> None:
        """From now on everybody must say who he is; we are root."""
        self.call("auth/user/add", {"name": "root", "password": root_password})
        with contextlib.suppress(Refused):
            self.call("auth/role/add", {"name": "root"})
        self.call("auth/user/grant", {"user": "root", "role": "root"})
        self.call("auth/enable", {})
        self.token = self.call("auth/authenticate", {"name": "root", "password": root_password})["token"]


class Recorder:
    """Every write below a prefix, in order, with none missing: the truth that histories are judged by.

    It watches at every member at once and takes each revision from whichever tells it first, so neither a killed nor a
    frozen member makes it miss anything. Only what it has seen may be compacted.
    """

    def __init__(self, cluster: Cluster, prefix: str, since: int) -> None:
        self.prefix = prefix
        self.seen = since
        self.writes: list[tuple[float, int, list[dict[str, Any]]]] = []
        """When it was heard of, the revision, and what etcd said of it."""
        self._cluster = cluster
        self._lock = threading.Condition()
        self._over = False
        self._threads = [threading.Thread(target=self._follow, args=(node,), daemon=True) for node in cluster.nodes]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        for thread in self._threads:
            thread.join(LONG_S)

    def catch_up(self) -> None:
        """Until it has seen all that was written so far."""
        last = int(self._cluster.call("kv/range", {"key": base64_of(self.prefix), "range_end": base64_of(end_of(self.prefix)),
                                                   "sort_target": "MOD", "sort_order": "DESCEND", "limit": "1"}
                                      ).get("kvs", [{"mod_revision": 0}])[0]["mod_revision"])  # fmt: skip
        with self._lock:
            assert self._lock.wait_for(lambda: self.seen >= last, LONG_S), f"the recorder is at {self.seen}, etcd at {last}"

    def until_written(self, key: str, count: int = 1, limit_s: float = LONG_S) -> None:
        """Until that many puts to keys that begin so were seen."""
        raw = key.encode()

        def puts() -> int:
            events = [event for _, _, group in self.writes for event in group if event.get("type") != "DELETE"]
            return sum(base64.b64decode(event["kv"]["key"]).startswith(raw) for event in events)

        with self._lock:
            assert self._lock.wait_for(lambda: puts() >= count, limit_s), f"{puts()} of {count} writes to {key}"

    def _follow(self, node: Node) -> None:
        while not self._over:
            if not node.is_up:
                time.sleep(0.05)
                continue
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError):
                self._read(node)

    def _read(self, node: Node) -> None:
        connection = node.connect(1.0)
        try:
            request = {
                "key": base64_of(self.prefix),
                "range_end": base64_of(end_of(self.prefix)),
                "start_revision": str(self.seen + 1),
            }
            headers = {"Authorization": self._cluster.token} if self._cluster.token else {}
            connection.request("POST", "/v3/watch", json.dumps({"create_request": request}), headers)
            response = connection.getresponse()
            while not self._over:
                line = response.readline()
                if not line:
                    return
                result = json.loads(line).get("result", {})
                if result.get("canceled"):
                    return
                self._add(result.get("events", []))
        finally:
            connection.close()

    def _add(self, events: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        with self._lock:
            for revision, group in _by_revision(events):
                if revision > self.seen:
                    self.seen = revision
                    self.writes.append((now, revision, group))
            self._lock.notify_all()


def _is_frozen(pid: int) -> bool:
    try:
        tasks = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False  # One of its threads has ended meanwhile.
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in tasks)


def _by_revision(events: list[dict[str, Any]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        groups.setdefault(int(event["kv"]["mod_revision"]), []).append(event)
    yield from sorted(groups.items())
