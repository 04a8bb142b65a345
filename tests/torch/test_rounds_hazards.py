"""What goes wrong in processes that stay, at length: kills, pauses, deaths while a group is made, defects that come again."""

from __future__ import annotations

import math
import random
import signal
import time

import pytest

pytestmark = pytest.mark.soak

QUICK = {"linger": 0.1, "drain_settle": 0.1}


def test_20_random_kills_leave_equal_states_and_the_same_losses(staying, tmp_path):
    """Four processes; each that is killed is replaced by a new one, with other first weights."""
    (tmp_path / "alone").mkdir()
    plan = {"report_every": 25, "lr": 5e-4, "settings": QUICK}
    job = staying((2, 4), steps=100_000, **plan)
    living = dict(zip("abcd", job.begin("abcd"), strict=True))
    chance, killed_at = random.Random(20), 0.0
    for turn in range(20):
        for one in living.values():
            one.until("step", size=4, after=killed_at)
        time.sleep(chance.random())
        killed_at = time.monotonic()
        living.pop(chance.choice(sorted(living))).kill()
        for one in living.values():
            one.until("step", size=3, after=killed_at)
        living[f"n{turn}"] = job.start(f"n{turn}")
    assert job.check_states() >= 40
    # One process that begins with the weights of the first rank 0 does the same steps alone.
    last = max(row.step for row in job.rows("step"))
    seed = next(number for number, name in enumerate("abcd") if job.processes[name].rows("world")[0].rank == 0)
    alone = staying((1, 1), steps=last, seed=seed, step_s=0.0, **plan)
    alone.folder = tmp_path / "alone"
    single = alone.start("single")
    assert single.ends() == 0
    expected = {row.step: row.loss for row in single.rows("step")}
    compared = [(row.loss, expected[row.step]) for row in job.rows("step") if row.step in expected]
    assert len(compared) > 100
    assert all(math.isclose(loss, wanted, rel_tol=0.01) for loss, wanted in compared), compared


def test_a_paused_member_does_not_keep_the_others_in_a_collective(staying):
    """Every survivor hangs in a subgroup's collective that would time out after ten minutes, and has a forked child."""
    job = staying((2, 3), subgroup=True, forks=True, settings={**QUICK, "lease": 4})
    a, b, c = job.begin("abc")
    b.send(signal.SIGSTOP)
    for one in (a, c):
        one.until("step", size=2)
    b.send(signal.SIGCONT)
    for one in (a, b, c):
        one.until("step", size=3, round=3)
    job.check_states()


def test_sigterm_ends_a_process_that_a_paused_peer_keeps_in_a_collective(staying):
    """Two members and a quorum of two: the round is not formed again, so the process goes by itself."""
    job = staying((2, 2), settings={**QUICK, "lease": 600})
    a, b = job.begin("ab")
    b.send(signal.SIGSTOP)
    time.sleep(1)
    a.send(signal.SIGTERM)
    assert a.ends(30) == 128 + signal.SIGTERM
    b.send(signal.SIGCONT)


def test_forked_children_of_a_killed_process_do_not_hide_its_death(staying):
    job = staying((2, 3), forks=True, settings={**QUICK, "lease": 600})
    a, b, c = job.begin("abc")
    killed_at = time.monotonic()
    b.kill()
    for one in (a, c):
        assert one.until("step", size=2).at - killed_at < 10, "the children live for 30 s"


@pytest.mark.parametrize("keeps", [False, True], ids=["freed", "kept"])
def test_100_rounds_of_a_healthy_loop_leave_no_threads_and_descriptors(staying, keeps):
    """Each round ends while the other members are in a collective. With DDP that are kept, it works all the same."""
    settings = {**QUICK, "settle": 0, "bootstrap_port": "29830-29840", "max_failures": 3}
    job = staying((3, 3), again_every=3, keeps=keeps, step_s=0.0, settings=settings)
    started = [job.start(name) for name in "abc"]
    for one in started:
        one.until("world", round=100, timeout_s=600)
    job.check_states()
    if not keeps:
        for one in started:
            rows = {row.round: row for row in one.rows("world")}
            assert rows[100].fd <= rows[10].fd + 12, one.report()
            assert rows[100].task <= rows[10].task + 8, one.report()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_process_that_dies_or_stands_still_while_a_group_is_made_delays_the_others_only(staying, name, call, victim):
    """Four processes; one is killed, and in the second round another one ends at a call of the store. One is rank 0."""
    job = staying((2, 4), settings={**QUICK, "form_s": 1.0, "lease": 4})
    plans = {one: {"ends_at_call": (call, name)} if one == victim else {} for one in "abcd"}
    started = {one: job.start(one, **plan) for one, plan in plans.items()}
    for one in started.values():
        one.until("step", size=4)
    killed_at = time.monotonic()
    started.pop("d").kill()
    started.pop(victim)
    for one in started.values():
        row = one.until("step", after=killed_at)
        while row.size != 2 and job.processes[victim].rows("ends"):
            row = one.until("step", after=row.at)
    job.check_states()


def test_a_defect_that_aborts_a_process_again_and_again_closes_the_run(staying):
    """Rank 1 gives a collective another size than the others. A batch system starts each process again that aborts."""
    job = staying((2, 3), mismatch_at=10, settings={**QUICK, "max_failures": 3, "timeout_s": 10})
    for name in "abc":
        job.start(name)
    deadline, number = time.monotonic() + 120, 0
    closed = []
    while not closed and time.monotonic() < deadline:
        for name, process in list(job.processes.items()):
            if not process.lives and process.ends() < 0 and not name.endswith("+"):
                number += 1
                job.processes[f"{name}{number}+"] = job.processes.pop(name)
                job.start(f"r{number}")
        closed = [one for one in job.processes.values() if "rounds in a row failed before a step was completed" in one.errors]
        time.sleep(0.05)
    assert closed, job.report()
    assert number < 20


def test_a_newcomer_that_comes_while_the_run_ends_is_no_failure(staying):
    job = staying((2, 3), steps=40, settings=QUICK)
    assert [one.ends() for one in [job.start(name) for name in "abc"]] == [0, 0, 0], job.report()


def test_a_program_that_exits_within_a_round_leaves_and_ends(staying):
    job = staying((2, 3), settings=QUICK)
    a, b, c = (job.start(name, exits_at=30 if name == "b" else -1) for name in "abc")
    assert b.ends(30) == 3
    for one in (a, c):
        one.until("step", size=2)
        assert "b gave up: SystemExit: 3" in one.until("world", size=2).reason
