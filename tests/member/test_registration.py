"""How members come in (T1): by how many attempts, and whom they watch afterwards."""

from __future__ import annotations

import collections

import pytest

from rdzv.member.registration import Registration
from support.memory_members import Party, join


@pytest.fixture
def attempts(monkeypatch) -> collections.Counter[str]:
    """How often each host tried."""
    counted: collections.Counter[str] = collections.Counter()
    right = Registration.ways

    def ways(self, seen):
        counted[self._record.host] += 1
        return right(self, seen)

    monkeypatch.setattr(Registration, "ways", ways)
    return counted


async def test_the_first_and_all_others_come_by_one_attempt_one_after_the_other_or_together(attempts):
    async with Party(3, 3) as party:
        await party.form("a", "b", "c")
    async with Party(30, 30) as party:
        await join(*(party.member(f"n{index}") for index in range(30)))
    assert set(attempts.values()) == {1}
    assert len(attempts) == 33


async def test_who_brings_more_than_itself_looks_first(attempts):
    """A higher incarnation may have a closed head to replace."""

    async with Party(2, 2) as party:
        await join(party.member("a", incarnation=1), party.member("b", incarnation=1))
        assert sorted(attempts.values()) == [1, 2]


async def test_everybody_but_the_leader_watches_somebody_who_came_earlier_and_few_the_same_one():
    async with Party(64, 64) as party:
        members = [party.member(f"n{index}") for index in range(64)]
        await join(*members)
        presences = sorted((member.presence for member in members), key=lambda one: one.created)
        created = {one.keys.member(one.id): one.created for one in presences}
        leader, *others = presences
        assert leader.leader is not None
        assert leader.predecessor == ""
        assert all(created[one.predecessor] < one.created and one.leader is None for one in others)
        assert max(collections.Counter(one.predecessor for one in others).values()) < 16
