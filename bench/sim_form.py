"""How many operations and bytes does it cost one member to be formed into a round of n, and does that grow with n?

The real member code on the simulated network, so counts are exact and the same on every machine. Times are not the point.

    python bench/sim_form.py [n ...]          # default: 100 1000 10000
"""

from __future__ import annotations

import sys
import time

from rdzv.config.settings import Settings
from rdzv.member.member import Member
from rdzv.testing.driver import SimDriver
from rdzv.testing.network import SimNetwork
from rdzv.testing.nodes import SimNode
from rdzv.testing.server import SimServer
from rdzv.testing.virtual_loop import VirtualLoop


def form(n, driver=SimDriver, observer=None):
    """Start n members within a second of each other; everything they sent and received until the last has its world."""
    loop = VirtualLoop()
    network = SimNetwork(loop, n)
    server = SimServer(network, "engine", n)
    network.route = lambda _node: server
    settings = Settings.make("memory://", run_id="bench", min_nodes=n, max_nodes=n, lease=60)
    nodes = [SimNode(loop, f"node{index}", n) for index in range(n)]
    worlds = []

    async def live(node):
        member = Member(driver(network, node), settings, node, observer)
        await Sleep(node).until(node.rng.random())
        worlds.append(await member.join())

    async def play():
        for exited in [node.spawn(live(node)) for node in nodes]:
            await exited

    began = time.perf_counter()
    loop.run(play(), callbacks_max=1 << 60)
    assert sorted(world.rank for world in worlds) == list(range(n))
    assert len({world.digest for world in worlds}) == 1
    return network.counters, loop, time.perf_counter() - began


class Sleep:
    """Waits by the node's clock."""

    def __init__(self, node):
        self.node = node

    async def until(self, delay_s):
        """Wait that long."""
        waiter = self.node.loop.create_future()
        self.node.call_later(delay_s, lambda: waiter.set_result(None))
        await waiter


def main(sizes):
    """A line per size: the leader's share is linear by design, everybody else's must be constant."""
    print(f"{'members':>8} {'ops/member':>11} {'bytes/member':>13} {'worst follower':>22} {'leader':>22} {'seconds':>8}")
    for n in sizes:
        counters, _, took_s = form(n)
        ranked = sorted(counters.values(), key=lambda one: one.bytes)
        leader, worst = ranked[-1], ranked[-2]
        operations = sum(one.operations for one in ranked) / n
        size = sum(one.bytes for one in ranked) / n
        print(
            f"{n:>8} {operations:>11.2f} {size:>13.0f} {worst.operations:>9} ops {worst.bytes:>6} B"
            f" {leader.operations:>9} ops {leader.bytes:>6} B {took_s:>8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [100, 1000, 10_000])
