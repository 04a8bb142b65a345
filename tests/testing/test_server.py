from __future__ import annotations

import asyncio

import pytest

from rdzv.engines.port import EngineReset, Get, Put
from rdzv.errors import Unreachable
from rdzv.testing.history import Acted, Commit
from rdzv.testing.server import TICK_S, SimServer
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


async def break_off(world):
    """Connections break again and again, and are back within the linger."""
    for _ in range(50):
        await asyncio.sleep(2)
        world.network.reset(world.nodes[1])


async def lose_answers(world):
    """The goodbye of a connection that was given up arrives after the next one was made."""
    for _ in range(10):
        world.network.cut(world.nodes[1], world.server, "answers")
        await asyncio.sleep(6)
        world.network.heal(world.nodes[1], world.server)
        await asyncio.sleep(12)


async def stall(world):
    for stall_s in (3.0, 9.0, 15.0, 60.0):
        world.server.pause()
        await asyncio.sleep(stall_s)
        world.server.resume()
        await asyncio.sleep(20)


async def break_off_during_a_stall(world):
    """A connection that was given up while the server stood still says nothing about its member."""
    world.server.pause()
    await asyncio.sleep(1)
    world.network.cut(world.nodes[1], world.server)
    world.network.reset(world.nodes[1])
    await asyncio.sleep(1)
    world.server.resume()
    await asyncio.sleep(3)
    world.network.heal(world.nodes[1], world.server)


async def isolate(world, seconds=120.0, between_s=0.0, reset=False):
    for node in world.nodes:
        world.network.cut(node, world.server)
    if reset:
        world.network.reset()
    await asyncio.sleep(seconds)
    for node in world.nodes:
        world.network.heal(node, world.server)
        await asyncio.sleep(between_s)


@pytest.mark.parametrize(
    "disturb",
    [
        break_off,
        lose_answers,
        stall,
        break_off_during_a_stall,
        isolate,
        lambda world: isolate(world, 60.0, between_s=3.0),  # The first to be back does not condemn the others.
        lambda world: isolate(world, 30.0, reset=True),
    ],
)
def test_no_member_is_lost_by_a_fault_of_the_server_or_the_network(disturb):
    async def main(world):
        for number in range(3):
            world.on(number, hold(world, number))
        await asyncio.sleep(20)
        await disturb(world)
        await asyncio.sleep(60)

    for seed in range(10):
        world = Small(3, seed=seed)
        world.run(main)
        assert lost(world) == []
        assert world.history.of(Acted) == []


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


@pytest.mark.parametrize(("silent", "stop_s", "least_s", "most_s"), [(True, 0.0, 10 - 10 / 3, 10.5), (False, 0.3, 1.0, 1.6)])
def test_a_member_that_dies_is_lost_in_time_even_during_a_short_stop_of_the_server(silent, stop_s, least_s, most_s):
    async def main(world):
        for number in range(3):
            world.on(number, hold(world, number))
        await asyncio.sleep(20)
        world.server.pause()
        world.nodes[1].crash(silent=silent)
        crashed_at = world.loop.time()
        await asyncio.sleep(stop_s)
        world.server.resume()
        await asyncio.sleep(30)
        return [commit.at - crashed_at for commit in world.history.of(Commit) if commit.kind == "expired"]

    world = Small(3)
    (after_s,) = world.run(main)
    assert lost(world) == ["n1"]
    assert least_s <= after_s < most_s


def test_what_arrived_during_a_stall_is_read_before_leases_are_judged():
    async def main(world):
        world.on(1, hold(world, 1, ttl_s=2.0))
        session = await world.session()
        lease = await world.on(0, session.grant(2, presence=True))
        await world.on(0, session.txn([], [Put("members/n0", b"", lease)]))
        leases = world.server.engine.leases
        for _ in range(20):
            while leases._leases[lease].due - leases._now > TICK_S + 0.01:  # noqa: ASYNC110  One more tick ends it.
                await asyncio.sleep(0.01)
            world.server.pause()
            renewed = world.on(0, session.renew(lease))
            await asyncio.sleep(0.3)
            world.server.resume()
            await renewed

    world = Small(2)
    world.run(main)
    assert lost(world) == []
