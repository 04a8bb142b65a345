"""The checkers find each planted defect within 200 seeds. A checker that cannot fail is worth nothing."""

from __future__ import annotations

import pytest

from rdzv.testing.sim import simulate
from support.planted_bugs import BUGS, planted, table_row

SEEDS_MAX = 200

FIRST_TO_TRY = {
    "address of the former round is used again": 178,
    "done member blocks re-forming": 9,
    "engine that came back is not told": 33,
    "engine's return is not waited for": 43,
    "evicted member acts": 25,
    "failure closes although others could go on": 7,
    "former leader's write is accepted": 27,
    "last-call age is taken from another machine's clock": 45,
    "leader's gap is not re-listed": 26,
    "one who came later is watched": 9,
    "rank table of another attempt is used": 20,
    "round broken before it was taken is not given up": 27,
    "stragglers are waited for without end": 9,
    "two worlds from two engines": 45,
    "world is given from memory": 25,
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
        assert any(simulate(seed).wrong for seed in seeds), f"{bug}: not found in {SEEDS_MAX} seeds"


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
