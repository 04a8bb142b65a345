from __future__ import annotations

import asyncio

import pytest

from rdzv.engines.port import Created, Driver, Gap, Get, LeaseGone, Put
from rdzv.errors import Unreachable
from rdzv.testing.driver import SimDriver
from rdzv.testing.history import Acted, Commit
from rdzv.testing.network import SimNetwork
from rdzv.testing.virtual_loop import VirtualLoop
from support.small_simulation import Small, hold, lost

# ---- the port


@pytest.mark.parametrize("stars", [True, False])
def test_a_session_is_the_shipping_one_with_what_its_engine_says_of_itself(stars):
    async def main(world):
        driver: Driver = SimDriver(world.network, world.nodes[0])
        session = await world.on(0, driver.connect())
        assert (session.instance, session.place) == (world.server.engine.instance, "s0:29400")
        assert (session.durable, session.stars, session.local_host) == (False, stars, "n0")
        lease = await world.on(0, session.grant(5))
        assert len(world.server.engine.leases) == (not stars), "etcd's leases begin with an exchange of their own"
        await world.on(0, session.txn([], [Put("b", b"", lease)]))
        await world.on(0, session.revoke(lease))
        assert world.keys() == []
        with pytest.raises(LeaseGone):
            await world.on(0, session.txn([], [Put("b", b"", lease)]))

    Small(stars=stars).run(main)


def test_commits_are_attributed_to_their_machine():
    seen = []

    async def main(world):
        world.server.commits.append(
            lambda server, actor, batch, kind: seen.append((server.name, actor, batch.revision, kind))
        )
        session = await world.session(1)
        await world.on(1, session.txn([Created("a", 0)], [Put("a", b"1")]))
        await world.on(1, session.txn([Created("a", 0)], [Put("never", b"")], [Put("a", b"2")]))
        await world.on(1, session.txn([], [Get("a")]))
        lease = await world.on(1, session.grant(1))
        await world.on(1, session.txn([], [Put("leased", b"", lease)]))
        await world.on(1, session.revoke(lease))
        lease = await world.on(1, session.grant(1))
        await world.on(1, session.txn([], [Put("leased", b"", lease)]))
        for _ in range(10):  # Somebody must be heard for time to pass.
            await asyncio.sleep(0.3)
            await world.on(1, session.txn([], [Get("a")]))

    Small(2).run(main)
    assert seen[0] == ("s0", "n1", 2, "then")
    assert [(actor, kind) for _, actor, _, kind in seen] == [
        ("n1", "then"),
        ("n1", "otherwise"),
        ("n1", "then"),
        ("n1", "revoked"),
        ("n1", "then"),
        ("", "expired"),
    ]


# ---- order and delay


def test_a_connection_keeps_its_order_and_connections_overtake_each_other():
    async def main(world):
        sessions = [await world.session(number) for number in (0, 1)]
        asked = [
            world.on(turn % 2, sessions[turn % 2].txn([], [Put(f"{turn % 2}/{turn:03d}", b"")])) for turn in range(400)
        ]
        await asyncio.gather(*asked)
        return [event.key for commit in world.history.of(Commit) for event in commit.events]

    keys = Small(2).run(main)
    for node in ("0/", "1/"):
        own = [key for key in keys if key.startswith(node)]
        assert own == sorted(own)
    assert [key[2:] for key in keys] != sorted(key[2:] for key in keys)


def test_delays_are_usually_short_with_a_tail():
    network = SimNetwork(VirtualLoop(), 3)
    drawn = sorted(network.delay_s() for _ in range(20_000))
    assert drawn[0] >= 0.0002
    assert drawn[10_000] < 0.005
    assert drawn[-1] > 0.04
    assert drawn[-1] <= 0.05


def test_a_slow_server_delays_everything_and_breaks_nothing():
    async def main(world):
        session = await world.session()
        world.server.slow_s = 2.0
        began = world.loop.time()
        await world.on(0, session.txn([], [Put("a", b"")]))
        assert 4.0 < world.loop.time() - began < 4.2
        world.server.slow_s = 0.0

    Small().run(main)


# ---- loss of a connection


@pytest.mark.parametrize(("way", "applied"), [("requests", False), ("answers", True)])
def test_a_connection_lost_before_or_after_the_effect_looks_the_same_to_the_caller(way, applied):
    async def main(world):
        session = await world.session()
        world.network.break_next(world.nodes[0], world.server, way)
        with pytest.raises(Unreachable) as unknown:
            await world.on(0, session.txn([], [Put("a", b"")]))
        assert unknown.value.applied is None
        assert world.keys() == (["a"] if applied else [])
        outcome = await world.on(0, session.txn([], [Get("a")]))
        assert bool(outcome.item(0)) is applied
        assert world.loop.time() < 1, "the connection is restored at once"

    Small().run(main)


def test_what_is_under_way_is_lost_with_its_connection():
    async def main(world):
        session = await world.session()
        asked = world.on(0, session.txn([], [Put("a", b"")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        world.network.reset()
        with pytest.raises(Unreachable):
            await asked
        await asyncio.sleep(1)
        assert world.keys() == []

    for seed in range(20):
        Small(seed=seed).run(main)


def test_connections_break_at_random_and_no_request_takes_effect_twice():
    async def main(world):
        world.network.loss = 0.05
        session = await world.session()
        outcomes = {None: 0, True: 0}
        for number in range(300):
            try:
                await world.on(0, session.txn([], [Put(f"{number:03d}", b"")]))
                outcomes[True] += 1
            except Unreachable as error:
                outcomes[error.applied] += 1
        keys = [event.key for commit in world.history.of(Commit) for event in commit.events]
        assert len(keys) == len(set(keys))
        assert outcomes[True] < len(keys) < 300, "some of the unknown ones took effect, others did not"

    Small().run(main)


def test_a_call_while_disconnected_waits_for_the_reconnect():
    async def main(world):
        session = await world.session()
        world.server.pause()
        world.network.reset()
        await asyncio.sleep(1)
        asked = world.on(0, session.txn([], [Put("a", b"")]))
        await asyncio.sleep(3)
        assert not asked.done()
        world.server.resume()
        assert (await asked).succeeded

    Small().run(main)


def test_a_call_that_was_never_sent_says_so():
    async def main(world):
        session = await world.session()
        world.server.pause()
        world.network.reset()
        await asyncio.sleep(1)
        began = world.loop.time()
        with pytest.raises(Unreachable, match="not back") as unsent:
            await world.on(0, session.txn([], [Put("a", b"")]))
        assert unsent.value.applied is False
        assert world.loop.time() - began == pytest.approx(10, abs=0.01)
        world.server.resume()
        await asyncio.sleep(5)
        assert world.keys() == []

    Small().run(main)


def test_a_server_that_does_not_listen_refuses():
    async def main(world):
        world.server.crash()
        with pytest.raises(Unreachable, match="refused") as refused:
            await world.session()
        assert refused.value.applied is False
        assert world.loop.time() < 0.2
        world.network.route = lambda _node: None
        with pytest.raises(Unreachable, match="name is not known"):
            await world.session()

    Small().run(main)


# ---- partitions


def test_requests_into_a_partition_time_out():
    async def main(world):
        session = await world.session()
        world.network.cut(world.nodes[0], world.server)
        began = world.loop.time()
        with pytest.raises(Unreachable, match="no answer") as silence:
            await world.on(0, session.txn([], [Put("a", b"")]))
        assert silence.value.applied is None
        assert world.loop.time() - began == pytest.approx(10, abs=0.01)
        assert world.keys() == []
        with pytest.raises(Unreachable, match="did not greet us within 3 s"):
            await world.session()

    Small().run(main)


def test_a_one_way_partition_of_requests_lets_watches_go_on():
    async def main(world):
        watch = (await world.session(0)).watch(["a"], 1)
        await asyncio.sleep(1)
        world.network.cut(world.nodes[0], world.server, "requests")
        other = await world.session(1)
        await world.on(1, other.txn([], [Put("a", b"")]))
        assert (await world.on(0, anext(aiter(watch)))).events[0].key == "a"

    Small(2).run(main)


def test_a_request_may_take_effect_long_after_its_sender_gave_it_up():
    async def main(world):
        session = await world.session()
        world.network.cut(world.nodes[0], world.server)
        with pytest.raises(Unreachable):
            await world.on(0, session.txn([], [Put("late", b"")]))
        await asyncio.sleep(20)
        world.network.heal(world.nodes[0], world.server)
        await asyncio.sleep(5)
        await world.on(0, session.txn([], [Get("late")]))
        return world.keys() == ["late"]

    effects = [Small(seed=seed).run(main) for seed in range(20)]
    assert set(effects) == {True, False}


def read_watch(world, session, target):
    """Return a watch, and the list to which the first node adds the revisions that it shows."""
    watch, seen = session.watch([target], 1), []

    async def read():
        async for batch in watch:
            seen.extend(event.revision for event in batch.events)

    world.on(0, read())
    return watch, seen


def test_a_short_partition_costs_a_watch_nothing():
    async def main(world):
        session, other = await world.session(0), await world.session(1)
        _, seen = read_watch(world, session, "a")
        for turn in range(40):
            if turn % 8 == 2:
                world.network.cut(world.nodes[0], world.server, *(("answers",) if turn % 16 == 2 else ()))
            if turn % 8 == 6:
                world.network.heal(world.nodes[0], world.server)
            await world.on(1, other.txn([], [Put("a", b"")]))
            await asyncio.sleep(0.5)
        world.network.heal(world.nodes[0], world.server)
        await asyncio.sleep(5)
        return seen

    for seed in range(10):
        assert Small(2, seed=seed).run(main) == list(range(2, 42))


# ---- watches


def test_a_watch_goes_on_after_lost_connections_without_loss_or_duplication():
    async def main(world):
        session, other = await world.session(0), await world.session(1)
        watch, seen = read_watch(world, session, "dir/")
        for turn in range(200):
            await world.on(1, other.txn([], [Put(f"dir/{turn}", b""), Put("else", b"")]))
            if turn % 7 == 3:
                world.network.reset(world.nodes[0])
        await asyncio.sleep(3)
        await world.on(0, watch.aclose())
        return seen

    for seed in range(5):
        assert Small(2, seed=seed).run(main) == list(range(2, 202))


def test_a_server_may_cut_off_its_watches():
    async def main(world):
        watch = (await world.session()).watch(["a"], 1)
        await asyncio.sleep(1)
        world.server.drop_watches()
        with pytest.raises(Gap, match="too slow"):
            await world.on(0, anext(aiter(watch)))

    Small().run(main)


# ---- machines on the network


def test_a_paused_machine_gets_its_deliveries_when_it_resumes():
    async def main(world):
        session, other = await world.session(0), await world.session(1)
        seen = []

        async def read():
            async for batch in session.watch(["a"], 1):
                seen.append((world.loop.time(), batch.revision))  # noqa: PERF401

        world.on(0, read())
        await asyncio.sleep(1)
        world.nodes[0].pause()
        for _ in range(10):
            await world.on(1, other.txn([], [Put("a", b"")]))
        await asyncio.sleep(60)
        assert seen == []
        world.nodes[0].resume()
        resumed_at = world.loop.time()
        await asyncio.sleep(0.1)
        assert seen == [(resumed_at, revision) for revision in range(2, 12)]

    Small(2).run(main)


def test_a_paused_member_is_lost_by_its_lease_and_finds_out():
    async def main(world):
        world.on(0, hold(world, 0))
        world.on(1, hold(world, 1))
        await asyncio.sleep(20)
        world.nodes[1].pause()
        await asyncio.sleep(15)
        assert lost(world) == ["n1"]
        world.nodes[1].resume()
        await asyncio.sleep(5)
        return [(acted.actor, acted.detail) for acted in world.history.of(Acted)]

    assert Small(2).run(main) == [("n1", "LeaseGone")]


def test_a_crashed_machine_reaches_nothing():
    async def main(world):
        session = await world.session()

        async def app():
            try:
                await asyncio.sleep(1000)
            finally:
                try:
                    await session.txn([], [Put("from the grave", b"")])
                finally:
                    world.history.add(Acted(actor="n0", what="cleaned up"))

        world.on(0, app())
        await asyncio.sleep(1)
        asked = world.on(0, session.txn([], [Put("sent before", b"")]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        world.nodes[0].crash()
        await asyncio.sleep(60)
        assert asked.cancelled()
        assert world.keys() == ["sent before"]

    world = Small()
    world.run(main)
    assert world.keys() == ["sent before"]
    assert world.history.of(Acted) == []
