"""The real member on a simulated compare-and-set register, judged by the same checkers as on every other engine.

The checkers leave out what a register does not promise (`CheckContext.register`).
"""

from __future__ import annotations

import math
import os

import pytest

from rdzv.engines.register import expiry
from rdzv.testing.cluster import SimCluster
from rdzv.testing.register import SimRegister
from rdzv.testing.scenario import FaultPlan, draw
from rdzv.testing.sim import check, main, simulate

SEEDS = int(os.environ.get("RDZV_REGISTER_SEEDS", "160"))
CHUNK = 20
REGRESSIONS = {
    25: "an answer came after the watch had shown what happened later in the same swap: a broken round was taken",
    52: "a member starved: it swapped what it had known before its pause",
    108: "the same",
}


def judge(seeds):
    for seed in seeds:
        result = simulate(seed, register=True)
        assert not result.wrong, "\n".join([f"seed {seed} is wrong; replay it: {result.replay}", *result.wrong[:10]])


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_guarantee_that_a_register_allows_holds(first):
    judge(range(first, min(first + CHUNK, SEEDS)))


@pytest.mark.parametrize("seed", REGRESSIONS)
def test_what_once_failed_on_a_register_holds(seed):
    judge([seed])


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000_000, 1_005_000, 100))
def test_every_guarantee_that_a_register_allows_holds_in_five_thousand_more(first):
    judge(range(first, first + 100))


def test_a_seed_is_repeated_exactly_on_a_register(capsys):
    assert simulate(7, register=True).history.digest() == simulate(7, register=True).history.digest()
    assert main(["--seed", "7", "--register"]) == 0
    assert "seed 7: every guarantee held" in capsys.readouterr().out


# ---- the checkers would notice


def play(seed, *troubles):
    """A run of that seed, with these troubles instead of its own."""
    scenario = draw(seed, 5)
    scenario.troubles = list(troubles)
    scenario.loss = 0.0
    scenario.calm_at = max([20.0, *(trouble.at + trouble.lasts_s + 2.0 for trouble in troubles)])
    scenario.end_at = scenario.calm_at + 60.0
    for life in scenario.lives:
        life.train_s, life.stop_s, life.fail_every_s, life.give_up_after_s, life.leave_after_s = 1e4, 0.3, None, None, None
    stage = SimCluster(scenario, register=True)
    stage.play()
    return check(stage)


def test_a_register_that_forgets_what_it_took_is_found_out(monkeypatch):
    really = SimRegister.swap

    async def forgetful(self, state, token):
        if self._driver.node.rng.random() < 0.2:
            return state, token, True
        return await really(self, state, token)

    assert not play(1)
    monkeypatch.setattr(SimRegister, "swap", forgetful)
    assert any(play(seed) for seed in range(1, 4))


STALL = FaultPlan(20.0, "engine stall", "", 20.0)


def test_an_observer_that_does_not_start_anew_after_a_stall_is_found_out(monkeypatch):
    seeds = (4, 6, 10)
    assert not any(play(seed, STALL) for seed in seeds)
    monkeypatch.setattr(expiry, "GAP", math.inf)
    assert any("G7" in wrong for seed in seeds for wrong in play(seed, STALL))
