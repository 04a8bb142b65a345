"""The leaders' decisions as the simulator sees them, and faults that wait for one."""

from __future__ import annotations

from rdzv.core.rules import RULES
from rdzv.testing.cluster import SimCluster
from rdzv.testing.decisions import MOMENTS, Moment
from rdzv.testing.history import Fault
from rdzv.testing.scenario import FaultPlan, Scenario, draw
from rdzv.testing.sim import simulate


def calm(members: int = 3, *troubles: FaultPlan) -> Scenario:
    """A run of patient members that have only these troubles."""
    scenario = draw(1, members)
    scenario.options.update(min_nodes=members, max_nodes=members, grow="settle")
    scenario.troubles, scenario.loss = list(troubles), 0.0
    for life in scenario.lives:
        life.start_at, life.train_s, life.stop_s = 0.1, 1e4, 0.3
        life.fail_every_s = life.give_up_after_s = life.leave_after_s = None
    scenario.plan_end()
    return scenario


def test_every_rule_of_every_phase_is_a_moment():
    assert len(MOMENTS) == len(set(MOMENTS)) == sum(map(len, RULES.values()))
    assert Moment("first_head", "no head") in MOMENTS
    assert str(Moment("seal", "broken")) == "seal, broken"


def test_decisions_are_seen_in_order_with_the_phase_of_the_head_that_was_judged():
    stage = SimCluster(calm(), observed=True)
    stage.play()
    moments = list(dict.fromkeys(one.moment for one in stage.decisions))
    assert moments == [
        Moment("first_head", "no head"),
        Moment("grow", "sealed"),
        Moment("close_after_success", "sealed"),
        Moment("stay_closed", "closed"),
    ]
    assert [one.at for one in stage.decisions] == sorted(one.at for one in stage.decisions)
    assert {one.actor for one in stage.decisions} <= {"m0", "m1", "m2"}


def test_observing_decisions_changes_nothing_in_a_run():
    plain, observed = simulate(11), simulate(11, observed=True)
    assert not plain.decisions
    assert observed.decisions
    assert plain.history.digest() == observed.history.digest()


def test_a_fault_that_waits_for_a_decision_strikes_the_leader_at_that_moment():
    trouble = FaultPlan(0.1, "pause", lasts_s=1.0, when=Moment("first_head", "no head"))
    stage = SimCluster(calm(3, trouble))
    stage.play()
    decided = next(one for one in stage.decisions if one.moment == trouble.when)
    struck = next(one for one in stage.history.of(Fault) if one.kind == "pause")
    assert (struck.at, struck.target) == (decided.at, decided.actor)


def test_a_fault_may_wait_for_a_decision_and_strike_another_member():
    when = Moment("grow", "sealed")
    stage = SimCluster(calm(3, FaultPlan(0.1, "crash", "m2", 1.0, when), FaultPlan(0.1, "drain", "m1", 0.3, when)))
    stage.play()
    assert {(one.kind, one.target) for one in stage.history.of(Fault) if one.target} == {("crash", "m2"), ("drain", "m1")}


def test_a_fault_gives_up_if_its_moment_does_not_come():
    stage = SimCluster(calm(3, FaultPlan(0.1, "crash", when=Moment("evict_banned", "open"))))
    stage.play()
    assert not [one for one in stage.history.of(Fault) if one.kind == "crash"]
