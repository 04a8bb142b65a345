"""Forming on one etcd, compared with as many bare puts and notifications on the same etcd, in the same run.

python bench/etcd_form.py [--members 100 1000] [--repeat 5]

"Bare" is gRPC alone, without client, driver or members: one watch of one key per member, as many puts as the forming wrote
keys, by one caller per member, and as many notifications as the members got. Both begin without connections and end with the
last notification. Leaving is neither counts nor timed.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Callable

import grpc
import grpc.aio

from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import Settings
from rdzv.engines.etcd.client import messages
from rdzv.engines.etcd.client.client import Client
from rdzv.engines.etcd.client.cluster import ClusterMember
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.client.watches import Subscription
from rdzv.engines.etcd.driver import EtcdDriver
from rdzv.engines.etcd.server import EtcdServer
from rdzv.member.member import Member
from rdzv.system.node import LocalNode

LIMIT_S = 300.0


class Counts:
    """Requests, puts and notifications of the client, counts by wrapping its methods until `stop`."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.puts = 0
        self.told = 0
        self._originals = (ClusterMember.unary, Client.txn, Subscription.deliver)
        counts, (real_unary, real_txn, real_deliver) = self, self._originals

        def unary(member, method):
            counts.calls[method.rpartition("/")[2]] += 1
            return real_unary(member, method)

        async def txn(client, compares=(), then=(), otherwise=(), *rest, **more):
            done = await real_txn(client, compares, then, otherwise, *rest, **more)
            counts.puts += sum(isinstance(one, messages.PutRequest) for one in (then if done.succeeded else otherwise))
            return done

        def deliver(subscription, changes):
            counts.told += len(changes)
            real_deliver(subscription, changes)

        ClusterMember.unary, Client.txn, Subscription.deliver = unary, txn, deliver

    def stop(self) -> None:
        ClusterMember.unary, Client.txn, Subscription.deliver = self._originals


async def form(server: EtcdServer, size: int, joined: Callable[[], object] = lambda: None) -> float:
    """Return the seconds until all have their world. `joined` is called then, before they leave."""
    endpoint = Endpoint.parse(server.url + "/bench")
    settings = Settings.make(endpoint, run_id=f"job{size}-{time.monotonic_ns()}", min_nodes=size, max_nodes=size, lease=60)
    members = [Member(EtcdDriver(endpoint, Credentials()), settings, LocalNode(f"node{n}")) for n in range(size)]
    began_at = time.perf_counter()
    worlds = await asyncio.gather(*(member.join(LIMIT_S) for member in members))
    took_s = time.perf_counter() - began_at
    joined()
    assert {world.rank for world in worlds} == set(range(size))
    await asyncio.wait_for(asyncio.gather(*(member.leave() for member in members)), LIMIT_S)
    return took_s


async def bare(server: EtcdServer, size: int, puts: int, told: int) -> float:
    """Return the seconds that those puts and notifications take."""
    began_at = time.perf_counter()
    async with grpc.aio.insecure_channel(server.get_endpoint()) as channel:
        put = channel.unary_unary("/etcdserverpb.KV/Put")
        stream = channel.stream_stream("/etcdserverpb.Watch/Watch")()
        for n in range(size):
            await stream.write(messages.encode_watch(n + 1, b"bare/head", b"", 0))
        for _ in range(size):
            assert messages.decode_watch(await stream.read()).created
        heads = max(1, round(told / size))
        each = max(1, round((puts - heads) / size))

        async def caller(n: int) -> None:
            for count in range(each):
                await put(messages.PutRequest(b"bare/%d/%d" % (n, count), b"x" * 300).encode())

        async def listen() -> None:
            missing = heads * size
            while missing:
                missing -= len(messages.decode_watch(await stream.read()).changes)

        listening = asyncio.create_task(listen())
        await asyncio.wait_for(asyncio.gather(*(caller(n) for n in range(size))), LIMIT_S)
        for _ in range(heads):
            await put(messages.PutRequest(b"bare/head", b"x" * 300).encode())
        await asyncio.wait_for(listening, LIMIT_S)  # etcd may have told less than was expected.
        took_s = time.perf_counter() - began_at
        stream.cancel()
        return took_s


class CpuTime:
    """CPU seconds of this process and of the server, from construction until `stop`."""

    def __init__(self, server: EtcdServer) -> None:
        self._pid = server.pid
        self.ours = self.theirs = 0.0
        self.stop()

    def stop(self) -> None:
        fields = pathlib.Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        theirs = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.ours, self.theirs = time.process_time() - self.ours, theirs - self.theirs


async def measure(size: int, repeat: int, binary: str = "") -> float:
    """Print the medians of several repetitions. Return the ratio of the times of forming and bare."""
    with EtcdServer(binary=binary) as server:
        counts = Counts()
        await form(server, size, counts.stop)  # The first repetition also warms up.
        rows = []
        for _ in range(repeat):
            spent = CpuTime(server)
            formed_s = await form(server, size, spent.stop)
            bare_spent = CpuTime(server)
            bare_s = await bare(server, size, counts.puts, counts.told)
            bare_spent.stop()
            rows.append((formed_s, spent.ours, spent.theirs, bare_s, bare_spent.ours, bare_spent.theirs))
    formed_s, ours, theirs, bare_s, bare_ours, bare_theirs = map(statistics.median, zip(*rows, strict=True))
    calls = ", ".join(f"{count / size:.2f} {name}" for name, count in counts.calls.most_common())
    print(f"{size} members: formed in {formed_s:.2f} s (CPU: this process {ours:.2f} s, etcd {theirs:.2f} s)")
    print(
        f"  bare etcd: {counts.puts} puts and {counts.told} notifications in {bare_s:.2f} s "
        f"(CPU: {bare_ours:.2f} s, {bare_theirs:.2f} s)"
    )
    ratio = formed_s / bare_s
    print(f"  ratio {ratio:.2f}; of CPU {(ours + theirs) / (bare_ours + bare_theirs):.2f}; medians of {repeat}")
    print(f"  requests per member: {calls}")
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--etcd", default="", help="the program, if not the one that is found")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for size in args.members:
        asyncio.run(measure(size, args.repeat, args.etcd))


if __name__ == "__main__":
    main()
