"""Hundreds of real members in a few processes, random faults in them and in their engine, and a check of every world.

    with Crowd(endpoint, run_id="job") as crowd:
        Storm(crowd, ServerFaults(...), seed=1).rage(60.0)

After each wave of faults all members must hold one world again. A seed chooses the faults. How they meet the run depends on
timing, so a seed gives the same faults but not the same history.
"""

from __future__ import annotations

import random
import statistics
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rdzv.testing.history import Acted, Changed, ClosedTold, EvictedTold, Given, Observation
from support.etcd_cluster import Cluster
from support.etcd_members import MemberProcess
from support.member_processes import Line, ProcessSet, wrong_worlds

SIZES = (25,) * 7 + (4,) * 5 + (1,) * 5
"""Members of each process: 200 in all. One that is alone in its process can be killed alone."""
LEASE_S = 10.0
"""A renewal must get past two frozen members of etcd in a row, which takes nearly four seconds."""
WHOLE_S = 120.0
"""How long all members may take to hold one world after the last fault of a wave: a lease, and what two busy cores add."""
REST_S = 5.0
"""Time between two waves. Without it, two crowds take most of two cores from the tests beside them."""
SETTINGS = {
    "lease": LEASE_S, "last_call": 3, "regroup": 30, "settle": 0.3, "grow_every": 0, "join_timeout": 600, "is_host": False,
    "closed_for": 600, "outage_grace": 120,
}  # fmt: skip


class Crowd:
    """Processes with several members each. Only worlds are kept, so that a long run does not grow."""

    def __init__(self, endpoint: str, sizes: Sequence[int] = SIZES, *, run_id: str = "job", **options: Any) -> None:
        self.size = sum(sizes)
        self._endpoint = endpoint
        self._sizes = sizes
        self._options = {**SETTINGS, "run_id": run_id, "min_nodes": self.size // 2, "max_nodes": self.size, **options}
        self.processes: list[MemberProcess] = []
        self.held: dict[str, Given] = {}
        """By actor, the world that it holds as far as it was told."""
        self.worlds: list[tuple[str, Line]] = []
        self.told = 0
        self.closed = 0
        self.problems: list[str] = []
        """What members have said that none should say, whatever the faults are."""
        self._last: deque[str] = deque(maxlen=400)
        self._changed = threading.Condition()

    def __enter__(self):
        names = (f"h{number}" for number in range(self.size))
        for size in self._sizes:
            self.processes.append(self._start([next(names) for _ in range(size)]))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is not None:
            for process in self.processes:
                self._last.append(f"---- {process.name} ({process.state}), told {process.told}\n{process.log()[-1500:]}")
            sys.stderr.write("\n".join([*self._last, ""]))
        for process in self.processes:
            process.close()

    def _start(self, hosts: Sequence[str]) -> MemberProcess:
        return MemberProcess(self, hosts, self._endpoint, (), **self._options)

    def replace(self, process: MemberProcess) -> None:
        """Start another process with the hosts of one that has died."""
        with self._changed:
            for name in process.names:
                self.held.pop(name, None)
        self.processes[self.processes.index(process)] = self._start(process.hosts)
        process.close()

    def add(self, one: Observation) -> None:
        """Take what a member says."""
        with self._changed:
            self._last.append(str(one))
            if isinstance(one, Given):
                self.held[one.actor] = one
                self.worlds.append((one.actor, _line(one)))
            elif isinstance(one, Acted) and one.what in ("refused", "store mixed"):
                self.problems.append(str(one))
            elif isinstance(one, ClosedTold):
                self.closed += 1
            elif isinstance(one, (Changed, EvictedTold, Acted)):
                self.told += isinstance(one, Changed)
                self.held.pop(one.actor, None)
            self._changed.notify_all()

    def whole(self, limit_s: float = WHOLE_S) -> int:
        """Wait until all members of the processes hold one world of the full size, and return its round."""

        def is_whole() -> bool:
            names = [name for process in self.processes for name in process.names]
            worlds = {(one.number, one.table, one.size) for name in names if (one := self.held.get(name))}
            is_one = len(worlds) == 1 and all(name in self.held for name in names)
            return bool(self.problems) or (is_one and worlds.pop()[2] == self.size)

        with self._changed:
            if not self._changed.wait_for(is_whole, limit_s):
                found = Counter((one.number, one.size) for one in self.held.values())
                raise AssertionError(f"not one world within {limit_s:g} s, but members by (round, size): {dict(found)}")
            assert not self.problems, self.problems
            return next(iter(self.held.values())).number

    def wrong(self) -> list[str]:
        """Return what is wrong with the worlds that any member was given."""
        bounds = {"job": (self._options["min_nodes"], self._options["max_nodes"])}
        return [*self.problems, *wrong_worlds(self.worlds, bounds)]

    def close_run(self) -> None:
        """Let a member close the run, and wait until all others were told, and every process has ended by itself."""
        self.processes[0].tell("close", self.processes[0].hosts[0])
        with self._changed:
            told = self._changed.wait_for(lambda: self.closed >= self.size - 1, WHOLE_S)
            assert told, f"{self.closed} of {self.size - 1} members were told within {WHOLE_S:g} s that the run is closed"
        for process in self.processes:
            assert process.wait(WHOLE_S) == 0, process.name


def _line(given: Given) -> Line:
    """Return a world in the form that `wrong_worlds` judges."""
    return {
        "run": "job", "incarnation": given.run, "era": (given.era.level, given.era.id), "round": given.number,
        "size": given.size, "rank": given.rank, "bootstrap": given.boot,
        "digest": (given.digest, given.table, given.fence),
    }  # fmt: skip


class EngineFaults(Protocol):
    """Faults of an engine."""

    def begin(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        """Begin one. Return its name, and what ends it."""


class ServerFaults:
    """The embedded server, as a user starts it: killed and started again at its place, or frozen for a while."""

    def __init__(self, processes: ProcessSet) -> None:
        self._processes = processes
        self._server, self.place = processes.serve()
        self._is_well = True

    def begin(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        if not self._is_well:
            return "", lambda: None
        self._is_well = False
        if rng.random() < 0.5:
            self._server.kill()
            return "server killed", self._restart
        self._server.pause()
        return "server frozen", self._thaw

    def _restart(self) -> None:
        self._server, _ = self._processes.serve(self.place, limit_s=WHOLE_S)
        self._is_well = True

    def _thaw(self) -> None:
        self._server.resume()
        self._is_well = True


class EtcdFaults:
    """A cluster of etcd: members are killed and started again, or frozen; now and then so many that no majority is left."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def begin(self, rng: random.Random) -> tuple[str, Callable[[], None]]:
        up = [node for node in self._cluster.nodes if node.is_up]
        if len(up) <= (1 if rng.random() < 0.2 else 2):
            return "", lambda: None
        node = rng.choice(up)
        # Not for longer than a lease: a frozen leader would end the leases of others when it goes on (docs/etcd.md).
        if rng.random() < 0.5:
            node.kill()
            return "etcd killed", node.start
        node.stop()
        return "etcd frozen", node.cont


class Storm:
    """Waves of faults, and all that is counted of them."""

    def __init__(self, crowd: Crowd, engine: EngineFaults, seed: int) -> None:
        self._crowd = crowd
        self._engine = engine
        self._rng = random.Random(seed)
        self._ends: list[tuple[float, Callable[[], None]]] = []
        self.faults: Counter[str] = Counter()
        self.took_s: list[float] = []
        """Of each wave, the time from the end of its last fault until all members held one world."""

    def rage(self, seconds: float) -> None:
        """Make waves for that long. Raises AssertionError if the members do not come together after one."""
        over_at = time.monotonic() + seconds
        while time.monotonic() < over_at:
            for _ in range(self._rng.randint(1, 4)):
                self._begin_one()
                self._end_until(time.monotonic() + self._rng.uniform(0.0, 2.0))
            self._end_until(float("inf"))
            ended_at = time.monotonic()
            self._crowd.whole()
            self.took_s.append(time.monotonic() - ended_at)
            time.sleep(REST_S)

    def report(self) -> str:
        ordered = sorted(self.took_s)
        rounds = len({line["round"] for _, line in self._crowd.worlds})
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        return (
            f"{self._crowd.size} members: {sum(self.faults.values())} faults in {len(ordered)} waves ({faults}), "
            f"{rounds} rounds, {len(self._crowd.worlds)} worlds given; "
            f"whole again after {statistics.median(ordered):.1f} s (median; longest {ordered[-1]:.1f} s)"
        )

    def _end_until(self, at: float) -> None:
        """Wait until then, or until no fault is left, and end those that are due."""
        while self._ends and (due := min(self._ends, key=lambda one: one[0]))[0] <= at:
            time.sleep(max(0.0, due[0] - time.monotonic()))
            self._ends.remove(due)
            due[1]()
        if at < float("inf"):
            time.sleep(max(0.0, at - time.monotonic()))

    def _later(self, low_s: float, high_s: float, end: Callable[[], None]) -> None:
        self._ends.append((time.monotonic() + self._rng.uniform(low_s, high_s), end))

    def _begin_one(self) -> None:
        well = [process for process in self._crowd.processes if process.is_alive and not process.is_stopped]
        if self._rng.random() < 0.3:
            kind, end = self._engine.begin(self._rng)
            self._later(0.2, LEASE_S / 3, end)
        elif 2 * sum(len(process.hosts) for process in well) > 3 * self._crowd.size // 2:  # At most a quarter has a fault.
            kind = self._fault_in(self._rng.choice(well))
        else:
            return
        if kind:
            self.faults[kind] += 1

    def _fault_in(self, process: MemberProcess) -> str:
        kind = self._rng.choice(["killed", "killed", "paused", "paused for long", "connections reset", "workers failed"])
        if kind == "killed":
            process.kill()
            self._later(0.2, 3.0, lambda: self._crowd.replace(process))
        elif kind == "paused":
            process.stop()
            self._later(0.2, LEASE_S / 2, process.cont)
        elif kind == "paused for long":
            process.stop()
            self._later(LEASE_S, LEASE_S * 1.5, process.cont)
        elif kind == "connections reset":
            process.tell("reset")
        else:
            process.tell("fail", self._rng.choice(process.hosts))
        return kind
