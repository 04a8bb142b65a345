"""The journal of a run: its durations add up, and a scripted job is told with every cause and duration."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack

import msgspec

from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import JOURNAL_MAX, Call, Cause, CauseKind, Era, JournalEntry, Phase
from rdzv.engines.port import Put
from rdzv.operate import commands, journal
from rdzv.operate.journal import Duration, histories
from support.cli_commands import LIMIT_S, rdzv, running, served
from support.memory_members import Party, join, kill, run, until

LOST = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))


def line(seq, phase, number=1, lasted_s=None, **others):
    fields = {"run": "r", "era": Era(1, "e"), "size": 2, "call": Call.NONE, "by": "a", "reason": "why", **others}
    return JournalEntry(seq=seq, phase=phase, number=number, lasted_s=lasted_s, **fields)


def test_a_restart_costs_from_the_break_to_the_next_seal_over_all_writers():
    (history,) = histories([
        line(1, Phase.OPEN, 0),
        line(2, Phase.SEALED, lasted_s=2.0),
        line(3, Phase.BROKEN, lasted_s=10.0, cause=LOST),
        line(4, Phase.BROKEN, lasted_s=1.5, call=Call.LAST, by="b"),
        line(5, Phase.SEALED, 2, lasted_s=0.25, by="b", came=("d",), gone=("c",)),
    ])  # fmt: skip
    assert [step.at.seconds for step in history.steps] == [0, 2, 12, 13.5, 13.75]
    (restart,) = history.restarts
    assert (restart.kind, restart.members, restart.by) == (CauseKind.LOST, ("c",), "a")
    assert (str(restart.ran), str(restart.cost)) == ("10.0 s", "1.8 s")
    assert (restart.round, restart.next_round, restart.came, restart.gone) == (1, 2, ("d",), ("c",))
    assert [step.text for step in history.steps[1:]] == [
        "round 1 sealed with 2 nodes (why)",
        "round 1 broken after 10.0 s: c lost",
        "why",
        "round 2 sealed with 2 nodes (why); came in: d; no longer in: c; the restart took 1.8 s",
    ]
    assert (history.whole, str(history.cost)) == (True, "1.8 s")


def test_an_unknown_duration_makes_a_sum_a_lower_bound():
    (history,) = histories([
        line(7, Phase.BROKEN, cause=LOST),
        line(8, Phase.SEALED, 2, lasted_s=None),
        line(9, Phase.BROKEN, 2, lasted_s=4.0),
        line(10, Phase.CLOSED, 2, lasted_s=1.0, cause=Cause(kind=CauseKind.CLOSED, text="enough")),
    ])  # fmt: skip
    assert not history.whole
    assert [str(one.ran) for one in history.restarts] == ["at least 0.0 s", "4.0 s"]
    assert [str(one.cost) for one in history.restarts] == ["at least 0.0 s", "1.0 s"]
    assert (history.restarts[1].kind, history.restarts[1].next_round) == (None, 0)
    assert history.steps[-1].text == "closed: enough"
    assert str(history.cost) == "at least 1.0 s"


def test_a_settle_call_is_no_new_round_and_a_restart_under_way_is_shown():
    (history,) = histories([
        line(1, Phase.SEALED, size=1),
        line(2, Phase.SEALED, lasted_s=5.0, call=Call.SETTLE, reason="d waiting to come in"),
        line(3, Phase.BROKEN, lasted_s=2.0),
    ])  # fmt: skip
    assert history.steps[0].text == "round 1 sealed with 1 node (why)"
    assert history.steps[1].text == "d waiting to come in"
    (restart,) = history.restarts
    assert (restart.ran, restart.cost, restart.next_round) == (Duration(7.0), Duration(0.0, exact=False), 0)


def test_a_run_that_filled_at_once_has_all_its_lines():
    (history,) = histories([line(2, Phase.SEALED), line(3, Phase.BROKEN, lasted_s=1.0)])
    assert history.whole
    (history,) = histories([line(2, Phase.SEALED, lasted_s=0.5)])
    assert not history.whole, "the head before it had stood for half a second"


def test_a_real_run_that_fills_at_once_is_said_to_be_whole():
    async def scenario():
        async with Party(2, 2) as party:
            await party.form("a", "b")
            (history,) = await journal.read(party.operator, "job")
            assert (history.steps[0].entry.seq, history.whole) == (2, True)

    run(scenario)


def test_lives_of_one_run_id_are_told_apart():
    first, second = histories([line(1, Phase.OPEN, 0), line(1, Phase.OPEN, 0, run="s"), line(2, Phase.SEALED)])
    assert (first.run, len(first.steps), second.run, len(second.steps)) == ("r", 2, "s", 1)


def test_the_journal_is_bounded_survives_its_leaders_and_is_read_in_the_order_of_writing():
    async def scenario():
        async with Party(1, 3) as party:
            (a, b), _ = await party.form("a", "b")
            await kill(a)
            await until(lambda: b.wait_changed(0.01))
            await join(b)
            await commands.close(party.operator, "job", "enough", "me")
            (history,) = await journal.read(party.operator, "job")
            assert [one.entry.seq for one in history.steps] == list(range(1, len(history.steps) + 1))
            assert {one.entry.by for one in history.steps} == {"a", "b", "me"}
            (restart,) = history.restarts
            assert (restart.kind, restart.members, restart.gone, restart.by) == (CauseKind.LOST, ("a",), ("a",), "b")
            assert restart.cost.exact
            assert all(one.entry.stamp for one in history.steps)
            # As if it had gone on for very long; and a line that is none.
            keys, last = Keys("job"), history.steps[-1].entry
            for seq in range(last.seq + 1, last.seq + JOURNAL_MAX + 10):
                value = wire.encode(msgspec.structs.replace(last, seq=seq))
                await party.operator.txn(then=[Put(keys.journal_entry(seq), value)])
            await party.operator.txn(then=[Put(keys.journal_entry(seq), b"rubbish")])
            (history,) = await journal.read(party.operator, "job")
            assert (len(history.steps), history.whole) == (JOURNAL_MAX - 1, False)
            seqs = [one.entry.seq for one in history.steps]
            assert seqs == sorted(seqs)

    run(scenario)


# ---- a scripted job and its journal

PAIRS = ("last_call=0.3", "settle=0.2", "lease=3", "grow_every=0", "replace_wait=0.7")
QUICK = [word for pair in PAIRS for word in ("-c", pair)]
NOISE_S = 2.0
"""Between the leader's write and the script's view of it, on a loaded machine."""
RUN = ["--run-id", "scripted"]


class Node:
    """A member as a process, and the times of its events by the script's own clock."""

    def __init__(self, stack, place, name):
        words = ["join", place, *RUN, "--nnodes", "2:3", "--json", *QUICK, "-c", f"slot={name}"]
        self.name = f"{os.uname().nodename}/{name}"
        self.process = stack.enter_context(running(*words))

    def until(self, number, event="world", **fields):
        for line in self.process.stdout:
            said = json.loads(line)
            if said["event"] == event and said["round"] == number and fields.items() <= said.items():
                return time.monotonic()
        raise AssertionError(self.process.stderr.read())


def test_the_journal_of_a_job_names_every_cause_and_duration():
    """Form, kill, re-form, grow, spare promoted, close."""
    with ExitStack() as stack:
        place = stack.enter_context(served())
        a, b, c = (Node(stack, place, name) for name in "abc")
        sealed = {1: max(node.until(1) for node in (a, b, c))}
        c.process.kill()
        broken = {1: a.until(1, "changed")}
        sealed[2] = max(node.until(2) for node in (a, b))
        d = Node(stack, place, "d")
        broken[2] = a.until(2, "changed")
        sealed[3] = max(node.until(3) for node in (a, b, d))
        e = Node(stack, place, "e")
        e.until(3, "notice", kind="present")
        b.process.kill()
        broken[3] = a.until(3, "changed")
        sealed[4] = max(node.until(4) for node in (a, d, e))
        assert rdzv("close", place, *RUN, "--reason", "enough").returncode == 0
        assert [node.process.wait(LIMIT_S) for node in (a, d, e)] == [4, 4, 4]
        done = rdzv("journal", place, *RUN, "--json")
        shown = rdzv("journal", place, *RUN)
    assert (done.returncode, done.stderr) == (0, "")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    restarts = [one for one in said if one["event"] == "restart"]
    assert [(one["round"], one["kind"], one["members"], one["came"], one["gone"]) for one in restarts] == [
        (1, "lost", [c.name], [], [c.name]),
        (2, "growth", [d.name], [d.name], []),
        (3, "lost", [b.name], [e.name], [b.name]),
    ]
    assert [(one["next_round"], one["next_size"]) for one in restarts] == [(2, 2), (3, 3), (4, 3)]
    for one in restarts:
        number = one["round"]
        assert one["cost_exact"]
        assert one["ran_exact"]
        assert abs(one["cost_s"] - (sealed[number + 1] - broken[number])) < NOISE_S, one
        assert abs(one["ran_s"] - (broken[number] - sealed[number])) < NOISE_S, one
    assert restarts[0]["cost_s"] >= 0.7, "the wait for a replacement is part of what it cost"
    closed = said[len(said) - len(restarts) - 1]
    assert (closed["phase"], closed["cause"]["kind"], closed["reason"]) == ("closed", "closed", "enough")
    assert f"round 1 broken after {restarts[0]['ran_s']:.1f} s: {c.name} lost" in shown.stdout
    assert f"came in: {e.name}; no longer in: {b.name}; the restart took {restarts[2]['cost_s']:.1f} s" in shown.stdout
    assert f"restart after round 2: growth (by {d.name})" in shown.stdout
    assert "closed: enough (by " in shown.stdout


def test_a_restart_has_the_root_cause_that_was_found_later():
    """T7.14: a collective failed first, then the loss behind it was noticed."""
    stopped = Cause(kind=CauseKind.RESTARTED, text="the workers of a stopped: a new round is wanted", members=("a",))
    (history,) = histories([
        line(2, Phase.SEALED),
        line(3, Phase.BROKEN, lasted_s=10.0, cause=stopped),
        line(4, Phase.BROKEN, lasted_s=1.0, cause=LOST, reason="round 1 broken: c lost"),
        line(5, Phase.SEALED, 2, lasted_s=0.5, cause=LOST),
    ])  # fmt: skip
    (restart,) = history.restarts
    assert (restart.kind, restart.members, restart.reason) == (CauseKind.LOST, ("c",), "c lost")
    assert (str(restart.ran), str(restart.cost)) == ("10.0 s", "1.5 s")
    assert [step.text for step in history.steps[1:3]] == [
        f"round 1 broken after 10.0 s: {stopped.text}",
        "round 1 broken: c lost",
    ]
