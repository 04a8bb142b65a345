from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import time

import pytest

from rdzv.testing import virtual_loop
from rdzv.testing.virtual_loop import (
    Process,
    RunError,
    TaskFailed,
    VirtualLoop,
    current_process,
)
from support.timing import within


def test_time_jumps_to_the_next_timer():
    loop = VirtualLoop()
    began = time.monotonic()

    async def main():
        await asyncio.sleep(86_400)
        return loop.time()

    assert loop.run(main(), limit_s=1e6) == 86_400
    within(time.monotonic() - began, 1)


def test_time_stands_still_while_anything_can_run():
    loop = VirtualLoop()

    async def main():
        for _ in range(1000):
            await asyncio.sleep(0)
        return loop.time()

    assert loop.run(main()) == 0


def test_timers_of_one_instant_run_in_the_order_they_were_set():
    loop = VirtualLoop()
    seen = []

    async def main():
        for number in range(100):
            loop.call_at(1.0, seen.append, number)
        loop.call_at(0.5, seen.append, "first")
        await asyncio.sleep(2)

    loop.run(main())
    assert seen == ["first", *range(100)]


def test_a_cancelled_timer_does_not_run_and_does_not_move_time():
    loop = VirtualLoop()

    async def main():
        for _ in range(1000):
            loop.call_later(5, pytest.fail).cancel()
        waiter = loop.create_future()
        loop.call_later(1, waiter.set_result, None)
        await waiter
        assert len(loop._timers) < 200, "void timers must not pile up"
        return loop.time()

    assert loop.run(main()) == 1


def test_asyncio_timeouts_work_on_virtual_time():
    loop = VirtualLoop()

    async def main():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(loop.create_future(), 30)
        return loop.time()

    assert loop.run(main()) == 30


def test_the_limit_of_virtual_time_names_what_is_pending():
    async def forever():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1)

    async def main():
        asyncio.get_running_loop().create_task(forever(), name="heartbeat")
        await forever()

    with pytest.raises(RunError, match=r"not at its end after 50 s.*main, heartbeat"):
        VirtualLoop().run(main(), limit_s=50)


def test_a_livelock_at_one_instant_is_an_error(monkeypatch):
    monkeypatch.setattr(virtual_loop, "INSTANT_CALLBACKS_MAX", 10_000)

    async def main():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(RunError, match="time does not pass"):
        VirtualLoop().run(main())


def test_too_many_callbacks_over_time_are_a_livelock():
    async def main():
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1e-6)

    with pytest.raises(RunError, match="not at its end after 1"):
        VirtualLoop().run(main(), callbacks_max=1000)


def test_a_run_in_which_nothing_can_happen_is_stuck():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RunError, match="nothing can run and no timer is set; pending: main"):
        VirtualLoop().run(main())


def test_a_task_that_fails_unseen_fails_the_run():
    async def fail():
        raise ValueError("the cause")

    async def main():
        asyncio.get_running_loop().create_task(fail(), name="background")
        await asyncio.sleep(1)

    with pytest.raises(TaskFailed, match=r"background failed and nobody looked: ValueError\('the cause'\)") as failed:
        VirtualLoop().run(main())
    assert isinstance(failed.value.__cause__, ValueError)


def test_a_failure_unseen_goes_before_the_error_it_led_to():
    async def fail():
        raise ValueError("the cause")

    async def main():
        asyncio.get_running_loop().create_task(fail())
        await asyncio.get_running_loop().create_future()

    with pytest.raises(TaskFailed, match="the cause"):
        VirtualLoop().run(main())


def test_a_failure_that_was_seen_is_none():
    async def fail():
        raise ValueError("seen")

    async def main():
        task = asyncio.get_running_loop().create_task(fail())
        with pytest.raises(ValueError, match="seen"):
            await task

    VirtualLoop().run(main())


def test_a_callback_that_raises_ends_the_run_at_once():
    loop = VirtualLoop()

    def fail():
        raise ValueError("in a callback")

    async def main():
        loop.call_later(1, fail)
        await asyncio.sleep(1000)

    with pytest.raises(TaskFailed, match="in a callback"):
        loop.run(main())
    assert loop.time() < 1000


def test_a_future_that_fails_unseen_fails_the_run():
    async def main():
        loop = asyncio.get_running_loop()
        loop.create_future().set_exception(ValueError("dropped"))
        gc.collect()
        await asyncio.sleep(1)

    with pytest.raises(TaskFailed, match=r"never retrieved failed and nobody looked: ValueError\('dropped'\)"):
        VirtualLoop().run(main())


def test_the_error_of_main_is_raised_as_it_is():
    async def main():
        raise KeyError("main")

    with pytest.raises(KeyError, match="main"):
        VirtualLoop().run(main())


def test_tasks_left_over_are_unwound_and_may_clean_up():
    seen = []

    async def worker():
        try:
            await asyncio.sleep(1e5)
        finally:
            await asyncio.sleep(5)
            asyncio.get_running_loop().create_task(asyncio.sleep(1e9))
            seen.append("clean")

    async def main():
        asyncio.get_running_loop().create_task(worker())
        await asyncio.sleep(1)

    VirtualLoop().run(main())
    gc.collect()  # A task destroyed while pending would warn, and warnings are errors.
    assert seen == ["clean"]


def test_a_task_that_cannot_be_cancelled_is_an_error():
    async def stubborn():
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(100)

    async def main():
        asyncio.get_running_loop().create_task(stubborn(), name="stubborn")
        await asyncio.sleep(1)

    with pytest.raises(RunError, match="ignore their cancellation: pending: stubborn"):
        VirtualLoop().run(main())


def test_there_are_no_threads():
    async def main():
        await asyncio.get_running_loop().run_in_executor(None, print)

    with pytest.raises(RuntimeError, match="neither threads"):
        VirtualLoop().run(main())


def test_task_names_are_the_same_in_every_run():
    def names():
        loop = VirtualLoop()
        process = Process(loop, "n1", random.Random(0))

        async def main():
            made = [loop.create_task(asyncio.sleep(0)) for _ in range(2)]
            made += [process.context.copy().run(loop.create_task, asyncio.sleep(0)) for _ in range(2)]
            made.append(loop.create_task(asyncio.sleep(0), name="named"))
            await asyncio.gather(*made)
            return [task.get_name() for task in made]

        return loop.run(main())

    assert names() == names() == ["1", "2", "n1/1", "n1/2", "named"]


def test_a_task_belongs_to_the_process_that_made_it():
    loop = VirtualLoop()
    process = Process(loop, "n1", random.Random(0))

    async def inner():
        return current_process.get()

    async def outer():
        return await loop.create_task(inner())

    async def main():
        assert current_process.get() is None
        return await process.context.copy().run(loop.create_task, outer())

    assert loop.run(main()) is process


def test_a_paused_process_runs_nothing_and_others_go_on():
    loop = VirtualLoop()
    process = Process(loop, "n1", random.Random(0))
    seen = []

    async def beat(name):
        while True:
            seen.append((name, loop.time()))
            await asyncio.sleep(1)

    async def main():
        loop.create_task(beat("free"))
        process.context.copy().run(loop.create_task, beat("held"))
        await asyncio.sleep(2.5)
        process.pause()
        process.context.run(loop.call_soon, seen.append, ("held", "soon"))
        await asyncio.sleep(5)
        assert [at for name, at in seen if name == "held"] == [0, 1, 2]
        process.resume()
        await asyncio.sleep(1.75)

    loop.run(main())
    assert [at for name, at in seen if name == "held"] == [0, 1, 2, "soon", 7.5, 8.5]
    assert [at for name, at in seen if name == "free"] == list(range(10))


def test_resume_shuffles_streams_but_keeps_the_order_within_each():
    def order(seed):
        loop = VirtualLoop()
        process = Process(loop, "n1", random.Random(seed))
        seen = []

        async def main():
            process.pause()
            for number in range(20):
                for stream in ("a", "b", None):
                    call = loop.call_later(number, seen.append, (stream, number), context=process.context)
                    call.stream = stream
            await asyncio.sleep(30)
            process.resume()
            await asyncio.sleep(0)

        loop.run(main())
        return seen

    first = order(1)
    for stream in ("a", "b", None):
        assert [number for name, number in first if name == stream] == list(range(20))
    assert first == order(1) != order(2)
