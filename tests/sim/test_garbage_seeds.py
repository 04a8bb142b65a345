"""Simulated runs in which somebody overwrites the head with garbage, beside all other faults (T11.12)."""

from __future__ import annotations

import pytest

from rdzv.testing.cluster import SimCluster
from rdzv.testing.history import Fault
from rdzv.testing.scenario import FAULTS, draw
from rdzv.testing.sim import check

pytestmark = pytest.mark.seeds

WEIGHTS = {**FAULTS, "garbage head": sum(FAULTS.values()) / 2}
CHUNK = 20
EXPECTED = (
    "evicted: the run's records are gone or cannot be read",  # Those who hold a round.
    "was given a world under a new id and not told of its eviction",  # Those who wait hold nothing, and come in again.
)


def judge(seed: int) -> int:
    """Run one seed; return how often its head was overwritten."""
    stage = SimCluster(draw(seed, stream="garbage", weights=WEIGHTS))
    stage.play()
    wrong = [one for one in check(stage) if not any(known in one for known in EXPECTED)]
    assert not wrong, "\n".join([f"seed {seed} with garbage is wrong", *wrong[:10]])
    return sum(one.kind == "garbage head" and not one.stop for one in stage.history.of(Fault))


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_every_guarantee_holds_though_the_head_is_overwritten_with_garbage(first):
    assert sum(judge(seed) for seed in range(first, first + CHUNK)) > 5


@pytest.mark.soak
@pytest.mark.parametrize("first", range(2_500, 4_000, 250))
def test_every_guarantee_holds_in_fifteen_hundred_more(first):
    for seed in range(first, first + 250):
        judge(seed)
