"""The round's store compared with torch's TCPStore and a bare etcd; and assigning ranks to the workers of 1,000 agents.

python bench/store.py [--operations 500] [--agents 100 1000] [--repeat 3] [--out bench/results]

Eight clients, each with its own connection and thread; the server is another process. Latency: one client, one operation after
the other. Throughput: all eight at once. `wait`: from the call that sets a key until a client that waits for it returns.
Our operations are fenced and exactly once (docs/protocol.md), those of the others are not; a TCPStore's `set` does not wait for
a reply. A bare etcd has no `add`.
Ranks: torch's agent code on our agent store and on a TCPStore; bytes are the payload of all connections as the kernel counts.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

from common import Book, Crowd, Server, allow_files

from rdzv import Rendezvous

CLIENTS = 8
KEY, VALUE = "k", b"x" * 100
CONNECTED_MAX = 100
"""Most clients of one TCPStore: each looks up its own host name, one after the other."""


def ours(stack: ExitStack) -> list:
    server = stack.enter_context(Server())
    members = [
        stack.enter_context(
            Rendezvous(
                server.address, run_id="bench", min_nodes=CLIENTS, max_nodes=CLIENTS, slot=str(index), is_host=False
            )
        )
        for index in range(CLIENTS)
    ]
    with ThreadPoolExecutor(CLIENTS) as pool:
        return [world.store for world in pool.map(lambda member: member.join(60.0), members)]


def torchs(stack: ExitStack) -> list:
    from torch.distributed import TCPStore  # noqa: PLC0415  Seconds.

    host, port = stack.enter_context(Server("tcpstore")).address.split(":")
    return [TCPStore(host, int(port), is_master=False, wait_for_workers=False) for _ in range(CLIENTS)]


class EtcdStore:
    """A store on a bare etcd, by gRPC alone."""

    def __init__(self, channel, messages) -> None:
        self._messages = messages
        self._put = channel.unary_unary("/etcdserverpb.KV/Put")
        self._range = channel.unary_unary("/etcdserverpb.KV/Range")
        self._watch = channel.stream_stream("/etcdserverpb.Watch/Watch")

    def set(self, key: str, value: bytes) -> None:
        self._put(self._messages.PutRequest(key.encode(), value).encode())

    def get(self, key: str) -> bytes:
        return self._range(self._messages.RangeRequest(key.encode()).encode())

    def wait(self, keys: list[str]) -> None:
        """Wait for a key. A read after the creation of the watch shows a value that was there before."""
        stream = self._watch(iter([self._messages.encode_watch(1, keys[0].encode(), b"", 0)]))
        for message in stream:
            told = self._messages.decode_watch(message)
            if told.changes or (told.created and VALUE in self.get(keys[0])):
                stream.cancel()
                return


def etcds(stack: ExitStack) -> list:
    import grpc  # noqa: PLC0415

    from rdzv.engines.etcd.client import messages  # noqa: PLC0415
    from rdzv.engines.etcd.server import EtcdServer  # noqa: PLC0415

    etcd = stack.enter_context(EtcdServer())
    own = [("grpc.use_local_subchannel_pool", 1)]  # Otherwise all channels would share one connection.
    channels = [stack.enter_context(grpc.insecure_channel(etcd.get_endpoint(), own)) for _ in range(CLIENTS)]
    return [EtcdStore(channel, messages) for channel in channels]


KINDS = {"ours": (ours, "embedded"), "torch": (torchs, "TCPStore"), "etcd": (etcds, "etcd")}


def operation(store, name: str, key: str):
    return {
        "set": lambda: store.set(key, VALUE),
        "get": lambda: store.get(key),
        "add": lambda: store.add(key + "+", 1),
    }[name]


def latency(store, name: str, count: int) -> float:
    act = operation(store, name, KEY)
    took = []
    for _ in range(count):
        began_at = time.perf_counter()
        act()
        took.append(time.perf_counter() - began_at)
    return statistics.median(took)


def throughput(stores: list, name: str, count: int) -> float:
    """Return the operations per second of all clients, each on its own key."""
    gate = threading.Barrier(CLIENTS + 1)

    def one(index: int) -> None:
        act = operation(stores[index], name, f"{KEY}{index}")
        gate.wait()
        for _ in range(count):
            act()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(CLIENTS)]
    for index, thread in enumerate(threads):
        stores[index].set(f"{KEY}{index}", VALUE)
        thread.start()
    gate.wait()
    began_at = time.perf_counter()
    for thread in threads:
        thread.join()
    return CLIENTS * count / (time.perf_counter() - began_at)


def waited(stores: list, count: int) -> float:
    took = []
    with ThreadPoolExecutor(1) as pool:
        for number in range(count):
            key = f"wait{number}"
            waiter = pool.submit(lambda key=key: (stores[1].wait([key]), time.perf_counter())[1])
            time.sleep(0.02)  # Let it begin to wait.
            began_at = time.perf_counter()
            stores[0].set(key, VALUE)
            took.append(waiter.result(60.0) - began_at)
    return statistics.median(took)


def operations(count: int, book: Book) -> None:
    for what, (make, engine) in KINDS.items():
        with ExitStack() as stack:
            stores = make(stack)
            names = ("set", "get", "add") if hasattr(stores[0], "add") else ("set", "get")
            stores[0].set(KEY, VALUE)
            figures = {f"{name}_s": latency(stores[0], name, count) for name in names}
            figures["wait_s"] = waited(stores, max(10, count // 20))
            figures |= {f"{name}s_per_second": throughput(stores, name, count // 2) for name in names}
            book.add(what=what, engine=engine, n=CLIENTS, **figures)


# ---- ranks


class Agents:
    """Agents for `crowd`, each with a round and a store."""

    def __init__(self, spec: dict) -> None:
        self._spec = spec
        self._count = spec["size"]
        self._found = [None] * self._count

    def prepare(self) -> None:
        is_ours = self._spec["of"] == "ours"
        # Our members wait for each other. A thousand clients of torch that connect at once may wait for minutes.
        with ThreadPoolExecutor(self._count if is_ours else 16) as pool:
            self._agents = list(pool.map(self._ours if is_ours else self._torchs, range(self._count)))
        self._before = self._bytes()

    def _ours(self, index: int) -> tuple:
        from rdzv.torchrun.agent_store import AgentStore  # noqa: PLC0415

        size = self._count
        member = Rendezvous(
            self._spec["address"], run_id="bench", min_nodes=size, max_nodes=size, slot=str(index), is_host=False
        )
        world = member.join(120.0)
        return world.rank, AgentStore(world, SimpleNamespace(restart=print)), member

    def _torchs(self, index: int) -> tuple:
        from torch.distributed import TCPStore  # noqa: PLC0415

        host, port = self._spec["address"].split(":")
        return index, TCPStore(host, int(port), is_master=False, wait_for_workers=False), None

    def form(self, index: int) -> None:
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent  # noqa: PLC0415

        rank, store, _ = self._agents[index]
        worker = SimpleNamespace(role="trainer", local_world_size=8)
        self._found[index] = SimpleElasticAgent._assign_worker_ranks(None, store, rank, self._count, worker)

    def check(self) -> None:
        ranks = {worker.global_rank for workers in self._found for worker in workers}
        assert ranks == set(range(8 * self._count))

    def extra(self) -> dict:
        return {"bytes": (self._bytes() - self._before) / self._count}

    def stop(self) -> None:
        with ThreadPoolExecutor(64) as pool:
            list(pool.map(lambda agent: agent[2] and agent[2].leave(), self._agents))

    def _bytes(self) -> int:
        """Return the payload acknowledged and received by all connections to the server: two fields of Linux's tcp_info."""
        port, total = int(self._spec["address"].rpartition(":")[2]), 0
        for file in Path("/proc/self/fd").iterdir():
            with suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as one:
                if one.family != socket.AF_UNIX and one.getpeername()[1] == port:
                    total += sum(struct.unpack_from("QQ", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136), 120))
        return total


def ranks(size: int, repeat: int, book: Book) -> None:
    for what, kind in (("ours", "rdzv"), ("torch", "tcpstore")):
        if what == "torch" and size > CONNECTED_MAX:
            continue
        turns = []
        for _ in range(repeat if what == "ours" else 1):
            with Server(kind) as server, Crowd("agents", server.address, size, of=what) as crowd:
                turns.append(crowd.form())
        figures = {name: [turn[name] for turn in turns] for name in turns[0]}
        book.add(what=what, engine=KINDS[what][1], n=size, mode="agents", **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=500)
    parser.add_argument("--agents", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book("store", args.out)
    operations(args.operations, book)
    for size in args.agents:
        ranks(size, args.repeat, book)


if __name__ == "__main__":
    main()
