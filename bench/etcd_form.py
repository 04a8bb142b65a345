"""Forming on one etcd, beside what the same etcd needs for as many bare puts and notifications. Both in one run.

python bench/etcd_form.py [--members 100 1000] [--profile]

Bare: gRPC alone, without client, driver or members. As many puts as the forming wrote keys, made by as many callers as there
were members, and as many watches of one key as there were members, told as many events in all as the members were.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import resource
import time

import grpc
import grpc.aio

from rdzv.drivers.etcd import EtcdDriver
from rdzv.endpoint import Endpoint
from rdzv.etcd import messages
from rdzv.etcd.access import Access
from rdzv.etcd.client import Client
from rdzv.etcd.server import EtcdServer
from rdzv.etcd.watches import Watches
from rdzv.machine import RealMachine
from rdzv.member import Member
from rdzv.settings import Settings


class Counted:
    """What the client asks for and is told, counted by wrapping it."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()
        self.puts = 0
        self.told = 0

    def __enter__(self):
        self._ask, self._txn, self._hear = Client._ask, Client.txn, Watches._hear
        counted = self

        async def ask(client, method, request, **more):
            counted.calls[method.rpartition("/")[2]] += 1
            return await counted._ask(client, method, request, **more)

        async def txn(client, compares=(), then=(), otherwise=(), timeout_s=None):
            done = await counted._txn(client, compares, then, otherwise, timeout_s)
            counted.puts += sum(isinstance(one, messages.Put) for one in (then if done.succeeded else otherwise))
            return done

        def hear(watches, message):
            counted.told += len(messages.decode_watch(message).changes)
            return counted._hear(watches, message)

        Client._ask, Client.txn, Watches._hear = ask, txn, hear
        return self

    def __exit__(self, *_):
        Client._ask, Client.txn, Watches._hear = self._ask, self._txn, self._hear


async def form(server: EtcdServer, size: int) -> float:
    endpoint = Endpoint.parse(server.url + "/bench")
    settings = Settings.make(endpoint, run_id=f"job{size}-{time.monotonic_ns()}", min_nodes=size, max_nodes=size, lease=60)
    members = [Member(EtcdDriver(endpoint, Access()), settings, RealMachine(f"node{n}")) for n in range(size)]
    began_at = time.perf_counter()
    worlds = await asyncio.gather(*(member.join() for member in members))
    took_s = time.perf_counter() - began_at
    assert {world.rank for world in worlds} == set(range(size))
    await asyncio.gather(*(member.leave() for member in members))
    return took_s


async def bare(server: EtcdServer, size: int, puts: int, told: int) -> float:
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
                await put(messages.Put(b"bare/%d/%d" % (n, count), b"x" * 300).encode())

        async def listen() -> None:
            missing = heads * size
            while missing:
                missing -= len(messages.decode_watch(await stream.read()).changes)

        began_at = time.perf_counter()
        listening = asyncio.create_task(listen())
        await asyncio.gather(*(caller(n) for n in range(size)))
        for _ in range(heads):
            await put(messages.Put(b"bare/head", b"x" * 300).encode())
        await listening
        took_s = time.perf_counter() - began_at
        stream.cancel()
        return took_s


async def measure(size: int, repeat: int, binary: str = "") -> None:
    with EtcdServer(binary=binary) as server:
        formed, plain = [], []
        for _ in range(repeat):
            cpu_s = time.process_time()
            with Counted() as counted:
                formed.append(await form(server, size))
            cpu_s = time.process_time() - cpu_s
            plain.append(await bare(server, size, counted.puts, counted.told))
        calls = ", ".join(f"{count / size:.2f} {name}" for name, count in counted.calls.most_common())
        ours, theirs = min(formed), min(plain)
        print(f"{size} members: formed in {ours:.2f} s ({cpu_s:.2f} s CPU of this process, leaving included)")
        print(f"  bare etcd: {counted.puts} puts and {counted.told} notifications in {theirs:.2f} s; ratio {ours / theirs:.2f}")
        print(f"  requests per member, leaving included: {calls}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, nargs="*", default=[100, 1000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--etcd", default="", help="the program, if not the one that is found")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for size in args.members:
        asyncio.run(measure(size, args.repeat, args.etcd))


if __name__ == "__main__":
    main()
