"""A head that cannot be read counts as none (T11.12), and a leader replaces settings that are garbage: members go on."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.core import wire
from rdzv.core.model import Phase
from rdzv.engines.port import Get, Put
from rdzv.errors import Closed, Evicted, RoundOver
from rdzv.operate import commands
from support.memory_members import Party, assert_one_world, join, run, until

GARBAGE = [b"", b"garbage", b"\x00\xff", b'{"v":99,"type":"head"}', b'{"v":1,"type":"head"}', b"x" * 100_000]


async def overwrite(party: Party, value: bytes = b"garbage") -> None:
    await party.write(Put(party.keys.head, value))


@pytest.mark.parametrize("value", GARBAGE)
def test_holders_are_evicted_and_form_the_next_round_with_a_higher_fence(value):
    async def scenario():
        async with Party(2, 2) as party:
            members, worlds = await party.form("a", "b")
            await overwrite(party, value)
            changes = await asyncio.gather(*(member.wait_changed() for member in members))
            assert {(change.kind.value, change.reason) for change in changes} == {
                ("evicted", "the run's records are gone or cannot be read")
            }
            later = await join(*members)
            assert_one_world(later, 2)
            assert later[0].fence > worlds[0].fence

    run(scenario)


def test_a_waiting_join_goes_on():
    async def scenario():
        async with Party(2, 2) as party:
            first = party.member("a")
            waiting = asyncio.ensure_future(first.join())

            async def has_head():
                return (await party.operator.txn(then=[Get(party.keys.head)])).item(0) is not None

            await until(has_head)
            await overwrite(party)
            other = party.member("b")
            assert_one_world(await asyncio.gather(waiting, other.join()), 1)

    run(scenario)


def test_the_first_to_come_replaces_garbage_that_nobody_made_a_head_of():
    async def scenario():
        async with Party(1, 1) as party:
            await overwrite(party)
            _, worlds = await party.form("a")
            assert_one_world(worlds, 1)

    run(scenario)


def test_a_member_does_not_close_a_run_that_may_have_gone_on():
    async def scenario():
        async with Party(1, 1) as party:
            (member,), _ = await party.form("a")
            await overwrite(party)
            with pytest.raises((RoundOver, Evicted)):
                await member.close_run("done here")

    run(scenario)


def test_an_operator_closes_it():
    async def scenario():
        async with Party(1, 1) as party:
            await overwrite(party)
            assert await commands.close(party.operator, "job", "it is garbage", "operator")
            head = await party.head()
            assert head is not None
            assert (head.phase, head.cause.text) == (Phase.CLOSED, "it is garbage (by operator)")
            assert not await commands.close(party.operator, "job", "again", "operator")
            with pytest.raises(Closed, match="it is garbage"):
                await party.form("a")

    run(scenario)


@pytest.mark.parametrize("value", GARBAGE)
def test_garbage_is_read_as_no_head(value):
    assert wire.read_head(value) is None


def test_a_leader_replaces_settings_that_somebody_has_overwritten():
    """T12.2: otherwise no member could come in any more."""

    async def scenario():
        async with Party(1, 2, settle=0) as party:
            (first,), _ = await party.form("a")
            before = (await party.operator.txn(then=[Get(party.keys.settings)])).item(0)
            await party.write(Put(party.keys.settings, b"garbage"))

            async def are_back():
                now = (await party.operator.txn(then=[Get(party.keys.settings)])).item(0)
                return now.value == before.value and now.lease

            await until(are_back)
            coming = asyncio.ensure_future(party.member("b").join())
            await first.wait_changed()
            assert_one_world(await asyncio.gather(first.join(), coming), 2)

    run(scenario)
