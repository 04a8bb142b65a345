"""Members of one run on an engine of their own in memory, in real time, with settings that make them quick."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from rdzv.config.settings import Settings
from rdzv.core import wire
from rdzv.core.keys import Keys
from rdzv.core.model import Head
from rdzv.engines.memory import MemoryDriver, MemorySession
from rdzv.engines.port import Get, Operation
from rdzv.member.member import Member
from rdzv.member.notices import Observer
from rdzv.member.world import AsyncWorld
from rdzv.system.node import LocalNode

LONG_S = 20.0
"""No test takes that long: one that does has failed."""
QUICK = {"last_call": 0.2, "settle": 0.1, "drain_settle": 0.1, "grow_every": 0, "lease": 1, "closed_for": 5}

_engines = itertools.count()


def memory() -> str:
    """An endpoint that no other test has."""
    return f"memory://party-{next(_engines)}"


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(scenario(), LONG_S)

    asyncio.run(bounded())


class Party:
    """Makes the members, and sees them off."""

    def __init__(self, min_nodes: int, max_nodes: int, **options: object) -> None:
        self.endpoint = memory()
        self.options: dict[str, Any] = {
            "run_id": "job", "min_nodes": min_nodes, "max_nodes": max_nodes, **QUICK, **options
        }  # fmt: skip
        self.keys = Keys("job")
        self.driver = MemoryDriver(self.endpoint.removeprefix("memory://"))
        self.members: list[Member] = []

    async def __aenter__(self):
        # While this session is open the engine is kept, whoever comes and goes.
        self.operator: MemorySession = await self.driver.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(member.leave() for member in self.members))
        await self.operator.close()

    def member(self, host: str, observer: Observer | None = None, **options: object) -> Member:
        settings = Settings.make(self.endpoint, **{**self.options, **options})
        member = Member(MemoryDriver(self.driver.name), settings, LocalNode(host), observer)
        self.members.append(member)
        return member

    async def form(self, *hosts: str) -> tuple[list[Member], list[AsyncWorld]]:
        """New members with these hosts, and the world each of them is given."""
        members = [self.member(host) for host in hosts]
        return members, await join(*members)

    async def write(self, *operations: Operation) -> None:
        """Write as an operator would."""
        await self.operator.txn(then=operations)

    async def head(self) -> Head | None:
        item = (await self.operator.txn(then=[Get(self.keys.head)])).item(0)
        return None if item is None else wire.decode(Head, item.value)


async def join(*members: Member) -> list[AsyncWorld]:
    return list(await asyncio.gather(*(member.join() for member in members)))


async def kill(member: Member) -> None:
    """Stop it as a power cut would: nothing is said, and its lease runs out."""
    task = member.task
    assert task is not None
    task.cancel()
    await asyncio.wait([task])



async def until(holds: Callable[[], Awaitable[object]]) -> None:
    """Poll until the condition holds, where there is nothing to wait on. `run` bounds it."""
    while not await holds():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


def assert_one_world(worlds: Sequence[AsyncWorld], number: int) -> None:
    assert {(world.round, world.size, world.digest, str(world.bootstrap)) for world in worlds} == {
        (number, len(worlds), worlds[0].digest, str(worlds[0].bootstrap))
    }
    assert sorted(world.rank for world in worlds) == list(range(len(worlds)))
