"""Bans that expire: the engine alone ends them, on the embedded server and on a real etcd."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import Ban
from rdzv.core.text import NAME_MAX, clip
from rdzv.errors import Banned, SettingsError
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
            run_id, keys = rig.root, Keys(rig.root)
            operator, session = await rig.open(), await rig.connect()
            # Nothing is read of the short one: on a busy machine it may be over by then.
            for host, for_s in (("b", 1.0), ("c", 3600.0), ("d", None)):
                await commands.ban(operator, run_id, host, "bad memory", for_s)
            await operator.close()  # Whoever asked for it need not stay.
            await soon(gone(session, keys.ban("b")))
            reasons = [wire.decode(Ban, (await get(session, keys.ban(host))).value).reason for host in "cd"]
            assert reasons == ["bad memory (for 1 h)", "bad memory"]
            assert [await commands.unban(session, run_id, host) for host in "bcd"] == [False, True, True]

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


@pytest.mark.parametrize("host", ["", "h" * 5000, "h\udcff", "a\nb"])
def test_what_no_host_can_be_named_is_refused_before_anything_is_written(host):
    async def scenario():
        async with Party(1, 2) as party:
            for act in (commands.ban(party.operator, "job", host, "x", 3.0), commands.unban(party.operator, "job", host)):
                with pytest.raises(SettingsError, match="is no name of a host: it must be printable text of 1 to 128 bytes"):
                    await act
            longest = clip("h" * 5000, NAME_MAX)  # As a member with such a host is shown.
            await commands.ban(party.operator, "job", longest, "x")
            assert await commands.unban(party.operator, "job", longest)

    run(scenario)


def test_a_member_of_the_host_is_let_in_again():
    async def scenario():
        async with Party(1, 2) as party:
            (a, b), _ = await party.form("a", "b")
            await commands.ban(party.operator, "job", "b", "bad memory", 3.0)
            assert (await a.wait_changed(LONG_S)).reason == "b banned: bad memory (for 3 s)"
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
            assert "host 'b' is banned from run 'job': bad memory (for 3 s)" in refused[0]

    run(scenario)
