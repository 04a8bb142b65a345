"""The gate: a node whose check fails takes no part, is shown with the reason, and comes in once the check passes."""

from __future__ import annotations

import asyncio
import time

import pytest

from rdzv.aio import AsyncRendezvous
from rdzv.errors import JoinTimeout, SettingsError
from rdzv.member import gate
from rdzv.system.node import LocalNode

LONG_S = 40.0


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Check again soon."""
    monkeypatch.setattr(gate, "AGAIN_S", (0.05, 0.2))


@pytest.fixture
def made(request):
    """Make members of one run, on nodes of their own."""
    endpoint = f"memory://{request.node.name}"

    def make(name, **options):
        settings = {"run_id": "job", "min_nodes": 2, "max_nodes": 2, "last_call": 0.1, "settle": 0.1, "grow_every": 0}
        return AsyncRendezvous(endpoint, **{**settings, "slot": name, **options})

    return make


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario(), LONG_S))


async def until(holds, what):
    deadline = time.monotonic() + 20
    while not await holds():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


def names(world):
    return {member.name.rpartition("/")[2] for member in world.members}


def test_a_spare_takes_the_place_of_a_node_whose_check_fails(made, tmp_path):
    """The job runs at full size, and the node comes in as a spare when its check passes."""
    healthy = tmp_path / "healthy"
    checks = {"check": f"cat {healthy}"}

    async def scenario():
        async with made("a") as a, made("sick", **checks) as sick, made("spare") as spare:
            joining = asyncio.create_task(sick.join())
            await until(lambda: is_shown(sick, "unhealthy", "exit code 1: cat: "), "it is shown with the last line")
            worlds = await asyncio.gather(a.join(), spare.join())
            assert {world.size for world in worlds} == {2}
            assert not joining.done()
            healthy.write_text("ok")
            await until(lambda: is_shown(sick, "spare"), "it came in as a spare")
            joining.cancel()

    run(scenario)


async def is_shown(member, state, problem=""):
    """Whether a member is shown in that state. While its check runs for the first time, that is the problem."""
    return any(problem in one.problem for one in (await member.status()).of(state))


def test_a_member_whose_check_fails_between_rounds_is_left_out_at_once(made, tmp_path):
    healthy = tmp_path / "healthy"
    healthy.write_text("ok")

    async def scenario():
        async with made("a") as a, made("sick", check=f"cat {healthy}") as sick:
            worlds = await asyncio.gather(a.join(), sick.join())
            assert {world.size for world in worlds} == {2}
            async with made("spare") as spare:
                waiting = asyncio.create_task(spare.join())
                await until(lambda: is_shown(a, "spare"), "there is a spare")
                healthy.unlink()
                rejoining = asyncio.create_task(sick.join())
                await a.wait_changed()
                again = await asyncio.gather(a.join(), waiting)
                assert {world.size for world in again} == {2}
                assert {world.round for world in again} == {2}
                assert await is_shown(a, "unhealthy", "exit code 1")
                assert not rejoining.done()
                rejoining.cancel()

    run(scenario)


def test_the_reason_says_who_is_missing_and_why(made):
    async def scenario():
        async with made("a") as a, made("sick", check="false") as sick:
            joining = [asyncio.create_task(one.join(3.0)) for one in (a, sick)]
            with pytest.raises(JoinTimeout, match=r"sick unhealthy: the check failed with exit code 1.*; mend what"):
                await joining[0]
            await asyncio.wait(joining)
            assert isinstance(joining[1].exception(), JoinTimeout)

    run(scenario)


def test_the_check_runs_once_in_a_join_that_succeeds(made, monkeypatch):
    ran = []

    async def check(_self, command, timeout_s):
        ran.append((command, timeout_s))
        return ""

    monkeypatch.setattr(LocalNode, "check", check)

    async def scenario():
        async with made("a", check="probe", check_timeout=7) as a, made("b") as b:
            await asyncio.gather(a.join(), b.join())
            assert ran == [("probe", 7.0)]
            await asyncio.gather(a.join(), b.join())
            assert len(ran) == 2

    run(scenario)


def test_a_command_without_its_closing_quotation_mark_is_refused(made):
    with pytest.raises(SettingsError, match=r"check is .*: it must be a command"):
        made("a", check="probe 'gpu")


def test_a_member_that_its_caller_keeps_out_gives_its_round_up_at_once_and_comes_back(made, tmp_path):
    """As an agent does while it starts a worker again. The check is not run before that."""
    checked = tmp_path / "checked"

    async def scenario():
        async with made("a", min_nodes=1) as a, made("b", min_nodes=1, check=f"touch {checked}") as b:
            await asyncio.gather(a.join(), b.join())
            checked.unlink()
            b.keep_out("a worker is being started")
            joining = asyncio.create_task(b.join())
            assert "b stopped" in (await a.wait_changed(LONG_S)).reason
            assert (await a.join()).size == 1
            await until(lambda: is_shown(a, "unhealthy", "a worker is being started"), "it is shown with the reason")
            assert not joining.done()
            assert not checked.exists()
            b.keep_out("")
            await a.wait_changed(LONG_S)
            assert {(await a.join()).size, (await joining).size} == {2}
            assert checked.exists()

    run(scenario)
