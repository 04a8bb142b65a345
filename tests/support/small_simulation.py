"""A small world for the tests of the simulated network and its servers."""

from __future__ import annotations

from collections.abc import Callable

from rdzv.engines.port import EngineReset, LeaseGone, Put, Session
from rdzv.errors import Unreachable
from rdzv.system.timers import sleep
from rdzv.testing.driver import SimDriver
from rdzv.testing.history import Acted, Commit, History
from rdzv.testing.network import SimNetwork
from rdzv.testing.nodes import SimNode
from rdzv.testing.server import SimServer
from rdzv.testing.virtual_loop import VirtualLoop


class Small:
    """A few machines, one server, and what happened."""

    def __init__(self, nodes: int = 1, seed: int = 1, **server) -> None:
        self.loop = VirtualLoop()
        self.network = SimNetwork(self.loop, seed)
        self.server = SimServer(self.network, "s0", seed, **server)
        self.network.route = lambda _node: self.server
        self.nodes = [SimNode(self.loop, f"n{number}", seed, rate=1.0) for number in range(nodes)]
        self.history = History(self.loop)
        self.history.follow(self.server)

    async def session(self, number: int = 0, **driver) -> Session:
        return await self.nodes[number].spawn(SimDriver(self.network, self.nodes[number], **driver).connect())

    def on(self, number: int, coro):
        return self.nodes[number].spawn(coro)

    def keys(self) -> list[str]:
        return sorted(self.server.engine._tree.items)

    def run(self, main: Callable):
        return self.loop.run(main(self), limit_s=2000)


async def hold(world: Small, number: int, ttl_s: float = 10.0) -> None:
    """A member reduced to its presence: a leased key, renewed in thirds."""
    node = world.nodes[number]
    while True:
        try:
            session = await SimDriver(world.network, node).connect()
            lease = await session.grant(ttl_s, presence=True)
            await session.txn([], [Put(f"members/{node.name}", b"here", lease)])
            break
        except Unreachable:
            await sleep(node, 0.1)
    while True:
        await sleep(node, ttl_s / 3)
        try:
            await session.renew(lease)
        except Unreachable:
            pass
        except (LeaseGone, EngineReset) as end:
            world.history.add(Acted(actor=node.name, what="lost", detail=type(end).__name__))
            return


def lost(world: Small) -> list[str]:
    """Machines whose presence ended, in order."""
    return [
        event.key.partition("/")[2]
        for commit in world.history.of(Commit)
        for event in commit.events
        if event.item is None and event.key.startswith("members/")
    ]
