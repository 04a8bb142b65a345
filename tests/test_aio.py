"""The asyncio API: how a member is made, and what the end of its block tells the others."""

from __future__ import annotations

import asyncio
import sys

import pytest

from rdzv import aio, drivers, errors
from rdzv.aio import departure_of
from rdzv.core.member_rules import ChangeKind
from rdzv.engines.memory import MemoryDriver, MemorySession
from support.memory_members import LONG_S, QUICK, memory


def rendezvous(endpoint: str, slot: str = "", **options: object) -> aio.AsyncRendezvous:
    return aio.AsyncRendezvous(endpoint, **{"run_id": "job", "min_nodes": 1, "max_nodes": 2, "slot": slot, **QUICK, **options})


# ---- making one


def test_a_wrong_setting_is_refused_when_the_object_is_made():
    with pytest.raises(errors.SettingsError, match="unknown setting 'last_cal': did you mean 'last_call'"):
        rendezvous(memory(), last_cal=3)
    with pytest.raises(errors.SettingsError, match="min_nodes is 3 and max_nodes is 2"):
        rendezvous(memory(), min_nodes=3)


def test_an_engine_that_needs_what_is_not_installed_says_how_to_get_it(monkeypatch):
    def missing(_):
        raise ModuleNotFoundError(name="torch.distributed")

    monkeypatch.setattr(drivers, "import_module", missing)
    with pytest.raises(errors.SettingsError) as refused:
        rendezvous("c10d://host")
    assert refused.value.sentence == (
        "endpoint 'c10d://host:29400' needs torch, which is not installed: pip install 'rdzv[torch]'"
    )
    monkeypatch.setattr(drivers, "import_module", lambda _: __import__("no_such_module"))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        rendezvous("c10d://host")


def test_the_engine_in_memory_has_no_options():
    with pytest.raises(errors.SettingsError, match="unknown option 'x'"):
        rendezvous("memory://?x=1")


async def test_what_the_batch_system_knows_is_asked_of_the_environment(monkeypatch):
    endpoint = memory()
    monkeypatch.setenv("SLURM_NODEID", "1")
    first = rendezvous(endpoint, min_nodes=2)
    monkeypatch.setenv("SLURM_NODEID", "0")
    second = rendezvous(endpoint, min_nodes=2)
    async with first, second:
        worlds = await asyncio.gather(first.join(), second.join())
        assert [world.rank for world in worlds] == [1, 0]


def test_an_object_that_is_never_used_needs_no_loop_and_leaves_nothing():
    assert rendezvous(memory()).run_id == "job"


# ---- connecting beforehand


class Dialled(MemoryDriver):
    """An engine in memory that counts who comes, and is not there for the first of them."""

    def __init__(self, missing: int = 0) -> None:
        super().__init__(memory())
        self.missing = missing
        self.open: asyncio.Event | None = None
        self.sessions: list[MemorySession | None] = []

    async def connect(self) -> MemorySession:
        self.sessions.append(None)
        if self.open is not None:
            await self.open.wait()
        if len(self.sessions) <= self.missing:
            raise errors.Unreachable(self.endpoint, "nobody is there", applied=False)
        self.sessions[-1] = await super().connect()
        return self.sessions[-1]


async def test_who_is_prepared_has_connected_once_and_joins_by_that():
    driver = Dialled()
    async with rendezvous("memory://", driver=driver) as member:
        await member.prepare()
        await member.prepare()
        await until(lambda: driver.sessions and driver.sessions[0])
        await member.join()
        await member.prepare()
        assert len(driver.sessions) == 1
        assert (await member.status()).size == 1


async def test_who_was_prepared_in_vain_joins_all_the_same_and_nobody_hears_of_it():
    driver, notices = Dialled(missing=1), []
    async with rendezvous("memory://", driver=driver, observer=notices.append) as member:
        await member.prepare()
        await until(lambda: driver.sessions)
        await member.join()
        assert len(driver.sessions) == 2
        assert [notice.kind for notice in notices[:2]] == ["joining", "present"]


async def test_what_was_wrong_when_a_member_was_prepared_is_raised_by_one_join_only():
    class Wrong(Dialled):
        async def connect(self) -> MemorySession:
            session = await super().connect()
            if len(self.sessions) == 1:
                raise errors.SettingsError("the file is not there yet")
            return session

    async with rendezvous("memory://", driver=Wrong()) as member:
        await member.prepare()
        with pytest.raises(errors.SettingsError, match="the file is not there yet"):
            await member.join()
        assert (await member.join()).size == 1


@pytest.mark.parametrize("missing", [0, 1], ids=["connected", "in vain"])
async def test_who_is_prepared_and_leaves_without_joining_leaves_nothing_behind(missing):
    driver = Dialled(missing)
    member = rendezvous("memory://", driver=driver)
    await member.prepare()
    await until(lambda: driver.sessions)
    await asyncio.sleep(0)
    await member.leave()
    for session in filter(None, driver.sessions):
        with pytest.raises(errors.Unreachable, match="the session is closed"):
            await session.txn()
    for call in (member.join, member.prepare, member.serve_workers):
        with pytest.raises(errors.LeftAlready, match=f"^{call.__name__}: this member has left run 'job'"):
            await call()
    assert len(driver.sessions) == 1


async def test_who_leaves_the_moment_it_is_connected_leaves_nothing_behind():
    driver = Dialled()
    driver.open = asyncio.Event()
    member = rendezvous("memory://", driver=driver)
    await member.prepare()
    joining = asyncio.create_task(member.join())
    await asyncio.sleep(0.01)
    driver.open.set()
    await member.leave()  # In the turn in which the connection is made; who waits for it would be told in the next.
    with pytest.raises(errors.LeftAlready):
        await joining
    assert [session._closed for session in driver.sessions] == [True]


async def until(holds) -> None:
    while not holds():  # noqa: ASYNC110  Bounded by `run`.
        await asyncio.sleep(0.001)


# ---- using it


async def test_a_member_joins_works_is_told_and_joins_again():
    endpoint, notices = memory(), []
    a, b = rendezvous(endpoint, "a", observer=notices.append), rendezvous(endpoint, "b")
    async with a:
        async with b:
            worlds = await asyncio.gather(a.join(), b.join())
            assert sorted(world.rank for world in worlds) == [0, 1]
            assert (await a.status()).size == 2
            assert a.changed is None
            assert await a.wait_changed(timeout_s=0.01) is None
        change = await a.wait_changed()
        assert change.kind is ChangeKind.ROUND
        assert change.reason.endswith("/b left: its work here is over")
        assert a.changed == change
        world = await a.join(timeout_s=LONG_S)
        assert (world.round, world.size) == (2, 1)
        await a.done()
    assert [notice.kind for notice in notices][:5] == ["joining", "present", "leading", "sealed", "given"]
    with pytest.raises(errors.LeftAlready):
        await a.join()


# ---- the end of the block


class Ours(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, (False, "its work here is over")),
        (Ours("lost a GPU"), (True, "Ours: lost a GPU")),
        (Ours(), (True, "Ours")),
        (asyncio.CancelledError(), (False, "CancelledError")),
        (KeyboardInterrupt(), (False, "KeyboardInterrupt")),
        (GeneratorExit(), (False, "GeneratorExit")),
        (SystemExit(), (False, "SystemExit")),
        (SystemExit(0), (False, "SystemExit: 0")),
        (SystemExit(3), (True, "SystemExit: 3")),
        (SystemExit("out of disk"), (True, "SystemExit: out of disk")),
        (errors.Closed("job", "all done", success=True), (False, "Closed: run 'job' is closed: all done")),
        (errors.Closed("job", "b gave up"), (True, "Closed: run 'job' is closed: b gave up")),
        (
            errors.Drained("job", "a", "upkeep"),
            (False, "Drained: member a is drained from run 'job': upkeep; leave, do not join again"),
        ),
    ],
    ids=repr,
)
def test_the_error_that_ends_a_block_decides_what_the_others_hear(error, said):
    assert departure_of(error) == said


async def test_a_block_that_fails_gives_up_with_the_error_as_reason():
    endpoint = memory()

    async def work(a: aio.AsyncRendezvous) -> None:
        async with rendezvous(endpoint, "b") as b:
            await asyncio.gather(a.join(), b.join())
            raise Ours("lost a GPU")

    async with rendezvous(endpoint, "a") as a:
        with pytest.raises(Ours):
            await work(a)
        assert (await a.wait_changed(LONG_S)).reason.endswith("/b gave up: Ours: lost a GPU")


async def test_a_block_that_is_cancelled_has_left_when_the_cancel_gets_through():
    endpoint = memory()
    a, b, at_work = rendezvous(endpoint, "a"), rendezvous(endpoint, "b"), asyncio.Event()

    async def work() -> None:
        async with b:
            await b.join()
            at_work.set()
            await b.wait_changed()

    async with a:
        working = asyncio.create_task(work())
        assert (await a.join()).size == 2
        await at_work.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        with pytest.raises(errors.LeftAlready):
            await b.join()
        assert (await a.wait_changed(LONG_S)).reason.endswith("/b left: CancelledError")


# ---- the package


def test_the_package_offers_what_it_promises():
    import rdzv

    assert set(rdzv.__all__) <= set(dir(rdzv))
    for name in rdzv.__all__:
        assert getattr(rdzv, name) is not None
    assert rdzv.aio is sys.modules["rdzv.aio"]
    assert rdzv.Rendezvous.__module__ == "rdzv.blocking"
    with pytest.raises(AttributeError, match="module 'rdzv' has no attribute 'rendezvous'"):
        rdzv.rendezvous  # noqa: B018
