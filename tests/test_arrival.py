"""How members come in (T1): by how many attempts, and whom they watch afterwards."""

from __future__ import annotations

import collections

import pytest

from party import Party, join, run
from rdzv.arrival import AS_FIRST, Arrival
from rdzv.errors import SettingsError
from rdzv.machine import RealMachine


@pytest.fixture
def attempts(monkeypatch) -> collections.Counter[str]:
    """How often each host tried, of those that expect to find others."""
    counted: collections.Counter[str] = collections.Counter()
    right = Arrival._plan

    def plan(self, seen):
        counted[self._presence.record.host] += 1
        return right(self, seen)

    monkeypatch.setattr(Arrival, "_plan", plan)
    monkeypatch.setattr(RealMachine, "jitter", lambda _self: 0.5)
    return counted


def test_the_first_comes_by_its_second_attempt_and_the_others_by_their_first(attempts):
    async def scenario():
        async with Party(3, 3) as party:
            await party.form("a", "b", "c")
            assert attempts == {"a": 2, "b": 1, "c": 1}

    run(scenario)


def test_one_of_a_few_comes_as_if_it_were_the_first(attempts, monkeypatch):
    async def scenario():
        async with Party(2, 3) as party:
            monkeypatch.setattr(RealMachine, "jitter", lambda _self: AS_FIRST / 2)
            await party.form("a", "b")
            assert attempts == {"a": 1, "b": 2}

    run(scenario)


def test_who_was_told_other_settings_is_refused_by_name_although_it_guessed(attempts):
    async def scenario():
        async with Party(1, 3) as party:
            await party.form("a")
            with pytest.raises(SettingsError, match=r"settle is 9 here and 0\.1 in the run"):
                await party.member("b", settle=9).join()
            assert attempts["b"] == 2

    run(scenario)


def test_everybody_but_the_leader_watches_somebody_who_came_earlier_and_few_the_same_one():
    async def scenario():
        async with Party(64, 64) as party:
            members = [party.member(f"n{index}") for index in range(64)]
            await join(*members)
            presences = sorted((member._presence for member in members), key=lambda one: one.created)
            created = {one.keys.member(one.id): one.created for one in presences}
            leader, *others = presences
            assert leader.duty is not None
            assert leader._predecessor == ""
            assert all(created[one._predecessor] < one.created and one.duty is None for one in others)
            assert max(collections.Counter(one._predecessor for one in others).values()) < 16

    run(scenario)
