"""Bans that expire: the engine alone ends them, on the embedded server and on a real etcd."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import Ban
from rdzv.errors import Banned
from rdzv.operate import commands
from support.engine_contract import RIGS, get, soon
from support.memory_members import LONG_S, Party, run


async def gone(session, key):
    while await get(session, key) is not None:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("engine", ["remote", "etcd", "file"])
def test_a_ban_with_a_time_ends_by_itself_and_one_without_does_not(engine):
    async def scenario():
        async with RIGS[engine]() as rig:
            run_id, key = rig.root, Keys(rig.root).ban("b")
            operator, session = await rig.open(), await rig.connect()
            await commands.ban(operator, run_id, "b", "bad memory", 1.0)
            await commands.ban(operator, run_id, "c", "bad disk")
            await operator.close()  # Whoever asked for it need not stay.
            item = await get(session, key)
            assert wire.decode(Ban, item.value).reason == "bad memory (for 1 s)"
            await soon(gone(session, key))
            assert await get(session, Keys(run_id).ban("c")) is not None
            assert await commands.unban(session, run_id, "c")

    asyncio.run(scenario())


@pytest.mark.parametrize("engine", ["remote", "etcd"])
def test_the_last_word_about_a_host_counts(engine):
    """A ban without a time replaces one with a time, whose end then ends nothing."""

    async def scenario():
        async with RIGS[engine]() as rig:
            session, key, other = await rig.connect(), Keys(rig.root).ban("b"), Keys(rig.root).ban("c")
            await commands.ban(session, rig.root, "b", "bad memory", 1.0)
            await commands.ban(session, rig.root, "b", "bad disk")
            await commands.ban(session, rig.root, "c", "bad memory", 1.0)
            await soon(gone(session, other))
            assert wire.decode(Ban, (await get(session, key)).value).reason == "bad disk"
            assert await commands.unban(session, rig.root, "b")
            assert not await commands.unban(session, rig.root, "b")

    asyncio.run(scenario())


def test_a_member_of_the_host_is_let_in_again():
    async def scenario():
        async with Party(1, 2) as party:
            (a, b), _ = await party.form("a", "b")
            await commands.ban(party.operator, "job", "b", "bad memory", 1.0)
            assert (await a.wait_changed(LONG_S)).reason == "b banned: bad memory (for 1 s)"
            assert (await a.join()).size == 1
            await b.wait_changed(LONG_S)
            refused = []

            async def insist():
                while True:
                    try:
                        return await b.join()
                    except Banned as error:
                        refused.append(error.sentence)
                        await asyncio.sleep(0.05)

            waiting = asyncio.create_task(insist())
            await a.wait_changed(LONG_S)
            assert (await a.join()).size == (await waiting).size == 2
            assert "host 'b' is banned from run 'job': bad memory (for 1 s)" in refused[0]

    run(scenario)
