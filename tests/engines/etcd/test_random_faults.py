"""Twelve members on a cluster of three, and a hand that hurts both at random. The simulator's checkers judge what happened.

The faults are drawn from a seed, which is shown with a failure; how they meet the run depends on the machine, so a seed gives
the same hand and not the same history.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import pytest

from rdzv.testing.history import Changed, Given
from support.etcd_cluster import Cluster, Node, Refused, base64_of
from support.etcd_members import Agent, Troupe

TICK_S = 0.2
"""As often as this, all history that was seen is compacted away, so that whoever lags behind meets a gap."""
PARTIES = [["a"], ["b"], ["c"], ["d"], ["e"], ["f"], ["g", "h", "i"], ["j", "k", "l"]]
LEASE_S = 10.0
"""A renewal must find its way past two frozen members of etcd in a row, which takes nearly four seconds."""


class Hand:
    """Hurts, and heals what it hurt."""

    def __init__(self, cluster: Cluster, troupe: Troupe, seed: int) -> None:
        self.cluster = cluster
        self.troupe = troupe
        self.rng = random.Random(seed)
        self.agents = [troupe.start(*hosts) for hosts in PARTIES]
        self._heals: list[tuple[float, Callable[[], None]]] = []
        self.deeds = self.forgot = 0

    def play(self, seconds: float) -> None:
        over_at = time.monotonic() + seconds
        forgetting = threading.Thread(target=self._forget, args=(over_at,), daemon=True)
        forgetting.start()
        while time.monotonic() < over_at:
            began_at = time.monotonic()
            self._heal(began_at)
            if self.rng.random() < 0.2:
                self._hurt()
            time.sleep(max(0.0, began_at + TICK_S - time.monotonic()))
        self._heal(float("inf"))
        forgetting.join()

    def _forget(self, over_at: float) -> None:
        """Write something and have all that is before it forgotten, whether or not etcd can answer at the moment."""
        while time.monotonic() < over_at:
            began_at = time.monotonic()
            revision = {"revision": str(self.troupe.recorder.seen)}
            for node in self.cluster.nodes:
                with contextlib.suppress(OSError, Refused):
                    node.call("kv/put", {"key": base64_of("rdzv/noise")}, 0.5)
                    node.call("kv/compaction", revision, 0.5)
                    self.forgot += 1
                    break
            time.sleep(max(0.0, began_at + TICK_S - time.monotonic()))

    def _heal(self, now: float) -> None:
        for due in sorted((one for one in self._heals if one[0] <= now), key=lambda one: one[0]):
            self._heals.remove(due)
            due[1]()

    def _later(self, low_s: float, high_s: float, heal: Callable[[], None]) -> None:
        self._heals.append((time.monotonic() + self.rng.uniform(low_s, high_s), heal))

    def _hurt(self) -> None:
        up = [node for node in self.cluster.nodes if node.is_up]
        well = [agent for agent in self.agents if agent.is_alive and not agent.is_stopped]
        # A majority of etcd is away now and then, but not all the time; and at most half of the members are in trouble.
        if self.rng.random() < 0.6 and len(up) > (1 if self.rng.random() < 0.1 else 2):
            self._hurt_etcd(self.rng.choice(up))
        elif len(well) > len(self.agents) // 2:
            self._hurt_agent(self.rng.choice(well))
        else:
            return
        self.deeds += 1

    def _hurt_etcd(self, node: Node) -> None:
        self.troupe.fault("engine stall", node.name)
        kills = self.rng.random() < 0.5
        (node.kill if kills else node.stop)()

        def heal() -> None:
            (node.start if kills else node.cont)()
            self.troupe.fault("engine stall", node.name, stop=True)

        self._later(0.2, 2.5, heal)

    def _hurt_agent(self, agent: Agent) -> None:
        deed = self.rng.choice(["crash", "pause", "pause", "fail"])
        if deed == "fail":
            agent.tell("fail")
            return
        for name in agent.names:
            self.troupe.fault(deed, name)
        if deed == "pause":
            agent.stop()
            self._later(0.2, LEASE_S * 1.5, lambda: self._resume(agent))
        else:
            agent.kill()
            self._later(0.5, 3.0, lambda: self._replace(agent))

    def _resume(self, agent: Agent) -> None:
        agent.cont()
        for name in agent.names:
            self.troupe.fault("pause", name, stop=True)

    def _replace(self, agent: Agent) -> None:
        """The same hosts, another process."""
        for name in agent.names:
            self.troupe.fault("crash", name, stop=True)
        self.agents[self.agents.index(agent)] = self.troupe.start(*agent.hosts)


def chaos(seconds: float, seed: int) -> None:
    options = {"lease": LEASE_S, "regroup": 30, "last_call": 1}
    with Cluster() as cluster, Troupe(cluster, 6, 12, noise="rdzv/", **options) as troupe:
        hand = Hand(cluster, troupe, seed)
        troupe.until(lambda: troupe.of(Given), "a first round")
        hand.play(seconds)
        cluster.heal()
        number = troupe.wait_world(*hand.agents, limit_s=120.0)
        wrong = troupe.wrong()
        assert wrong == [], f"seed {seed}"
        rounds, told = {one.number for one in troupe.of(Given)}, len(troupe.of(Changed))
        assert hand.deeds > seconds / 4, "it was a rough time"
        assert hand.forgot > seconds, "and little of it was remembered"
        assert max(rounds) == number > 1
        assert told, "and it was noticed"


def test_at_every_moment_of_a_rough_time_there_is_one_world_and_after_it_everybody_is_in():
    chaos(60.0, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_ten_rough_minutes_on_a_real_cluster_are_held_by_every_checker():
    chaos(600.0, seed=100)
