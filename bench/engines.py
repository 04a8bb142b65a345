"""Forming on the other engines: etcd, and a register (one compare-and-set value) in torch's TCPStore.

python bench/engines.py [--engine etcd register] [--repeat 3] [--out bench/results]

As in form.py: cold, warm, again. The floor of etcd is `etcd_form.bare`: gRPC alone, as many puts and notifications. On a
register the members of one process share a line to it, which would flatter us, so they are spread over eight processes; and
warm only, since what takes time is the client of the TCPStore, which asks for the name of its own host. They connect one after
the other: a name server that is asked by all at once drops some of it, and is asked again after 5 s.
"""

from __future__ import annotations

import argparse
import asyncio

import etcd_form
from common import Book, Crowd, Server, allow_files, cpu_s

from rdzv.engines.etcd.server import EtcdServer

REGISTER_PROCESSES = 8
ETCD_HEADS = 2
"""An engine that forgets nothing has nobody to wait for: the first member begins the run, and later it is sealed."""
Found = dict[str, list[dict[str, float]]]


COLD = (("cold",), False)
WARM = (("warm", "again"), True)


def turn(
    crowd: Crowd, pid: int, found: Found, address: str, size: int, number: int, kinds: object, **more: object
) -> None:
    """Runs of which the engine has not heard."""
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
        address, pid = f"{etcd.url}/bench", etcd._guarded.pid
        for size in sizes:
            found: Found = {}
            with Crowd("members", address, size) as crowd:
                for number in range(repeat):
                    turn(crowd, pid, found, address, size, number, (COLD, WARM))
                    # Each member's record and line; settings, heads and journal.
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
