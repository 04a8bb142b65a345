"""A viewer sees a run without being a member, and follows it to its end."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.engines.port import Delete
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
        assert (await viewer.look()).reason == GONE
