"""Hosts that break rounds again and again, among faults of all kinds: they are kept out, and every guarantee holds."""

from __future__ import annotations

import pytest

from rdzv.core.keys import Keys
from rdzv.testing.history import Commit
from rdzv.testing.sim import simulate

pytestmark = pytest.mark.seeds

SEEDS = range(2, 122, 5)
"""Every fifth seed of broken rounds has a quarantine."""
KEYS = Keys("sim")


def play(seeds):
    """Return what went wrong in these seeds, and how many quarantines began."""
    results = [simulate(seed, broken=True) for seed in seeds]
    wrong = [f"{result.replay}: {result.wrong[0]}" for result in results if result.wrong]
    events = [event for result in results for commit in result.history.of(Commit) for event in commit.events]
    return wrong, sum(event.item is not None and event.key.startswith(KEYS.quarantines) for event in events)


def test_hosts_are_quarantined_and_every_guarantee_holds():
    wrong, quarantines = play(SEEDS)
    assert wrong == []
    assert quarantines >= 20


@pytest.mark.soak
@pytest.mark.parametrize("first", range(4_000_002, 4_005_002, 500))
def test_every_guarantee_holds_in_a_thousand_runs_with_quarantines(first):
    wrong, _ = play(range(first, first + 500, 5))
    assert wrong == []
