"""A notice before a drain: members on an engine in memory, with workers in processes of their own and without."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import pytest

from rdzv.core.worker_messages import WorkerHello, encode
from rdzv.errors import Drained, Evicted, SettingsError
from rdzv.operate import commands
from support.memory_members import LONG_S, Party

SAVES = """
import os, signal, sys, time
from rdzv import worker
signal.alarm(300)  # If the test is killed, nobody else ends it.
worker.progress(int(os.environ["RANK"]))
assert worker.notice() is None
worker.saved()  # There is nothing to answer.
print("up", flush=True)
while (notice := worker.notice()) is None:
    time.sleep(0.01)
print(notice.reason, round(notice.seconds), flush=True)
sys.stdin.readline()
worker.saved()
assert worker.notice() is None
print("saved", flush=True)
sys.stdin.readline()
"""


@asynccontextmanager
async def worker(path, rank=0, round=1, program=SAVES):
    environ = {**os.environ, "RDZV_WORKER": path, "RANK": str(rank), "RDZV_ROUND": str(round)}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def line(process):
    return (await asyncio.wait_for(process.stdout.readline(), LONG_S)).decode().strip()


async def noticed(*members):
    """Wait until all of them know of the notice."""
    deadline = time.monotonic() + LONG_S
    while any(member.notice is None for member in members):
        assert time.monotonic() < deadline, [member.state.head for member in members]
        await asyncio.sleep(0.005)


async def changes(*members):
    return await asyncio.wait_for(asyncio.gather(*(member.wait_changed() for member in members)), LONG_S)


async def test_all_members_are_told_and_the_round_is_broken_when_the_last_has_saved():
    async with Party(2, 3, drain_notice=60) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        assert (a.notice, a.drain_left_s) == (None, 0.0)
        await a.saved()  # There is nothing to answer.
        await a.drain("SIGTERM received")  # The leader.
        await noticed(a, b, c)
        assert b.notice.reason == f"{a.state.me.name} draining: SIGTERM received"
        assert 50 < b.notice.seconds <= 60
        assert 50 < a.drain_left_s <= 60
        await a.saved()
        await b.saved()
        assert b.notice is None, "it has answered"
        assert c.changed is None
        waiting = asyncio.ensure_future(a.wait_drained())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await c.saved()
        (first, *_) = await changes(b, c)
        await asyncio.wait_for(waiting, LONG_S)
        assert first.reason == f"{a.state.me.name} draining: SIGTERM received; all workers have saved"
        assert a.drain_left_s == 0.0
        with pytest.raises(Drained):
            await a.join()


async def test_a_member_that_never_answers_holds_up_the_drain_no_longer_than_the_notice():
    async with Party(2, 3, drain_notice=0.8) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        began_at = time.monotonic()
        await b.drain("SIGTERM received")
        await noticed(a)
        await a.saved()
        (change, *_) = await changes(a, c)
        assert time.monotonic() - began_at >= 0.8
        assert change.reason.startswith(f"{b.state.me.name} draining: SIGTERM received; the workers of ")
        assert change.reason.endswith(" have not saved within 0.8 s")
        await asyncio.wait_for(b.wait_drained(), LONG_S)


async def test_the_grace_of_the_node_that_drains_bounds_the_notice():
    async with Party(2, 3, drain_notice=60, drain_grace=45) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        began_at = time.monotonic()
        await c.drain("spot instance", grace_s=0.5)
        (change, _) = await changes(a, b)
        assert 0.5 <= time.monotonic() - began_at < 30
        assert change.reason.endswith("have not saved within 0.5 s")
        assert c.presence.record.grace == 0.5


async def test_a_second_drain_shares_the_notice_and_a_setting_gives_its_grace():
    async with Party(1, 3, drain_notice=60, drain_grace=45) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        await b.drain("SIGTERM received")
        await noticed(a, b, c)
        number = a.notice.id
        await a.saved()
        await c.drain("SIGTERM received")
        deadline = time.monotonic() + LONG_S
        while a.state.head.notice.drains < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        assert a.notice is None, "it need not save again"
        assert c.notice.id == number
        assert c.notice.seconds <= 45
        await b.saved()
        await c.saved()
        (change,) = await changes(a)
        assert change.reason == f"{b.state.me.name} and {c.state.me.name} draining: SIGTERM received; all workers have saved"


async def test_if_too_few_would_remain_the_members_are_told_all_the_same_and_may_go():
    async with Party(2, 2, drain_notice=60) as party:
        (a, b), _ = await party.form("a", "b")
        await a.drain("time limit")
        await noticed(a, b)
        await b.saved()
        await a.saved()
        await asyncio.wait_for(a.wait_drained(), LONG_S)
        assert a.changed is b.changed is None, "the round is kept as long as it lasts"
        await a.leave()
        (change,) = await changes(b)
        assert "left: time limit" in change.reason


async def test_a_member_that_is_lost_during_the_notice_ends_it():
    async with Party(2, 3, drain_notice=60) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        await c.drain("SIGTERM received")
        await noticed(a, b, c)
        await c.presence.session.revoke(c.presence.lease)
        (change, _) = await changes(a, b)
        assert change.reason == f"{c.state.me.name} lost"


async def test_a_program_is_told_of_an_eviction_that_the_answer_of_its_workers_met_first(monkeypatch):
    async with Party(1, 2, drain_notice=60) as party:
        (a, b), _ = await party.form("a", "b")
        await a.drain("SIGTERM received")
        await noticed(b)
        session, lease = b.presence.session, b.presence.lease
        put = session.txn

        async def lose_first(*words, **more):
            monkeypatch.undo()
            await session.revoke(lease)
            return await put(*words, **more)

        monkeypatch.setattr(session, "txn", lose_first)
        await asyncio.wait_for(b.answer_notice(), LONG_S)
        with pytest.raises(Evicted):
            await b.join()


async def test_an_operators_drain_gives_the_notice_too():
    async with Party(2, 3, drain_notice=60) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        assert await commands.drain(party.operator, "job", c.presence.id, "maintenance")
        await noticed(a, b, c)
        assert "draining: maintenance" in a.notice.reason
        await asyncio.gather(a.saved(), b.saved(), c.saved())
        await changes(a, b, c)


async def test_an_operator_asks_all_members_at_once_in_as_many_transactions_as_the_engine_needs(monkeypatch):
    async with Party(2, 3, drain_notice=60) as party:
        members, _ = await party.form("a", "b", "c")
        monkeypatch.setattr(party.operator, "writes_max", 2, raising=False)
        asked = await commands.drain(party.operator, "job", "*", "end of the job")
        assert asked == sorted(one.state.me.name for one in members)
        await noticed(*members)
        await asyncio.gather(*(one.saved() for one in members))
        await asyncio.wait_for(asyncio.gather(*(one.wait_drained() for one in members)), LONG_S)
        assert [one.changed for one in members] == [None] * 3, "nobody would remain to form another round"


async def test_workers_in_processes_of_their_own_hear_of_it_and_all_of_them_must_answer():
    async with Party(2, 3, drain_notice=60) as party:
        a, b, c = party.member("a"), party.member("b"), party.member("c")
        await asyncio.gather(*(one.join(workers=2 if one is a else 0) for one in (a, b, c)))
        path = await a.serve_workers()
        async with worker(path, 0) as first, worker(path, 1) as second:
            assert (await line(first), await line(second)) == ("up", "up")
            await b.drain("SIGTERM received")
            told = await line(first)
            assert told == await line(second)
            assert told.startswith(f"{b.state.me.name} draining: SIGTERM received ")
            assert 50 <= int(told.split()[-1]) <= 60
            await noticed(a, b, c)
            await asyncio.gather(b.saved(), c.saved())
            first.stdin.write(b"\n")
            assert await line(first) == "saved"
            await asyncio.sleep(0.2)
            assert a.changed is None, "one worker has not saved"
            second.stdin.write(b"\n")
            (change, *_) = await changes(a, c)
            assert change.reason.endswith("; all workers have saved")


async def test_workers_are_told_when_a_notice_is_withdrawn_and_of_the_next_one():
    program = """
import sys, time
from rdzv import worker
def wait(sure):
    while (worker.notice() is not None) != sure: time.sleep(0.01)
for _ in range(2):
    wait(True); print("told", flush=True); wait(False); print("withdrawn", flush=True)
"""
    async with Party(3, 3, drain_notice=60) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        path = await a.serve_workers()
        async with worker(path, program=program) as process:
            await b.drain("time limit")
            assert await line(process) == "told"
            await b.done()  # It has finished after all.
            assert await line(process) == "withdrawn"
            await c.drain("time limit")
            assert await line(process) == "told"


async def test_a_worker_of_an_older_version_is_told_nothing_and_messages_that_nobody_knows_do_no_harm():
    async with Party(2, 3, drain_notice=0.5) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        path = await a.serve_workers()
        reader, writer = await asyncio.open_unix_connection(path)
        page = os.path.join(os.path.dirname(path), "0123456789abcdef")  # noqa: PTH118, PTH120
        with open(page, "wb") as file:  # noqa: ASYNC230, PTH123
            file.write(bytes(64))
        writer.write(encode(WorkerHello(0, 1, "0123456789abcdef")) + b'{"type":"saved"}\nnonsense\n{"type":"later"}\n')
        deadline = time.monotonic() + LONG_S
        while not a._workers.channel.workers:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await b.drain("SIGTERM received")
        (change, *_) = await changes(a, c)
        assert "have not saved within 0.5 s" in change.reason
        assert not a._workers.channel.workers[0].listens
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)
        writer.close()


async def test_members_with_and_without_the_setting_do_not_meet():
    async with Party(1, 2, drain_notice=60) as party:
        await party.form("a")
        other = party.member("b", drain_notice=0)
        with pytest.raises(SettingsError, match="drain_notice is 0 here and 60 in the run"):
            await other.join()


async def test_without_the_setting_a_drain_is_as_ever_and_writes_nothing_new():
    async with Party(2, 3, drain_grace=20) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        await c.drain("SIGTERM received", grace_s=10)
        await asyncio.wait_for(c.wait_drained(), LONG_S)
        (change, _) = await changes(a, b)
        assert change.reason == f"{c.state.me.name} draining: SIGTERM received"
        assert a.state.head.notice is None
        assert (c.presence.record.grace, c.presence.record.saved, a.presence.record.reached) == (0.0, 0, -1)
