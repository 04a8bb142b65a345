"""Members that cannot get in, are evicted, leave, or fail: what they and the others are told."""

from __future__ import annotations

import asyncio
import socket

import pytest

from rdzv.core import wire
from rdzv.core.member_rules import Change, ChangeKind
from rdzv.core.model import Ban, DrainRequest, Phase
from rdzv.core.model import MemberRecord as Record
from rdzv.engines.memory import MemorySession
from rdzv.engines.port import Delete, EngineReset, Get, List, Put
from rdzv.errors import Banned, Drained, Evicted, JoinTimeout, LeftAlready, NotJoined, RoundOver, SettingsError
from rdzv.member.member import Member
from rdzv.member.notices import Notice
from rdzv.system.node import LocalNode
from rdzv.system.timers import Wakeup
from support.memory_members import LONG_S, Party, assert_one_world, kill, run, until
from support.timing import within


async def is_present(party: Party, host: str) -> bool:
    members = await party.operator.txn(then=[List(party.keys.members)])
    return any(wire.decode(Record, item.value).host == host for item in members.reads[0])


def count_closed(session: MemorySession, member: Member) -> list[None]:
    """Let the member get this session whenever it connects. Return a list with an entry for each time that it was closed."""
    closed: list[None] = []
    right = session.close

    async def connect() -> MemorySession:
        return session

    async def close() -> None:
        closed.append(None)
        await right()

    session.close, member.driver.connect = close, connect
    return closed


# ---- what a member that cannot get in is told


async def test_a_join_that_times_out_says_who_is_here_who_is_missing_and_what_holds():
    async with Party(4, 4) as party:
        a, b = party.member("a"), party.member("b")
        waiting = asyncio.create_task(b.join())
        with pytest.raises(JoinTimeout) as late:
            await a.join(timeout_s=0.3)
        assert late.value.present == ("a", "b")
        assert late.value.sentence == (
            f"run 'job' gave no world in {late.value.waited_s:.3g} s: 2 of 4 nodes: waiting for 2 more (here: a, b) "
            "[min_nodes=4 max_nodes=4 join_timeout=600 last_call=0.2 regroup=75 lease=1 settle=0.1 grow_every=0 "
            "drain_settle=0.1 closed_for=5]; start the missing nodes"
        )
        assert late.value.waited_s >= 0.3
        within(late.value.waited_s, 2)
        await b.leave()
        with pytest.raises(LeftAlready):
            await waiting


async def test_different_settings_are_refused_by_name():
    async with Party(2, 2) as party:
        a, b = party.member("a"), party.member("b", min_nodes=1, last_call=7)
        waiting = asyncio.create_task(a.join())
        await until(lambda: is_present(party, "a"))
        with pytest.raises(SettingsError) as wrong:
            await b.join()
        assert wrong.value.sentence == (
            "run 'job' was started with other settings: min_nodes is 1 here and 2 in the run; "
            "last_call is 7 here and 0.2 in the run; give all members the same"
        )
        c = party.member("c")
        assert_one_world([await c.join(), await waiting], 1)


async def test_a_banned_host_is_kept_out_and_put_out():
    async with Party(1, 2) as party:
        (a, b), _ = await party.form("a", "b")
        await party.write(Put(party.keys.ban("b"), wire.encode(Ban(reason="bad memory"))))
        assert (await a.wait_changed(LONG_S)).reason == "b banned: bad memory"
        assert (await a.join()).size == 1
        change = await b.wait_changed(LONG_S)
        assert change.kind is ChangeKind.EVICTED
        with pytest.raises(Banned, match="host 'b' is banned from run 'job': bad memory"):
            await b.join()
        await party.write(Delete(party.keys.ban("b")))
        waiting = asyncio.create_task(b.join())
        await a.wait_changed(LONG_S)
        assert_one_world([await a.join(), await waiting], 3)


async def test_a_member_that_an_operator_asks_to_go_is_told_and_the_others_go_on():
    async with Party(1, 2) as party:
        (a, b), _ = await party.form("a", "b")
        (id,) = (standing.id for standing in (await a.status()).members if standing.name == "b")
        await party.write(Put(party.keys.ask(id), wire.encode(DrainRequest(reason="maintenance"))))
        for member in (a, b):
            assert (await member.wait_changed(LONG_S)).reason == "b draining: maintenance"
        with pytest.raises(Drained, match="member b is drained from run 'job': maintenance"):
            await b.join()
        assert (await a.join()).size == 1
        await b.leave()
        assert a.changed is None, "its going was expected"


async def test_a_member_can_say_that_it_is_about_to_go():
    async with Party(1, 2) as party:
        (a, b), _ = await party.form("a", "b")
        await b.drain("SIGTERM")
        assert (await a.wait_changed(LONG_S)).reason == "b draining: SIGTERM"
        assert (await a.join()).size == 1
        with pytest.raises(Drained):
            await b.join()


# ---- eviction


async def evict(party: Party, member) -> None:
    """Delete its key, as a leader does."""
    await party.write(Delete(party.keys.member(member.presence.id)))


async def test_who_has_not_looked_is_told_of_its_eviction_by_the_next_join_and_once_only():
    async with Party(1, 1) as party:
        (a,), _ = await party.form("a")
        await evict(party, a)
        await asyncio.wait([a.task])
        with pytest.raises(Evicted) as evicted:
            await a.join()
        assert (evicted.value.run_id, evicted.value.member) == ("job", "a")
        assert (await a.join()).round == 2


async def test_nothing_is_answered_before_an_eviction_is_told():
    async with Party(1, 1) as party:
        (a,), _ = await party.form("a")
        await evict(party, a)
        for call in (a.done, a.drain, a.close_run):
            with pytest.raises(Evicted):
                await call()
        assert (await party.head()).phase is not Phase.CLOSED
        assert (await a.join()).round == 2, "it was told"


async def test_a_killed_member_is_gone_after_its_lease_and_not_before():
    async with Party(1, 2) as party:
        (a, b), _ = await party.form("a", "b")
        began_at = asyncio.get_running_loop().time()
        await kill(b)
        assert await a.wait_changed(LONG_S)
        took_s = asyncio.get_running_loop().time() - began_at
        assert took_s > 0.6
        within(took_s, 4)


# ---- leaving


async def test_leaving_ends_everything_that_is_under_way():
    async with Party(2, 2) as party:
        (a, _), (world, _) = await party.form("a", "b")
        c = party.member("c")
        joining = asyncio.create_task(c.join())
        watching = asyncio.create_task(a.wait_changed())
        getting = asyncio.create_task(world.store.get("never"))
        await until(lambda: is_present(party, "c"))
        await asyncio.gather(c.leave(), a.leave())
        with pytest.raises(LeftAlready, match="join: this member has left run 'job'"):
            await joining
        with pytest.raises(RoundOver, match="round 1 is over: this member has left"):
            await getting
        assert await watching == Change(ChangeKind.LEFT, "this member has left run 'job'")
        for call in (a.join, a.done, a.drain, a.close_run):
            with pytest.raises(LeftAlready):
                await call()
        await a.leave()


async def test_a_leave_that_nobody_waits_for_is_finished_all_the_same():
    async with Party(1, 2) as party:
        (a, b), _ = await party.form("a", "b")
        leaving = asyncio.create_task(b.leave(reason="in a hurry"))
        await asyncio.sleep(0)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await a.wait_changed(LONG_S)).reason == "b left: in a hurry"
        await b.leave()
        assert b.task.done(), "the second leave waits for the first"


async def test_a_join_that_fails_after_it_has_connected_closes_its_session():
    with socket.create_server(("", 0)) as taken:
        async with Party(1, 1, bootstrap_port=str(taken.getsockname()[1])) as party:
            a = party.member("a")
            closed = count_closed(await a.driver.connect(), a)
            for attempt in range(3):
                with pytest.raises(SettingsError, match="no port could be bound on this host"):
                    await a.join()
                assert len(closed) == attempt + 1


async def test_a_member_that_leaves_while_it_asks_an_engine_elsewhere_closes_that_session():
    async with Party(1, 1) as party:
        (a,), _ = await party.form("a")
        elsewhere, asks = await a.driver.connect(), asyncio.Event()
        closed = count_closed(elsewhere, a)

        async def never(**_operations):
            asks.set()
            await asyncio.Event().wait()

        async def restarted(_lease):
            raise EngineReset("another instance")

        elsewhere.place, elsewhere.txn = "elsewhere", never
        a.presence.session.renew = restarted
        await asks.wait()
        await a.leave()
        assert len(closed) == 1


async def test_a_bootstrap_socket_that_nobody_took_is_closed_when_the_member_leaves():
    async with Party(1, 1) as party:
        (a,), (world,) = await party.form("a")
        assert world.bootstrap.held
        await a.leave()
        assert not world.bootstrap.held


async def test_a_round_that_ends_at_once_leaves_its_bootstrap_socket_until_the_member_joins_again():
    """The caller may be about to take it, and has been told nothing yet."""
    async with Party(1, 2) as party:
        (a, b), worlds = await party.form("a", "b")
        first, other, world = (a, b, worlds[0]) if worlds[0].rank == 0 else (b, a, worlds[1])
        await other.leave()
        assert (await first.wait_changed(LONG_S)).kind is ChangeKind.ROUND
        assert world.bootstrap.held
        await first.join()
        assert not world.bootstrap.held


# ---- before joining, and when something is wrong with ourselves


@pytest.mark.parametrize("call", ["done", "drain", "close_run"])
async def test_what_only_a_member_can_say_is_refused_before_joining(call):
    async with Party(1, 1) as party:
        a = party.member("a")
        with pytest.raises(NotJoined, match=f"{call}: this member has not joined run 'job'; call join"):
            await getattr(a, call)()
        assert (await a.join()).size == 1, "and has no consequence"


async def test_a_run_can_be_looked_at_without_joining_it():
    async with Party(2, 2) as party:
        a = party.member("a")
        assert str(await a.status()) == "run 'job', round 0 none: 0 of 2 nodes: the run begins (no members)"
        await party.form("b", "c")
        status = await a.status()
        assert (status.round, status.phase, [one.name for one in status.of("in")]) == (1, "sealed", ["b", "c"])


async def test_a_defect_of_the_member_reaches_the_holder():
    async with Party(1, 1) as party:
        (a,), _ = await party.form("a")

        async def renew(_lease):
            raise ZeroDivisionError("oops")

        a.presence.session.renew = renew
        change = await a.wait_changed(LONG_S)
        assert (change.kind, change.reason) == (
            ChangeKind.REFUSED, "this member has failed: ZeroDivisionError('oops')"
        )  # fmt: skip
        with pytest.raises(ZeroDivisionError):
            await a.join()


def test_the_observer_sees_what_happens_and_cannot_break_it(caplog):
    async def scenario():
        notices: list[Notice] = []

        def observe(notice: Notice) -> None:
            notices.append(notice)
            raise ZeroDivisionError("an observer's mistake")

        async with Party(1, 1) as party:
            a = party.member("a", observe)
            await a.join()
            await a.done()
            kinds = [notice.kind for notice in notices]
            assert kinds[:6] == ["joining", "present", "leading", "sealed", "given", "done"]
            given = notices[4]
            assert (given.round, given.member, given.reason, given.rank, given.size) == (1, "a", "rank 0 of 1", 0, 1)
            assert given.incarnation
            assert given.seconds >= 0

    run(scenario)
    assert "an observer failed" in caplog.text
    assert "an observer's mistake" in caplog.text


async def test_a_ring_reaches_each_of_those_who_share_a_bell():
    bell = Wakeup(LocalNode())
    known = bell.rings
    bell.ring()
    assert await bell.wait(0), "the first uses up the kept ring"
    assert await bell.wait(0, known), "the second still hears that it rang since it looked"
    assert not await bell.wait(0, bell.rings)


async def test_the_head_of_a_run_is_kept_by_the_engine_not_by_its_members():
    async with Party(1, 1) as party:
        (a,), _ = await party.form("a")
        await a.leave()
        found = await party.operator.txn(then=[Get(party.keys.head)])
        assert found.item(0) is not None
        assert (await party.member("b").join()).round == 2
