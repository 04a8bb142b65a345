"""The real member on a simulated compare-and-set register, judged by the same checkers as on every other engine.

The checkers leave out what a register does not promise (`CheckContext.register`).
"""

from __future__ import annotations

import math
import os

import pytest

from rdzv.engines.register import expiry
from rdzv.testing.cluster import SimCluster
from rdzv.testing.register import RegisterServer, SimRegister
from rdzv.testing.scenario import FaultPlan, draw
from rdzv.testing.sim import check, main, simulate

pytestmark = pytest.mark.seeds

SEEDS = int(os.environ.get("RDZV_REGISTER_SEEDS", "160"))
CHUNK = 20
REGRESSIONS = {
    25: "an answer came after the watch had shown what happened later in the same swap: a broken round was taken",
    52: "a member starved: it swapped what it had known before its pause",
    108: "the same",
    183003715: "(checker) it was emptied just after a seal, and restored within a second by one that knew nothing of it",
    1003289: "the simulated register gave the same token twice, before and after it was emptied",
    **dict.fromkeys(
        (710178, 950558, 1001570, 1003732, 1004278, 1550166, 1550404),
        "members of a slow register lost so many swaps that their leases ended: they renew in turns now",
    ),
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


def play(seed, *troubles, members=5, slow_s=0.0):
    """A run of that seed, with these troubles instead of its own."""
    scenario = draw(seed, members)
    scenario.troubles = list(troubles)
    scenario.loss = 0.0
    scenario.calm_at = max([20.0, *(trouble.at + trouble.lasts_s + 2.0 for trouble in troubles)])
    scenario.tail_s = 60.0
    for life in scenario.lives:
        life.train_s, life.stop_s, life.fail_every_s, life.give_up_after_s, life.leave_after_s = 1e4, 0.3, None, None, None
    stage = SimCluster(scenario, register=True)
    stage.engine.slow_s = slow_s
    stage.play()
    return check(stage)


@pytest.mark.parametrize(("members", "slow_s"), [(6, 0.15), (12, 0.05), (12, 0.5)])
def test_members_of_a_register_that_is_always_slow_keep_their_leases(members, slow_s):
    """At half a second per message, twelve renewals alone take longer than any of these leases."""
    assert not [wrong for seed in (2, 4) for wrong in play(seed, members=members, slow_s=slow_s) if "G7" in wrong]


def test_a_dead_member_of_a_register_that_is_always_slow_is_noticed(monkeypatch):
    ended = []
    really = RegisterServer.publish

    def publish(self, *args):
        before = self._document
        really(self, *args)
        if before is not None:
            gone = before.leases.keys() - self._document.leases.keys()
            ended.extend(self.loop.time() for id in gone if before.leases[id].ttl_s <= 10.0)

    monkeypatch.setattr(RegisterServer, "publish", publish)
    wrong = play(4, FaultPlan(60.0, "power cut", "m0", 50.0), slow_s=0.3)
    assert not [one for one in wrong if "G7" in one]
    assert len([at for at in ended if 60.0 < at < 90.0]) == 1


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
