"""Steered scenarios: their random choices lead to triples of rule, phase and fault that plain seeds seldom reach.

A steered scenario is a drawn one with two rare triples added. Each triple brings the conditions under which its rule
decides in its phase (`CONDITIONS`), and its fault, which waits for that decision and strikes before the answer is back.

The scenario follows from the seed and from `reached.json`, the counts of plain seeds, which
`python -m rdzv.testing.sim --seed 0 --count 2000 --jobs 2 --save-reached src/rdzv/testing/reached.json` makes anew.
New counts change the scenarios of all steered seeds.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

from .decisions import Moment
from .reached import POSSIBLE, Reached
from .scenario import FAULTS, MOMENTARY, FaultPlan, Scenario, draw
from .targeted_faults import AMBUSHES

COUNTS = Path(__file__).with_name("reached.json")
TARGETS = 2
"""Rare triples per scenario."""
UNDER_WAY_S = 6.0
"""By then nearly every run has sealed a round."""
WRITES_MIN = 4
"""Fewest writes per transaction that a leader can seal with: the head, the journal, the former table and its store."""


def draw_steered(seed: int, members: int | None = None) -> Scenario:
    """Return the steered scenario of that seed."""
    triple_weights, fault_weights = _weights()
    scenario = draw(seed, members, stream="steered", weights=fault_weights)
    rng = random.Random(f"steering {seed}")  # noqa: S311
    for moment, kind in rng.choices(POSSIBLE, triple_weights, k=TARGETS):
        if moment in CONDITIONS:
            CONDITIONS[moment](scenario)
        if kind not in FAULTS:
            continue
        lasts_s = 0.0 if kind in MOMENTARY else rng.choice([0.3, 2.0, 6.0, 12.0])
        if kind in AMBUSHES:
            # A targeted fault waits for a seal by itself. The rule may decide within seconds after that.
            early = moment.phase in ("no head", "open")
            scenario.troubles.append(FaultPlan(0.1 if early else rng.choice([0.1, UNDER_WAY_S]), kind))
        else:
            target = rng.choice(["", rng.choice(scenario.lives).name])
            scenario.troubles.append(FaultPlan(0.1, kind, target, lasts_s, moment))
    scenario.plan_end()
    return scenario


@cache
def _weights() -> tuple[list[float], dict[str, float]]:
    """Return how likely each triple is to be aimed at, and how likely each fault is to strike besides."""
    reached = Reached.decode(COUNTS.read_bytes())
    triples = [1.0 / (1 + reached.counts[triple]) for triple in POSSIBLE]
    faults = {kind: 1.0 / (1 + sum(reached.counts[moment, kind] for moment, _ in POSSIBLE)) for kind in FAULTS}
    return triples, faults


# ---- the conditions under which a rule decides


def _sizes(scenario: Scenario, fewest: int, most: int) -> None:
    """Set the sizes of a round, as differences from the number of members."""
    count = len(scenario.lives)
    low = max(1, count + fewest)
    scenario.options.pop("segment", None)  # These sizes need not be whole segments.
    scenario.options.update(min_nodes=low, max_nodes=max(low, count + most), grow="settle")


def _steady(scenario: Scenario) -> None:
    """Let all start early, and do nothing but train."""
    for life in scenario.lives:
        life.start_at, life.train_s = life.start_at * 0.1, 10_000.0
        life.fail_every_s = life.give_up_after_s = life.leave_after_s = None


def _slow_to_stop(scenario: Scenario) -> None:
    """Let all workers take a few seconds to stop, so that a broken round stays broken for as long."""
    for life in scenario.lives:
        life.stop_s = 3.0


def _add(scenario: Scenario, kind: str, at: float = UNDER_WAY_S, when: Moment | None = None, lasts_s: float = 6.0) -> None:
    """Add a fault that strikes the first member, or the leader whose decision it waits for."""
    target = scenario.lives[0].name if when is None else ""
    scenario.troubles.append(FaultPlan(at, kind, target, 0.0 if kind in MOMENTARY else lasts_s, when))


def _broken(scenario: Scenario) -> None:
    """Lose a member of a running round, and let the others take their time."""
    _slow_to_stop(scenario)
    _add(scenario, "crash")


def _broken_twice(scenario: Scenario) -> None:
    """Lose the leader too, while the round re-forms."""
    _broken(scenario)
    _add(scenario, "crash", when=BROKEN)


def _all_succeed(scenario: Scenario) -> None:
    """Let all finish their work early."""
    _steady(scenario)
    for life in scenario.lives:
        life.train_s = 4.0


def _succeed_while_broken(scenario: Scenario) -> None:
    """Let all finish in the moment in which the round is broken for a newcomer, on an engine that takes its time."""
    _steady(scenario)
    scenario.options.update(grow="now", grow_every=0.0, min_nodes=1, max_nodes=len(scenario.lives) + 3)
    _add(scenario, "engine slow", UNDER_WAY_S - 0.1, lasts_s=12.0)
    _add(scenario, "newcomer")
    _add(scenario, "all done", UNDER_WAY_S + 0.1, Moment("grow", "sealed"))


def _gives_up(scenario: Scenario) -> None:
    scenario.options["on_failure"] = "close"
    scenario.lives[-1].give_up_after_s = 5.0


def _gives_up_and_another_is_lost(scenario: Scenario) -> None:
    _sizes(scenario, -1, 0)
    _gives_up(scenario)
    _slow_to_stop(scenario)
    _add(scenario, "crash", 3.0, BROKEN)


def _fails_and_another_is_lost(scenario: Scenario) -> None:
    """Let workers fail, and lose the leader before the others have stopped theirs."""
    _steady(scenario)
    _sizes(scenario, -2, 0)
    _slow_to_stop(scenario)
    scenario.lives[-1].fail_every_s = 5.0
    _add(scenario, "crash", 3.0, BROKEN)


def _stalls(scenario: Scenario) -> None:
    scenario.options["stall"] = 600.0
    scenario.lives[-1].stall_after_s = UNDER_WAY_S


def _never_stops(scenario: Scenario) -> None:
    """Lose a member, and let another one take longer to stop than the others wait."""
    _broken(scenario)
    scenario.options.update(min_nodes=1, regroup=5.0)
    scenario.lives[-1].stop_s = 15.0


def _half_a_seal(scenario: Scenario) -> None:
    """Let a member die between the batches of a seal, so that the table that was begun is an orphan."""
    scenario.writes_max = WRITES_MIN
    _add(scenario, "expire at seal", 0.1)


def _half_a_seal_again(scenario: Scenario) -> None:
    scenario.writes_max = WRITES_MIN
    _sizes(scenario, -1, 0)
    _add(scenario, "crash")
    _add(scenario, "expire at seal", UNDER_WAY_S - 0.1)


def _late_member(scenario: Scenario) -> None:
    """Let the run wait for its last member."""
    _steady(scenario)
    _sizes(scenario, 0, 0)
    scenario.lives[-1].start_at = 5.0


def _all(*steps: Callable[[Scenario], object]) -> Callable[[Scenario], None]:
    def prepare(scenario: Scenario) -> None:
        for step in steps:
            step(scenario)

    return prepare


BROKEN = Moment("keep_waiting", "broken")
CONDITIONS: dict[Moment, Callable[[Scenario], None]] = {
    Moment("restore_closed", "no head"): _all(
        _all_succeed,
        lambda scenario: _add(scenario, "engine restart", 0.1, Moment("close_after_success", "sealed")),
    ),
    Moment("restore_sealed", "no head"): lambda scenario: _add(scenario, "engine restart"),
    Moment("restore_broken", "no head"): _all(
        _broken, lambda scenario: _add(scenario, "engine restart", when=BROKEN)
    ),
    Moment("evict_banned", "open"): _all(_late_member, lambda scenario: _add(scenario, "ban", 2.0)),
    Moment("stop_call", "open"): _all(
        lambda scenario: _sizes(scenario, 0, 1),
        lambda scenario: _add(scenario, "crash", 0.1, Moment("start_call", "open")),
    ),
    Moment("start_call", "open"): lambda scenario: _sizes(scenario, 0, 1),
    Moment("sweep", "open"): _all(lambda scenario: _sizes(scenario, 0, 0), _half_a_seal),
    Moment("keep_waiting", "open"): _late_member,
    Moment("evict_banned", "sealed"): lambda scenario: _add(scenario, "ban"),
    Moment("close_after_success", "sealed"): _all_succeed,
    Moment("close_after_failure", "sealed"): _all(lambda scenario: _sizes(scenario, 0, 0), _gives_up),
    Moment("break_round", "sealed"): lambda scenario: _add(scenario, "crash"),
    Moment("break_for_stall", "sealed"): _stalls,
    Moment("break_for_drains", "sealed"): _all(
        lambda scenario: _sizes(scenario, -2, 0), lambda scenario: _add(scenario, "drain")
    ),
    Moment("sweep", "sealed"): _all(lambda scenario: _sizes(scenario, -2, 0), _half_a_seal),
    Moment("evict_banned", "broken"): _all(_broken, lambda scenario: _add(scenario, "ban", when=BROKEN)),
    Moment("close_after_success", "broken"): _succeed_while_broken,
    Moment("close_after_failure", "broken"): _gives_up_and_another_is_lost,
    Moment("name_root_cause", "broken"): _fails_and_another_is_lost,
    Moment("stop_call", "broken"): _all(lambda scenario: _sizes(scenario, -1, 0), _broken_twice),
    Moment("evict_stragglers", "broken"): _never_stops,
    Moment("evict_away", "broken"): _all(_never_stops, lambda scenario: setattr(scenario, "stars", True)),
    Moment("seal", "broken"): lambda scenario: _add(scenario, "crash"),
    Moment("start_call", "broken"): _all(lambda scenario: _sizes(scenario, 0, 1), _broken),
    Moment("sweep", "broken"): _half_a_seal_again,
    Moment("keep_waiting", "broken"): _broken,
    Moment("stay_closed", "closed"): _all_succeed,
}  # fmt: skip
"""Changes of a scenario that make a rule decide in a phase. Moments without an entry come by themselves."""
