"""Notices: who is told what of a run's life, what is logged, and what all of it costs the engine."""

from __future__ import annotations

import asyncio
import logging

from party import Party, join, kill, run, until
from rdzv import operate
from rdzv.drivers.base import Put
from rdzv.drivers.memory import MemorySession
from rdzv.notices import Log, Notice


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
            await operate.drain(party.operator, "job", "c", "maintenance")
            await until(lambda: has(heard, "drained"))
            await c.leave()
            await join(b, d)
            await operate.ban(party.operator, "job", "d", "bad memory")
            await until(lambda: has(heard, "banned"))
            await join(b)
            await operate.close(party.operator, "job", "enough", "me")
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


def test_all_sinks_together_cost_the_engine_little(monkeypatch, caplog):
    """The journal is the one sink that the engine bears: at most a tenth of operations and bytes, and less the more members.

    What is asked for is a run of 1,000; here are 40, of which it is a larger share.
    """
    counts = {"journal": [0, 0], "other": [0, 0]}
    observed: list[Notice] = []
    txn = MemorySession.txn

    async def counting(self, compares=(), then=(), otherwise=(), instead=()):
        then = tuple(then)
        for operation in then:
            kind = "journal" if "/journal/" in getattr(operation, "key", "") else "other"
            counts[kind][0] += 1
            if isinstance(operation, Put):
                counts[kind][1] += len(operation.key) + len(operation.value)
        return await txn(self, compares, then, otherwise, instead)

    async def scenario():
        async with Party(40, 40) as party:
            members = [party.member(f"node{number}", observed.append) for number in range(40)]
            await join(*members)

    monkeypatch.setattr(MemorySession, "txn", counting)
    with caplog.at_level(logging.INFO, "rdzv"):
        run(scenario)
    assert len(observed) >= 80
    (journal_operations, journal_bytes), (operations, bytes_) = counts["journal"], counts["other"]
    assert 0 < journal_operations <= 0.1 * operations, counts
    assert 0 < journal_bytes <= 0.1 * bytes_, counts
