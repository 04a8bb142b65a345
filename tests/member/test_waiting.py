"""The reports of a join that lasts."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from rdzv.core.status import MemberStatus, Status
from rdzv.engines.port import EngineReset
from rdzv.errors import Unreachable
from rdzv.member import waiting
from rdzv.system.node import LocalNode
from support.memory_members import Party, run


def status(phase="open", *members):
    standings = tuple(MemberStatus(str(number), name, name, state) for number, (name, state) in enumerate(members))
    return Status("job", 1, phase, 2, "1 of 2 nodes: waiting for 1 more", "a", standings)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(waiting, "REPORT_EVERY_S", 0.005)


async def reports(ask, count):
    """Return the first texts that are told."""
    texts, enough = [], asyncio.Event()

    def tell(text, waited_s):
        assert waited_s > 0
        texts.append(text)
        if len(texts) >= count:
            enough.set()

    task = asyncio.ensure_future(waiting.report_waiting(LocalNode(), ask, 600.0, tell))
    await asyncio.wait_for(enough.wait(), 20)
    task.cancel()
    return texts[:count]


async def test_an_engine_that_is_away_is_what_is_waited_for():
    errors = [Unreachable("host:1", "connection refused"), EngineReset("another instance")]

    async def ask():
        raise errors.pop(0) if errors else EngineReset("x")

    assert await reports(ask, 2) == [
        "engine host:1 is unreachable: connection refused",
        "the engine was restarted: another instance",
    ]


async def test_a_spare_of_a_round_that_runs_says_so_seldom():
    asked = []

    async def ask():
        asked.append(1)
        return status("sealed" if len(asked) < 2 * waiting.SPARE_REPORTS_EVERY else "open")

    assert len(await reports(ask, 3)) == 3
    assert len(asked) >= 2 * waiting.SPARE_REPORTS_EVERY


def test_a_report_names_who_is_here_lost_and_late():
    here = status("broken", ("a", "ready"), ("b", "lost"), ("c", "straggling"), ("d", "draining"), ("e", "spare"))
    assert waiting.describe(here, 1.0) == (
        "1 of 2 nodes: waiting for 1 more; here: a, e; lost: b; about to leave: d; still stopping their workers: c"
    )


def test_a_report_below_quorum_says_what_happens_next():
    few = replace(status(), round=0, min_nodes=2, ready=1)
    assert waiting.describe(few, 600.0).endswith("waiting for 1 more; gives up in 600 s (join_timeout)")
    again = replace(few, round=3, phase="broken")
    assert waiting.describe(again, -1.0).endswith("; a run that had a round is waited for without limit")


def test_many_names_are_cut():
    many = status("broken", *((f"n{number}", "lost") for number in range(10)))
    assert waiting.describe(many, 1.0).endswith("lost: n0, n1, n2, n3, n4, n5, n6, n7 and 2 more")


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_member_reports_only_if_its_log_is_read(level, caplog):
    async def scenario():
        async with Party(2, 2) as party:
            joining = asyncio.ensure_future(party.member("a").join())
            await asyncio.sleep(0.2)
            joining.cancel()

    with caplog.at_level(level, "rdzv"):
        run(scenario)
    told = [record.getMessage() for record in caplog.records if getattr(record, "rdzv_kind", "") == "waiting"]
    assert bool(told) is (level == logging.INFO)
    assert all("1 of 2 nodes: waiting for 1 more; here: a; gives up in" in line for line in told)
