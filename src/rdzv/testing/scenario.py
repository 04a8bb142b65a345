"""Scenarios of simulated runs, drawn from a seed before the run starts, so that they can be shown and repeated.

A scenario has settings, a plan for each node (when it starts, how its workers behave, how it ends), and faults. It has
three parts: faults; then calm, in which all faults have healed and progress is owed; then, once the run has converged, the
last events.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .decisions import Moment
from .targeted_faults import AMBUSHES

TROUBLE_S = 10.0
"""Faults begin within this time."""
WAIT_UNTIL_S = 15.0
"""A fault that waits for a decision gives up then."""

SIZES: dict[int, float] = {2: 24, 3: 40, 4: 20, 5: 6, 6: 2, 7: 2, 8: 2, 9: 1, 10: 1, 11: 1, 12: 1}
"""Numbers of members, and how likely each one is. Three and four are the fewest with a leader, a member in line and a
spare, and a run takes as long as it has members."""

FAULTS: dict[str, float] = {
    "crash": 5, "power cut": 1, "pause": 4, "cut": 3, "cut requests": 1, "cut answers": 1, "reset": 3, "reset all": 1,
    "lose request": 1, "lose answer": 1, "engine restart": 4, "engine crash": 1, "engine stall": 1, "engine slow": 1,
    "engine isolated": 1, "watch gap": 1, "second engine": 3, "compact": 1, "ask": 1, "ban": 0.5, "drain": 1,
    "drain all": 1, "operator close": 0.3, "newcomer": 3, "newcomer first": 2, "stranger": 1,
    **dict.fromkeys(AMBUSHES, 4.0),
}  # fmt: skip
"""Kinds of fault, and how likely each one is. The order is part of what a seed means."""
KEPT, BROKEN = "kept", "broken"
"""The two kinds of promise about a declared place (T16.4)."""
REPLACED = "pod 0 replaced"
PROMISED = {**FAULTS, REPLACED: 30.0}
"""Faults of runs whose server has a declared place."""
IN_BROKEN_ROUNDS: dict[str, float] = {
    "crash": 3, "power cut": 1, "pause": 2, "cut": 3, "cut requests": 2, "cut answers": 2, "reset": 4, "reset all": 2,
    "lose request": 2, "lose answer": 2, "engine restart": 1, "engine stall": 2, "engine slow": 1,
    "crash in a collective": 6, "reset in a collective": 6, "cut in a collective": 4,
}  # fmt: skip
"""Faults for `draw_broken`: connections and processes end while the workers of others fail."""
WITH_NOTICES: dict[str, float] = {**FAULTS, "drain": 8, "ask": 4, "drain all": 2, "crash": 6}
"""Faults for `draw_noticed`."""
MOMENTARY = frozenset({
    "reset", "reset all", "reset in a collective", "lose request", "lose answer", "watch gap", "compact", *AMBUSHES,
})  # fmt: skip
"""Faults that do not last."""
PLACED = 0.15
"""How many of the runs know where their nodes are."""
LAST_EVENTS = ["finish", "finish", "fail", "leave", "give up", "drain", "done", "newcomer"]
"""Orders to one application, a newcomer, or the end of all work."""


@dataclass
class NodePlan:
    """The behaviour of one member's application."""

    name: str
    start_at: float
    train_s: float
    """Training until its work is done, summed over rounds."""
    stop_s: float
    """Time that its workers take to stop."""
    fail_every_s: float | None = None
    """Time after which its workers fail and it joins again."""
    give_up_after_s: float | None = None
    leave_after_s: float | None = None
    stall_after_s: float | None = None
    """Time in a round after which it reports, once, that its workers get no further."""
    saves_after_s: float | None = None
    """Time that its workers take to save when they are told that the round will end; None: they do not answer."""
    gains: int | None = None
    """How many steps its workers get further in each round than in the one before; None: they tell no steps."""
    closes: bool = False
    """The application closes the run as soon as a long pause ends, which an evicted member must not be able to do."""
    stores: bool = True
    """The application uses the store of every round. If it does not, it still writes there as rank 0, for the others."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """How many workers it starts: the same in each of its lives, and 0, which says nothing, for one in nine."""
        return sum(self.name.encode()) % 9

    @property
    def role(self) -> str:
        return "reader" if self.workers % 3 == 1 else "trainer"


@dataclass
class FaultPlan:
    """One fault. `target` is a member's name or empty; the fault heals after `lasts_s`."""

    at: float
    kind: str
    target: str = ""
    lasts_s: float = 0.0
    when: Moment | None = None
    """From `at` on, the fault waits for a leader's decision of this kind, and strikes that leader if it has no target."""


@dataclass
class Scenario:
    """All that is decided before the run starts."""

    seed: int
    options: dict[str, Any]
    lives: list[NodePlan]
    troubles: list[FaultPlan]
    loss: float
    writes_max: int
    stars: bool
    """A member's watch shows its rank entry, as on our own engines; otherwise, as on etcd, the member reads it."""
    lingers: bool
    """A run that has converged is watched for longer than a lease: a member that does not renew is found out then."""
    last_events: list[str]
    """Orders to one application each, after the run has converged: progress is owed for each, and no fault excuses it."""
    promise: str = ""
    """Whether the platform keeps its promise about the declared place of the server; empty: it has promised nothing."""
    calm_at: float = 0.0
    tail_s: float = 0.0
    """Time to converge in the calm phase, and again after each of the last events."""

    def plan_end(self) -> None:
        """Choose the calm and the tail so long that everything owed can happen."""
        ends = [(WAIT_UNTIL_S if fault.when else fault.at) + fault.lasts_s for fault in self.troubles]
        self.calm_at = max([life.start_at for life in self.lives] + ends) + 2.0
        # Enough for the effects of all faults to end, for a straggler to be evicted if there is one, and for another round.
        slowest = max(life.stop_s for life in self.lives)
        straggler_s = self.options["regroup"] + slowest if slowest > 10.0 else 0.0
        self.tail_s = 40.0 + self.options["last_call"] + straggler_s


def draw(
    seed: int, members: int | None = None, *, stream: str = "scenario", weights: Mapping[str, float] = FAULTS
) -> Scenario:
    """Return the scenario of that seed. Another stream has other scenarios, with faults as likely as `weights` say."""
    rng = random.Random(f"{stream} {seed}")  # noqa: S311
    # Drawn in any case, so that the other draws do not depend on `members`.
    drawn = rng.choices(list(SIZES), list(SIZES.values()))[0]
    count = members if members is not None else drawn
    options = _options(rng, count)
    if seed % 3:  # Few ports: processes on one host bind the same ones again and again.
        options["bootstrap_port"] = "20000-20003"
    lives = [_node_plan(rng, f"m{index}", options) for index in range(count)]
    _draw_places(random.Random(f"{stream} places {seed}"), options, lives)  # noqa: S311
    if rng.random() < 0.5:
        for life in lives:
            life.start_at *= 0.05
    troubles = [_fault_plan(rng, lives, weights) for _ in range(rng.randint(0, 5))]
    troubles.sort(key=lambda fault: fault.at)
    last_events = rng.choices(LAST_EVENTS, k=rng.choice([1, 1, 1, 2]))
    loss, writes_max = rng.choice([0.0, 0.0, 0.0, 0.002]), rng.choice([100_000, 100_000, 6])
    stars, lingers = rng.random() < 0.5, rng.random() < 0.2
    scenario = Scenario(seed, options, lives, troubles, loss, writes_max, stars, lingers, last_events)
    scenario.plan_end()
    return scenario


def draw_promised(seed: int, promise: str, members: int | None = None) -> Scenario:
    """Return the scenario of that seed with a server whose place is declared, and which is replaced at least once."""
    scenario = draw(seed, members, stream="promised", weights=PROMISED)
    scenario.promise = promise
    rng = random.Random(f"promise {seed}")  # noqa: S311
    if all(fault.kind != REPLACED for fault in scenario.troubles):
        scenario.troubles.append(FaultPlan(rng.uniform(2.0, TROUBLE_S), REPLACED))
    for fault in scenario.troubles:
        if fault.kind == REPLACED:
            # How long no server is there, or two are.
            fault.lasts_s = rng.choice([0.6, 2.0, 6.0] if promise == KEPT else [3.0, 12.0, 25.0])
    scenario.plan_end()
    return scenario


def draw_broken(seed: int, members: int | None = None) -> Scenario:
    """Return a scenario whose rounds break often, with faults of connections around the break (T8.5)."""
    scenario = draw(seed, members, stream="broken rounds", weights=IN_BROKEN_ROUNDS)
    rng = random.Random(f"broken rounds {seed} failures")  # noqa: S311
    scenario.stars = True  # Only the embedded server sees connections.
    if rng.random() < 0.7:  # The others are a quorum, mostly.
        scenario.options["min_nodes"] = min(scenario.options["min_nodes"], max(1, len(scenario.lives) - 2))
    for life in scenario.lives:
        if rng.random() < 0.4:
            life.fail_every_s = rng.uniform(1.0, 6.0)
        if rng.random() < 0.6:
            life.stop_s = 0.05
    scenario.troubles += [_fault_plan(rng, scenario.lives, IN_BROKEN_ROUNDS) for _ in range(6)]
    if seed % 5 == 3:  # The others are what they were before there was a check.
        scenario.options["check"] = "check"
        for _ in range(rng.randint(1, 3)):
            name, lasts_s = rng.choice(scenario.lives).name, rng.choice([0.3, 2.0, 6.0, 12.0])
            scenario.troubles.append(FaultPlan(rng.uniform(0.5, TROUBLE_S), "sick", name, lasts_s))
    if seed % 5 == 1:  # As for the check.
        scenario.options["stall"] = rng.choice([0.5, 600.0])
        for life in scenario.lives:
            life.stall_after_s = rng.uniform(0.0, 3.0) if rng.random() < 0.5 else None
    if seed % 5 == 2:  # As for the check.
        scenario.options["quarantine"] = rng.choice(["1/20s/4s", "2/20s/8s", "2/1h", "3/10s/2s"])
        for life in scenario.lives:
            if rng.random() < 0.3:
                life.fail_every_s = rng.uniform(1.0, 4.0)
        scenario.troubles += [FaultPlan(rng.uniform(0.5, TROUBLE_S), "crash", rng.choice(scenario.lives).name, 0.3)]
    scenario.troubles.sort(key=lambda fault: fault.at)
    scenario.plan_end()
    return scenario


def draw_noticed(seed: int, members: int | None = None) -> Scenario:
    """Return a scenario in which drains give notice, and in half of which rounds without progress are counted."""
    scenario = draw(seed, members, stream="notices", weights=WITH_NOTICES)
    rng = random.Random(f"notices {seed} answers")  # noqa: S311
    scenario.options["drain_notice"] = rng.choice([3.0, 8.0, 8.0])
    scenario.options["futile_rounds"] = rng.choice([0, 1, 1, 2])
    if rng.random() < 0.6:  # The others are a quorum, mostly.
        scenario.options["min_nodes"] = min(scenario.options["min_nodes"], max(1, len(scenario.lives) - 2))
    for life in scenario.lives:
        life.saves_after_s = None if rng.random() < 0.15 else rng.choice([0.0, 0.3, rng.uniform(0.0, 4.0)])
        life.gains = rng.choice([None, 0, 0, 0, 1])
        life.options["drain_grace"] = rng.choice([0.0, 0.0, rng.uniform(0.5, 6.0)])
    for _ in range(rng.randint(1, 3)):
        at, name = rng.uniform(2.0, TROUBLE_S), rng.choice(scenario.lives).name
        scenario.troubles.append(FaultPlan(at, rng.choice(["drain", "drain", "ask"]), name))
        if rng.random() < 0.5:  # Something else goes wrong while the notice runs.
            kind = rng.choice(["crash", "pause", "cut", "reset", "engine restart", "newcomer", "drain", "watch gap"])
            lasts_s = 0.0 if kind in MOMENTARY else rng.choice([0.3, 2.0])
            scenario.troubles.append(FaultPlan(at + rng.uniform(0.0, 3.0), kind, rng.choice(scenario.lives).name, lasts_s))
    scenario.troubles.sort(key=lambda fault: fault.at)
    scenario.plan_end()
    return scenario


def _options(rng: random.Random, count: int) -> dict[str, Any]:
    low = rng.randint(1, count)
    high = rng.randint(low, count + 1)
    if rng.random() < 0.3:
        low = high = count
    options: dict[str, Any] = {
        "min_nodes": low,
        "max_nodes": high,
        "last_call": round(rng.uniform(0.5, 5.0), 2),
        "regroup": round(rng.uniform(6.0, 16.0), 2),
        "lease": round(rng.uniform(3.0, 10.0), 2),
        "settle": rng.choice([0.0, 0.5, 2.0]),
        "grow": rng.choice(["settle", "settle", "settle", "now", "never"]),
        "grow_every": rng.choice([0.0, 5.0, 12.0]),
        "replace_wait": rng.choice([0.0, 0.0, 0.0, 4.0]),
        "drain_settle": 1.0,
        "on_failure": rng.choice(["close", "close", "wait"]),
        "closed_for": rng.choice([4.0, 60.0]),
        "outage_grace": 900.0,
        "join_timeout": 100_000.0,
    }
    if high >= 2 and rng.random() < 0.15:
        options["grow"] = "unit=2"
        options["max_nodes"] = max(2, high)
        if options["min_nodes"] == options["max_nodes"] and high % 2:
            options["max_nodes"] += 1
    return options


def _draw_places(rng: random.Random, options: dict[str, Any], lives: list[NodePlan]) -> None:
    """Put the nodes of some runs into racks, and let some of these take only whole segments.

    The draws are of a stream of their own, so that the other parts of a scenario do not depend on them.
    """
    if rng.random() >= PLACED:
        return
    racks = rng.randint(1, 3)
    for life in lives:
        life.options["topology"] = f"b{rng.randrange(2)}/r{rng.randrange(racks)}"
    low, high = options["min_nodes"], options["max_nodes"]
    if "unit" not in options["grow"] and rng.random() < 0.5 and low + low % 2 <= high:
        options["segment"] = 2


def _node_plan(rng: random.Random, name: str, options: dict[str, Any]) -> NodePlan:
    stop_s = rng.choice([0.05, 0.3, 1.0, 3.0])
    if rng.random() < 0.08:
        stop_s = options["regroup"] + 12.0
    return NodePlan(
        name=name,
        start_at=rng.uniform(0.0, 6.0),
        train_s=rng.choice([4.0, 12.0, 10_000.0, 10_000.0, 10_000.0]),
        stop_s=stop_s,
        fail_every_s=rng.uniform(4.0, 20.0) if rng.random() < 0.12 else None,
        give_up_after_s=rng.uniform(2.0, 20.0) if rng.random() < 0.06 else None,
        leave_after_s=rng.uniform(2.0, 20.0) if rng.random() < 0.06 else None,
        closes=rng.random() < 0.15,
        stores=rng.random() < 0.5,
        options={"slot": rng.choice(["", "a"]), "order": rng.choice(["", "", str(rng.randint(0, 9))])},
    )


def _fault_plan(rng: random.Random, lives: list[NodePlan], weights: Mapping[str, float]) -> FaultPlan:
    kind = rng.choices(list(weights), list(weights.values()))[0]
    lasts_s = rng.choice([0.3, 2.0, 6.0, 12.0])
    if kind == "second engine":
        lasts_s = min(lasts_s, 11.0)  # Longer than any lease; members that are led elsewhere dial all the time.
    if kind in MOMENTARY:
        lasts_s = 0.0
    at = rng.uniform(0.5, TROUBLE_S) if kind not in AMBUSHES else rng.choice([0.1, rng.uniform(0.1, TROUBLE_S / 2)])
    return FaultPlan(at, kind, rng.choice(lives).name, lasts_s)
