"""Operations and bytes that forming a round of n costs each member, and how they grow with n.

The real member code runs on the simulated network, so counts are exact and the same on every node. Times do not matter here.

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
    """Start n members within a second. Return all that they sent and received until the last has its world."""
    loop = VirtualLoop()
    network = SimNetwork(loop, n)
    server = SimServer(network, "engine", n)
    network.route = lambda _node: server
    settings = Settings.make("memory://", run_id="bench", min_nodes=n, max_nodes=n, lease=60)
    nodes = [SimNode(loop, f"node{index}", n) for index in range(n)]
    worlds = []

    async def join(node):
        member = Member(driver(network, node), settings, node, observer)
        waiter = loop.create_future()
        node.call_later(node.rng.random(), lambda: waiter.set_result(None))
        await waiter
        worlds.append(await member.join())

    async def run_all():
        for exited in [node.spawn(join(node)) for node in nodes]:
            await exited

    began = time.perf_counter()
    loop.run(run_all(), callbacks_max=1 << 60)
    assert sorted(world.rank for world in worlds) == list(range(n))
    assert len({world.digest for world in worlds}) == 1
    return network.counters, loop, time.perf_counter() - began


def main(sizes):
    """Print a line per size. The leader's cost is linear by design; that of every other member must be constant."""
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
