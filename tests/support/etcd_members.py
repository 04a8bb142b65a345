"""Members of a run on etcd, each in a process of its own, and their history in the form that the checkers read."""

from __future__ import annotations

import base64
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

import rdzv
from rdzv.config.settings import Settings
from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import Head, JournalEntry, MemberRecord, Phase
from rdzv.engines.port import Event, Item
from rdzv.testing import checkers
from rdzv.testing.checkers import (
    Calm,
    CheckContext,
    Checker,
    G1Agreement,
    G2Ranks,
    G3Order,
    G4Ghosts,
    G8Fencing,
    G9Closing,
    G10Clocks,
    T1Settings,
)
from rdzv.testing.history import Acted, Changed, ClosedTold, Commit, EvictedTold, Fault, Given, Observation
from rdzv.testing.progress_checkers import G7Cause
from rdzv.testing.replay import State
from support.etcd_cluster import LONG_S, Cluster, WriteLog

PROGRAM = Path(__file__).with_name("etcd_member_process.py")
SRC = Path(rdzv.__file__).parent.parent
RUN = "job"
QUICK = {"last_call": 0.5, "settle": 0.2, "drain_settle": 0.2, "grow_every": 0, "lease": 5, "closed_for": 5, "regroup": 20}
"""The lease is as short as two elections, two lost requests and a busy test node together allow."""

SAFETY: tuple[type[Checker], ...] = (
    G1Agreement, G2Ranks, G3Order, G4Ghosts, G7Cause, G8Fencing, G9Closing, G10Clocks, T1Settings
)  # fmt: skip
"""The simulator's checkers that need no precise clock. G5 and G6 measure half seconds, too short for two busy cores."""

_decode = msgspec.json.Decoder(Given | Changed | EvictedTold | ClosedTold | Acted).decode


class Listener(Protocol):
    """The one that hears what a process observes, in a thread of its own."""

    def add(self, observation: Observation) -> None: ...


class MemberProcess:
    """A process with one or several members."""

    def __init__(self, run: Listener, hosts: Sequence[str], endpoint: str, within: Sequence[str], **options: Any) -> None:
        self.hosts = list(hosts)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        spec = {"endpoint": endpoint, "hosts": self.hosts, "options": options}
        self._process = subprocess.Popen(
            [*within, sys.executable, str(PROGRAM), msgspec.json.encode(spec).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        self.pid = self._process.pid
        self.names = [f"{host}:{self.pid}" for host in self.hosts]
        self.is_stopped = False
        self.told: list[str] = []
        """The orders so far."""
        self._run = run
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(msgspec.DecodeError):  # The process was killed within a line.
                self._run.add(_decode(line))

    @property
    def state(self) -> str:
        """The letter that the kernel has for its state: T is stopped, Z is dead."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "gone"

    def tell(self, order: str, host: str = "*") -> None:
        assert self._process.stdin is not None
        self.told.append(f"{host} {order}")
        self._process.stdin.write(f"{host} {order}\n".encode())
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.is_stopped = False

    def wait(self, limit_s: float) -> int:
        """Wait until it has ended by itself."""
        return self._process.wait(limit_s)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.is_stopped = True

    def cont(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.is_stopped = False

    def log(self) -> str:
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode(errors="replace")

    def close(self) -> None:
        self.kill()
        self._reader.join(LONG_S)
        for file in (self._process.stdin, self._process.stdout, self._log):
            assert file is not None
            with contextlib.suppress(BrokenPipeError):
                file.close()


class EtcdRun:
    """All processes of one run on one etcd cluster, with everything that was observed."""

    def __init__(
        self,
        cluster: Cluster,
        min_nodes: int,
        max_nodes: int,
        *,
        run_id: str = RUN,
        noise: str = "",
        record: bool = True,
        **options: Any,
    ) -> None:
        self.cluster = cluster
        self.run_id = run_id
        self.keys = Keys(run_id)
        self.options = {"run_id": run_id, "min_nodes": min_nodes, "max_nodes": max_nodes, **QUICK, **options}
        self.processes: list[MemberProcess] = []
        self.observations: list[Observation] = []
        self._changed = threading.Condition()
        self._records = record
        self.write_log = WriteLog(cluster, noise or self.keys.run, cluster.revision() if record else 0)
        """Logs the run's keys or, with `noise`, a prefix below which others write, too."""

    def __enter__(self):
        if self._records:
            self.write_log.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            sys.stderr.write(f"{self}\n")
        for process in self.processes:
            process.close()
        if self._records:
            self.write_log.__exit__()

    def __str__(self) -> str:
        with self._changed:
            lines = [str(one) for one in self.observations]
        logs = [f"---- {process.name}\n{process.log()[-3000:]}" for process in self.processes]
        return "\n".join([*lines, *logs])

    # ---- actions

    def start(self, *hosts: str, within: Sequence[str] = (), endpoint: str = "", **options: Any) -> MemberProcess:
        """Start a process with these members."""
        process = MemberProcess(self, hosts, endpoint or self.cluster.endpoint(), within, **{**self.options, **options})
        self.processes.append(process)
        return process

    def fault(self, kind: str, target: str, *, stop: bool = False) -> None:
        self.add(Fault(kind=kind, target=target, stop=stop, at=time.monotonic()))

    def add(self, observation: Observation) -> None:
        with self._changed:
            self.observations.append(observation)
            self._changed.notify_all()

    # ---- observations

    def until(self, holds: Callable[[], Any], what: str, limit_s: float = LONG_S) -> Any:
        """Wait until observations make `holds` true, and return its result."""
        with self._changed:
            assert self._changed.wait_for(holds, limit_s), f"not within {limit_s:g} s: {what}"
            return holds()

    def of(self, *kinds: type[Observation]) -> list[Any]:
        with self._changed:
            return [one for one in self.observations if isinstance(one, kinds)]

    def holders(self) -> dict[str, Given]:
        """Return, by actor, the world that it holds as far as it was told."""
        held: dict[str, Given] = {}
        for one in self.of(Given, Changed, EvictedTold, ClosedTold, Acted):
            if isinstance(one, Given):
                held[one.actor] = one
            else:
                held.pop(one.actor, None)
        return held

    def in_one_world(self, *actors: str, above: int = 0) -> bool:
        """Whether exactly these hold one round above that number."""
        held = self.holders()
        worlds = {(held[name].number, held[name].table) for name in actors if name in held}
        size = {held[name].size for name in actors if name in held}
        return set(actors) <= set(held) and len(worlds) == 1 and size == {len(actors)} and min(worlds)[0] > above

    def wait_world(self, *processes: MemberProcess, above: int = 0, limit_s: float = LONG_S) -> int:
        """Wait until these are one world, and return its round."""
        actors = [name for process in processes for name in process.names]
        self.until(lambda: self.in_one_world(*actors, above=above), f"{actors} hold one round above {above}", limit_s)
        return self.holders()[actors[0]].number

    def disturbed(self, since: float = 0.0) -> list[Observation]:
        """Return all observations that would have restarted or ended workers."""
        return [one for one in self.of(Changed, EvictedTold, ClosedTold) if one.at >= since]

    def evicted(self) -> list[Any]:
        """Return the observations that tell an actor that the others went on without it."""
        return [one for one in self.disturbed() if isinstance(one, EvictedTold) or getattr(one, "kind", "") == "evicted"]

    # ---- checks

    def head_writes(self) -> list[tuple[int, Head | None, str]]:
        """Return revision, new head and name of the writer for every write of the head."""
        found = []
        for commit in self.commits("?"):
            for event in commit.events:
                if event.key == self.keys.head:
                    head = None if event.item is None else wire.decode(Head, event.item.value)
                    found.append((commit.revision, head, _writer(self.keys, commit.events)))
        return found

    def commits(self, instance: str) -> list[Commit]:
        self.write_log.catch_up()
        commits = [_commit(at, revision, raw, self.keys, instance) for at, revision, raw in list(self.write_log.writes)]
        return [commit for commit in commits if commit.events]

    def wrong(self, *kinds: type[Checker]) -> list[str]:
        """Return the violations that the simulator's checkers find."""
        instances = {one.instance for one in self.of(Given)}
        assert len(instances) == 1, "an etcd cluster is one engine instance for good"
        commits = self.commits(instances.pop())
        agreed = Settings.make(self.cluster.endpoint(), **self.options).agreed()
        case = CheckContext(
            keys=self.keys,
            owners={(host, process.pid): f"{host}:{process.pid}" for process in self.processes for host in process.hosts},
            agreed={name: agreed for process in self.processes for name in process.names},
            slow_stop=frozenset(),
            loss=0.0,
        )
        case.calm = Calm(self.of(Fault), 10.0)
        merged = _merge(commits, sorted(self.of(Observation), key=lambda one: one.at), case)
        return list(checkers.run(case, merged, [kind(case) for kind in kinds or SAFETY]))  # type: ignore[arg-type]


def _commit(at: float, revision: int, raw: list[dict[str, Any]], keys: Keys, instance: str) -> Commit:
    events = []
    for one in raw:
        kv = one["kv"]
        key = base64.b64decode(kv["key"]).decode()
        if not key.startswith(keys.run):
            continue
        item = None
        if one.get("type") != "DELETE":
            value = base64.b64decode(kv.get("value", ""))
            item = Item(key, value, int(kv["create_revision"]), int(kv["mod_revision"]), int(kv.get("lease", 0)))
        events.append(Event(key, revision, item))
    # A commit of deletions only is the end of a lease or an eviction. The checkers need no writer for it.
    kind = "then" if any(event.item for event in events) else "expired"
    return Commit(at=at, server="engine", instance=instance, revision=revision, kind=kind, events=tuple(events))


def _writer(keys: Keys, events: Sequence[Event]) -> str:
    """Return the name of the head's writer from the journal entry that is written with it."""
    for event in events:
        if event.key.startswith(keys.journal) and event.item is not None:
            return wire.decode(JournalEntry, event.item.value).by
    return ""


def _merge(commits: list[Commit], seen: list[Observation], case: CheckContext) -> list[Observation]:
    """Merge both into an order in which no effect precedes its cause: a read's reply follows the write that it shows."""
    merged: list[Observation] = []
    state = State("", case.keys)
    ids: dict[str, str] = {}
    left = iter(commits)
    commit = next(left, None)

    def add_until(one: Observation | None) -> None:
        nonlocal commit
        at = float("inf") if one is None else one.at
        while commit is not None and (one is None or commit.at <= at or _needs(one, commit, state, ids)):
            actor = _actor(commit, state, case)
            state.apply(commit)
            merged.append(msgspec.structs.replace(commit, actor=actor, at=min(commit.at, at)))
            commit = next(left, None)

    for one in seen:
        add_until(one)
        merged.append(one)
        if isinstance(one, Given):
            ids[one.actor] = one.member
    add_until(None)
    return merged


def _needs(one: Observation, commit: Commit, state: State, ids: dict[str, str]) -> bool:
    """Whether the commit must precede the observation, although the log may have received it later."""
    if isinstance(one, Given):
        return commit.revision <= one.revision
    if not isinstance(one, Changed) or state.head is None:
        return False
    if one.kind == "evicted":
        return len(state.lives.get(ids.get(one.actor, ""), (0, 0))) == 1
    return state.head.phase is Phase.SEALED and state.head.round == one.round


def _actor(commit: Commit, state: State, case: CheckContext) -> str:
    """Return the actor that wrote the commit, as far as its content tells."""
    keys = case.keys
    by = _writer(keys, commit.events)
    for event in commit.events:
        if event.item is None:
            continue
        if event.key == keys.head:
            named = sorted((one for one in state.members.values() if one.record.name == by), key=lambda one: one.created)
            return case.owner(state, named[0].id) if named else by
        if event.key.startswith(keys.members):
            record = wire.decode(MemberRecord, event.item.value)
            return case.owners.get((record.host, record.pid), "?")
        if event.key.startswith(keys.run + "kv/"):
            _, _, rest = event.key.partition("/mark/")
            if rest:
                return case.owner(state, rest.partition("/")[0])
    return ""
