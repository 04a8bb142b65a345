"""Steered scenarios: they follow from the seed alone, and reach what plain ones seldom do."""

from __future__ import annotations

import pytest

from rdzv.testing import steering
from rdzv.testing.cluster import SimCluster
from rdzv.testing.decisions import MOMENTS, Moment
from rdzv.testing.reached import IMPOSSIBLE, POSSIBLE, Reached
from rdzv.testing.scenario import WAIT_UNTIL_S, draw
from rdzv.testing.sim import main, simulate
from rdzv.testing.steering import CONDITIONS, COUNTS, draw_steered

COMMON = {Moment("first_head", "no head"), Moment("seal", "open"), Moment("grow", "sealed")}
"""Moments that come in nearly every run."""


def test_a_steered_scenario_follows_from_the_seed():
    assert draw_steered(5) == draw_steered(5)
    assert draw_steered(5) != draw_steered(6)
    assert draw_steered(5).options != draw(5).options


def test_a_steered_seed_is_repeated_exactly():
    assert simulate(8, steered=True).history.digest() == simulate(8, steered=True).history.digest()


def test_rare_triples_and_faults_are_aimed_at_most():
    reached = Reached.decode(COUNTS.read_bytes())
    triples, faults = steering._weights()
    by_count = sorted(zip((reached.counts[triple] for triple in POSSIBLE), triples, strict=True))
    assert [weight for _, weight in by_count] == sorted(triples, reverse=True)
    assert faults["ban"] > faults["crash"]


def test_faults_that_wait_for_a_decision_end_before_the_calm():
    for seed in range(50):
        scenario = draw_steered(seed)
        assert all(WAIT_UNTIL_S + fault.lasts_s < scenario.calm_at for fault in scenario.troubles if fault.when)


def test_every_moment_that_can_come_has_its_conditions():
    assert CONDITIONS.keys() | COMMON == set(MOMENTS) - set(IMPOSSIBLE)


@pytest.mark.parametrize("moment", CONDITIONS, ids=str)
def test_the_conditions_of_a_moment_bring_it_about(moment):
    """Otherwise its triples would be aimed at in vain."""
    for seed in range(10):
        scenario = draw(seed, 6, stream="steered")
        scenario.troubles, scenario.loss = [], 0.0
        CONDITIONS[moment](scenario)
        scenario.plan_end()
        stage = SimCluster(scenario, observed=True)
        stage.play()
        if any(one.moment == moment for one in stage.decisions):
            return
    pytest.fail(f"{moment}: in none of 10 runs")


def test_the_command_runs_steered_seeds_in_several_processes_and_saves_what_they_reached(capsys, tmp_path):
    counts = tmp_path / "reached.json"
    assert main(["--seed", "0", "--count", "4", "--jobs", "2", "--steered", "--reached", "--save-reached", str(counts)]) == 0
    shown = capsys.readouterr().out
    assert "4 of 4 seeds held" in shown
    assert "4 seeds reached" in shown
    assert Reached.decode(counts.read_bytes()).seeds == 4


def test_a_steered_seed_says_how_to_repeat_it():
    replay = "python -m rdzv.testing.sim --seed 3 --members 4 --steered --register --verbose"
    assert simulate(3, 4, steered=True, register=True).replay == replay
