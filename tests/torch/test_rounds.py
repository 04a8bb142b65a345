"""Processes that stay: they train on, with all that they have loaded, when others are killed, drained, paused or come."""

from __future__ import annotations

import math
import signal
import time

from rdzv import Rendezvous

QUICK = {"linger": 0.1, "drain_settle": 0.1}


def test_a_killed_member_a_newcomer_and_a_drained_one_leave_the_others_in_place(staying):
    job = staying((2, 4), settings=QUICK)
    a, b, c, d = job.begin("abcd")
    pids = {one.pid for one in (a, b, d)}
    c.kill()
    for one in (a, b, d):
        one.until("step", size=3)
    e = job.start("e")
    for one in (a, b, d, e):
        one.until("step", size=4, round=3)
    assert "e" in a.until("world", round=3).reason
    b.send(signal.SIGTERM)
    for one in (a, d, e):
        one.until("step", size=3, round=4)
    assert b.ends() == 128 + signal.SIGTERM
    assert "b draining: SIGTERM received" in a.until("world", round=4).reason
    assert {one.pid for one in (a, b, d)} == pids
    assert job.check_states() == 4
    assert max(e.until("world", round=3).steps) == e.until("world", round=3).step > 0, "no checkpoint was needed"


def test_the_member_that_is_furthest_gives_its_state_to_all_whatever_its_rank(staying):
    job = staying((3, 3), steps=7, ballast=500_000)
    steps = {"a": 5, "b": 7, "c": 0}
    started = [
        job.start(name, first_step=step, settings={"order": number}) for number, (name, step) in enumerate(steps.items())
    ]
    assert [one.ends() for one in started] == [0, 0, 0], job.report()
    rows = [one.until("world") for one in started]
    assert [row.rank for row in rows] == [0, 1, 2]
    assert rows[0].steps == rows[1].steps == rows[2].steps == [5, 7, 0]
    assert len({one.until("begins").digest for one in started}) == 3
    assert {row.digest for row in rows} == {started[1].until("begins").digest}
    assert {row.step for row in rows} == {7}


def test_a_collective_that_waits_for_a_peer_ends_when_the_round_is_over(staying):
    """One member stands still outside of the collective, so that no connection ends. A newcomer breaks the round."""
    job = staying((2, 3), only_reduce=True, settings=QUICK)
    a, b = job.start("a"), job.start("b", sleeps_at=20)
    b.until("sleeps")
    job.start("c")
    assert a.until("stopped", round=1).last > 0
    assert b.lives
    assert not b.rows("stopped")


def test_losses_with_a_kill_and_without_one_agree(staying, tmp_path):
    """The same model, data and steps: three members, one of which is killed, and one member alone."""
    (tmp_path / "alone").mkdir()
    plan = {"steps": 120, "report_every": 20, "seed": 1, "settings": QUICK}
    alone = staying((1, 1), **plan)
    alone.folder = tmp_path / "alone"
    single = alone.start("single", step_s=0.0)
    job = staying((2, 3), **plan)
    a, b, c = job.begin("abc")
    a.until("step", step=20)
    b.kill()
    assert (a.ends(), c.ends(), single.ends()) == (0, 0, 0), job.report()
    expected = {row.step: row.loss for row in single.rows("step")}
    for one in (a, c):
        losses = {row.step: row.loss for row in one.rows("step") if row.step in expected}
        assert len(losses) >= 6
        assert all(math.isclose(loss, expected[step], rel_tol=1e-3) for step, loss in losses.items()), (losses, expected)
        assert one.until("world", round=2).size == 2
    assert a.until("end").digest == c.until("end").digest
    assert a.until("end").loss < expected[20] / 2, "it has learned something"


def test_an_error_of_the_program_leaves_with_its_reason(staying):
    job = staying((2, 2), settings=QUICK)
    a, b = job.start("a", fails_at=30), job.start("b")
    assert a.ends() == 1
    assert "ValueError: the data are wrong" in a.errors
    assert b.ends() == 1
    assert "a gave up: ValueError: the data are wrong" in b.errors


def test_sigterm_ends_a_process_that_has_finished_and_waits_for_the_others(staying):
    """Two members and a quorum of two: no other round is formed, so the process goes by itself after 5 s."""
    job = staying((2, 2), only_reduce=True, settings=QUICK)
    a, _b = job.start("a", steps=20), job.start("b")
    a.until("stopped")
    a.send(signal.SIGTERM)
    assert a.ends(30) == 128 + signal.SIGTERM


def test_all_members_save_in_the_same_step_before_the_one_that_got_sigterm_goes(staying):
    job = staying((2, 3), only_reduce=True, saves=True, settings={**QUICK, "drain_notice": 50, "stall": 600})
    a, b, c = job.begin("abc")
    b.send(signal.SIGTERM)
    assert b.ends() == 128 + signal.SIGTERM
    for one in (a, c):
        one.until("step", size=2, round=2)
    rows = [one.until("saved", round=1) for one in (a, b, c)]
    assert len({row.step for row in rows}) == 1, job.report()
    assert all("b draining: SIGTERM received" in row.reason and 40 < row.seconds <= 50 for row in rows)
    assert a.until("world", round=2).reason.endswith("; all workers have saved"), job.report()


def test_the_steps_of_a_process_that_stays_are_shown(staying):
    job = staying((1, 1), only_reduce=True)
    (a,) = job.begin("a")
    with Rendezvous(job.server.endpoint, run_id="job", min_nodes=1, max_nodes=1) as observer:
        deadline = time.monotonic() + 60
        while (told := observer.status().progress) is None:
            assert time.monotonic() < deadline, job.report()
            time.sleep(0.2)
    assert told.workers == 1
    assert told.step > 0
    assert a.lives
