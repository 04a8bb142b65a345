"""Losses and arrivals while torch's agent polls nothing: assigning ranks, stopping workers, in the last barrier."""

from __future__ import annotations

import time

import pytest

QUICK = {"last_call": 1, "settle": 0.3, "grow_every": 0}
TOGETHER = {"last_call": 10}
"""Long enough for all to be in the first round."""


def form_with_one_done(training):
    """Form a round of three. Return its rows, a node in the last barrier, another node, and the one that serves."""
    training.start("a", "b", "c")
    rows = training.world("abc", 3)
    server = training.server()
    done, other = [node for node in "abc" if node != server]
    order_and_wait(training, done)
    return rows, done, other, server


def order_and_wait(training, node):
    training.order(node)
    training.row("order", node)
    time.sleep(0.5)  # Its agent is in the barrier by now; if it is not yet, the same must hold.


@pytest.mark.parametrize("victim", ["a", "c"])
def test_a_member_killed_while_ranks_are_given_out_costs_the_others_no_restart(job, victim):
    """The victim is rank 0, for which torch's own agents wait, or another, for which their rank 0 waits."""
    training = job("2:3", max_restarts=0, **TOGETHER)
    training.hold(victim)
    for rank, node in enumerate("abc"):
        training.agent(node, order=rank)
    training.row("held", victim)
    survivors = {"a", "b", "c"} - {victim}
    for node in survivors:
        training.row("joined", node)
    training.world(survivors, 3)  # Nobody waits for the one that is held: its ranks are part of the seal.
    killed_at = training.agents[victim].kill()
    after = training.world(survivors, 2, after=killed_at)
    assert {(row.restarts, row.round) for row in after.values()} == {(0, 2)}
    training.finish_all(survivors)


def test_a_loss_while_one_is_done_leaves_that_one_with_success_and_lets_the_others_re_form(job):
    training = job("1:3", **TOGETHER)
    rows, done, lost, left = form_with_one_done(training)
    assert training.agents[done].code is None, "it waits for the others"
    killed_at = training.agents[lost].kill()
    training.world([left], 1, after=killed_at)
    training.check_success([done])
    assert training.rows("start", node=done) == [rows[done]], "its workers were not started again"
    training.finish_all([left])


def test_a_loss_after_which_too_few_are_not_done_is_told_at_once(job):
    training = job("2:3", **TOGETHER)
    _, done, lost, left = form_with_one_done(training)
    training.agents[lost].kill()
    training.check_success([done])
    assert training.agents[left].ends(30) == 1
    sentence = "RendezvousClosedError: run 'job' is closed: "
    assert sentence in training.agents[left].out
    assert "lost after others were done; 1 of at least 2 nodes remain" in training.agents[left].out.partition(sentence)[2]


def test_those_done_end_with_success_when_one_of_them_is_killed_in_the_last_barrier(job):
    training = job("1:3", **TOGETHER)
    _, done, killed, left = form_with_one_done(training)
    order_and_wait(training, killed)
    training.agents[killed].kill()
    training.finish_all([done, left])


def test_a_newcomer_restarts_nobody_once_a_member_is_done(job):
    training = job("1:3", **QUICK)
    training.start("a", "b")
    rows = training.world("ab", 2)
    order_and_wait(training, "a")
    training.start("c")
    training.row("joins", "c")
    time.sleep(2)  # Several times as long as it takes to let a newcomer in.
    assert training.rows("told") == []
    assert training.rows("start") == sorted(rows.values(), key=lambda row: row.at)
    training.finish_all("abc")


def test_a_spare_takes_the_place_of_a_lost_node_and_ends_with_success(job):
    """Two spares; one is promoted, the other waits until the end."""
    training = job("2:2")
    training.start("a", "b")
    rows = training.world("ab", 2)
    training.start("c", "d")
    training.row("joins", "c")
    training.row("joins", "d")
    time.sleep(1)
    assert training.rows("told") == [], "spares disturb nobody"
    left, lost = training.server(), next(node for node in "ab" if node != training.server())
    killed_at = training.agents[lost].kill()
    promoted = training.row("joined", "c", after=killed_at) if training.rows("joined", node="c") else None
    names = {row.node for row in training.world_of(2, after=killed_at).values()}
    assert left in names
    assert len(names & {"c", "d"}) == 1
    assert promoted is None or "c" in names
    assert rows[left].rank == training.rows("start", node=left)[-1].rank
    training.finish_all([left, "c", "d"])


def test_a_slow_worker_reads_nothing_of_the_attempt_before(job):
    """After a failure the workers meet at a new address; at the old one the reader would find the former value."""
    training = job("2:2")
    training.start("a", "b", function="functions:meet", env={"PYTHONPATH": str(training.jobs)})
    first = training.row("met", "b")
    training.order("a", 3)
    second = training.row("met", "b", after=first.at)
    assert (first.value, second.value) == ("1", "2")
    training.finish_all("ab")


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_a_worker_that_takes_thirty_seconds_to_stop_restarts_the_others_once(job):
    training = job("1:4", **QUICK)
    training.start("a", "b", "c")
    training.world("abc", 3)
    server = training.server()
    slow, lost = [node for node in "abc" if node != server]
    training.agents[slow].kill()
    training.world([server, lost], 2)
    training.agent("slow", mode="ignores SIGTERM")
    three = [server, lost, "slow"]
    before = training.world(three, 3)
    killed_at = training.agents[lost].kill()
    after = training.world([server, "slow"], 2, after=killed_at, timeout_s=90)
    assert min(row.at for row in after.values()) - killed_at > 25, "it did take that long"
    assert {row.round for row in after.values()} == {before["slow"].round + 1}
    assert len(training.rows("start", node=server, after=killed_at)) == 1
    training.finish_all([server, "slow"])
