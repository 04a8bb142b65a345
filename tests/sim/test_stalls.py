"""Members that report a stall, among faults of all kinds: their round is broken in time, and nothing else goes wrong."""

from __future__ import annotations

import pytest

from rdzv.core import rules
from rdzv.core.model import Phase
from rdzv.testing.decisions import Moment
from rdzv.testing.sim import simulate

pytestmark = pytest.mark.seeds

SEEDS = range(1, 120, 5)
"""Every fifth seed of broken rounds has members that stall."""
STALL = Moment("break_for_stall", "sealed")


def play(seeds):
    """Return the results of these seeds, and how often the rule decided."""
    results = [simulate(seed, broken=True, observed=True) for seed in seeds]
    return results, sum(one.moment == STALL for result in results for one in result.decisions)


def test_rounds_with_stalled_workers_are_broken_and_every_guarantee_holds():
    results, decided = play(SEEDS)
    assert [f"{result.replay}: {result.wrong[0]}" for result in results if result.wrong] == []
    assert decided >= 5


def test_a_leader_that_overlooks_stalls_is_found_out(monkeypatch):
    without = tuple(rule for rule in rules.RULES[Phase.SEALED] if rule is not rules.break_for_stall)
    monkeypatch.setattr(rules, "RULES", {**rules.RULES, Phase.SEALED: without})
    results, decided = play(SEEDS)
    assert decided == 0
    assert any("stalled" in line for result in results for line in result.wrong)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(3_000_001, 3_005_001, 500))
def test_every_guarantee_holds_in_a_thousand_runs_with_stalls(first):
    results, _ = play(range(first, first + 500, 5))
    assert [f"{result.replay}: {result.wrong[0]}" for result in results if result.wrong] == []
