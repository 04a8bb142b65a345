"""Operations and bytes that forming a round of n costs each member, and how they grow with n.

The real member code runs on the simulated network, so counts are exact and the same on every node. Times do not matter here.

    python bench/sim_form.py [n ...]          # default: 100 1000 10000

Above 10,000 members the settings and the simulated server allow more than real ones do: the counts are of the protocol.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import dataclass

import msgspec

from rdzv.config.settings import NODES_MAX, Settings
from rdzv.engines.embedded.limits import Limits
from rdzv.member.member import Member
from rdzv.testing.driver import SimDriver
from rdzv.testing.network import SimNetwork
from rdzv.testing.nodes import SimNode
from rdzv.testing.server import SimServer
from rdzv.testing.virtual_loop import VirtualLoop

PER_SECOND = NODES_MAX
"""Members that start in one second, at most: no more are in one real run."""


@dataclass
class Counters:
    """The traffic of one node. Bytes are counted in both directions."""

    operations: int = 0
    received: int = 0
    bytes: int = 0
    largest: int = 0


def count_traffic(network):
    """Count what each node sends and receives over that network from now on, by the name of the node."""
    counters, connect = {}, network.connect

    def connect_counted(node):
        connection, counted = connect(node), counters.setdefault(node.name, Counters())
        request, answer = connection.client_end.write, connection.server_end.write

        def ask(data):
            counted.operations += 1
            counted.bytes += len(data)
            counted.largest = max(counted.largest, len(data))
            request(data)

        def reply(data):
            counted.received += 1
            counted.bytes += len(data)
            counted.largest = max(counted.largest, len(data))
            answer(data)

        connection.client_end.write, connection.server_end.write = ask, reply
        return connection

    network.connect = connect_counted
    return counters


def limits_for(n):
    """Return the limits of a server that n members may use, whatever the ones of a real server are."""
    return None if n <= PER_SECOND else Limits(connections=2 * n, leases=2 * n, keys=3 * n, run_targets=6 * n, stored=n << 14)


def form(n, driver=SimDriver, observer=None):
    """Start n members, `PER_SECOND` at most. Return their traffic until the last has its world, the loop, and the CPU time."""
    loop = VirtualLoop()
    network = SimNetwork(loop, n)
    counters = count_traffic(network)
    server = SimServer(network, "engine", n, limits=limits_for(n))
    network.route = lambda _node: server
    plain = Settings.make("memory://", run_id="bench", min_nodes=1, max_nodes=1, lease=60)
    settings = msgspec.structs.replace(plain, min_nodes=n, max_nodes=n)  # More than `make` allows.
    nodes = [SimNode(loop, f"node{index}", n) for index in range(n)]
    worlds = []

    async def join(node):
        member = Member(driver(network, node), settings, node, observer)
        waiter = loop.create_future()
        node.call_later(node.rng.random() * max(1.0, n / PER_SECOND), lambda: waiter.set_result(None))
        await waiter
        worlds.append(await member.join())

    async def run_all():
        for exited in [node.spawn(join(node)) for node in nodes]:
            await exited

    began = time.process_time()
    loop.run(run_all(), callbacks_max=1 << 60)
    assert sorted(world.rank for world in worlds) == list(range(n))
    assert len({world.digest for world in worlds}) == 1
    return counters, loop, time.process_time() - began


def main(sizes):
    """Print a line per size. The leader's cost is linear by design; that of every other member must be constant."""
    head = f"{'members':>8} {'ops/member':>11} {'bytes/member':>13} {'worst follower':>22} {'leader':>22}"
    print(f"{head} {'largest':>9} {'CPU s':>8}")
    gc.disable()  # All that is made lives until the end of its run: to look through it again and again finds nothing.
    for n in sizes:
        gc.collect()
        counters, _, took_s = form(n)
        ranked = sorted(counters.values(), key=lambda one: one.bytes)
        leader, worst = ranked[-1], ranked[-2]
        operations = sum(one.operations for one in ranked) / n
        size = sum(one.bytes for one in ranked) / n
        print(
            f"{n:>8} {operations:>11.2f} {size:>13.0f} {worst.operations:>9} ops {worst.bytes:>6} B"
            f" {leader.operations:>9} ops {leader.bytes:>6} B {max(one.largest for one in ranked):>9} {took_s:>8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main([int(argument) for argument in sys.argv[1:]] or [100, 1000, 10_000])
