"""Notices: who is told what of a run's life, and what is logged. What it costs: explain/test_cost.py."""

from __future__ import annotations

import asyncio
import logging

import pytest

from rdzv.member.notices import Log, Notice
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


async def has(notices, kind):
    return any(notice.kind == kind for notice in notices)


def test_what_is_logged_has_fields_is_said_once_and_is_silent_but_for_warnings(caplog):
    log = Log()
    away, sealed = Notice("engine away", "job", 1, "a", "gone"), Notice("sealed", "job", 2, "a", "2 nodes")
    with caplog.at_level(logging.WARNING, "rdzv.notices"):
        for notice in (sealed, away, away):
            log(notice)
    assert [record.getMessage() for record in caplog.records] == ["run 'job', round 1, a: engine away: gone"]
    caplog.clear()
    with caplog.at_level(logging.INFO, "rdzv.notices"):
        log(sealed)
        log(away)
    first, second = caplog.records
    assert (first.levelname, second.levelname) == ("INFO", "WARNING")
    assert (first.rdzv_kind, first.rdzv_run_id, first.rdzv_round, first.rdzv_reason) == ("sealed", "job", 2, "2 nodes")


@pytest.mark.parametrize(("kind", "level"), [("engine away", "WARNING"), ("engine back", "WARNING"), ("evicted", "WARNING"),
                                             ("broken", "INFO"), ("lost", "INFO"), ("closed", "INFO")])  # fmt: skip
def test_only_what_nobody_else_would_tell_is_heard_without_any_set_up(kind, level, caplog):
    with caplog.at_level(logging.INFO, "rdzv.notices"):
        Log()(Notice(kind, "job", 1, "a", "x"))
    assert [record.levelname for record in caplog.records] == [level]
