from __future__ import annotations

import asyncio

import pytest

from rdzv.engines.port import EngineReset, Get, Put
from rdzv.errors import Unreachable
from rdzv.testing.history import Acted, Commit
from rdzv.testing.server import SimServer
from support.small_simulation import Small, hold, lost

# ---- the server's lives


def test_a_server_restarted_empty_is_another_instance_at_the_same_place():
    async def main(world):
        session = await world.session()
        await world.on(0, session.txn([], [Put("a", b"")]))
        watch = session.watch(["a"], 2)
        reader = world.on(0, anext(aiter(watch)))
        await asyncio.sleep(1)
        world.server.crash()
        await asyncio.sleep(5)
        asked = world.on(0, session.txn([], [Put("never", b"")]))
        await asyncio.sleep(1)
        world.server.restart()
        for failing in (asked, reader, world.on(0, session.renew(5)), world.on(0, anext(aiter(session.watch(["a"], 1))))):
            with pytest.raises(EngineReset):
                await failing
        again = await world.session()
        assert again.instance != session.instance
        assert again.place == session.place
        assert (await world.on(0, again.txn([], [Get("a")]))).item(0) is None
        assert world.keys() == []

    Small().run(main)


def test_calls_under_way_when_the_server_dies_have_an_unknown_outcome():
    async def main(world):
        session = await world.session()
        world.server.pause()
        asked = world.on(0, session.txn([], [Put("a", b"")]))
        await asyncio.sleep(1)
        world.server.restart()
        with pytest.raises(Unreachable) as unknown:
            await asked
        assert unknown.value.applied is None
        with pytest.raises(EngineReset):
            await world.on(0, session.txn([], [Get("a")]))

    Small().run(main)


def test_two_servers_under_one_name():
    async def main(world):
        moved = SimServer(world.network, "s1", 1)
        await world.session(0)
        world.network.route = lambda node: moved if node.name == "n1" else world.server
        places = [(await world.session(number)).place for number in (0, 1)]
        assert places == ["s0:29400", "s1:29400"]

    Small(2).run(main)


def test_a_session_whose_endpoint_moved_is_reset():
    async def main(world):
        session = await world.session()
        moved = SimServer(world.network, "s1", 1)
        world.network.route = lambda _node: moved
        await world.on(0, session.txn([], [Put("a", b"")]))  # A connection that lives does not move.
        world.network.reset()
        await asyncio.sleep(1)
        with pytest.raises(EngineReset):
            await world.on(0, session.txn([], [Get("a")]))

    Small().run(main)


# ---- leases


def test_a_silent_member_loses_its_lease_and_not_before():
    async def main(world):
        world.on(0, hold(world, 0))
        world.on(1, hold(world, 1))
        await asyncio.sleep(20)
        world.nodes[1].crash(silent=True)
        crashed_at = world.loop.time()
        await asyncio.sleep(30)
        return [commit.at - crashed_at for commit in world.history.of(Commit) if commit.kind == "expired"]

    world = Small(2)
    (after_s,) = world.run(main)
    assert lost(world) == ["n1"]
    assert 10 - 10 / 3 < after_s < 10.5


def test_a_killed_member_is_noticed_after_the_linger():
    async def main(world):
        for number in range(3):
            world.on(number, hold(world, number))
        await asyncio.sleep(20)
        world.nodes[1].crash()
        crashed_at = world.loop.time()
        await asyncio.sleep(5)
        return [commit.at - crashed_at for commit in world.history.of(Commit) if commit.kind == "expired"]

    world = Small(3)
    (after_s,) = world.run(main)
    assert lost(world) == ["n1"]
    assert 1.0 <= after_s < 1.3


def test_a_connection_that_is_back_within_the_linger_is_not_a_death():
    async def main(world):
        world.on(0, hold(world, 0))
        world.on(1, hold(world, 1))
        for _ in range(50):
            await asyncio.sleep(2)
            world.network.reset(world.nodes[1])

    world = Small(2)
    world.run(main)
    assert lost(world) == []


def test_a_late_goodbye_of_an_old_connection_does_not_end_the_new_one():
    async def main(world):
        world.on(0, hold(world, 0))
        world.on(1, hold(world, 1))
        await asyncio.sleep(5)
        for _ in range(10):
            world.network.cut(world.nodes[1], world.server, "answers")
            await asyncio.sleep(6)
            world.network.heal(world.nodes[1], world.server)
            await asyncio.sleep(12)

    for seed in range(10):
        world = Small(2, seed=seed)
        world.run(main)
        assert lost(world) == []


def test_a_late_hello_of_a_connection_given_up_does_not_take_the_lease_with_it():
    async def main(world):
        world.on(0, hold(world, 0, ttl_s=30.0))
        world.on(1, hold(world, 1, ttl_s=30.0))
        await asyncio.sleep(35)
        world.network.cut(world.nodes[1], world.server, "requests")
        await asyncio.sleep(20)  # Its renewal times out, it dials twice in vain, and renews again only later.
        world.network.heal(world.nodes[1], world.server)
        await asyncio.sleep(40)

    for seed in range(20):
        world = Small(2, seed=seed)
        world.run(main)
        assert lost(world) == []


def test_a_goodbye_leaves_leases_alone():
    async def main(world):
        world.on(0, hold(world, 0))
        session = await world.session(1)
        lease = await world.on(1, session.grant(10, presence=True))
        await world.on(1, session.txn([], [Put("members/n1", b"", lease)]))
        left_at = world.loop.time()
        await world.on(1, session.close())
        await asyncio.sleep(20)
        return [commit.at - left_at for commit in world.history.of(Commit) if commit.kind == "expired"]

    (after_s,) = Small(2).run(main)
    assert 10 <= after_s < 10.5


def test_only_the_lease_of_its_presence_ends_with_a_connection():
    async def main(world):
        world.on(0, hold(world, 0))
        session = await world.session(1)
        for key, ttl_s in (("presence", 10), ("closed", 4), ("run", 86_400)):
            lease = await world.on(1, session.grant(ttl_s, presence=key == "presence"))
            await world.on(1, session.txn([], [Put(key, b"", lease)]))
        world.nodes[1].crash()
        await asyncio.sleep(2)
        assert world.keys() == ["closed", "members/n0", "run"]
        await asyncio.sleep(5)
        assert world.keys() == ["members/n0", "run"]

    Small(2).run(main)


def test_a_stall_of_the_server_is_credited_to_all_leases():
    async def main(world):
        for number in range(3):
            world.on(number, hold(world, number))
        for stall_s in (3.0, 9.0, 15.0, 60.0):
            await asyncio.sleep(20)
            world.server.pause()
            await asyncio.sleep(stall_s)
            world.server.resume()
        await asyncio.sleep(60)

    for seed in range(10):
        world = Small(3, seed=seed)
        world.run(main)
        assert lost(world) == []
        assert world.history.of(Acted) == []


def test_what_arrived_during_a_stall_is_read_before_leases_are_judged():
    async def main(world):
        world.on(1, hold(world, 1, ttl_s=2.0))
        session = await world.session()
        lease = await world.on(0, session.grant(2, presence=True))
        await world.on(0, session.txn([], [Put("members/n0", b"", lease)]))
        leases = world.server.engine.leases
        for _ in range(20):
            while leases._leases[lease].due - leases._now > 0.11:  # noqa: ASYNC110  One more tick ends it.
                await asyncio.sleep(0.01)
            world.server.pause()
            renewed = world.on(0, session.renew(lease))
            await asyncio.sleep(0.3)
            world.server.resume()
            await renewed

    world = Small(2)
    world.run(main)
    assert lost(world) == []


def test_connections_given_up_during_a_stall_are_not_a_death():
    async def main(world):
        world.on(0, hold(world, 0))
        world.on(1, hold(world, 1))
        await asyncio.sleep(20)
        world.server.pause()
        await asyncio.sleep(1)
        world.network.cut(world.nodes[1], world.server)
        world.network.reset(world.nodes[1])
        await asyncio.sleep(1)
        world.server.resume()
        await asyncio.sleep(3)
        world.network.heal(world.nodes[1], world.server)
        await asyncio.sleep(20)

    world = Small(2)
    world.run(main)
    assert lost(world) == []


def test_isolation_of_the_server_ends_no_lease():
    async def main(world):
        for number in range(3):
            world.on(number, hold(world, number))
        await asyncio.sleep(20)
        for node in world.nodes:
            world.network.cut(node, world.server)
        await asyncio.sleep(120)
        for node in world.nodes:
            world.network.heal(node, world.server)
        await asyncio.sleep(60)

    for seed in range(10):
        world = Small(3, seed=seed)
        world.run(main)
        assert lost(world) == []


def test_the_first_to_be_back_after_an_isolation_does_not_condemn_the_others():
    async def main(world):
        for number in range(3):
            world.on(number, hold(world, number))
        await asyncio.sleep(20)
        for node in world.nodes:
            world.network.cut(node, world.server)
        await asyncio.sleep(60)
        for node in world.nodes:
            world.network.heal(node, world.server)
            await asyncio.sleep(3)
        await asyncio.sleep(30)

    for seed in range(10):
        world = Small(3, seed=seed)
        world.run(main)
        assert lost(world) == []


def test_isolation_with_all_connections_broken_ends_no_lease_either():
    async def main(world):
        for number in range(3):
            world.on(number, hold(world, number))
        await asyncio.sleep(20)
        for node in world.nodes:
            world.network.cut(node, world.server)
        world.network.reset()
        await asyncio.sleep(30)
        for node in world.nodes:
            world.network.heal(node, world.server)
        await asyncio.sleep(60)

    for seed in range(10):
        world = Small(3, seed=seed)
        world.run(main)
        assert lost(world) == []


def test_a_short_lease_that_ended_no_longer_decides_what_silence_is():
    async def main(world):
        session = await world.session(2)
        lease = await world.on(2, session.grant(1))
        world.on(0, hold(world, 0))
        world.on(1, hold(world, 1))
        await asyncio.sleep(1)
        await world.on(2, session.revoke(lease))
        await asyncio.sleep(20)
        world.nodes[1].crash(silent=True)
        await asyncio.sleep(15)

    world = Small(3)
    world.run(main)
    assert lost(world) == ["n1"]


def test_one_member_that_is_heard_lets_time_pass_for_the_others():
    async def main(world):
        for number in range(3):
            world.on(number, hold(world, number))
        await asyncio.sleep(20)
        for node in world.nodes[1:]:
            world.network.cut(node, world.server)
        await asyncio.sleep(12)
        assert sorted(lost(world)) == ["n1", "n2"]
        for node in world.nodes[1:]:
            world.network.heal(node, world.server)
        await asyncio.sleep(20)
        return [(acted.actor, acted.detail) for acted in world.history.of(Acted)]

    assert sorted(Small(3).run(main)) == [("n1", "LeaseGone"), ("n2", "LeaseGone")]
