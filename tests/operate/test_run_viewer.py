"""A viewer sees a run without being a member, and follows it to its end."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.core.model import CauseKind
from rdzv.engines.port import Delete, DeletePrefix, Get, Put
from rdzv.operate.run_viewer import GONE, RunViewer
from support.memory_members import Party, until


@pytest.mark.parametrize("run_id", ["other", "job"])
async def test_a_viewer_sees_what_is_there_and_changes_nothing(run_id):
    async with Party(2, 3, last_call=5) as party:
        viewer = RunViewer(party.operator, run_id, asyncio.get_running_loop().time)
        assert await viewer.look() is None
        joining = asyncio.gather(party.member("a").join(), party.member("b").join())
        await until(party.head)
        if run_id == "other":
            assert await viewer.look() is None
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
            return
        await until(lambda: says(party.operator, "last call, at most "))
        before = (await party.operator.txn()).revision
        status = await viewer.look()
        assert (status.min_nodes, status.max_nodes, status.ready, status.call) == (2, 3, 2, "last")
        assert (await party.operator.txn()).revision == before
        joining.cancel()
        await asyncio.gather(joining, return_exceptions=True)


async def says(session, text):
    """Whether a viewer that has never looked before sees that text in the reason."""
    return text in (await RunViewer(session, "job", asyncio.get_running_loop().time).look()).reason


async def test_a_viewer_follows_a_run_to_its_end():
    async with Party(1, 2) as party:
        viewer = RunViewer(party.operator, "job", asyncio.get_running_loop().time)
        phases = []

        async def follow():
            async for status in viewer.follow():
                phases.append(status and status.phase)
                if phases[-1] == "closed":
                    return

        following = asyncio.ensure_future(follow())
        (a,), _ = await party.form("a")
        await a.done()
        await following
        assert list(dict.fromkeys(phases)) == [None, "none", "open", "sealed", "closed"]
        assert viewer.succeeded
        await a.leave()
        await party.write(Delete(party.keys.head))
        status = await viewer.look()
        assert (status.phase, status.round, status.reason) == ("closed", 1, "closed: the only member of round 1 is done")
        assert viewer.succeeded, "the journal knows it longer than the head"
        await party.write(DeletePrefix(party.keys.journal))
        later = RunViewer(party.operator, "job", asyncio.get_running_loop().time)
        status = await later.look()
        assert (status.phase, status.reason, status.events, later.succeeded) == ("none", GONE, None, False)


async def test_a_viewer_tells_what_happened_last_and_why():
    async with Party(1, 3) as party:
        (a, b), _ = await party.form("a", "b")
        viewer = RunViewer(party.operator, "job", asyncio.get_running_loop().time)
        status = await viewer.look()
        assert status.events.last.text.startswith("round 1 sealed with 2 nodes (")
        assert (status.events.broken, status.events.last.by) == (None, "a")
        assert 0 <= status.changed_s <= status.age_s < 60
        following = viewer.follow()
        await anext(following)
        await asyncio.gather(b.leave(reason="scaled down"), a.wait_changed())
        status = await viewer.look()
        assert [(one.name, one.state, one.here) for one in status.members] == [("a", "straggling", True), ("b", "left", False)]
        assert (status.events.last.cause, status.events.last.members) == (CauseKind.LEFT, ("b",))
        await a.join()
        async for status in following:
            if status.round == 2:
                break
        await following.aclose()
        assert status.events.last.text.endswith("no longer in: b")
        assert status.events.broken.text == "round 1 broken: b left: scaled down"


async def test_entries_of_others_and_of_an_earlier_life_tell_nothing():
    async with Party(1, 1) as party:
        (a,), _ = await party.form("a")
        head = await party.head()
        entry = (await party.operator.txn(then=[Get(party.keys.journal_entry(head.seq))])).item(0)
        other = entry.value.replace(head.run.encode(), b"another")
        for value in (other, b"rubbish"):
            await party.write(Put(party.keys.journal_entry(head.seq), value), Put(party.keys.journal_entry(1), value))
            status = await RunViewer(party.operator, "job", asyncio.get_running_loop().time).look()
            assert (status.phase, status.events, status.age_s) == ("sealed", None, None)
        bad = entry.value.replace(b'"stamp":"2', b'"stamp":"x')
        await party.write(Put(party.keys.journal_entry(head.seq), bad))
        status = await RunViewer(party.operator, "job", asyncio.get_running_loop().time).look()
        assert (status.events.last.round, status.changed_s) == (1, None)
        await a.leave()
