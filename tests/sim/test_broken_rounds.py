"""Connections and processes that end in broken rounds: nobody is evicted early whom a linger of 1 s would have spared."""

from __future__ import annotations

import pytest

from rdzv.testing.sim import main, simulate

SEEDS = 60


def judge_all(seeds):
    """Return how many killed processes were evicted before their linger was over."""
    evicted = 0
    for seed in seeds:
        result = simulate(seed, broken=True)
        assert not result.wrong, "\n".join([f"seed {seed} is wrong; replay it: {result.replay}", *result.wrong[:10]])
        evicted += result.evicted
    return evicted


@pytest.mark.seeds
def test_h33_only_killed_processes_are_evicted_early():
    """T8.5: and some are, or the rule would not be tested."""
    assert judge_all(range(SEEDS)) >= 3


@pytest.mark.soak
@pytest.mark.parametrize("first", range(2_000_000, 2_005_000, 250))
def test_only_killed_processes_are_evicted_early_in_five_thousand(first):
    judge_all(range(first, first + 250))


def test_the_command_counts_them(capsys):
    assert main(["--seed", "0", "--count", "2", "--broken"]) == 0
    assert "2 of 2 seeds held; 0 members were evicted before their linger was over" in capsys.readouterr().out
