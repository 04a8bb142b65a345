"""On uvloop: the asyncio API, the embedded server and its clients do the same as on asyncio's own loop."""

from __future__ import annotations

import asyncio

import pytest

from rdzv import aio
from support.memory_members import LONG_S
from support.ports import free_port

uvloop = pytest.importorskip("uvloop", reason="uvloop is not installed")


def rendezvous(endpoint, slot, **options):
    given = {"run_id": "job", "min_nodes": 2, "max_nodes": 3, "last_call": 0.2, "settle": 0.1, "grow_every": 0, **options}
    return aio.Rendezvous(endpoint, slot=slot, **given)


async def scenario(endpoint):
    """Form a round, use its store, lose a member, and let another one in."""
    a, b, c = (rendezvous(endpoint, slot) for slot in "abc")
    async with a, c:
        first = await asyncio.gather(a.join(LONG_S), b.join(LONG_S))
        await first[0].store.set("key", "value")
        assert await first[1].store.get("key") == b"value"
        assert {world.rank for world in first} == {0, 1}
        await b.leave(reason="seen enough")
        change = await a.wait_changed(LONG_S)
        assert change.reason.endswith("/b left: seen enough")
        again = await asyncio.gather(a.join(LONG_S), c.join(LONG_S))
        assert [world.round for world in again] == [again[0].round] * 2
        assert "sealed" in str(await a.status())


@pytest.mark.parametrize("endpoint", ["memory://uvloop", "127.0.0.1"])
def test_members_meet_on_uvloop(endpoint):
    where = endpoint if "://" in endpoint else f"{endpoint}:{free_port()}"
    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(asyncio.wait_for(scenario(where), LONG_S))
    finally:
        loop.close()
