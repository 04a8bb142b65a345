"""A thousand simulated runs of the real member, with every guarantee checked in each. `make soak` runs more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rdzv.testing.sim import simulate

pytestmark = pytest.mark.seeds

SEEDS = int(os.environ.get("RDZV_SEEDS", "1000"))
FIRST = int(os.environ.get("RDZV_FIRST_SEED", "0"))
CHUNK = 25

REGRESSIONS = [
    line.split()[0]
    for line in (Path(__file__).parent / "regressions.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def judge(seed, **kind):
    """Fail with the command that repeats a wrong seed."""
    result = simulate(seed, **kind)
    assert not result.wrong, "\n".join([f"seed {seed} is wrong; replay it: {result.replay}", *result.wrong[:10]])


def judge_all(seeds):
    """Every second seed is steered to what the others seldom reach."""
    for seed in seeds:
        judge(seed, steered=seed % 2 == 1)


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, CHUNK))
def test_every_guarantee_holds(first):
    """Members 2 to 12, all kinds of faults."""
    judge_all(range(first, min(first + CHUNK, FIRST + SEEDS)))


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_once_failed_holds(seed):
    """A seed that is not plain has its kind before it: steered-1892."""
    kind, _, number = seed.rpartition("-")
    judge(int(number), **({kind: True} if kind else {}))


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000_000, 1_010_000, 250))
def test_every_guarantee_holds_in_ten_thousand_more(first):
    judge_all(range(first, first + 250))
