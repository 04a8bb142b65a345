"""What a simulated run is made of: drawn from a seed, before anything happens, so that it can be shown and repeated.

A scenario has settings, members with a life of their own (when they come, how their workers behave, how they end), and faults.
It runs in three acts: trouble, then calm, in which everything that can heal has healed and progress is owed, then the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from ..config.settings import Settings
from .targeted_faults import AMBUSHES

TROUBLE_S = 40.0
"""Faults begin within this time."""

FAULTS = (
    "crash",
    "power cut",
    "pause",
    "cut",
    "cut requests",
    "cut answers",
    "reset",
    "reset all",
    "lose request",
    "lose answer",
    "engine restart",
    "engine crash",
    "engine stall",
    "engine slow",
    "engine isolated",
    "watch gap",
    "second engine",
    "compact",
    "ask",
    "ban",
    "drain",
    "drain all",
    "operator close",
    "newcomer",
    "newcomer first",
    "stranger",
    *AMBUSHES,
)
WEIGHTS = {
    "crash": 5,
    "pause": 4,
    "cut": 3,
    "reset": 3,
    "engine restart": 4,
    "second engine": 2,
    "newcomer": 3,
    "newcomer first": 2,
    "operator close": 0.3,
    "ban": 0.5,
    **dict.fromkeys(AMBUSHES, 2.0),
}


@dataclass
class NodePlan:
    """How one member's application behaves."""

    name: str
    start_at: float
    train_s: float
    """Training it takes until its work is done; what was trained in a broken round is not lost."""
    stop_s: float
    """How long its workers take to stop."""
    fail_every_s: float | None = None
    """Its workers fail by themselves this often and it joins again."""
    give_up_after_s: float | None = None
    leave_after_s: float | None = None
    closes: bool = False
    """It closes the run the moment it comes back from a pause: what an evicted one must not be able to do."""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class FaultPlan:
    """One fault: `target` is a member's name or empty, `lasts_s` until it heals."""

    at: float
    kind: str
    target: str = ""
    lasts_s: float = 0.0


@dataclass
class Scenario:
    """Everything that is decided beforehand."""

    seed: int
    options: dict[str, Any]
    lives: list[NodePlan]
    troubles: list[FaultPlan]
    loss: float
    writes_max: int
    stars: bool
    """Lines are shown by a watch, as they are by engines of ours; else each member asks for its own."""
    calm_at: float
    end_at: float

    def settings(self, life: NodePlan) -> Settings:
        """What that member is started with."""
        return Settings.make("memory://", run_id="sim", **{**self.options, **life.options})


def draw(seed: int, members: int | None = None) -> Scenario:
    """The scenario of that seed."""
    rng = random.Random(f"scenario {seed}")  # noqa: S311
    drawn = rng.randint(2, 12)  # In any case: the rest must not depend on whether somebody said how many.
    count = members if members is not None else drawn
    options = _options(rng, count)
    lives = [_life(rng, f"m{index}", options) for index in range(count)]
    if rng.random() < 0.5:
        for life in lives:
            life.start_at *= 0.05
    troubles = sorted((_trouble(rng, lives) for _ in range(rng.randint(0, 8))), key=lambda trouble: trouble.at)
    over = max([TROUBLE_S * 0.3, *(trouble.at + trouble.lasts_s for trouble in troubles)])
    slowest = max(life.stop_s for life in lives)
    # Long enough for the effects of all faults to end, for a straggler to be evicted if there is one, and for one round more.
    tail_s = 40.0 + options["last_call"] + (options["regroup"] + slowest if slowest > 10.0 else 0.0)
    calm_at = over + 2.0
    return Scenario(
        seed=seed,
        options=options,
        lives=lives,
        troubles=troubles,
        loss=rng.choice([0.0, 0.0, 0.0, 0.002]),
        writes_max=rng.choice([100_000, 100_000, 6]),
        stars=rng.random() < 0.5,
        calm_at=calm_at,
        end_at=calm_at + tail_s,
    )


def _options(rng: random.Random, count: int) -> dict[str, Any]:
    low = rng.randint(1, count)
    high = rng.randint(low, count + 1)
    if rng.random() < 0.3:
        low = high = count
    options: dict[str, Any] = {
        "min_nodes": low,
        "max_nodes": high,
        "last_call": round(rng.uniform(0.5, 8.0), 2),
        "regroup": round(rng.uniform(15.0, 75.0), 2),
        "lease": round(rng.uniform(3.0, 10.0), 2),
        "settle": rng.choice([0.0, 0.5, 2.0]),
        "grow": rng.choice(["settle", "settle", "settle", "now", "never"]),
        "grow_every": rng.choice([0.0, 5.0, 60.0]),
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


def _life(rng: random.Random, name: str, options: dict[str, Any]) -> NodePlan:
    stop_s = rng.choice([0.05, 0.3, 1.0, 3.0])
    if rng.random() < 0.06:
        stop_s = rng.choice([60.0, options["regroup"] + 20.0])
    return NodePlan(
        name=name,
        start_at=rng.uniform(0.0, 12.0),
        train_s=rng.choice([12.0, 30.0, 10_000.0, 10_000.0, 10_000.0]),
        stop_s=stop_s,
        fail_every_s=rng.uniform(15.0, 60.0) if rng.random() < 0.12 else None,
        give_up_after_s=rng.uniform(5.0, 60.0) if rng.random() < 0.06 else None,
        leave_after_s=rng.uniform(5.0, 60.0) if rng.random() < 0.06 else None,
        closes=rng.random() < 0.15,
        options={"slot": rng.choice(["", "a"]), "order": rng.choice(["", "", str(rng.randint(0, 9))])},
    )


def _trouble(rng: random.Random, lives: list[NodePlan]) -> FaultPlan:
    kind = rng.choices(FAULTS, [WEIGHTS.get(kind, 1.0) for kind in FAULTS])[0]
    lasts_s = rng.choice([0.3, 2.0, 6.0, 12.0, 20.0])
    if kind in ("reset", "reset all", "lose request", "lose answer", "watch gap", "compact", *AMBUSHES):
        lasts_s = 0.0
    at = rng.uniform(0.5, TROUBLE_S) if kind not in AMBUSHES else rng.choice([0.1, rng.uniform(0.1, TROUBLE_S / 2)])
    return FaultPlan(at, kind, rng.choice(lives).name, lasts_s)
