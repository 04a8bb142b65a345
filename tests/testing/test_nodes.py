from __future__ import annotations

import asyncio
import gc
from itertools import pairwise

import pytest

from rdzv.system.node import Node
from rdzv.system.timers import Wakeup, sleep
from rdzv.testing.nodes import SimNode
from rdzv.testing.virtual_loop import TaskFailed, VirtualLoop


def test_a_machine_is_what_the_member_asks_for():
    node: Node = SimNode(VirtualLoop(), "n1")
    assert node.host == "n1"
    assert node.pid > 1


def test_clocks_are_far_apart_and_drift():
    loop = VirtualLoop()
    nodes = [SimNode(loop, f"n{number}", seed=7) for number in range(20)]

    async def main():
        before = [node.now() for node in nodes]
        await asyncio.sleep(1000)
        return [node.now() - was for node, was in zip(nodes, before, strict=True)], sorted(before)

    passed, starts = loop.run(main())
    assert all(990 <= one <= 1010 for one in passed)
    assert len({round(one, 3) for one in passed}) == 20
    assert starts[0] >= 1e9
    assert min(later - earlier for earlier, later in pairwise(starts)) > 1e4


@pytest.mark.parametrize("rate", [0.99, 1.0, 1.01])
def test_a_timer_keeps_the_time_of_its_machine_and_is_never_early_by_it(rate):
    loop = VirtualLoop()
    node = SimNode(loop, "n1", rate=rate, offset_s=9e9)

    async def app():
        for delay_s in (0.001, 0.1, 3.3, 100.0):
            began = node.now()
            await sleep(node, delay_s)
            assert 0 <= node.now() - began - delay_s < 1e-4
        return loop.time()

    async def main():
        return await node.spawn(app())

    assert loop.run(main()) == pytest.approx(103.401 / rate, abs=1e-3)


def test_random_things_come_from_the_seed():
    def draw(seed, name):
        node = SimNode(VirtualLoop(), name, seed)
        return node.pid, node.now(), node.rate, [node.token(), node.token()], node.jitter()

    assert draw(1, "n1") == draw(1, "n1")
    assert draw(1, "n1") != draw(2, "n1")
    assert draw(1, "n1") != draw(1, "n2")
    assert len(draw(1, "n1")[3][0]) == 16
    assert 0 <= draw(1, "n1")[4] < 1


def test_every_bound_address_is_new():
    loop = VirtualLoop()
    nodes = [SimNode(loop, name, host="shared") for name in ("a", "b")]
    addresses = [str(node.bind("10.0.0.1", (0, 0))) for node in nodes for _ in range(50)]
    assert len(set(addresses)) == 100
    assert str(nodes[0].bind("h", (29500, 29500))) == "h:29500"
    assert 7000 <= nodes[0].bind("h", (7000, 7009)).port <= 7009


def test_the_clock_goes_on_while_a_machine_is_paused():
    loop = VirtualLoop()
    node = SimNode(loop, "n1", rate=1.0)
    woke = []

    async def app():
        began = node.now()
        await sleep(node, 1)
        woke.append(node.now() - began)

    async def main():
        node.spawn(app())
        await asyncio.sleep(0.5)
        node.pause()
        await asyncio.sleep(60)
        assert not woke
        node.resume()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run(main())
    assert woke == [pytest.approx(60.5, abs=1e-3)]


def test_what_was_about_to_run_is_held_back_too():
    loop = VirtualLoop()
    node = SimNode(loop, "n1")
    bell = Wakeup(node)
    seen = []

    async def app():
        await bell.wait()
        seen.append("rung")

    async def main():
        node.spawn(app())
        await asyncio.sleep(1)
        bell.ring()
        node.pause()  # The task was made ready a moment ago, and does not run.
        await asyncio.sleep(10)
        assert not seen
        node.resume()
        await asyncio.sleep(0.1)

    loop.run(main())
    assert seen == ["rung"]


def test_a_crash_runs_no_cleanup_within_the_run_and_leaves_nothing_half_run():
    loop = VirtualLoop()
    node = SimNode(loop, "n1")
    seen = []

    async def app():
        try:
            while True:
                await sleep(node, 1)
                seen.append("beat")
        finally:
            seen.append("unwound" if loop.unwinding else "cleaned up")
            await sleep(node, 5)

    async def main():
        exited = node.spawn(app())
        node.on_crash.append(lambda silent: seen.append((node.dead, silent)))
        await asyncio.sleep(2.5)
        node.crash()
        node.crash()
        node.resume()
        await asyncio.sleep(10)
        assert seen == ["beat", "beat", (True, False)]
        assert exited.cancelled()
        with pytest.raises(RuntimeError, match="n1 is dead"):
            node.spawn(app())

    loop.run(main())
    gc.collect()
    assert seen[3:] == ["unwound"]


def test_a_task_made_by_a_task_dies_with_the_machine():
    loop = VirtualLoop()
    node = SimNode(loop, "n1")
    beats = []

    async def inner():
        while True:
            await asyncio.sleep(1)
            beats.append(loop.time())

    async def outer():
        loop.create_task(inner())
        await asyncio.sleep(1e6)

    async def main():
        node.spawn(outer())
        await asyncio.sleep(3.5)
        node.crash()
        await asyncio.sleep(10)

    loop.run(main())
    assert beats == [1, 2, 3]


def test_spawn_gives_the_result_from_outside():
    loop = VirtualLoop()
    node = SimNode(loop, "n1")

    async def app(value):
        await sleep(node, 1)
        if isinstance(value, Exception):
            raise value
        return value

    async def main():
        assert await node.spawn(app(7)) == 7
        with pytest.raises(ValueError, match="seen"):
            await node.spawn(app(ValueError("seen")))

    loop.run(main())


def test_an_application_that_fails_unseen_fails_the_run():
    loop = VirtualLoop()
    node = SimNode(loop, "n1")

    async def app():
        raise ValueError("nobody looks")

    async def main():
        node.spawn(app(), "app")
        await asyncio.sleep(1)

    with pytest.raises(TaskFailed, match=r"exit of n1/app failed.*nobody looks"):
        loop.run(main())
