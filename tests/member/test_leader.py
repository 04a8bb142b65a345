"""When the leader looks at the run: seldom while members come in crowds, and at once when the last of them is there."""

from __future__ import annotations

import asyncio
import time

import pytest

from rdzv.core.rules import lead
from rdzv.engines.port import Put
from rdzv.member import leader
from support.memory_members import LONG_S, Party, assert_one_world, join

CROWD = 12


@pytest.fixture
def looks(monkeypatch):
    """The number of members at each look of a leader."""
    counts = []

    def counted(view):
        counts.append(len(view.members))
        return lead(view)

    monkeypatch.setattr(leader, "lead", counted)
    return counts


@pytest.mark.parametrize("again", [False, True])
async def test_the_last_that_a_round_waits_for_does_not_wait_for_the_end_of_a_pause(monkeypatch, again):
    async with Party(3, 3) as party:
        *early, last = [party.member(host) for host in "abc"]
        if again:
            await join(*early, last)
        monkeypatch.setattr(leader, "JUDGING_S", LONG_S)
        waiting = [asyncio.create_task(member.join(LONG_S)) for member in early]
        await asyncio.sleep(0.2)  # The leader has looked at those that are there, and rests.
        began_at = time.monotonic()
        worlds = [await last.join(LONG_S), *await asyncio.gather(*waiting)]
        assert time.monotonic() - began_at < LONG_S / 4
        assert_one_world(worlds, 2 if again else 1)


async def test_a_crowd_that_comes_one_by_one_costs_few_looks(monkeypatch, looks):
    monkeypatch.setattr(leader, "JUDGING_S", LONG_S)
    async with Party(CROWD, CROWD) as party:
        joins = []
        for number in range(CROWD):
            joins.append(asyncio.create_task(party.member(f"node{number:02}").join(LONG_S)))
            await asyncio.sleep(0.02)
        assert_one_world(await asyncio.gather(*joins), 1)
    assert looks[-1] == CROWD
    assert len([count for count in looks if count < CROWD]) <= 2, looks


async def test_a_pause_is_over_in_time_although_others_are_still_missing(monkeypatch):
    monkeypatch.setattr(leader, "JUDGING_S", 0.05)
    async with Party(2, 4, last_call=0.3) as party:
        a, b, c = (party.member(host) for host in "abc")
        waiting = [asyncio.create_task(member.join(LONG_S)) for member in (a, b)]
        await asyncio.sleep(0.2)  # A last call for four.
        assert_one_world(await asyncio.gather(c.join(LONG_S), *waiting), 1)


async def test_a_leader_that_judges_all_the_time_is_not_taken_for_stuck(monkeypatch):
    """It was evicted: changes that came faster than it looked left it hardly a moment of rest, in which it would be renewed."""
    monkeypatch.setattr(leader, "JUDGING_S", 0.05)
    async with Party(99, 99) as party:
        joining = asyncio.create_task(party.member("a").join(LONG_S))
        await asyncio.sleep(0.2)
        present, renewals = party.members[0].presence, []
        leading, renew = present.leader, present.session.renew

        def noted(lease):
            renewals.append(lease)
            return renew(lease)

        present.session.renew = noted
        idle, ends_at = [], time.monotonic() + 1.5  # A lease and a half.
        while time.monotonic() < ends_at:
            await party.write(Put(party.keys.ban("nobody"), b"{}"))
            idle.append(leading.idle)
            await asyncio.sleep(0.002)
        assert sum(idle) < len(idle) / 3, "the test must keep it busy"
        assert party.members[0].presence is present
        assert len(renewals) >= 3
        joining.cancel()
