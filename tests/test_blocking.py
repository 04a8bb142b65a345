"""The blocking face: the same as the asyncio one, for many threads. What concerns processes is in test_processes.py."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import rdzv
from rdzv.core.member_rules import Change, ChangeKind
from rdzv.errors import Closed, JoinTimeout, LeftAlready, NotJoined, RoundOver, StoreTimeout
from rdzv.system import portal as portal_module
from support.memory_members import LONG_S, QUICK, memory
from support.timing import within

LEFT = Change(ChangeKind.LEFT, "this member has left run 'job'")
SOON_S = 3.0
"""For what should take no time, on a busy machine."""


def rendezvous(endpoint: str, slot: str = "", **options: object) -> rdzv.Rendezvous:
    given = {"run_id": "job", "min_nodes": 1, "max_nodes": 8, "slot": slot, **QUICK, **options}
    return rdzv.Rendezvous(endpoint, **given)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "rdzv"]


@contextlib.contextmanager
def party(count: int, **options: object) -> Iterator[tuple[list[rdzv.Rendezvous], list[rdzv.World]]]:
    """Members 0..count-1 of one round, in the order of their ranks."""
    endpoint = memory()
    given = {"min_nodes": count, "max_nodes": count, **options}
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        members = [stack.enter_context(rendezvous(endpoint, str(slot), **given)) for slot in range(count)]
        worlds = [future.result(LONG_S) for future in [pool.submit(member.join) for member in members]]
        yield members, worlds


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert threads() == []


# ---- one after the other


def test_two_threads_meet_as_in_the_readme():
    endpoint, worlds = memory(), []

    def node(name: str) -> None:
        with rdzv.Rendezvous(endpoint, run_id="job", min_nodes=2, max_nodes=2, info={"name": name}) as r:
            world = r.join(timeout_s=60)
            worlds.append((world.round, world.size, str(world.bootstrap), world.rank))
            r.done()

    nodes = [threading.Thread(target=node, args=(name,)) for name in ("a", "b")]
    for thread in nodes:
        thread.start()
    for thread in nodes:
        thread.join(LONG_S)
    assert len({world[:3] for world in worlds}) == 1
    assert sorted(rank for *_, rank in worlds) == [0, 1]


def test_a_world_has_all_that_the_asyncio_one_has():
    with party(2, info={"gpus": "8"}) as (_, (first, second)):
        assert (first.run_id, first.round, first.rank, first.size) == ("job", 1, 0, 2)
        assert (second.rank, second.era, second.digest, second.table, second.incarnation) == (
            1, first.era, first.digest, first.table, first.incarnation
        )  # fmt: skip
        assert re.fullmatch(r"<World 'job' round 1: rank 0 of 2, bootstrap 127\.0\.0\.1:\d+>", repr(first))
        assert [(peer.rank, peer.info, peer.pid) for peer in second.members()] == [
            (0, {"gpus": "8"}, os.getpid()), (1, {"gpus": "8"}, os.getpid())
        ]  # fmt: skip


def test_a_store_has_all_that_the_asyncio_one_has():
    with party(2) as (_, worlds):
        a, b = (world.store for world in worlds)
        a.set("k", "v")
        a.multi_set({"x": "1", "y": b"2"})
        assert (b.get("k"), b.multi_get(["x", "y"])) == (b"v", [b"1", b"2"])
        assert (a.add("n", 2), b.add("n", 3)) == (2, 5)
        b.append("k", "w")
        assert a.compare_set("k", "vw", "z") == b"z"
        assert a.check(["k", "x"])
        assert not a.check(["missing"])
        assert (a.num_keys(), b.delete("x"), b.delete("x"), a.num_keys()) == (4, True, False, 3)
        a.wait(["k"], timeout_s=1)
        a.set_timeout(0.05)
        assert a.timeout_s == 0.05
        with pytest.raises(StoreTimeout):
            a.wait(["missing"])
        with pytest.raises(StoreTimeout):
            b.get("missing", timeout_s=0.05)


def test_the_bootstrap_socket_of_rank_0_is_there_before_anybody_serves(pool):
    with party(2) as (_, (first, second)):
        where = (second.bootstrap.host, second.bootstrap.port)
        with socket.create_connection(where, LONG_S) as caller, first.take_bootstrap_socket() as listener:
            listener.settimeout(LONG_S)
            answer, _ = listener.accept()
            with answer:
                answer.sendall(b"hello")
                caller.settimeout(LONG_S)
                assert caller.recv(5) == b"hello"
        with pytest.raises(rdzv.errors.SettingsError, match="not held here"):
            second.take_bootstrap_socket()


def test_a_member_is_told_and_joins_again(pool):
    with party(3, min_nodes=2) as (members, _):
        assert [member.changed for member in members] == [None] * 3
        assert members[0].wait_changed(timeout_s=0.01) is None
        members[2].leave(failed=True, reason="exit code 1")
        for member in members[:2]:
            change = member.wait_changed(timeout_s=LONG_S)
            assert change.kind is ChangeKind.ROUND
            assert change.reason.endswith("/2 gave up: exit code 1")
            assert member.changed == change
        worlds = list(pool.map(lambda member: member.join(), members[:2]))
        assert [(world.round, world.size) for world in worlds] == [(2, 2)] * 2
        members[1].drain("SIGTERM")
        with pytest.raises(rdzv.errors.Drained):
            members[1].join()
        members[0].close_run("enough")
        with pytest.raises(Closed, match="enough"):
            members[0].join()


def test_an_eviction_that_was_read_in_one_thread_lets_another_join(pool):
    with party(2, min_nodes=1, regroup=0.2) as (members, _):
        again = pool.submit(members[1].join)
        deadline = time.monotonic() + LONG_S
        while getattr(members[0].changed, "kind", None) is not ChangeKind.EVICTED:
            assert time.monotonic() < deadline
            members[0].wait_changed(0.01)
            time.sleep(0.01)
        assert again.result(LONG_S).size == 1
        back = pool.submit(members[0].join)
        assert members[1].wait_changed(LONG_S)
        assert members[1].join().size == 2
        assert back.result(LONG_S).round == 3


def test_a_join_that_times_out_says_what_is_missing():
    with rendezvous(memory(), min_nodes=2) as member:
        with pytest.raises(JoinTimeout, match=r"1 of 2\.\.8 nodes: waiting for 1 more \(here: "):
            member.join(timeout_s=0.1)
        assert member.status().of("ready")
        with pytest.raises(NotJoined, match="done: this member has not joined"):
            member.done()


def test_whoever_waits_can_be_called_meanwhile_in_its_own_thread(monkeypatch):
    monkeypatch.setattr(portal_module, "SLICE_S", 0.05)
    threads = []
    with rendezvous(memory(), min_nodes=2) as member, pytest.raises(JoinTimeout):
        member.join(timeout_s=0.5, lasts=lambda: threads.append(threading.current_thread()))
    assert len(threads) >= 2
    assert set(threads) == {threading.current_thread()}


def test_a_block_that_fails_gives_up_with_the_error_as_reason():
    def fail(member: rdzv.Rendezvous) -> None:
        with member:
            raise ZeroDivisionError("oops")

    with party(2, min_nodes=1) as (members, _):
        with pytest.raises(ZeroDivisionError):
            fail(members[1])
        assert members[0].wait_changed(LONG_S).reason.endswith("/1 gave up: ZeroDivisionError: oops")


def test_a_blocking_and_an_asyncio_member_meet(pool):
    endpoint = memory()
    options = {"run_id": "job", "min_nodes": 2, "max_nodes": 2, **QUICK}

    async def other() -> int:
        async with rdzv.aio.Rendezvous(endpoint, slot="b", **options) as r:
            world = await r.join()
            await world.store.set("word", "hello")
            await r.wait_changed(LONG_S)
            return world.rank

    with rdzv.Rendezvous(endpoint, slot="a", **options) as r:
        running = pool.submit(asyncio.run, other())
        world = r.join()
        assert world.store.get("word") == b"hello"
    assert {world.rank, running.result(LONG_S)} == {0, 1}


# ---- several threads on one object


def test_leaving_in_one_thread_ends_what_others_are_doing(pool):
    with party(2) as (members, worlds):
        changing = pool.submit(members[0].wait_changed)
        getting = pool.submit(worlds[0].store.get, "never")
        lone = rendezvous(memory(), min_nodes=2)
        joining = pool.submit(lone.join)
        while not lone.status().members:  # Others can look while one joins.
            assert lone.changed is None
        lone.leave()
        members[0].leave()
        with pytest.raises(LeftAlready, match="join: this member has left run 'job'"):
            joining.result(SOON_S)
        with pytest.raises(RoundOver, match="this member has left"):
            getting.result(SOON_S)
        assert changing.result(SOON_S) == lone.changed == LEFT


def test_nothing_but_another_leave_can_be_called_after_leaving():
    with party(1) as ((member,), (world,)):
        member.leave()
        member.leave()
        for call in (
            member.prepare, member.join, member.wait_changed, member.status, member.done, member.drain, member.close_run,
            world.members, world.store.num_keys,
        ):  # fmt: skip
            with pytest.raises(LeftAlready, match=f"^{call.__name__}: this member has left run 'job'"):
                call()
        assert member.changed == LEFT


def test_leaving_in_several_threads_at_once_is_leaving_once(pool):
    with party(2, min_nodes=1) as (members, _):
        barrier = threading.Barrier(4)

        def leave() -> None:
            barrier.wait(LONG_S)
            members[1].leave(reason="all at once")

        for future in [pool.submit(leave) for _ in range(4)]:
            future.result(LONG_S)
        assert members[0].wait_changed(LONG_S).reason.endswith("left: all at once")
        assert threads() == ["rdzv"], "the other one is still there"


def test_an_object_that_was_not_used_leaves_without_a_word():
    member = rendezvous(memory())
    assert member.changed is None
    member.leave()
    assert member.changed == LEFT
    with pytest.raises(LeftAlready):
        member.join()


def test_each_object_shows_what_matters():
    endpoint = memory()
    member = rendezvous(endpoint, "a")
    where = f"<Rendezvous 'job' at {endpoint}: "
    assert repr(member) == f"{where}has not joined>"
    with member:
        world = member.join()
        assert repr(member) == f"{where}rank 0 of 1 in round 1>"
        assert repr(world) == f"<World 'job' round 1: rank 0 of 1, bootstrap {world.bootstrap}>"
        assert repr(member.status()) == "<Status run 'job', round 1 sealed: round 1 runs with 1 node (1 in)>"
    assert repr(member) == "<Rendezvous 'job': has left>"


def test_many_threads_share_one_member(pool):
    with party(2) as (members, worlds):
        counts = list(pool.map(lambda i: worlds[i % 2].store.add("n", 1), range(100)))
        assert sorted(counts) == list(range(1, 101))
        assert {status.size for status in pool.map(lambda i: members[i % 2].status(), range(20))} == {2}


# ---- the thread behind it


def test_one_thread_serves_all_and_ends_with_the_last():
    with party(3) as (members, _):
        assert threads() == ["rdzv"]
        members[0].leave()
        members[1].leave()
        assert threads() == ["rdzv"]
        members[2].leave()
        assert threads() == []
    with party(1):
        assert threads() == ["rdzv"]


def test_a_system_without_room_for_a_thread_is_met_with_its_own_error_and_no_leftovers(monkeypatch):
    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with rendezvous(memory()) as member:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", start)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                member.join()
        assert member.join().size == 1


def test_reading_a_change_does_not_wait_for_the_thread():
    release, stuck = threading.Event(), threading.Event()

    def observe(notice: rdzv.Notice) -> None:
        if notice.kind == "done":
            stuck.set()
            release.wait(LONG_S)

    with rendezvous(memory(), observer=observe) as member, ThreadPoolExecutor(1) as pool:
        member.join()
        doing = pool.submit(member.done)
        assert stuck.wait(LONG_S)
        began_at = time.perf_counter()
        for _ in range(1000):
            assert member.changed is None
        within(time.perf_counter() - began_at, 1)
        release.set()
        doing.result(LONG_S)


def test_an_observer_that_calls_back_is_refused_and_not_left_hanging(caplog):
    member = rendezvous(memory(), observer=lambda _: member.status())
    with member:
        assert member.join().size == 1
    assert "an observer must not call a Rendezvous" in caplog.text


def test_a_member_leaves_when_all_that_belongs_to_it_is_dropped(pool):
    endpoint = memory()
    with rendezvous(endpoint, "a", min_nodes=2) as member:
        other = rendezvous(endpoint, "b", min_nodes=2)
        joining = pool.submit(other.join)
        member.join()
        world = joining.result(LONG_S)
        del joining, other
        gc.collect()
        assert member.wait_changed(0.2) is None, "a world keeps its member"
        del world
        gc.collect()
        assert member.wait_changed(LONG_S).reason.endswith("/b left: its Rendezvous was dropped")
