"""The in-process driver beyond the contract: threads, loops, time and forks."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from rdzv.engines import memory, watch_queue
from rdzv.engines.memory import MemoryDriver, MemorySession
from rdzv.engines.port import Created, DeletePrefix, Gap, Get, Modified, Put
from rdzv.errors import Unreachable

DEADLINE_S = 30.0
EVERYTHING = DeletePrefix("")


async def put(session: MemorySession, key: str, value: bytes = b"", lease: int = 0) -> int:
    return (await session.txn(then=[Put(key, value, lease)])).revision


def in_thread(main: Callable[[], Coroutine[Any, Any, None]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    return thread


async def joined(*threads: threading.Thread) -> None:
    for thread in threads:
        await asyncio.to_thread(thread.join, DEADLINE_S)
        assert not thread.is_alive()


# ---- the registry


async def test_engines_are_shared_by_name():
    one, same, other = [await MemoryDriver(name).connect() for name in ("a", "a", "b")]
    assert one.engine is same.engine
    assert one.instance != other.instance
    assert (one.place, other.place) == ("memory:a", "memory:b")
    assert MemoryDriver("a").endpoint == "memory://a"
    for session in (one, same, other):
        await session.close()
    with pytest.raises(Unreachable, match="memory://b is unreachable: the session is closed"):
        await other.txn()


async def test_an_engine_goes_with_its_last_session():
    """An engine with a key or a lease stays for the next session."""
    driver = MemoryDriver("r")
    first, second = await driver.connect(), await driver.connect()
    instance = first.instance
    lease = await first.grant(60)
    await put(first, "k", b"", lease)
    await first.close()
    await first.close()
    await second.close()

    third = await driver.connect()
    assert third.instance == instance
    await third.txn(then=[EVERYTHING])
    await third.close()

    fourth = await driver.connect()
    assert fourth.instance == instance
    await fourth.revoke(lease)
    await fourth.close()
    await driver.close()

    fifth = await driver.connect()
    assert fifth.instance != instance
    await fifth.close()
    assert "r" not in memory._SharedEngine.by_name


def test_sessions_whose_loop_was_closed_do_not_keep_an_engine():

    async def forget() -> None:
        await MemoryDriver("f").connect()

    async def close() -> None:
        await (await MemoryDriver("f").connect()).close()

    asyncio.run(forget())
    assert "f" in memory._SharedEngine.by_name
    asyncio.run(close())
    assert "f" not in memory._SharedEngine.by_name


# ---- time


class Clock:
    """Stands in for the `time` module."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def test_a_stall_is_credited_to_all_leases_and_time_passes_once(monkeypatch):
    """However long nobody ticked, at most two ticks pass. Loops that tick together do not make leases shorter."""
    clock = Clock()
    monkeypatch.setattr(memory, "time", clock)

    async def main() -> None:
        session = await MemoryDriver("stall").connect()
        lease = await session.grant(2)
        for _ in range(4):
            clock.now += 3600
            session.shared.pass_time()
        await session.renew(lease)
        for _ in range(9):
            clock.now += 0.25
            for _ in range(10):
                session.shared.pass_time()
        assert lease in session.engine.leases
        clock.now += 0.25
        session.shared.pass_time()
        assert lease not in session.engine.leases
        await session.close()

    asyncio.run(main())


async def test_one_timer_per_loop():
    loop: Any = asyncio.get_running_loop()
    driver = MemoryDriver("timers")
    for _ in range(20):
        sessions = [await driver.connect() for _ in range(20)]
        ticks = [one for one in loop._scheduled if not one.cancelled() and one._callback == sessions[0].shared._tick]
        assert len(ticks) == 1
        for session in sessions:
            await session.close()
    assert all(one.cancelled() for one in loop._scheduled if one._callback == sessions[0].shared._tick)


async def test_a_lease_ends_while_its_own_loop_is_stuck():
    """The loops of the other sessions pass the time."""
    here = await MemoryDriver("stuck").connect()
    watch = here.watch(["k"], (await here.txn()).revision)
    release = threading.Event()

    async def stuck() -> None:
        session = await MemoryDriver("stuck").connect()
        await put(session, "k", b"", await session.grant(0.1))
        release.wait(DEADLINE_S)
        await session.close()

    thread = in_thread(stuck)
    values = [(await anext(watch)).events[0].item is None for _ in range(2)]
    assert values == [False, True]
    release.set()
    await joined(thread)
    await here.close()


# ---- threads and loops


async def test_threads_with_loops_of_their_own_share_an_engine():
    """Counting by compare-and-set from many threads loses nothing; each thread's watch sees every count in order."""
    threads, count = 6, 100
    seen: list[list[int]] = []

    async def counter() -> None:
        session = await MemoryDriver("threads").connect()
        watch = session.watch(["n"], 1)
        done = 0
        while done < count:
            item = (await session.txn(then=[Get("n")])).item(0)
            value, at = (int(item.value), item.modified) if item else (0, 0)
            outcome = await session.txn([Modified("n", at)], [Put("n", b"%d" % (value + 1))])
            done += outcome.succeeded
        values: list[int] = []
        while not values or values[-1] < threads * count:
            values += [int(event.item.value) for event in (await anext(watch)).events if event.item]
        seen.append(values)
        await session.close()

    await joined(*(in_thread(counter) for _ in range(threads)))
    assert seen == [list(range(1, threads * count + 1))] * threads
    session = await MemoryDriver("threads").connect()
    await session.txn(then=[EVERYTHING])
    await session.close()


def test_a_watch_whose_loop_was_closed_is_dropped():
    """The next change drops the watch and succeeds, also outside of any loop."""
    loop = asyncio.new_event_loop()
    session = loop.run_until_complete(MemoryDriver("closed").connect())
    read = anext(session.watch(["k"], 1)).__await__()
    next(read)
    loop.close()
    session.engine.txn(then=[Put("k", b"")])
    assert not session.engine._by_key
    read.close()
    session.engine.txn(then=[EVERYTHING])


# ---- watches


def test_a_watch_that_is_not_read_gets_a_gap(monkeypatch):
    """Memory is bounded; other watches are not affected."""
    monkeypatch.setattr(watch_queue, "BACKLOG_MAX", 10)

    async def main() -> None:
        session = await MemoryDriver("slow").connect()
        slow, quick = session.watch(["k"], 1), session.watch(["k"], 1)
        for _ in range(11):
            await put(session, "k")
            await anext(quick)  # Reading makes room: only unread events count.
        assert not slow._batches
        assert len(session.engine._by_key["k"]) == 1
        for _ in range(2):
            with pytest.raises(Gap, match="11 events"):
                await anext(slow)
        await slow.aclose()
        await session.txn(then=[EVERYTHING])
        await session.close()

    asyncio.run(main())


async def test_calls_answer_without_giving_way():
    """A benchmark of thousands of members must measure the members."""
    session = await MemoryDriver("prompt").connect()
    ran: list[int] = []
    asyncio.get_running_loop().call_soon(ran.append, 1)
    lease = await session.grant(60)
    assert (await session.txn([Created("k", 0)], [Put("k", b"", lease)])).succeeded
    await session.renew(lease)
    await session.revoke(lease)
    assert not ran
    await session.close()


# ---- fork

FORKED = """
import asyncio, os, threading
from rdzv.engines.port import Get, Put
from rdzv.engines.memory import MemoryDriver
from rdzv.errors import Unreachable

async def busy(started, stop):
    session = await MemoryDriver("x").connect()
    while not stop.is_set():
        await session.txn(then=[Put(f"busy/{n}", b"") for n in range(100)])
        started.set()
    await session.close()

async def child(session, watch):
    for call in (session.txn(), session.grant(1), session.renew(1), session.revoke(1), anext(watch),
                 anext(session.watch(["k"], 1))):
        try:
            await call
        except Unreachable as error:
            assert "forked" in str(error) and error.applied is False, error
        else:
            raise SystemExit(f"{call} answered in the child")
    await watch.aclose()
    await session.close()
    own = await MemoryDriver("x").connect()
    assert own.instance != session.instance
    assert (await own.txn(then=[Get("k"), Put("k", b"child")])).item(0) is None
    await own.close()

loop = asyncio.new_event_loop()
session = loop.run_until_complete(MemoryDriver("x").connect())
loop.run_until_complete(session.txn(then=[Put("k", b"parent")]))
watch = session.watch(["k"], 1)
started, stop = threading.Event(), threading.Event()
thread = threading.Thread(target=lambda: asyncio.run(busy(started, stop)))
thread.start()
started.wait()
for _ in range(20):
    pid = os.fork()
    if pid == 0:
        try:
            asyncio.run(child(session, watch))
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
stop.set()
thread.join()
assert loop.run_until_complete(session.txn(then=[Get("k")])).item(0).value == b"parent"
loop.run_until_complete(session.close())
print("fine")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_child_does_not_share_the_engine():
    """The parent's sessions raise in the child instead of waiting for a lock; the child's own engines work."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKED], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("fine\n", "")


