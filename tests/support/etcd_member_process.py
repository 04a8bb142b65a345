"""A program that takes part in a run, as a training agent would, and prints all that it is told: one observation per line.

    python agent.py '{"endpoint": "etcd://...", "hosts": ["a"], "options": {...}}'

Several hosts are several members in one process. Lines on its standard input are orders: 'HOST WORD', with '*' for all hosts.
The words are those of `Life.obey`. Instants are of the system's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from contextlib import suppress
from typing import Any

import msgspec

from rdzv.config.settings import Settings
from rdzv.core.model import NO_ROUND, RoundId
from rdzv.drivers import open_driver
from rdzv.engines.port import EngineReset
from rdzv.errors import Closed, Evicted, RdzvError, RoundOver, StoreTimeout, Unreachable
from rdzv.member.member import Member
from rdzv.member.notices import Notice
from rdzv.member.world import AsyncWorld
from rdzv.system.node import LocalNode
from rdzv.system.timers import Wakeup
from rdzv.testing.history import Acted, Changed, ClosedTold, EvictedTold, Given, Observation

STOP_S = 0.05
"""How long its workers need to stop."""


class Spec(msgspec.Struct):
    endpoint: str
    hosts: list[str]
    options: dict[str, Any]


def say(observation: Observation) -> None:
    stamped = msgspec.structs.replace(observation, at=time.monotonic())
    # One write, so that a kill leaves no half of a line that looks whole.
    os.write(1, msgspec.json.encode(stamped) + b"\n")


class Life:
    """One member's application: it trains until it is told otherwise."""

    def __init__(self, spec: Spec, host: str) -> None:
        self.name = f"{host}:{os.getpid()}"
        settings = Settings.make(spec.endpoint, **spec.options)
        node = LocalNode(host)
        self.member = Member(open_driver(settings), settings, node, self._observe)
        self.bell = Wakeup(node)
        self.order = ""
        self.holds: RoundId = NO_ROUND

    def _observe(self, notice: Notice) -> None:
        sys.stderr.write(f"{time.monotonic():.3f} {self.name} {notice.kind}: {notice.reason}\n")

    def act(self, what: str, detail: str = "") -> None:
        say(Acted(actor=self.name, what=what, detail=detail, round=self.holds))

    def command(self, order: str) -> None:
        self.order = order
        self.bell.ring()

    async def run(self) -> None:
        while True:
            self.act("ready" if self.holds != NO_ROUND else "joined")
            try:
                world = await self.member.join()
            except Evicted as evicted:
                self._evicted(evicted)
                continue
            except Closed as closed:
                say(ClosedTold(actor=self.name, member=self.name, reason=closed.reason, success=closed.success))
                break
            except RdzvError as error:
                self.act("refused", f"{type(error).__name__}: {error}")
                break
            self._given(world)
            if not await self._train(world):
                break
        await self.member.leave()
        self.act("gone")

    def _given(self, world: AsyncWorld) -> None:
        instance, member, revision = world.given_by
        self.holds = RoundId(world.era, world.round)
        say(
            Given(
                actor=self.name, member=member, instance=instance, revision=revision, run=world.incarnation, era=world.era,
                number=world.round, table=world.table, size=world.size, rank=world.rank, digest=world.digest,
                boot=str(world.bootstrap),
            )
        )  # fmt: skip

    def _evicted(self, evicted: Evicted) -> None:
        say(EvictedTold(actor=self.name, member=evicted.member, reason=str(evicted)))
        self.holds = NO_ROUND

    async def _train(self, world: AsyncWorld) -> bool:
        """Until something happens; whether its life goes on."""
        watcher = asyncio.create_task(self._watch())
        store = asyncio.create_task(self._use_store(world))
        try:
            while self.member.changed is None:
                order, self.order = self.order, ""
                if order:
                    return await self.obey(order)
                await self.bell.wait(1.0)
        finally:
            for task in (watcher, store):
                task.cancel()
            await asyncio.wait([watcher, store])
        await asyncio.sleep(STOP_S)
        return True

    async def obey(self, order: str) -> bool:
        try:
            if order == "fail":
                self.act("workers failed")
                return True
            if order == "done":
                self.act("done")
                await self.member.done()
                while self.member.changed is None and not self.order:
                    await self.bell.wait(1.0)
            elif order == "close":
                self.act("closing")
                await self.member.close_run("asked to")
                self.act("closed")
            else:
                self.act("left")
        except Evicted as evicted:
            self._evicted(evicted)
            return True
        except RoundOver:
            return True
        return False

    async def _watch(self) -> None:
        """Put on record the moment it is told, whatever its workers are doing."""
        change = await self.member.wait_changed()
        if change is not None:
            say(Changed(actor=self.name, round=self.holds, kind=change.kind.value, reason=change.reason))
            self.bell.ring()

    async def _use_store(self, world: AsyncWorld) -> None:
        """Say who we are, count ourselves, and read what rank 0 says: all of it must be of this round."""
        store = world.store
        store.set_timeout(30.0)
        with suppress(RoundOver, StoreTimeout, Unreachable, EngineReset, Evicted):
            await store.set(f"from/{world.rank}", world.table)
            count = await store.add("count", 1)
            if count > world.size:
                self.act("store mixed", f"counted {count} members in a world of {world.size}")
            said = await store.get("from/0")
            if said.decode() != world.table:
                self.act("store mixed", f"read {said!r} in {world.table}")


async def main(spec: Spec) -> None:
    lives = {host: Life(spec, host) for host in spec.hosts}
    loop = asyncio.get_running_loop()
    left = b""

    def hear() -> None:
        nonlocal left
        data = os.read(0, 4096)
        if not data:
            loop.remove_reader(0)
            return
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            host, _, order = line.decode().partition(" ")
            for life in lives.values() if host == "*" else [lives[host]]:
                life.command(order)

    loop.add_reader(0, hear)
    await asyncio.gather(*(life.run() for life in lives.values()))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Spec)))
