"""The journal of a run: what its lines add up to."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import JOURNAL_MAX, Call, Cause, CauseKind, Era, JournalEntry, Phase
from rdzv.engines.port import Delete, Put
from rdzv.operate import commands, journal
from rdzv.operate.journal import Duration, histories
from rdzv.operate.run_viewer import GONE, RunViewer
from support.memory_members import Party, join, kill, run, until

LOST = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))


def line(seq, phase, number=1, lasted_s=None, **others):
    fields = {"run": "r", "era": Era(1, "e"), "size": 2, "call": Call.NONE, "by": "a", "reason": "why", **others}
    return JournalEntry(seq=seq, phase=phase, number=number, lasted_s=lasted_s, **fields)


def test_a_restart_costs_from_the_break_to_the_next_seal_whoever_wrote_what_is_between():
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


def test_what_a_writer_could_not_know_makes_a_sum_a_lower_bound():
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
    assert (restart.ran, restart.cost, restart.next_round) == (Duration(7.0), Duration(0.0), 0)


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


@pytest.mark.parametrize("run_id", ["other", "job"])
def test_an_onlooker_sees_what_is_there_and_changes_nothing(run_id):
    async def scenario():
        async with Party(2, 3, last_call=5) as party:
            onlooker = RunViewer(party.operator, run_id, asyncio.get_running_loop().time)
            assert await onlooker.look() is None
            joining = asyncio.gather(party.member("a").join(), party.member("b").join())
            await until(party.head)
            if run_id == "other":
                assert await onlooker.look() is None
                joining.cancel()
                await asyncio.gather(joining, return_exceptions=True)
                return
            await until(lambda: says(party.operator, "last call, at most "))
            before = (await party.operator.txn()).revision
            status = await onlooker.look()
            assert (status.min_nodes, status.max_nodes, status.ready, status.call) == (2, 3, 2, "last")
            assert (await party.operator.txn()).revision == before
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)

    run(scenario)


async def says(session, text):
    """To one who has never looked before."""
    return text in (await RunViewer(session, "job", asyncio.get_running_loop().time).look()).reason


def test_an_onlooker_follows_a_run_to_its_end():
    async def scenario():
        async with Party(1, 2) as party:
            onlooker = RunViewer(party.operator, "job", asyncio.get_running_loop().time)
            phases = []

            async def follow():
                async for status in onlooker.follow():
                    phases.append(status and status.phase)
                    if phases[-1] == "closed":
                        return

            following = asyncio.ensure_future(follow())
            (a,), _ = await party.form("a")
            await a.done()
            await following
            assert list(dict.fromkeys(phases)) == [None, "none", "open", "sealed", "closed"]
            assert onlooker.succeeded
            await a.leave()
            await party.write(Delete(party.keys.head))
            assert (await onlooker.look()).reason == GONE

    run(scenario)
