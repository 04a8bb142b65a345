"""The round's store compared with torch's TCPStore and a bare etcd; and assigning ranks to the workers of 1,000 agents.

python bench/store.py [--operations 500] [--agents 100 1000] [--repeat 5] [--out bench/results]

Eight clients, each a process with its own connection; the server is another process. Latency: one client, one operation after
the other. Throughput: all eight at once. `wait`: from the call that sets a key until a client that waits for it returns. The
systems take turns, so that other load on the machine affects all of them.
Our operations are fenced and exactly once (docs/protocol.md), those of the others are not; a TCPStore's `set` does not wait for
a reply. A bare etcd has no `add`.
Ranks: torch's agent code on our agent store and on a TCPStore, by turns, and the time that forming the round took before; bytes
are the payload of all connections as the kernel counts.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

from common import Book, Crowd, Server, allow_files

from rdzv import Rendezvous

CLIENTS = 8
KEY, VALUE = "k", b"x" * 100
CONNECTED_MAX = 100
"""Most clients of one TCPStore: each looks up its own host name, one after the other."""
LIMIT_S = 120.0
WORKERS = 8


def ours(address: str, index: int):
    member = Rendezvous(address, run_id="bench", min_nodes=CLIENTS, max_nodes=CLIENTS, slot=str(index), is_host=False)
    return member.join(LIMIT_S).store, member.leave


def torchs(address: str, _index: int):
    from torch.distributed import TCPStore  # noqa: PLC0415  Seconds.

    host, port = address.split(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False), bool


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


def etcds(address: str, _index: int):
    import grpc  # noqa: PLC0415

    from rdzv.engines.etcd.client import messages  # noqa: PLC0415

    channel = grpc.insecure_channel(address)
    return EtcdStore(channel, messages), channel.close


@contextmanager
def etcd_server():
    from rdzv.engines.etcd.server import EtcdServer  # noqa: PLC0415

    with EtcdServer() as etcd:
        yield SimpleNamespace(address=etcd.get_endpoint())


KINDS = {
    "ours": (ours, "embedded", Server),
    "torch": (torchs, "TCPStore", lambda: Server("tcpstore")),
    "etcd": (etcds, "etcd", etcd_server),
}


# ---- clients


def client(kind: str, address: str, index: int, pipe) -> None:
    """Serve one client's orders: (name, count, at), until None."""
    store, stop = KINDS[kind][0](address, index)
    own = f"{KEY}{index}"
    store.set(own, VALUE)
    names = ("set", "get", "add") if hasattr(store, "add") else ("set", "get")
    pipe.send(names)
    acts = {
        "set": lambda _: store.set(own, VALUE),
        "get": lambda _: store.get(own),
        "add": lambda _: store.add(own + "+", 1),
        "put": lambda number: store.set(f"wait{number}", VALUE),
        "wait": lambda number: store.wait([f"wait{number}"]),
    }
    while (order := pipe.recv()) is not None:
        name, numbers, at = order
        act, took = acts[name], []
        time.sleep(max(0.0, at - time.monotonic()))
        for number in numbers:
            began_at = time.perf_counter()
            act(number)
            took.append(time.perf_counter() - began_at)
        pipe.send((statistics.median(took), time.monotonic()))
    stop()


class Clients:
    """Eight processes, each with a client of one server."""

    def __init__(self, kind: str, stack: ExitStack) -> None:
        self.engine = KINDS[kind][1]
        server = stack.enter_context(KINDS[kind][2]())
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        for index in range(CLIENTS):
            pipe, theirs = context.Pipe()
            process = context.Process(target=client, args=(kind, server.address, index, theirs), daemon=True)
            process.start()
            stack.callback(self._stop, process, pipe)
            self._pipes.append(pipe)
        (self.names,) = {self._hear(pipe) for pipe in self._pipes}
        self._waits = 0

    def figures(self, count: int) -> dict[str, float]:
        """Measure everything once."""
        found = {f"{name}_s": self._ask(0, name, range(count))[0] for name in self.names}
        found["wait_s"] = statistics.median(self._waited() for _ in range(max(10, count // 20)))
        return found | {f"{name}s_per_second": self._throughput(name, count) for name in self.names}

    def _throughput(self, name: str, count: int) -> float:
        """Return the operations per second of all clients, each on its own key."""
        at = time.monotonic() + 0.1
        for pipe in self._pipes:
            pipe.send((name, range(count), at))
        return CLIENTS * count / (max(self._hear(pipe)[1] for pipe in self._pipes) - at)

    def _waited(self) -> float:
        number = [self._waits]
        self._waits += 1
        self._pipes[1].send(("wait", number, 0.0))
        at = time.monotonic() + 0.02  # Let it begin to wait.
        self._ask(0, "put", number, at)
        return self._hear(self._pipes[1])[1] - at

    def _ask(self, index: int, name: str, numbers, at: float = 0.0):
        self._pipes[index].send((name, numbers, at))
        return self._hear(self._pipes[index])

    @staticmethod
    def _hear(pipe):
        if not pipe.poll(LIMIT_S):
            raise RuntimeError("a client does not answer")
        return pipe.recv()

    @staticmethod
    def _stop(process, pipe) -> None:
        with suppress(OSError):
            pipe.send(None)
        process.join(10.0)
        process.kill()


def operations(count: int, repeat: int, book: Book) -> None:
    with ExitStack() as stack:
        systems = {what: Clients(what, stack) for what in KINDS}
        turns: dict[str, list[dict[str, float]]] = {what: [] for what in KINDS}
        for _ in range(repeat):
            for what, clients in systems.items():
                turns[what].append(clients.figures(count))
    found = {what: {name: [turn[name] for turn in of] for name in of[0]} for what, of in turns.items()}
    for what, figures in found.items():
        book.add(what=what, engine=KINDS[what][1], n=CLIENTS, **figures)
    judge(found)


def judge(found: dict[str, dict[str, list[float]]]) -> None:
    """Print the ratios that are asked for."""
    medians = {what: {name: statistics.median(of) for name, of in figures.items()} for what, figures in found.items()}
    mine, torch, etcd = medians["ours"], medians["torch"], medians["etcd"]
    for name in ("get", "set"):
        show(f"{name}: at most 6 times the latency of TCPStore's get", mine[f"{name}_s"] / torch["get_s"], 6.0, is_most=True)
        rate = mine[f"{name}s_per_second"]
        show(f"{name}s per second: at least a third of TCPStore's gets", rate / torch["gets_per_second"], 1 / 3)
        show(f"{name}s per second: at least twice etcd's", rate / etcd[f"{name}s_per_second"], 2.0)


def show(asked: str, ratio: float, limit: float, *, is_most: bool = False) -> None:
    print(f"{'met' if (ratio <= limit if is_most else ratio >= limit) else 'MISSED':7} {asked}: {ratio:.2f}", flush=True)


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
            began_at = time.monotonic()
            self._agents = list(pool.map(self._ours if is_ours else self._torchs, range(self._count)))
            self._formed_s = time.monotonic() - began_at
        self._before = self._bytes()

    def _ours(self, index: int) -> tuple:
        from rdzv.torchrun.agent_store import AgentStore  # noqa: PLC0415

        size = self._count
        member = Rendezvous(
            self._spec["address"], run_id="bench", min_nodes=size, max_nodes=size, slot=str(index), is_host=False
        )
        # As the handler does: it sees how many workers its agent starts, and the ranks are sealed with the round.
        world = member.join(LIMIT_S, workers=WORKERS, role="trainer")
        return world.rank, AgentStore(world, SimpleNamespace(learn_workers=lambda *_: True)), member

    def _torchs(self, index: int) -> tuple:
        from torch.distributed import TCPStore  # noqa: PLC0415

        host, port = self._spec["address"].split(":")
        return index, TCPStore(host, int(port), is_master=False, wait_for_workers=False), None

    def form(self, index: int) -> None:
        from torch.distributed.elastic.agent.server.api import SimpleElasticAgent  # noqa: PLC0415

        rank, store, _ = self._agents[index]
        worker = SimpleNamespace(role="trainer", local_world_size=WORKERS)
        self._found[index] = SimpleElasticAgent._assign_worker_ranks(None, store, rank, self._count, worker)

    def check(self) -> None:
        ranks = {worker.global_rank for workers in self._found for worker in workers}
        assert ranks == set(range(WORKERS * self._count))

    def extra(self) -> dict:
        formed = {"formed_s": self._formed_s} if self._spec["of"] == "ours" else {}
        return {"bytes": (self._bytes() - self._before) / self._count, **formed}

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
    sides = {"ours": "rdzv"} if size > CONNECTED_MAX else {"ours": "rdzv", "torch": "tcpstore"}
    turns: dict[str, list[dict]] = {what: [] for what in sides}
    for _ in range(repeat):
        for what, kind in sides.items():
            with Server(kind) as server, Crowd("agents", server.address, size, of=what) as crowd:
                turns[what].append(crowd.form())
    found = {what: {name: [turn[name] for turn in of] for name in of[0]} for what, of in turns.items()}
    for what, figures in found.items():
        book.add(what=what, engine=KINDS[what][1], n=size, mode="agents", **figures)
    took_s = statistics.median(found["ours"]["took_s"])
    if "torch" in found:
        ratio = took_s / statistics.median(found["torch"]["took_s"])
        show(f"ranks of {size} agents: no slower than by TCPStore", ratio, 1.0, is_most=True)
    ratio = took_s / statistics.median(found["ours"]["formed_s"])
    show(f"ranks of {size} agents: at most twice the time of forming", ratio, 2.0, is_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=500)
    parser.add_argument("--agents", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book("store", args.out)
    operations(args.operations, args.repeat, book)
    for size in args.agents:
        ranks(size, args.repeat, book)


if __name__ == "__main__":
    main()
