"""Notices: who is told what of a run's life, with durations and causes. Their cost: operate/test_notice_cost.py."""

from __future__ import annotations

import asyncio
import itertools
import logging

import msgspec
import pytest

from rdzv.core.model import Cause, CauseKind, Era, Head, Phase
from rdzv.member.notices import Notice, Timeline, Totals, about_head
from rdzv.member.notifier import Notifier
from rdzv.operate import commands
from support.memory_members import Party, join, kill, run, until


def test_the_life_of_a_run_is_told_in_full():
    """Formed, lost, promoted, drained, banned, closed; by the one who leads after the first was lost."""
    heard: list[Notice] = []
    spare_heard: list[Notice] = []

    def kinds(notices):
        return [(notice.kind, notice.member) for notice in notices]

    async def scenario():
        async with Party(1, 3, on_failure="wait") as party:
            a, b, c = party.member("a"), party.member("b", heard.append), party.member("c")
            first = asyncio.ensure_future(a.join())
            await until(party.head)
            await asyncio.gather(first, join(b, c))
            d = party.member("d", spare_heard.append)
            waiting = asyncio.ensure_future(d.join())
            await until(lambda: has(spare_heard, "present"))
            await kill(a)
            await b.wait_changed()
            await asyncio.gather(join(b, c), waiting)
            assert ("promoted", "d") in kinds(spare_heard)
            await commands.drain(party.operator, "job", "c", "maintenance")
            await until(lambda: has(heard, "drained"))
            await c.leave()
            await join(b, d)
            await commands.ban(party.operator, "job", "d", "bad memory")
            await until(lambda: has(heard, "banned"))
            await join(b)
            await commands.close(party.operator, "job", "enough", "me")
            await until(lambda: has(heard, "closed"))

    run(scenario)
    told = kinds(heard)
    for kind, member in [
        ("present", "b"), ("sealed", "b"), ("given", "b"), ("broken", "b"), ("lost", "a"), ("leading", "b"), ("drained", "c"),
        ("banned", "d"), ("closed", "b"),
    ]:  # fmt: skip
        assert (kind, member) in told, (kind, member, told)
    assert told.count(("lost", "a")) == 1


def test_a_root_cause_that_is_found_later_is_told_too():
    """T7.14: the round was broken because workers of b stopped, and then c was found to be lost."""
    stopped = Cause(kind=CauseKind.RESTARTED, text="the workers of b stopped", members=("b",))
    lost = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))
    heads = [Head(run="r", era=Era(), next_era=Era(), number=1, phase=Phase.SEALED)]
    for cause in (stopped, stopped, lost):
        heads.append(msgspec.structs.replace(heads[0], phase=Phase.BROKEN, cause=cause, seq=len(heads) + 1))
    heads.append(msgspec.structs.replace(heads[-1], phase=Phase.SEALED, number=2))
    told = [notice for old, new in itertools.pairwise(heads) for notice in about_head("job", "a", old, new)]
    assert [(notice.kind, notice.member) for notice in told] == [
        ("broken", "a"), ("broken", "a"), ("lost", "c"), ("sealed", "a"),
    ]  # fmt: skip


async def has(notices, kind):
    return any(notice.kind == kind for notice in notices)


# ---- durations and causes


def told(*steps):
    """Pass notices at these times through a timeline: (time, kind, round, cause, members)."""
    line, found = Timeline(), []
    for at, kind, *more in steps:
        number, cause, members, size = [*more, *(0, "", (), 3)[len(more):]]
        found.append(line.timed(Notice(kind, "job", number, "a", "x", size=size, cause=cause, members=members), at))
    return found


def test_a_restart_costs_from_the_break_to_the_next_world():
    joining, first, broken, again, second, leaving = told(
        (1.0, "joining"), (3.0, "given", 1, "", (), 3), (13.0, "broken", 1, "lost", ("b",)), (13.5, "joining", 1),
        (15.0, "given", 2, "", (), 2), (25.0, "leaving", 2, "left"),
    )  # fmt: skip
    assert (joining.cause, first.cause, first.seconds, broken.seconds, again.cause) == ("", "", 2.0, 10.0, "lost")
    assert (second.cause, second.members, second.seconds, second.size_before) == ("lost", ("b",), 2.0, 3)
    assert (leaving.seconds, leaving.totals) == (24.0, Totals(rounds=2, restarts=1, ran_s=20.0, lost_s=2.0))
    assert leaving.totals.availability == pytest.approx(20 / 22)


def test_a_restart_that_this_node_asked_for_counts_from_its_join_and_bears_the_cause_of_all():
    _, _, joining, broken, given = told(
        (0.0, "joining"), (1.0, "given", 1), (5.0, "joining", 1), (6.0, "broken", 1, "lost", ("b",)), (7.0, "given", 2)
    )
    assert (joining.cause, broken.seconds) == ("restarted", 4.0)
    assert (given.cause, given.members, given.seconds) == ("lost", ("b",), 2.0)


def test_the_root_cause_replaces_the_failure_that_followed_from_it():
    _, _, first, second, given, newcomer = told(
        (0.0, "joining"), (1.0, "given", 1), (5.0, "broken", 1, "restarted", ("a",)), (5.5, "broken", 1, "lost", ("b",)),
        (7.0, "given", 2), (8.0, "given", 3, "lost", ("c",)),
    )  # fmt: skip
    assert (first.seconds, second.seconds) == (4.0, 4.0)
    assert (given.cause, given.members, given.seconds) == ("lost", ("b",), 2.0)
    assert newcomer.cause == "", "it lost nothing: its round stood"
    *_, given = told(
        (0.0, "joining"), (1.0, "given", 1), (5.0, "broken", 1, "restarted", ("a",)), (7.0, "given", 2, "lost", ("b",))
    )
    assert (given.cause, given.members) == ("lost", ("b",)), "the sealed head knew it"


def test_an_eviction_and_an_outage_end_a_round_too():
    _, _, evicted, joining, _, outage, given = told(
        (0.0, "joining"), (1.0, "given", 1), (4.0, "evicted", 2), (4.5, "joining", 2), (5.0, "given", 3),
        (9.0, "joining", 3, "outage"), (10.0, "given", 4),
    )  # fmt: skip
    assert (evicted.seconds, evicted.cause, joining.cause) == (3.0, "evicted", "evicted")
    assert (outage.cause, given.cause, given.seconds) == ("outage", "outage", 1.0)


def test_a_round_that_was_over_already_is_not_ended_again():
    _, _, _, evicted, closed, given = told(
        (0.0, "joining"), (1.0, "given", 1), (3.0, "broken", 1), (4.0, "evicted", 1), (4.5, "closed", 1), (5.0, "given", 2)
    )
    assert (evicted.seconds, closed.seconds) == (None, None)
    assert (given.seconds, given.cause) == (2.0, "unknown")


def test_the_round_of_others_and_an_end_without_any_have_no_duration():
    broken, evicted, away, _, back, again, leaving = told(
        (0.0, "broken", 1), (0.0, "evicted"), (1.0, "engine away"), (2.0, "engine away"), (3.5, "engine back"),
        (4.0, "engine back"), (5.0, "leaving"),
    )  # fmt: skip
    assert (broken.seconds, evicted.seconds, away.seconds, again.seconds) == (None, None, None, None)
    assert back.seconds == 2.5
    assert (leaving.seconds, leaving.totals.availability) == (None, None)


def test_the_time_since_a_last_round_that_broke_is_time_without_one():
    *_, leaving = told((0.0, "joining"), (1.0, "given", 1), (9.0, "broken", 1, "lost"), (9.1, "joining", 1), (17.0, "leaving"))
    assert leaving.totals == Totals(rounds=1, restarts=0, ran_s=8.0, lost_s=8.0)
    assert leaving.totals.availability == 0.5


def test_a_closed_run_says_how_long_its_last_round_ran():
    *_, closed, leaving = told((0.0, "joining"), (1.0, "given", 1), (9.0, "closed", 1, "success"), (9.5, "leaving", 1))
    assert (closed.seconds, leaving.totals) == (8.0, Totals(rounds=1, restarts=0, ran_s=8.0, lost_s=0.0))


def test_a_listener_that_fails_disturbs_neither_the_others_nor_the_member(caplog):
    heard = []

    def fail(_notice):
        raise OSError("disk full")

    notifier = Notifier("job", "a", lambda: 0.0, [fail, heard.append])
    notifier.tell("leading", None, "why")
    notifier.close()
    assert [notice.kind for notice in heard] == ["leading"]
    assert "an observer failed with" in caplog.text


def test_a_listener_that_cannot_be_closed_disturbs_neither_the_others_nor_the_member(caplog):
    closed = []

    class Listener:
        def __init__(self, close):
            self.close = close

        def __call__(self, _notice):
            pass

    def fail():
        raise OSError("disk full")

    Notifier("job", "a", lambda: 0.0, [Listener(fail), Listener(lambda: closed.append("second"))]).close()
    assert closed == ["second"]
    assert "an observer failed as it was closed" in caplog.text


def test_a_log_that_fails_disturbs_neither_the_listeners_nor_the_member(caplog):
    heard = []

    def fail(_record):
        raise OSError("disk full")

    notifier = Notifier("job", "a", lambda: 0.0, [heard.append])
    rdzv = logging.getLogger("rdzv")
    rdzv.addFilter(fail)
    try:
        notifier.tell("engine away", None, "why")
    finally:
        rdzv.removeFilter(fail)
    assert [notice.reason for notice in heard] == ["why"]
    assert "the log failed with" in caplog.text


def test_no_notice_is_made_if_nobody_listens(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="rdzv")
    monkeypatch.setattr("rdzv.member.notifier.Notice", None)
    notifier = Notifier("job", "a", lambda: 0.0)
    notifier.tell("leading", None, "why")
    assert not notifier.hears("joining")
    assert notifier.hears("engine away")
