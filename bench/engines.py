"""Forming on the other engines: etcd, and a register (one compare-and-set value) in torch's TCPStore.

python bench/engines.py [--engine etcd register] [--repeat 3] [--out bench/results]

The modes are those of form.py: cold, warm, again. The floor of etcd is `etcd_form.bare`: gRPC alone, with as many puts and
notifications. On a register, the members of one process share a connection, which would make our figures too good, so they are
spread over eight processes. Only warm is measured there, because a cold start mostly measures the client of the TCPStore, which
looks up its own host name. The members connect one after the other: a name server that gets all requests at once drops some,
and each is repeated after 5 s.
"""

from __future__ import annotations

import argparse
import asyncio

import etcd_form
from common import Book, Crowd, Server, allow_files, cpu_s

from rdzv.engines.etcd.server import EtcdServer

REGISTER_PROCESSES = 8
ETCD_HEADS = 2
"""Heads written per forming. On a durable engine the first member begins the run at once; the other head is the seal."""
Found = dict[str, list[dict[str, float]]]


COLD = (("cold",), False)
WARM = (("warm", "again"), True)


def turn(
    crowd: Crowd, pid: int, found: Found, address: str, size: int, number: int, kinds: object, **more: object
) -> None:
    """Measure each mode once, in runs that are new to the engine."""
    for modes, warm in kinds:
        crowd.prepare(address, size, warm=warm, run_id=f"bench-{size}-{number}-{modes[0]}", **more)
        for mode in modes:
            before_s = cpu_s(pid)
            figures = crowd.form()
            figures["server_cpu_s"] = cpu_s(pid) - before_s
            found.setdefault(mode, []).append(figures)


def write(book: Book, engine: str, size: int, found: Found, **more: object) -> None:
    for mode, turns in found.items():
        figures = {name: [one[name] for one in turns] for name in turns[0]}
        what = {"what": "floor"} if mode == "floor" else {"what": "ours", "mode": mode}
        book.add(**what, engine=engine, n=size, **more, **figures)


def on_etcd(sizes: list[int], repeat: int, book: Book) -> None:
    with EtcdServer() as etcd:
        address, pid = f"{etcd.url}/bench", etcd.pid
        for size in sizes:
            found: Found = {}
            with Crowd("members", address, size) as crowd:
                for number in range(repeat):
                    turn(crowd, pid, found, address, size, number, (COLD, WARM))
                    # A record and an entry for each member; settings, heads and journal.
                    bare_s = asyncio.run(etcd_form.bare(etcd, size, 2 * size + 6, ETCD_HEADS * size))
                    found.setdefault("floor", []).append({"took_s": bare_s})
            write(book, "etcd", size, found)


def on_register(sizes: list[int], repeat: int, book: Book) -> None:
    with Server("tcpstore") as server:
        address = f"c10d://{server.address}"
        with Crowd("members", address, max(sizes), processes=REGISTER_PROCESSES) as crowd:
            for size in sizes:
                found: Found = {}
                for number in range(repeat):
                    turn(crowd, server.pid, found, address, size, number, (WARM,), at_once=1)
                write(book, "register", size, found, processes=REGISTER_PROCESSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", nargs="+", default=["etcd", "register"], choices=["etcd", "register"])
    parser.add_argument("--etcd-members", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--register-members", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book("engines", args.out)
    if "etcd" in args.engine:
        on_etcd(args.etcd_members, args.repeat, book)
    if "register" in args.engine:
        on_register(args.register_members, args.repeat, book)


if __name__ == "__main__":
    main()
