"""Real etcd clusters on loopback or in network namespaces, and the faults that tests inject into them.

This module talks to etcd through its JSON gateway and the standard library, so that what a test concludes does not depend on
the client that it tests.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import functools
import http.client
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rdzv.engines.etcd.server import SupervisedProcess, find_etcd
from support.certificates import ca_file, issue
from support.ports import free_ports

T = TypeVar("T")

LONG_S = 60.0
"""The longest wait of a test; after it the test has failed."""
CALL_S = 3.0
UNAVAILABLE = (4, 14)
"""The gRPC codes DEADLINE_EXCEEDED and UNAVAILABLE: the member has no leader, or not yet."""
HEARTBEAT_MS = 50
ELECTION_MS = 500
"""Ten heartbeats, as etcd advises. Short enough for tests, long enough for two busy cores."""
PATIENT = ("--heartbeat-interval=200", "--election-timeout=2000")
"""For a machine on which dozens of processes compete: members that are not heard in time elect for minutes."""
LOG_SHOWN = 3_000
"""Bytes of each member's log that are shown when a test fails."""


def until(holds: Callable[[], T], what: str, limit_s: float = LONG_S, every_s: float = 0.02) -> T:
    """Poll until `holds` returns something true, and return that."""
    deadline = time.monotonic() + limit_s
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}"
        time.sleep(every_s)
    return found


def base64_of(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def end_of(prefix: str) -> bytes:
    """Return the first key behind all those with that prefix."""
    raw = prefix.encode()
    return raw[:-1] + bytes([raw[-1] + 1])


class Refused(Exception):
    """etcd answered with a refusal."""


UNSOUND = re.compile(r"etcd Version: 3\.5\.[012]\b")
"""Versions that can lose a write when they are killed (docs/etcd.md). PyPI's etcd is one of them."""


@functools.cache
def sound_etcd() -> str:
    """Return an etcd that a test may kill and start again: one of RDZV_TEST_ETCD, or Debian's, which is fetched.

    An unsound one may come back without its last writes. Its revisions then differ from those of the others for good.
    """
    paths, problem = os.environ.get("RDZV_TEST_ETCD", "").replace(":", " ").split(), ""
    if not paths:
        root = Path(__file__).parents[2]
        folder = root / "build" / "etcd"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:  # Every job of pytest may come here.
            fcntl.flock(lock, fcntl.LOCK_EX)
            fetched = _run(root / ".ci" / "debian-etcd", folder)
        paths, problem = fetched.stdout.split(), fetched.stderr
    for path in reversed(paths):
        if not UNSOUND.search(_run(path, "--version").stdout):
            return path
    pytest.skip(f"NOT TESTED: no etcd whose data survive a crash could be had: {problem.strip()[-300:]}")


def _run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Node:
    """One member of a cluster."""

    def __init__(self, cluster: Cluster, name: str, host: str, ports: tuple[int, int], within: Sequence[str] = ()) -> None:
        self.cluster = cluster
        self.name = name
        self.host = host
        self.port, self.peer_port = ports
        self.within = within
        """The command that runs a program in this member's network namespace; empty: in that of the test."""
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
        """Kill it with SIGKILL."""
        if self.guarded is not None:
            self.guarded.kill()
            self.guarded.stop()
        self.guarded, self.is_stopped = None, False

    def stop(self) -> None:
        """Freeze it: its sockets stay open, but it does not answer."""
        assert self.guarded is not None
        pid = self.guarded.pid
        self.guarded.kill(signal.SIGSTOP)
        self.is_stopped = True
        # Its threads stop one by one; until the last has, it may still answer.
        until(lambda: _is_frozen(pid), f"etcd (pid {pid}) has stopped", every_s=0.001)

    def cont(self) -> None:
        if self.guarded is not None:
            self.guarded.kill(signal.SIGCONT)
        self.is_stopped = False

    def restart(self) -> None:
        """Kill it and start it with the data it had."""
        self.kill()
        self.start()

    def connect(self, timeout_s: float = CALL_S) -> http.client.HTTPConnection:
        if self.cluster.tls:
            context = ssl.create_default_context(cafile=ca_file())
            context.load_cert_chain(*issue())
            return http.client.HTTPSConnection(self.host, self.port, timeout=timeout_s, context=context)
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def call(self, path: str, body: dict[str, Any], timeout_s: float = CALL_S) -> dict[str, Any]:
        """Send a request to its gateway. Raises OSError if it cannot answer (yet), Refused if it refuses."""
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
    """Members that start together, and end with the `with` block, which also deletes their data."""

    def __init__(
        self,
        size: int = 3,
        *,
        binary: str = "",
        tls: bool = False,
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

    def standing(self) -> str:
        """Return how far each member is, and the end of its log. Equally many applied entries make the same revision."""
        told = {node: node.status() or {} for node in self.nodes}
        far = {node: (one.get("header", {}).get("revision"), one.get("raftAppliedIndex")) for node, one in told.items()}
        return "".join(
            f"{node}: revision {revision}, applied {applied}\n{self._log_of(node).read_text()[-LOG_SHOWN:]}\n"
            for node, (revision, applied) in far.items()
        )

    def _log_of(self, node: Node) -> Path:
        return self._folder / f"{node.name}.log"

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

    def endpoint(self, prefix: str = "", query: str = "") -> str:
        hosts = ",".join(f"{node.host}:{node.port}" for node in self.nodes)
        return f"{'etcds' if self.tls else 'etcd'}://{hosts}{prefix and '/' + prefix}{query and '?' + query}"

    def arguments(self, node: Node) -> list[str]:
        scheme = "https" if self.tls else "http"
        client, peer = (f"{scheme}://{node.host}:{port}" for port in (node.port, node.peer_port))
        all_peers = ",".join(f"{one.name}={scheme}://{one.host}:{one.peer_port}" for one in self.nodes)
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
            f"--log-outputs={self._log_of(node)}",
            "--log-level=warn",
            *(_tls_arguments() if self.tls else ()),
            *self.extra,
        ]

    def heal(self) -> None:
        """Bring all members up again, and wait until they are healthy and have the same revision."""
        for node in self.nodes:
            if node.guarded is None:
                node.start()
            elif node.is_stopped:
                node.cont()
        self.wait_healthy()
        try:
            until(self._is_agreed, "all members have the same revision")
        except AssertionError as error:
            raise AssertionError(f"etcd itself has lost writes:\n{self.standing()}") from error

    def _is_agreed(self) -> bool:
        told = [node.status() for node in self.nodes]
        return None not in told and len({one["header"]["revision"] for one in told if one is not None}) == 1

    # ---- requests

    def call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request to the first member that answers."""

        def ask() -> dict[str, Any] | None:
            for node in self.nodes:
                if node.is_up:
                    with contextlib.suppress(OSError):
                        return node.call(path, body)
            return None

        return until(ask, f"some member answers {path}")

    def leader(self) -> Node:
        """Return the member that leads now, as a majority sees it."""

        def agreed() -> Node | None:
            said = [(node, node.status()) for node in self.nodes if node.is_up]
            votes = [status.get("leader") for _, status in said if status is not None]
            for node, status in said:
                if status is not None and votes.count(status["header"]["member_id"]) > len(self.nodes) // 2:
                    return node
            return None

        return until(agreed, "the members agree on a leader")

    def wait_healthy(self) -> None:
        """Wait until every member is up and answers linearizable reads."""

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

    # ---- users

    def add_user(self, name: str, password: str, prefix: str = "") -> None:
        """Add a user who may read and write below the prefix."""
        self.call("auth/user/add", {"name": name, "password": password})
        self.call("auth/role/add", {"name": f"role-{name}"})
        if prefix:
            permission = {"permType": "READWRITE", "key": base64_of(prefix), "range_end": base64_of(end_of(prefix))}
            self.call("auth/role/grant", {"name": f"role-{name}", "perm": permission})
        self.call("auth/user/grant", {"user": name, "role": f"role-{name}"})

    def enable_auth(self, root_password: str) -> None:
        """Make etcd demand a login from everybody; `call` uses root's."""
        self.call("auth/user/add", {"name": "root", "password": root_password})
        with contextlib.suppress(Refused):
            self.call("auth/role/add", {"name": "root"})
        self.call("auth/user/grant", {"user": "root", "role": "root"})
        self.call("auth/enable", {})
        self.token = self.call("auth/authenticate", {"name": "root", "password": root_password})["token"]


class WriteLog:
    """Every write below a prefix, in order and without gaps: the truth that checkers compare a history with.

    The log watches at every member and takes each revision from the first that sends it, so neither a killed nor a frozen
    member makes it miss anything. Only revisions that it has seen may be compacted.
    """

    def __init__(self, cluster: Cluster, prefix: str, since: int) -> None:
        self.prefix = prefix
        self.seen = since
        self.writes: list[tuple[float, int, list[dict[str, Any]]]] = []
        """Time of receipt, revision and etcd's events of each write."""
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
        """Wait until it has seen all writes so far."""
        newest = {
            "key": base64_of(self.prefix), "range_end": base64_of(end_of(self.prefix)),
            "sort_target": "MOD", "sort_order": "DESCEND", "limit": "1",
        }  # fmt: skip

        def read() -> dict[str, Any]:
            """Return an answer of etcd. During an election it may be an error, which has no header and says nothing of keys."""
            answer = self._cluster.call("kv/range", newest)
            return answer if "header" in answer else {}

        last = int(until(read, "etcd answers").get("kvs", [{"mod_revision": 0}])[0]["mod_revision"])
        with self._lock:
            assert self._lock.wait_for(lambda: self.seen >= last, LONG_S), f"the log is at {self.seen}, etcd at {last}"

    def until_written(self, key: str, count: int = 1, limit_s: float = LONG_S) -> None:
        """Wait until that many puts to keys with this prefix were seen."""
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


def _tls_arguments() -> list[str]:
    """Return the arguments of a member that demands a certificate from every client and every other member."""
    cert, key = issue()
    return [
        f"--{kind}{word}"
        for kind in ("", "peer-")
        for word in (f"cert-file={cert}", f"key-file={key}", f"trusted-ca-file={ca_file()}", "client-cert-auth")
    ]


def _is_frozen(pid: int) -> bool:
    try:
        tasks = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except (FileNotFoundError, ProcessLookupError):
        return False  # One of its threads ended while it was read.
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in tasks)


def _by_revision(events: list[dict[str, Any]]) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    groups: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        groups.setdefault(int(event["kv"]["mod_revision"]), []).append(event)
    yield from sorted(groups.items())
