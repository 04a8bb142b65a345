"""How far the workers of a member are, and of a run."""

from __future__ import annotations

from rdzv.core import wire
from rdzv.core.model import BEHIND_MAX, Phase, ProgressReport
from rdzv.core.progress import WorkerSteps
from rdzv.core.status import describe, progress_of_run
from rdzv.core.worker_messages import STEP_MAX
from support.views import view


def seen(*looks):
    """The steps of a member after looks of (time, {rank: step})."""
    steps = WorkerSteps("t")
    for at, told in looks:
        steps.see(told, at)
    return steps


def stand_still(steps, told, begin, end):
    """Look every ten seconds, and always see the same."""
    for at in range(begin, end + 1, 10):
        steps.see(told, float(at))
    return steps


def test_a_member_tells_lowest_and_highest_step_the_slowest_ranks_and_the_rate():
    told = seen((0.0, {4: 10, 5: 10, 6: 10}), (10.0, {4: 50, 5: 30, 6: 30}), (12.0, {4: 50, 5: 30, 6: 30})).report()
    assert (told.low, told.high, told.slowest, told.workers) == (30, 50, (5, 6), 3)
    assert (told.rate, told.since_s) == (1.667, 2.0)


def test_nothing_is_told_before_the_first_step():
    assert seen((1.0, {})).report() is None


def test_a_worker_that_ended_does_not_count_any_more():
    told = seen((0.0, {0: 5, 1: 9}), (1.0, {1: 9})).report()
    assert (told.low, told.high, told.slowest) == (9, 9, (1,))


def test_the_rate_begins_anew_when_the_steps_do():
    told = seen((0.0, {0: 1000}), (10.0, {0: 0}), (20.0, {0: 30})).report()
    assert told.rate == 3.0


def test_a_report_is_small_whatever_the_workers_tell():
    steps = seen(*((at, dict.fromkeys(range(10_000), STEP_MAX - 2 + at)) for at in (0, 1)))
    told = steps.report()
    assert len(told.slowest) == BEHIND_MAX
    assert len(wire.encode(told)) < 400


def test_workers_that_do_not_move_are_a_stall_and_the_last_of_them_are_named():
    steps = seen((0.0, {0: 5, 1: 7, 2: 5}), (1.0, {0: 5, 1: 7, 2: 6}))
    stand_still(steps, {0: 5, 1: 7, 2: 6}, 10, 50)
    stand_still(steps, {0: 5, 1: 7, 2: 6, 3: 2}, 60, 90)
    assert steps.stall(100.0) is None
    steps.see({0: 5, 1: 7, 2: 6, 3: 2}, 100.0)
    told = steps.stall(100.0)
    assert (told.table, told.step, told.ranks, told.for_s, told.furthest) == ("t", 5, (0,), 100.0, 7)
    steps.see({0: 5, 1: 7, 2: 6, 3: 2}, 110.0)
    assert steps.stall(100.0).ranks == (3,), "it was seen to stop later, and is behind all the same"
    steps.see({1: 7}, 111.0)
    assert (steps.stall(100.0).step, steps.stall(100.0).ranks) == (7, (1,))
    steps.see({}, 112.0)
    assert steps.stall(100.0) is None


def test_a_worker_that_is_slower_but_moves_is_not_behind():
    steps = seen(*((float(at), {0: 50, 1: 20 + at // 10}) for at in range(0, 101, 10)))
    assert steps.stall(100.0).ranks == (0,)


def test_a_machine_that_stood_still_for_an_hour_has_no_stalled_workers():
    steps = seen((0.0, {0: 5}), (1.0, {0: 5}), (3600.0, {0: 5}))
    assert steps.stall(100.0) is None
    stand_still(steps, {0: 5}, 3610, 3700)
    assert steps.stall(100.0).for_s == 116.0


def report(low, high=None, slowest=(0,), table="t3", **fields):
    return ProgressReport(table=table, low=low, high=high or low, slowest=slowest, workers=1, **fields)


def test_the_progress_of_a_run_is_that_of_its_slowest_workers():
    told = [
        report(90, 95, (0,), rate=5.0, stamp="x", since_s=1.0),
        None,
        report(80, 80, (3, 4), rate=2.0, stamp="y", since_s=1.0),
    ]
    found = progress_of_run(told, {"x": 2.0, "y": 30.0})
    assert (found.step, found.furthest, found.rate, found.behind, found.workers) == (80, 95, 2.0, (3, 4), 2)
    assert found.age_s == 31.0
    assert progress_of_run([None]) is None
    assert progress_of_run([report(7, slowest=(0, 1))]).behind == ()


def test_the_status_shows_the_progress_of_the_present_round_only():
    now, before = report(80), report(99, table="older")
    found = describe("job", view(Phase.SEALED, "a b c", table="t3", progress={"A": now, "B": before}))
    assert [member.progress for member in found.members] == [now, None, None]
    assert found.progress.step == 80
    broken = describe("job", view(Phase.BROKEN, "a b c", table="t3", progress={"A": now}))
    assert broken.progress is None
