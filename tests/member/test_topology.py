"""Members that know their place in the network: ranks by path, replacements from nearby, whole segments."""

from __future__ import annotations

import asyncio

from rdzv.engines.port import List
from support.memory_members import Party, join, kill, run, until


def names(members, worlds):
    """The names of the members in the order of their ranks."""
    pairs = zip(members, worlds, strict=True)
    return " ".join(name for _, name in sorted((world.rank, member.state.me.name) for member, world in pairs))


def test_ranks_go_by_path_and_a_spare_of_the_same_rack_takes_the_place_of_a_lost_member():
    async def scenario():
        async with Party(2, 4) as party:
            places = {"n1": "b1/r2", "n2": "b1/r1", "n3": "b1/r2", "n4": "b1/r1"}
            members = [party.member(host, topology=path, order=host[1:]) for host, path in places.items()]
            worlds = await join(*members)
            assert names(members, worlds) == "n2 n4 n1 n3"
            assert {world.reason for world in worlds} == {""}
            # The first spare to come is of another block, the second of the rack of the member that will be lost.
            far, near = party.member("n5", topology="b2/r9"), party.member("n6", topology="b1/r1")
            waiting = asyncio.ensure_future(far.join())
            await until(lambda: present(party, 5))
            chosen = asyncio.ensure_future(near.join())
            await until(lambda: present(party, 6))
            n1, _, n3, n4 = members
            await kill(n4)
            await n1.wait_changed()
            rest = [n1, members[1], n3]
            worlds = [*await join(*rest), await chosen]
            assert names([*rest, near], worlds) == "n2 n6 n1 n3"
            assert {world.reason for world in worlds} == {"n4 lost"}
            waiting.cancel()

    run(scenario)


def test_only_whole_segments_take_part():
    async def scenario():
        async with Party(2, 4, segment=2) as party:
            members = [party.member(host, topology=path) for host, path in {"n1": "r1", "n2": "r2", "n3": "r1"}.items()]
            joins = [asyncio.ensure_future(member.join()) for member in members]
            worlds = await asyncio.gather(joins[0], joins[2])
            assert [world.size for world in worlds] == [2, 2]
            status = await members[0].status()
            assert {one.name: one.state for one in status.members} == {"n1": "in", "n2": "spare", "n3": "in"}
            # A neighbour of the spare makes its segment whole.
            late = party.member("n4", topology="r2")
            joins.append(asyncio.ensure_future(late.join()))
            await members[0].wait_changed()
            worlds = [*await join(members[0], members[2]), await joins[1], await joins[3]]
            assert names([members[0], members[2], members[1], late], worlds) == "n1 n3 n2 n4"

    run(scenario)


async def present(party, count):
    listed = await party.operator.txn(then=[List(party.keys.members)])
    return len(listed.reads[0]) == count
