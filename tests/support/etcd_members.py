"""Agents as processes of their own, and the history of what happened to them, in the form that the checkers judge."""

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
from typing import Any

import msgspec

import rdzv
from rdzv.config.settings import Settings
from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import Head, JournalEntry, Phase
from rdzv.core.model import MemberRecord as Record
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
from support.etcd_cluster import LONG_S, Cluster, Recorder

AGENT = Path(__file__).with_name("etcd_member_process.py")
SRC = Path(rdzv.__file__).parent.parent
RUN = "job"
QUICK = {"last_call": 0.5, "settle": 0.2, "drain_settle": 0.2, "grow_every": 0, "lease": 5, "closed_for": 5, "regroup": 20}
"""The lease is as short as two elections, two lost requests and a busy machine together allow."""

SAFETY: tuple[type[Checker], ...] = (
    G1Agreement, G2Ranks, G3Order, G4Ghosts, G7Cause, G8Fencing, G9Closing, G10Clocks, T1Settings
)  # fmt: skip
"""The simulator's checkers that need no clock. G5 and G6 measure half seconds, which two busy cores do not keep."""

_decode = msgspec.json.Decoder(Given | Changed | EvictedTold | ClosedTold | Acted).decode


class Agent:
    """A process with one member or several."""

    def __init__(self, troupe: Troupe, hosts: Sequence[str], endpoint: str, within: Sequence[str], **options: Any) -> None:
        self.hosts = list(hosts)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        spec = {"endpoint": endpoint, "hosts": self.hosts, "options": options}
        self._process = subprocess.Popen(
            [*within, sys.executable, str(AGENT), msgspec.json.encode(spec).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        self.pid = self._process.pid
        self.names = [f"{host}:{self.pid}" for host in self.hosts]
        self.is_stopped = False
        self._troupe = troupe
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
            with contextlib.suppress(msgspec.DecodeError):  # Half a line: it was killed.
                self._troupe.add(_decode(line))

    def tell(self, order: str, host: str = "*") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{host} {order}\n".encode())
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.is_stopped = False

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        self.is_stopped = True

    def cont(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.is_stopped = False

    def wait(self) -> int:
        return self._process.wait(LONG_S)

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


class Troupe:
    """All agents of one run on one cluster, with everything that was observed."""

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
        self.agents: list[Agent] = []
        self.observations: list[Observation] = []
        self._changed = threading.Condition()
        self._records = record
        self.recorder = Recorder(cluster, noise or self.keys.run, cluster.revision() if record else 0)
        """`noise` is a prefix that others write to as well, if there shall be others."""

    def __enter__(self):
        if self._records:
            self.recorder.__enter__()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            sys.stderr.write(f"{self}\n")
        for agent in self.agents:
            agent.close()
        if self._records:
            self.recorder.__exit__()

    def __str__(self) -> str:
        with self._changed:
            lines = [str(one) for one in self.observations]
        logs = [f"---- {agent.name}\n{agent.log()[-3000:]}" for agent in self.agents]
        return "\n".join([*lines, *logs])

    # ---- acting

    def start(self, *hosts: str, within: Sequence[str] = (), endpoint: str = "", **options: Any) -> Agent:
        """A process with these members."""
        agent = Agent(self, hosts, endpoint or self.cluster.endpoint(), within, **{**self.options, **options})
        self.agents.append(agent)
        return agent

    def fault(self, kind: str, target: str, *, stop: bool = False) -> None:
        self.add(Fault(kind=kind, target=target, stop=stop, at=time.monotonic()))

    def add(self, observation: Observation) -> None:
        with self._changed:
            self.observations.append(observation)
            self._changed.notify_all()

    # ---- looking

    def until(self, holds: Callable[[], Any], what: str, limit_s: float = LONG_S) -> Any:
        """Wait for observations until it is so."""
        with self._changed:
            assert self._changed.wait_for(holds, limit_s), f"not within {limit_s:g} s: {what}"
            return holds()

    def of(self, *kinds: type[Observation]) -> list[Any]:
        with self._changed:
            return [one for one in self.observations if isinstance(one, kinds)]

    def holders(self) -> dict[str, Given]:
        """By actor: the world it holds, as far as it was told."""
        held: dict[str, Given] = {}
        for one in self.of(Given, Changed, EvictedTold, ClosedTold, Acted):
            if isinstance(one, Given):
                held[one.actor] = one
            else:
                held.pop(one.actor, None)
        return held

    def in_one_world(self, *actors: str, above: int = 0) -> bool:
        """All of them, and nobody else, hold one round above that number."""
        held = self.holders()
        worlds = {(held[name].number, held[name].table) for name in actors if name in held}
        size = {held[name].size for name in actors if name in held}
        return set(actors) <= set(held) and len(worlds) == 1 and size == {len(actors)} and min(worlds)[0] > above

    def wait_world(self, *agents: Agent, above: int = 0, limit_s: float = LONG_S) -> int:
        """Until these are one world; its round."""
        actors = [name for agent in agents for name in agent.names]
        self.until(lambda: self.in_one_world(*actors, above=above), f"{actors} hold one round above {above}", limit_s)
        return self.holders()[actors[0]].number

    def disturbed(self, since: float = 0.0) -> list[Observation]:
        """Everything that would have restarted or ended workers."""
        return [one for one in self.of(Changed, EvictedTold, ClosedTold) if one.at >= since]

    def evicted(self) -> list[Any]:
        """Who was told that the others went on without it, by whichever way came first."""
        return [one for one in self.disturbed() if isinstance(one, EvictedTold) or getattr(one, "kind", "") == "evicted"]

    def given(self, number: int) -> list[Given]:
        return [one for one in self.of(Given) if one.number == number]

    # ---- judging

    def head_writes(self) -> list[tuple[int, Head | None, str]]:
        """Every write of the head since the beginning: revision, what it became, and the name of its writer."""
        found = []
        for commit in self.commits("?"):
            for event in commit.events:
                if event.key == self.keys.head:
                    head = None if event.item is None else wire.decode(Head, event.item.value)
                    found.append((commit.revision, head, _writer(self.keys, commit.events)))
        return found

    def commits(self, instance: str) -> list[Commit]:
        self.recorder.catch_up()
        commits = [_commit(at, revision, raw, self.keys, instance) for at, revision, raw in list(self.recorder.writes)]
        return [commit for commit in commits if commit.events]

    def wrong(self, *kinds: type[Checker]) -> list[str]:
        """What the simulator's checkers say of what happened."""
        instances = {one.instance for one in self.of(Given)}
        assert len(instances) == 1, "an etcd cluster is one engine instance for good"
        commits = self.commits(instances.pop())
        agreed = Settings.make(self.cluster.endpoint(), **self.options).agreed()
        case = CheckContext(
            keys=self.keys,
            owners={(host, agent.pid): f"{host}:{agent.pid}" for agent in self.agents for host in agent.hosts},
            agreed={name: agreed for agent in self.agents for name in agent.names},
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
    # What only deletes is the end of a lease, or the leader's eviction of a straggler: no writer is asked for there.
    kind = "then" if any(event.item for event in events) else "expired"
    return Commit(
        at=at, server="engine", instance=instance, place=keys.run, revision=revision, kind=kind, events=tuple(events)
    )


def _writer(keys: Keys, events: Sequence[Event]) -> str:
    """The name of the head's writer, from the journal entry that is written with it."""
    for event in events:
        if event.key.startswith(keys.journal) and event.item is not None:
            return wire.decode(JournalEntry, event.item.value).by
    return ""


def _merge(commits: list[Commit], seen: list[Observation], case: CheckContext) -> list[Observation]:
    """One order in which no effect comes before its cause: what a read showed was written before the read was answered."""
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
    """Whether that commit must have happened before this was observed, though we may have heard of it later."""
    if isinstance(one, Given):
        return commit.revision <= one.revision
    if not isinstance(one, Changed) or state.head is None:
        return False
    if one.kind == "evicted":
        return len(state.lives.get(ids.get(one.actor, ""), (0, 0))) == 1
    return state.head.phase is Phase.SEALED and state.head.round == one.round


def _actor(commit: Commit, state: State, case: CheckContext) -> str:
    """Which machine wrote this, as far as what was written tells."""
    keys = case.keys
    by = _writer(keys, commit.events)
    for event in commit.events:
        if event.item is None:
            continue
        if event.key == keys.head:
            named = sorted((one for one in state.members.values() if one.record.name == by), key=lambda one: one.created)
            return case.owner(state, named[0].id) if named else by
        if event.key.startswith(keys.members):
            record = wire.decode(Record, event.item.value)
            return case.owners.get((record.host, record.pid), "?")
        if event.key.startswith(keys.run + "kv/"):
            _, _, rest = event.key.partition("/mark/")
            if rest:
                return case.owner(state, rest.partition("/")[0])
    return ""
