from __future__ import annotations

import asyncio
import gc
from itertools import pairwise

import pytest

from rdzv.machine import Bell, Machine, sleep
from rdzv.testing.loop import TaskFailed, VirtualLoop
from rdzv.testing.machines import SimMachine


def test_a_machine_is_what_the_member_asks_for():
    machine: Machine = SimMachine(VirtualLoop(), "n1")
    assert machine.host == "n1"
    assert machine.pid > 1


def test_clocks_are_far_apart_and_drift():
    loop = VirtualLoop()
    machines = [SimMachine(loop, f"n{number}", seed=7) for number in range(20)]

    async def main():
        before = [machine.now() for machine in machines]
        await asyncio.sleep(1000)
        return [machine.now() - was for machine, was in zip(machines, before, strict=True)], sorted(before)

    passed, starts = loop.run(main())
    assert all(990 <= one <= 1010 for one in passed)
    assert len({round(one, 3) for one in passed}) == 20
    assert starts[0] >= 1e9
    assert min(later - earlier for earlier, later in pairwise(starts)) > 1e4


@pytest.mark.parametrize("rate", [0.99, 1.0, 1.01])
def test_a_timer_keeps_the_time_of_its_machine_and_is_never_early_by_it(rate):
    loop = VirtualLoop()
    machine = SimMachine(loop, "n1", rate=rate, offset_s=9e9)

    async def app():
        for delay_s in (0.001, 0.1, 3.3, 100.0):
            began = machine.now()
            await sleep(machine, delay_s)
            assert 0 <= machine.now() - began - delay_s < 1e-4
        return loop.time()

    async def main():
        return await machine.spawn(app())

    assert loop.run(main()) == pytest.approx(103.401 / rate, abs=1e-3)


def test_random_things_come_from_the_seed():
    def draw(seed, name):
        machine = SimMachine(VirtualLoop(), name, seed)
        return machine.pid, machine.now(), machine.rate, [machine.token(), machine.token()], machine.jitter()

    assert draw(1, "n1") == draw(1, "n1")
    assert draw(1, "n1") != draw(2, "n1")
    assert draw(1, "n1") != draw(1, "n2")
    assert len(draw(1, "n1")[3][0]) == 16
    assert 0 <= draw(1, "n1")[4] < 1


def test_every_bound_address_is_new():
    loop = VirtualLoop()
    machines = [SimMachine(loop, name, host="shared") for name in ("a", "b")]
    addresses = [str(machine.bind("10.0.0.1", (0, 0))) for machine in machines for _ in range(50)]
    assert len(set(addresses)) == 100
    assert str(machines[0].bind("h", (29500, 29500))) == "h:29500"
    assert 7000 <= machines[0].bind("h", (7000, 7009)).port <= 7009


def test_the_clock_goes_on_while_a_machine_is_paused():
    loop = VirtualLoop()
    machine = SimMachine(loop, "n1", rate=1.0)
    woke = []

    async def app():
        began = machine.now()
        await sleep(machine, 1)
        woke.append(machine.now() - began)

    async def main():
        machine.spawn(app())
        await asyncio.sleep(0.5)
        machine.pause()
        await asyncio.sleep(60)
        assert not woke
        machine.resume()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    loop.run(main())
    assert woke == [pytest.approx(60.5, abs=1e-3)]


def test_what_was_about_to_run_is_held_back_too():
    loop = VirtualLoop()
    machine = SimMachine(loop, "n1")
    bell = Bell(machine)
    seen = []

    async def app():
        await bell.wait()
        seen.append("rung")

    async def main():
        machine.spawn(app())
        await asyncio.sleep(1)
        bell.ring()
        machine.pause()  # The task was made ready a moment ago, and does not run.
        await asyncio.sleep(10)
        assert not seen
        machine.resume()
        await asyncio.sleep(0.1)

    loop.run(main())
    assert seen == ["rung"]


def test_a_crash_runs_no_cleanup_within_the_run_and_leaves_nothing_half_run():
    loop = VirtualLoop()
    machine = SimMachine(loop, "n1")
    seen = []

    async def app():
        try:
            while True:
                await sleep(machine, 1)
                seen.append("beat")
        finally:
            seen.append("unwound" if loop.unwinding else "cleaned up")
            await sleep(machine, 5)

    async def main():
        exited = machine.spawn(app())
        machine.on_crash.append(lambda silent: seen.append((machine.dead, silent)))
        await asyncio.sleep(2.5)
        machine.crash()
        machine.crash()
        machine.resume()
        await asyncio.sleep(10)
        assert seen == ["beat", "beat", (True, False)]
        assert exited.cancelled()
        with pytest.raises(RuntimeError, match="n1 is dead"):
            machine.spawn(app())

    loop.run(main())
    gc.collect()
    assert seen[3:] == ["unwound"]


def test_a_task_made_by_a_task_dies_with_the_machine():
    loop = VirtualLoop()
    machine = SimMachine(loop, "n1")
    beats = []

    async def inner():
        while True:
            await asyncio.sleep(1)
            beats.append(loop.time())

    async def outer():
        loop.create_task(inner())
        await asyncio.sleep(1e6)

    async def main():
        machine.spawn(outer())
        await asyncio.sleep(3.5)
        machine.crash()
        await asyncio.sleep(10)

    loop.run(main())
    assert beats == [1, 2, 3]


def test_spawn_gives_the_result_from_outside():
    loop = VirtualLoop()
    machine = SimMachine(loop, "n1")

    async def app(value):
        await sleep(machine, 1)
        if isinstance(value, Exception):
            raise value
        return value

    async def main():
        assert await machine.spawn(app(7)) == 7
        with pytest.raises(ValueError, match="seen"):
            await machine.spawn(app(ValueError("seen")))

    loop.run(main())


def test_an_application_that_fails_unseen_fails_the_run():
    loop = VirtualLoop()
    machine = SimMachine(loop, "n1")

    async def app():
        raise ValueError("nobody looks")

    async def main():
        machine.spawn(app(), "app")
        await asyncio.sleep(1)

    with pytest.raises(TaskFailed, match=r"exit of n1/app failed.*nobody looks"):
        loop.run(main())
