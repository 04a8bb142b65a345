"""Forming on one etcd, beside what the same etcd needs for as many bare puts and notifications. Both in one run.

python bench/etcd_form.py [--members 100 1000] [--repeat 5]

Bare: gRPC alone, without client, driver or members. As many watches of one key as there were members are made, then as many
puts as the forming wrote keys, by as many callers as there were members, and the watches are told as many changes in all as the
members were. Both begin with nothing, and end when the last one has been told; leaving is neither counted nor timed.
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
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.client.watches import Subscription
from rdzv.engines.etcd.driver import EtcdDriver
from rdzv.engines.etcd.server import EtcdServer
from rdzv.member.member import Member
from rdzv.system.node import LocalNode


class Counted:
    """What the client asks for, writes and tells, counted by wrapping it."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.puts = 0
        self.told = 0
        self._right = (Client._ask, Client.txn, Subscription.tell)
        counted, (ask_right, txn_right, tell_right) = self, self._right

        async def ask(client, method, request, **more):
            counted.calls[method.rpartition("/")[2]] += 1
            return await ask_right(client, method, request, **more)

        async def txn(client, compares=(), then=(), otherwise=(), *rest, **more):
            done = await txn_right(client, compares, then, otherwise, *rest, **more)
            counted.puts += sum(isinstance(one, messages.PutRequest) for one in (then if done.succeeded else otherwise))
            return done

        def tell(subscription, changes):
            counted.told += len(changes)
            tell_right(subscription, changes)

        Client._ask, Client.txn, Subscription.tell = ask, txn, tell

    def stop(self) -> None:
        Client._ask, Client.txn, Subscription.tell = self._right


async def form(server: EtcdServer, size: int, joined: Callable[[], object] = lambda: None) -> float:
    """How many seconds it takes until all have their world. `joined` is called then, before they leave."""
    endpoint = Endpoint.parse(server.url + "/bench")
    settings = Settings.make(endpoint, run_id=f"job{size}-{time.monotonic_ns()}", min_nodes=size, max_nodes=size, lease=60)
    members = [Member(EtcdDriver(endpoint, Credentials()), settings, LocalNode(f"node{n}")) for n in range(size)]
    began_at = time.perf_counter()
    worlds = await asyncio.gather(*(member.join() for member in members))
    took_s = time.perf_counter() - began_at
    joined()
    assert {world.rank for world in worlds} == set(range(size))
    await asyncio.gather(*(member.leave() for member in members))
    return took_s


async def bare(server: EtcdServer, size: int, puts: int, told: int) -> float:
    """How many seconds those puts and notifications take."""
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
        await asyncio.gather(*(caller(n) for n in range(size)))
        for _ in range(heads):
            await put(messages.PutRequest(b"bare/head", b"x" * 300).encode())
        await listening
        took_s = time.perf_counter() - began_at
        stream.cancel()
        return took_s


class Spent:
    """CPU seconds of this process and of the server, from the making of this until `stop`."""

    def __init__(self, server: EtcdServer) -> None:
        self._pid = server._guarded.pid
        self.ours = self.theirs = 0.0
        self.stop()

    def stop(self) -> None:
        fields = pathlib.Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        theirs = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.ours, self.theirs = time.process_time() - self.ours, theirs - self.theirs


async def measure(size: int, repeat: int, binary: str = "") -> float:
    """Say what it takes, by the medians of several; how many times as long as bare."""
    with EtcdServer(binary=binary) as server:
        counted = Counted()
        await form(server, size, counted.stop)  # The first also warms up.
        rows = []
        for _ in range(repeat):
            spent = Spent(server)
            formed_s = await form(server, size, spent.stop)
            bare_spent = Spent(server)
            bare_s = await bare(server, size, counted.puts, counted.told)
            bare_spent.stop()
            rows.append((formed_s, spent.ours, spent.theirs, bare_s, bare_spent.ours, bare_spent.theirs))
    formed_s, ours, theirs, bare_s, bare_ours, bare_theirs = map(statistics.median, zip(*rows, strict=True))
    calls = ", ".join(f"{count / size:.2f} {name}" for name, count in counted.calls.most_common())
    print(f"{size} members: formed in {formed_s:.2f} s (CPU: this process {ours:.2f} s, etcd {theirs:.2f} s)")
    print(
        f"  bare etcd: {counted.puts} puts and {counted.told} notifications in {bare_s:.2f} s "
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
