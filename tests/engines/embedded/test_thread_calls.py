"""Calls that threads make by a connection, beside its loop: each gets its own answer, whatever else comes and goes."""

from __future__ import annotations

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

import rdzv
from rdzv.engines.embedded import client_protocol, frames, thread_calls
from rdzv.engines.embedded.limits import Limits
from rdzv.errors import Unreachable
from support.embedded_server import LONG_S, ServerThread
from support.timing import within

MANY = 200
"""Calls enough for the loop to lend the reading, and to get it back, several times."""
LARGE = b"x" * (1024 * 1024)
SHORT = {"lease": 1.5, "linger": 0.5}


@pytest.fixture
def served() -> Iterator[ServerThread]:
    with ServerThread() as server:
        yield server


@pytest.fixture(autouse=True)
def _both_sides_understand_each_other(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A frame that is cut would end the connection with a complaint; the next one would hide that."""
    yield
    said = [one.getMessage() for one in caplog.get_records("call") if one.name in ("rdzv.server", "rdzv.remote")]
    assert not said


@contextmanager
def members(server: ServerThread, count: int, **options: object) -> Iterator[list[tuple[rdzv.Rendezvous, rdzv.World]]]:
    endpoint, given = f"127.0.0.1:{server.server.port}", {"min_nodes": count, "max_nodes": count, "is_host": False, **options}
    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        joining = [
            stack.enter_context(rdzv.Rendezvous(endpoint, run_id="job", slot=str(slot), **given)) for slot in range(count)
        ]
        yield list(zip(joining, pool.map(lambda one: one.join(LONG_S), joining), strict=True))


def link_of(world: rdzv.World) -> thread_calls.CalledByThreads:
    return world.store._calls.presence.session._link


def burst(world: rdzv.World) -> None:
    """Call until the thread reads by itself."""
    deadline = time.monotonic() + LONG_S
    while not link_of(world)._is_lent:
        world.store.check(["k"])
        assert time.monotonic() < deadline, "the reading was never lent"


class Portals:
    """Counts the calls that go through the portal."""

    def __init__(self, world: rdzv.World, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        run = world._handle.run

        def counted(coroutine, lasts=None, call=""):
            self.calls.append(call)
            return run(coroutine, lasts, call)

        monkeypatch.setattr(world._handle, "run", counted)


def test_only_calls_that_wait_go_through_the_loop(served, monkeypatch):
    with members(served, 1) as [(_, world)]:
        portals, store = Portals(world, monkeypatch), world.store
        for number in range(MANY):
            store.set(f"k{number}", str(number))
            assert store.get(f"k{number}") == str(number).encode()
        assert store.add("n", 2) == 2
        assert store.compare_set("c", "", "new") == b"new"
        assert store.multi_get(["k1", "k2"]) == [b"1", b"2"]
        assert (store.num_keys(), store.delete("c"), store.check(["c"])) == (MANY + 2, True, False)
        assert portals.calls == []
        with pytest.raises(rdzv.errors.StoreTimeout):
            store.get("missing", timeout_s=0.01)
        assert portals.calls == ["get"]


def test_a_thread_lists_more_than_one_answer_can_hold(monkeypatch):
    """Found by review: `num_keys` failed once the values had more than 16 MiB."""
    with ServerThread(limits=Limits(frame=100_000)) as server, members(server, 1) as [(_, world)]:
        portals, store = Portals(world, monkeypatch), world.store
        keys = [f"k{number:02}" for number in range(40)]
        for key in keys:
            store.set(key, b"x" * 10_000)
        assert store.list_keys() == keys
        assert store.num_keys() == len(keys)
        assert portals.calls == []


def test_a_thread_that_calls_and_calls_reads_by_itself(served, monkeypatch):
    with members(served, 1) as [(_, world)]:
        by_loop, right = [], thread_calls.CalledByThreads.received

        def received(link, data):
            by_loop.append(threading.get_ident())
            right(link, data)

        monkeypatch.setattr(thread_calls.CalledByThreads, "received", received)
        for _ in range(MANY):
            assert not world.store.check(["k"])
        assert threading.get_ident() not in by_loop, "a thread acted for the loop"
        assert len(by_loop) < MANY / 2, "the loop read most of the answers"


@pytest.fixture
def _in_turns() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(former)


@pytest.mark.usefixtures("_in_turns")
def test_each_of_many_threads_gets_its_own_answers(served):
    with members(served, 2) as [(_, one), (_, two)], ThreadPoolExecutor(8) as pool:

        def work(thread: int) -> None:
            store = (one, two)[thread % 2].store
            for number in range(MANY // 4):
                store.set(f"{thread}", f"{thread} {number}")
                assert store.get(f"{thread}") == f"{thread} {number}".encode()
                store.add("n", 1)

        for done in [pool.submit(work, thread) for thread in range(8)]:
            done.result(LONG_S)
        assert one.store.get("n") == str(8 * (MANY // 4)).encode()


def test_news_come_while_a_thread_reads(served):
    """Another thread of the same member waits for a key, and the member itself for changes."""
    with members(served, 2) as [(first, one), (_, two)], ThreadPoolExecutor(2) as pool:
        stop = threading.Event()

        def hammer() -> None:
            while not stop.is_set():
                one.store.check(["k"])

        hammering = pool.submit(hammer)
        try:
            for number in range(20):
                waiting = pool.submit(one.store.get, f"late{number}", LONG_S)
                two.store.set(f"late{number}", "here")
                assert waiting.result(LONG_S) == b"here"
        finally:
            stop.set()  # The pool waits for all its threads, also after a failure.
        hammering.result(LONG_S)
        assert first.changed is None


def test_news_come_soon_after_the_last_call_of_a_burst(served):
    with members(served, 2, lease=60) as [(first, one), (second, _)]:
        burst(one)
        second.leave()  # No renewal makes the loop read.
        began_at = time.monotonic()
        assert first.wait_changed(LONG_S) is not None
        within(time.monotonic() - began_at, 3.0)


def test_the_loop_reads_again_after_a_burst_whose_last_answer_was_slow(served, monkeypatch):
    monkeypatch.setattr(thread_calls, "PATIENCE_S", LONG_S)
    with members(served, 1, lease=60) as [(_, world)]:  # No renewal makes the loop read.
        burst(world)
        link, tried = link_of(world), threading.Event()
        take_back = link._take_back

        def tries() -> None:
            take_back()
            tried.set()

        monkeypatch.setattr(link, "_take_back", tries)
        served.loop.call_soon_threadsafe(tried.wait, LONG_S)  # The answer comes when the loop has found the thread reading.
        world.store.check(["k"])
        began_at = time.monotonic()
        while link._is_lent:
            assert time.monotonic() < began_at + 5.0, "nobody reads"
            time.sleep(0.001)


def test_the_reading_is_not_lent_again_while_a_thread_gives_it_back(served, monkeypatch):
    monkeypatch.setattr(thread_calls, "LENT_S", LONG_S)
    with members(served, 1, lease=60) as [(_, world)]:
        burst(world)
        link, heard = link_of(world), threading.Event()
        tell_loop = link._tell_loop

        def tells_late(callback, *given) -> None:
            if callback == link._read_on:
                monkeypatch.setattr(link, "_tell_loop", tell_loop)
                link._borrow()  # As another thread does before the loop is told.
            tell_loop(callback, *given)

        monkeypatch.setattr(link, "_tell_loop", tells_late)
        with link._reading:
            link._give_back(b"")
        tell_loop(heard.set)
        assert heard.wait(LONG_S)
        assert link.transport.is_reading() is not link._is_lent, "either the loop reads, or threads do"


def test_what_the_loop_asks_is_read_by_the_loop(served, monkeypatch):
    monkeypatch.setattr(thread_calls, "LENT_S", LONG_S)
    with members(served, 1, lease=60) as [(_, world)]:
        burst(world)
        assert [peer.rank for peer in world.members()] == [0]
        assert not link_of(world)._is_lent


def test_leases_are_renewed_while_a_thread_reads(served):
    with members(served, 1, **SHORT) as [(member, world)]:
        ends_at = time.monotonic() + 2 * SHORT["lease"]
        while time.monotonic() < ends_at:
            assert not world.store.check(["k"])
        assert member.changed is None


@pytest.mark.parametrize("lent", [False, True])
def test_a_value_larger_than_the_sockets_buffers_is_written_and_read(served, lent):
    with members(served, 1) as [(_, world)]:
        if lent:
            burst(world)
        link_of(world).transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for number in range(5):
            world.store.set("large", LARGE[: 1024 * 1024 - number])
            assert len(world.store.get("large")) == 1024 * 1024 - number
            assert not world.store.check(["other"])


@pytest.mark.parametrize("lent", [False, True])
def test_a_call_under_way_goes_on_by_the_next_connection(served, lent, monkeypatch):
    """The connection breaks after the request was written; what it did is found by its mark."""
    with members(served, 1) as [(member, world)]:
        if lent:
            burst(world)
        write = thread_calls._write

        def last(descriptor: int, data: bytes) -> int:
            monkeypatch.setattr(thread_calls, "_write", write)
            sent = write(descriptor, data)
            served.loop.call_soon_threadsafe(lambda: [peer.transport.abort() for peer in tuple(served.server.peers)])
            return sent

        monkeypatch.setattr(thread_calls, "_write", last)
        former = link_of(world)
        assert [world.store.add("n", 1), world.store.add("n", 1)] == [1, 2]
        assert link_of(world) is not former
        assert member.changed is None


def test_a_connection_that_ends_while_a_thread_reads_an_answer_gives_the_thread_one_of_both(served, monkeypatch):
    monkeypatch.setattr(thread_calls, "LENT_S", LONG_S)
    with members(served, 1, lease=60) as [(member, world)]:
        burst(world)
        link, ending, answered = link_of(world), threading.Event(), threading.Event()
        decode, settle, unreachable = frames.decode, client_protocol._settle, client_protocol.Unreachable

        def decoded_as_it_ends(*given):
            monkeypatch.setattr(frames, "decode", decode)
            link._tell_loop(link.lose, "cut")
            assert ending.wait(LONG_S)
            return decode(*given)

        def settled(*given):
            settle(*given)
            answered.set()

        def ends_late(*given):
            ending.set()
            answered.wait(0.2)  # Not if the thread waits for the end, as it should.
            return unreachable(*given)

        monkeypatch.setattr(frames, "decode", decoded_as_it_ends)
        monkeypatch.setattr(client_protocol, "_settle", settled)
        monkeypatch.setattr(client_protocol, "Unreachable", ends_late)
        assert not world.store.check(["k"])
        assert ending.is_set()
        world.store.set("k", "v")
        assert link_of(world) is not link, "the session knows that the connection has ended"
        assert member.changed is None


@pytest.mark.parametrize(("where", "lent"), [("write", False), ("write", True), ("read", True)])
def test_an_interrupted_call_leaves_no_half_of_a_frame_behind(served, where, lent, monkeypatch):
    with members(served, 1) as [(member, world)]:
        if lent:
            burst(world)
        real = getattr(os, where)

        def interrupted(descriptor: int, what: bytes | int) -> object:
            monkeypatch.undo()
            real(descriptor, 3 if where == "read" else what[:3])
            raise KeyboardInterrupt

        monkeypatch.setattr(thread_calls.os, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            world.store.set("k", "first")
        world.store.set("k", "second")
        assert world.store.get("k") == b"second"
        assert member.changed is None


def test_a_call_keeps_its_deadline_when_the_server_stands_still(served):
    with members(served, 1) as [(_, world)]:
        burst(world)
        world.store.set_timeout(0.5)
        goes_on = threading.Event()
        served.loop.call_soon_threadsafe(goes_on.wait, LONG_S)
        began_at = time.monotonic()
        try:
            with pytest.raises(Unreachable, match=r"the engine of this run did not answer|no answer"):
                world.store.set("k", "v")
            within(time.monotonic() - began_at, 3 * 1.6)
        finally:
            goes_on.set()
        world.store.set_timeout(LONG_S)
        world.store.set("k", "w")
        assert world.store.get("k") == b"w"


def test_an_observer_that_calls_the_store_is_refused_and_not_left_hanging(served):
    said: list[BaseException] = []
    worlds: list[rdzv.World] = []

    def observe(_notice: object) -> None:
        if worlds:
            with pytest.raises(RuntimeError, match="an observer must not call") as refused:
                worlds[0].store.get("k")
            said.append(refused.value)

    with members(served, 1, observer=observe) as [(member, world)]:
        worlds.append(world)
        member.drain("to be told of")
    assert said


@pytest.mark.parametrize("call", ["store", "drain"])
def test_the_handler_of_a_signal_makes_a_call_while_its_thread_reads(served, monkeypatch, call):
    """As a SIGTERM handler that drains: the loop waited for the thread that read, and the handler in it for the loop."""
    real, armed, handled = select.poll, [], []

    class Poll:
        """A signal comes while the thread waits for bytes."""

        def __init__(self) -> None:
            self._poll = real()
            self.register = self._poll.register

        def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
            if armed:
                armed.clear()
                began_at = time.monotonic()
                world.store.set("stop", "now") if call == "store" else member.drain("told to go", 5.0)
                handled.append(time.monotonic() - began_at)
            return self._poll.poll(timeout_ms)

    monkeypatch.setattr(thread_calls.select, "poll", Poll)
    with members(served, 1) as [(member, world)]:
        burst(world)
        armed.append(True)
        assert not world.store.check(["k"])
        within(handled[0], 1.0)
