"""Twelve members on a cluster of three, and random faults in both. The simulator's checkers check the history.

A seed, shown with a failure, chooses the faults. How they meet the run depends on timing, so a seed gives the same faults but
not the same history.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import pytest

from rdzv.testing.history import Changed, Given
from support.etcd_cluster import Cluster, Node, Refused, base64_of, sound_etcd
from support.etcd_members import EtcdRun, MemberProcess

TICK_S = 0.2
"""Interval of faults, and of compactions of all history that was seen, so that a watch that lags meets a gap."""
HOSTS = [["a"], ["b"], ["c"], ["d"], ["e"], ["f"], ["g", "h", "i"], ["j", "k", "l"]]
"""The hosts of each process."""
LEASE_S = 10.0
"""A renewal must get past two frozen members of etcd in a row, which takes nearly four seconds."""


class FaultInjector:
    """Injects random faults into the cluster and the members, and ends each after a while."""

    def __init__(self, cluster: Cluster, run: EtcdRun, seed: int) -> None:
        self.cluster = cluster
        self.run = run
        self.rng = random.Random(seed)
        self.processes = [run.start(*hosts) for hosts in HOSTS]
        self._repairs: list[tuple[float, Callable[[], None]]] = []
        self.faults = self.compactions = 0

    def inject(self, seconds: float, least: int) -> None:
        """Inject for so long; a busy machine gets a minute more for so many faults and compactions and a second round."""
        over_at, over = time.monotonic() + seconds, threading.Event()
        compacting = threading.Thread(target=self._compact, args=(over,), daemon=True)
        compacting.start()
        while (now := time.monotonic()) < over_at or (now < over_at + 60.0 and not self._has_enough(least)):
            began_at = time.monotonic()
            self._repair(began_at)
            if self.rng.random() < 0.2:
                self._inject_one()
            time.sleep(max(0.0, began_at + TICK_S - time.monotonic()))
        over.set()
        self._repair(float("inf"))
        compacting.join(60.0)

    def _has_enough(self, least: int) -> bool:
        return min(self.faults, self.compactions) >= least and any(one.number > 1 for one in self.run.of(Given))

    def _compact(self, over: threading.Event) -> None:
        """Write a key and compact all revisions before it, as often as etcd can answer."""
        while not over.is_set():
            began_at = time.monotonic()
            revision = {"revision": str(self.run.write_log.seen)}
            for node in self.cluster.nodes:
                with contextlib.suppress(OSError, Refused):
                    node.call("kv/put", {"key": base64_of("rdzv/noise")}, 0.5)
                    node.call("kv/compaction", revision, 0.5)
                    self.compactions += 1
                    break
            time.sleep(max(0.0, began_at + TICK_S - time.monotonic()))

    def _repair(self, now: float) -> None:
        for due in sorted((one for one in self._repairs if one[0] <= now), key=lambda one: one[0]):
            self._repairs.remove(due)
            due[1]()

    def _later(self, low_s: float, high_s: float, repair: Callable[[], None]) -> None:
        self._repairs.append((time.monotonic() + self.rng.uniform(low_s, high_s), repair))

    def _inject_one(self) -> None:
        up = [node for node in self.cluster.nodes if node.is_up]
        well = [process for process in self.processes if process.is_alive and not process.is_stopped]
        # Etcd loses its majority now and then, and at most half of the members have a fault.
        if self.rng.random() < 0.6 and len(up) > (1 if self.rng.random() < 0.1 else 2):
            self._fault_in_etcd(self.rng.choice(up))
        elif len(well) > len(self.processes) // 2:
            self._fault_in_process(self.rng.choice(well))
        else:
            return
        self.faults += 1

    def _fault_in_etcd(self, node: Node) -> None:
        self.run.fault("engine stall", node.name)
        kills = self.rng.random() < 0.5
        (node.kill if kills else node.stop)()

        def repair() -> None:
            (node.start if kills else node.cont)()
            self.run.fault("engine stall", node.name, stop=True)

        self._later(0.2, 2.5, repair)

    def _fault_in_process(self, process: MemberProcess) -> None:
        kind = self.rng.choice(["crash", "pause", "pause", "fail"])
        if kind == "fail":
            process.tell("fail")
            return
        for name in process.names:
            self.run.fault(kind, name)
        if kind == "pause":
            process.stop()
            self._later(0.2, LEASE_S * 1.5, lambda: self._resume(process))
        else:
            process.kill()
            self._later(0.5, 3.0, lambda: self._replace(process))

    def _resume(self, process: MemberProcess) -> None:
        process.cont()
        for name in process.names:
            self.run.fault("pause", name, stop=True)

    def _replace(self, process: MemberProcess) -> None:
        """Start another process with the same hosts."""
        for name in process.names:
            self.run.fault("crash", name, stop=True)
        self.processes[self.processes.index(process)] = self.run.start(*process.hosts)


def check_random_faults(seconds: float, seed: int) -> None:
    options = {"lease": LEASE_S, "regroup": 30, "last_call": 1}
    with Cluster(binary=sound_etcd()) as cluster, EtcdRun(cluster, 6, 12, noise="rdzv/", **options) as run:
        faults = FaultInjector(cluster, run, seed)
        run.until(lambda: run.of(Given), "a first round")
        faults.inject(seconds, least=int(seconds // 4))
        cluster.heal()
        number = run.wait_world(*faults.processes, limit_s=120.0)
        wrong = run.wrong()
        assert wrong == [], f"seed {seed}"
        assert min(faults.faults, faults.compactions) >= seconds // 4, (faults.faults, faults.compactions)
        rounds, told = {one.number for one in run.of(Given)}, len(run.of(Changed))
        assert max(rounds) >= number > 1, "a failure in the last moment may make one round more"
        assert told, "no member was told of a change"


def test_random_faults_violate_no_guarantee_and_end_with_all_members_in():
    check_random_faults(15.0, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_minutes_of_random_faults_violate_no_guarantee():
    check_random_faults(600.0, seed=100)
