"""The member in real time on an engine in memory: rounds form, break and form again, and everybody is told why."""

from __future__ import annotations

import asyncio
import itertools
import socket

import pytest

from rdzv.core.member_rules import ChangeKind
from rdzv.core.model import Phase, WorkerRanks
from rdzv.errors import Closed, JoinTimeout
from support.memory_members import LONG_S, Party, assert_one_world, join, kill, run


def ranks(worlds) -> list[int]:
    return [world.rank for world in worlds]


# ---- forming


async def test_a_full_world_is_sealed_at_once():
    async with Party(3, 3, last_call=LONG_S) as party:
        _, worlds = await party.form("a", "b", "c")
        assert_one_world(worlds, 1)
        assert ranks(worlds) == [0, 1, 2]
        peers = await worlds[1].members()
        assert [(peer.rank, peer.host, peer.addr) for peer in peers] == [
            (0, "a", "127.0.0.1"), (1, "b", "127.0.0.1"), (2, "c", "127.0.0.1")
        ]  # fmt: skip


async def test_members_on_one_host_are_told_apart_by_their_slots():
    async with Party(2, 2) as party:
        members = [party.member("a", slot=slot) for slot in ("1", "0")]
        worlds = await join(*members)
        assert [peer.name for peer in await worlds[0].members()] == ["a/0", "a/1"]


async def test_members_that_say_how_many_workers_they_start_are_told_their_ranks():
    async with Party(2, 2) as party:
        a, b = party.member("a"), party.member("b")
        worlds = await asyncio.gather(a.join(workers=8, role="t"), b.join(workers=4, role="t"))
        assert [world.worker_ranks for world in worlds] == [WorkerRanks(0, 12, 0, 12), WorkerRanks(8, 12, 8, 12)]
        worlds = await asyncio.gather(a.join(workers=2), b.join())
        assert [world.worker_ranks for world in worlds] == [None, None]


async def test_a_waiting_member_may_change_its_mind_about_its_workers():
    async with Party(2, 2) as party:
        a, b = party.member("a"), party.member("b")
        with pytest.raises(JoinTimeout):
            await a.join(0.2, workers=8)
        worlds = await asyncio.gather(a.join(workers=3), b.join(workers=4))
        assert [world.worker_ranks.total for world in worlds] == [7, 7]


async def test_the_next_round_has_another_bootstrap_port_or_a_warning_says_that_it_has_not(caplog):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with Party(1, 1, bootstrap_port=f"{port}-{port + 20}") as party:
        a = party.member("a")
        ports = [(await a.join()).bootstrap.port for _ in range(4)]
        assert all(one != other for one, other in itertools.pairwise(ports))
        assert "is free" not in caplog.text
    async with Party(1, 1, bootstrap_port=port) as party:
        a = party.member("a")
        assert [(await a.join()).bootstrap.port for _ in range(3)] == [port] * 3
    assert caplog.text.count(f"no port but {port} is free") == 1


# ---- forming again


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda member: member.leave(reason="tired"), "c left: tired"),
        (lambda member: member.leave(), "c left: no reason was given"),
        (lambda member: member.leave(failed=True, reason="exit code 1"), "c gave up: exit code 1"),
        (kill, "c lost"),
    ],
    ids=["leave", "leave without a word", "fail", "kill"],
)
def test_when_one_goes_the_others_are_told_why_and_form_again(how, told):
    async def scenario():
        async with Party(2, 3) as party:
            (a, b, c), _ = await party.form("a", "b", "c")
            assert a.changed is None
            await how(c)
            for member in (a, b):
                change = await member.wait_changed(LONG_S)
                assert (change.kind, change.reason) == (ChangeKind.ROUND, told)
                assert member.changed == change
            worlds = await join(a, b)
            assert_one_world(worlds, 2)
            assert ranks(worlds) == [0, 1]
            assert (a.changed, b.changed) == (None, None)

    run(scenario)


async def test_the_others_go_on_without_their_leader():
    async with Party(2, 3) as party:
        (a, b, c), _ = await party.form("a", "b", "c")
        assert (await b.status()).leader == "a"
        await kill(a)
        assert (await b.wait_changed(LONG_S)).reason == "a lost"
        worlds = await join(b, c)
        assert_one_world(worlds, 2)
        assert (await b.status()).leader == "b"


async def test_a_member_whose_workers_failed_has_the_round_formed_again():
    async with Party(2, 2) as party:
        (a, b), _ = await party.form("a", "b")
        again = asyncio.create_task(a.join())
        assert "workers of a" in (await b.wait_changed(LONG_S)).reason
        assert_one_world([await b.join(), await again], 2)


async def test_a_newcomer_is_let_in():
    async with Party(1, 3) as party:
        (a, b), _ = await party.form("a", "b")
        c = party.member("c")
        coming = asyncio.create_task(c.join())
        for member in (a, b):
            assert (await member.wait_changed(LONG_S)).reason == "c came to join"
        worlds = [*await join(a, b), await coming]
        assert_one_world(worlds, 2)
        assert ranks(worlds) == [0, 1, 2]


async def test_a_spare_disturbs_nobody_and_takes_the_place_of_one_that_is_lost():
    async with Party(2, 2) as party:
        (a, b), _ = await party.form("a", "b")
        spare = party.member("s")
        waiting = asyncio.create_task(spare.join(timeout_s=0.3))
        assert await a.wait_changed(0.6) is None
        assert not waiting.done(), "its time does not count while a round runs"
        assert [standing.name for standing in (await a.status()).of("spare")] == ["s"]
        await b.leave()
        assert await a.wait_changed(LONG_S)
        worlds = [await a.join(), await waiting]
        assert_one_world(worlds, 2)
        assert worlds[1].rank == 1


async def test_two_joins_of_one_member_are_given_one_world():
    async with Party(2, 2) as party:
        a, b = party.member("a"), party.member("b")
        first, other, second = await asyncio.gather(a.join(), b.join(), a.join())
        assert first is second
        assert other.round == first.round


# ---- the end of a run


async def test_when_all_are_done_the_run_is_closed_with_success():
    async with Party(2, 2) as party:
        (a, b), _ = await party.form("a", "b")
        spare = party.member("s")
        waiting = asyncio.create_task(spare.join())
        await a.done()
        assert a.changed is None
        await b.done()
        with pytest.raises(Closed) as closed:
            await waiting
        assert closed.value.success
        assert closed.value.reason == "all 2 members of round 1 are done"
        assert (a.changed, b.changed) == (None, None), "they have nothing to do about it"
        with pytest.raises(Closed):
            await a.join()


async def test_a_run_whose_members_are_done_and_go_at_once_is_closed_all_the_same():
    async with Party(3, 3) as party:
        members, _ = await party.form("a", "b", "c")

        async def finish(member):
            await member.done()
            await member.leave()

        await asyncio.gather(*(finish(member) for member in members))
        head = await party.head()
        assert (head.phase, head.cause.text) == (Phase.CLOSED, "all 3 members of round 1 are done")
        with pytest.raises(Closed) as closed:
            await party.member("late").join()
        assert closed.value.success


async def test_one_that_is_not_done_keeps_the_run_open():
    async with Party(1, 2) as party:
        (a, b), _ = await party.form("a", "b")
        await a.done()
        await a.leave()
        await b.leave(reason="to be continued")
        assert (await party.head()).phase is not Phase.CLOSED


async def test_closing_tells_everybody_by_whom_and_why():
    async with Party(2, 2) as party:
        (a, b), _ = await party.form("a", "b")
        await a.close_run("out of budget")
        change = await b.wait_changed(LONG_S)
        assert (change.kind, change.reason) == (ChangeKind.CLOSED, "the run was closed: out of budget (by a)")
        with pytest.raises(Closed) as closed:
            await b.join()
        assert not closed.value.success
        assert closed.value.sentence == (
            "run 'job' is closed: out of budget (by a); the id can be used again 5 s after the close, "
            "or at once with a higher incarnation"
        )


async def test_a_failure_that_puts_quorum_out_of_reach_closes_the_run_with_its_reason():
    async with Party(2, 2) as party:
        (a, b), _ = await party.form("a", "b")
        await b.leave(failed=True, reason="CUDA error")
        change = await a.wait_changed(LONG_S)
        assert (change.kind, change.reason) == (
            ChangeKind.CLOSED, "the run was closed: b gave up: CUDA error; 1 of at least 2 nodes remain"
        )  # fmt: skip


async def test_a_run_id_can_be_used_again_by_a_higher_incarnation():
    async with Party(1, 1, closed_for=LONG_S) as party:
        (a,), (world,) = await party.form("a")
        await a.close_run("requeued")
        await a.leave()
        with pytest.raises(Closed):
            await party.member("a").join()
        again = await party.member("a", incarnation=1).join()
        assert again.round == 1
        assert again.fence > world.fence, "also within the same second"
