"""The checkers find each planted defect within 300 seeds. A checker that cannot fail is worth nothing."""

from __future__ import annotations

import pytest

from rdzv.testing.sim import simulate
from support.planted_bugs import BUGS, planted, table_row

pytestmark = pytest.mark.seeds

SEEDS_MAX = 300

FIRST_TO_TRY = {
    "address of the former round is used again": 274,
    "close ends a later incarnation": 5,
    "done member blocks re-forming": 69,
    "engine that came back is not told": 39,
    "engine's return is not waited for": 39,
    "evicted member acts": 1,
    "failure closes although others could go on": 1,
    "former leader's write is accepted": 1,
    "fence of a restarted server begins at what it is told": 64,
    "ghost is sealed in": 5,
    "last-call age is taken from another machine's clock": 90,
    "leader is taken for dead without asking": 52,
    "leader of a running round is evicted": 38,
    "notice that is not answered has no end": 32,
    "growth counts as a round without progress": 10,
    "rounds without progress are counted by each leader anew": 51,
    "one who came later is watched": 45,
    "outage is told at once": 3,
    "rank table of another attempt is used": 67,
    "ready is not tied to a round": 1,
    "round broken before it was taken is not given up": 77,
    "round number is reused after a restart": 64,
    "segments are cut across racks": 60,
    "settings are taken for one's own without a compare": 24,
    "settings mismatch is ignored": 24,
    "spare disturbs the round": 1,
    "stragglers are taken for dead without asking": 48,
    "a lost connection is taken for the end of a process": 5,
    "stragglers are waited for without end": 56,
    "two worlds from two engines": 4,
    "unhealthy member is sealed in": 8,
    "quarantined host is let in without need": 2,
    "strikes are counted at the break only": 2,
    "quarantined host is kept out of a quorum": 12,
    "watch gap is not re-listed": 50,
    "world is given from memory": 45,
}
"""A seed below SEEDS_MAX that is known to find it, to save time. If it no longer does, all are tried."""


def test_there_are_enough_of_them():
    assert len(BUGS) >= 15
    assert set(FIRST_TO_TRY) <= set(BUGS)


@pytest.mark.parametrize("bug", sorted(BUGS))
def test_planted_bug_is_found(bug):
    """A checker catches the bug in one of the first seeds."""
    hint = FIRST_TO_TRY.get(bug, 0)
    assert 0 <= hint < SEEDS_MAX
    seeds = [hint, *(seed for seed in range(SEEDS_MAX) if seed != hint)]
    with planted(bug):
        found = any(simulate(seed, **BUGS[bug].scenarios).wrong for seed in seeds)
        assert found, f"{bug}: not found in {SEEDS_MAX} seeds"


def test_planted_bugs_replace_public_names_only():
    """A private name may change at any time, and the bug with it."""
    patched = [attribute for bug in BUGS.values() for _, attribute, _ in bug.patches]
    assert [attribute for attribute in patched if attribute.startswith("_")] == []


def test_the_table_says_which_seed_finds_a_bug_and_by_which_checker():
    assert table_row(5, "seals below quorum").startswith("| seals below quorum | G2 | 0: G2 | ")
    assert "| none of 1 |" in table_row(1, "round broken before it was taken is not given up")


def test_a_planted_bug_is_gone_afterwards():
    """Otherwise every later test would run on broken code."""
    with planted("seals below quorum"):
        assert simulate(0).wrong
    assert not simulate(0).wrong


def test_an_unknown_bug_is_named():
    """A typo must not plant nothing."""
    with pytest.raises(ValueError, match="no planted bug is called 'nonsense'"), planted("nonsense"):
        pass
