"""A program that takes part in a run as a training agent would, and prints each observation as a line of JSON.

    python etcd_member_process.py '{"endpoint": "etcd://...", "hosts": ["a"], "options": {...}}'

Several hosts are several members in one process. Lines on standard input are orders: 'HOST ORDER', with '*' for all hosts;
`Application.obey` has the orders, and 'reset' resets all connections of the process to the engine. Times are of the monotonic
clock, which all processes of a node share.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
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
"""Time that the workers need to stop."""


class Spec(msgspec.Struct):
    endpoint: str
    hosts: list[str]
    options: dict[str, Any]


def report(observation: Observation) -> None:
    stamped = msgspec.structs.replace(observation, at=time.monotonic())
    # One write, so that a kill leaves no partial line that looks complete.
    os.write(1, msgspec.json.encode(stamped) + b"\n")


def reset_connections(endpoint: str) -> None:
    """Reset every TCP connection of this process to a port of the endpoint, beneath the code that uses it."""
    ports = {int(port) for port in re.findall(r":(\d+)", endpoint)}
    libc = ctypes.CDLL(None, use_errno=True)
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family != socket.AF_UNIX and one.type == socket.SOCK_STREAM and one.getpeername()[1] in ports:
                    # To connect to an address of no family is to disconnect: the peer gets a reset.
                    libc.connect(one.fileno(), bytes(16), 16)


class Application:
    """One member's application: it trains until it is told of a change or gets an order."""

    def __init__(self, spec: Spec, host: str) -> None:
        self.name = f"{host}:{os.getpid()}"
        settings = Settings.make(spec.endpoint, **spec.options)
        node = LocalNode(host)
        self.member = Member(open_driver(settings), settings, node, self._observe)
        self.wakeup = Wakeup(node)
        self.order = ""
        self.holds: RoundId = NO_ROUND

    def _observe(self, notice: Notice) -> None:
        sys.stderr.write(f"{time.monotonic():.3f} {self.name} {notice.kind}: {notice.reason}\n")

    def act(self, what: str, detail: str = "") -> None:
        report(Acted(actor=self.name, what=what, detail=detail, round=self.holds))

    def command(self, order: str) -> None:
        self.order = order
        self.wakeup.ring()

    async def run(self) -> None:
        while True:
            self.act("ready" if self.holds != NO_ROUND else "joined")
            try:
                world = await self.member.join()
            except Evicted as evicted:
                self._evicted(evicted)
                continue
            except Closed as closed:
                report(ClosedTold(actor=self.name, member=self.name, reason=closed.reason, success=closed.success))
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
        report(
            Given(
                actor=self.name, member=member, instance=instance, revision=revision, run=world.incarnation, era=world.era,
                number=world.round, table=world.table, size=world.size, rank=world.rank, digest=world.digest, fence=world.fence,
                boot=str(world.bootstrap),
            )
        )  # fmt: skip

    def _evicted(self, evicted: Evicted) -> None:
        report(EvictedTold(actor=self.name, member=evicted.member, reason=str(evicted)))
        self.holds = NO_ROUND

    async def _train(self, world: AsyncWorld) -> bool:
        """Train until something happens. Return whether the application goes on."""
        watcher = asyncio.create_task(self._watch())
        store = asyncio.create_task(self._use_store(world))
        try:
            while self.member.changed is None:
                order, self.order = self.order, ""
                if order:
                    return await self.obey(order)
                await self.wakeup.wait(1.0)
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
                    await self.wakeup.wait(1.0)
            elif order == "close":
                self.act("closing")
                await self.member.close_run("asked to")
                self.act("closed")
            else:
                self.act("left")
        except (Evicted, RoundOver, Unreachable) as error:
            if isinstance(error, Evicted):
                self._evicted(error)
            if order == "close":
                self.order = self.order or order  # The test waits for the end of the run, so it stands in the next round.
            return True
        return False

    async def _watch(self) -> None:
        """Report a change at once, whatever the workers are doing."""
        change = await self.member.wait_changed()
        if change is not None:
            report(Changed(actor=self.name, round=self.holds, kind=change.kind.value, reason=change.reason))
            self.wakeup.ring()

    async def _use_store(self, world: AsyncWorld) -> None:
        """Write a key, count the members and read rank 0's key: all values must be of this round."""
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
    applications = {host: Application(spec, host) for host in spec.hosts}
    loop = asyncio.get_running_loop()
    left = b""

    def read_orders() -> None:
        nonlocal left
        data = os.read(0, 4096)
        sys.stderr.write(f"{time.monotonic():.3f} orders: {data!r}\n")
        if not data:
            os._exit(3)  # The test has ended, and nobody else would end this process.
        *lines, left = (left + data).split(b"\n")
        for line in lines:
            host, _, order = line.decode().partition(" ")
            if order == "reset":
                reset_connections(spec.endpoint)
                continue
            for application in applications.values() if host == "*" else [applications[host]]:
                application.command(order)

    loop.add_reader(0, read_orders)
    await asyncio.gather(*(application.run() for application in applications.values()))


if __name__ == "__main__":
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=Spec)))
