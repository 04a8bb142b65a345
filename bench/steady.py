"""The cost of idle members: bytes and CPU per second of a member, CPU and memory of the server.

python bench/steady.py [--members 10 100 1000 10000] [--idle 10] [--out bench/results]

Default settings: a lease of 10 s, renewed every third of it. Members, server and the relay that counts bytes (tap.py) run in
different processes, so the CPU of each is its own. Memory is the growth of the server's RSS from n members to three times as
many: memory that the allocator keeps after a burst counts, that of the program itself does not. Above 2,000 members there is no
relay and no count of bytes: a tenth of the members come first, and the memory is what the others add.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from common import Book, Crowd, Server, allow_files, cpu_s
from tap import Tap

TAPPED_MAX = 2000


async def steady(size: int, idle_s: float, book: Book) -> None:
    with Server() as server:
        async with Tap(server.address) as tap:
            first = await asyncio.to_thread(Crowd, "members", tap.address, size, run_id="first")
            with first:
                await asyncio.to_thread(first.form)
                await asyncio.sleep(1.0)
                tap.reset()
                before_s, members_before_s = server.cpu_s(), cpu_s(first.pids[0])
                await asyncio.sleep(idle_s)
                total = tap.total()
                figures = {
                    "bytes_per_second": total.bytes / size / idle_s,
                    "frames_per_second": total.frames / size / idle_s,
                    "member_cpu": (cpu_s(first.pids[0]) - members_before_s) / size / idle_s,
                    "server_cpu": (server.cpu_s() - before_s) / idle_s,
                }
                before_kib = server.rss_kib()
                second = await asyncio.to_thread(Crowd, "members", server.address, 2 * size, run_id="second")
                with second:
                    await asyncio.to_thread(second.form)
                    await asyncio.sleep(1.0)
                    figures["kb_per_member"] = (server.rss_kib() - before_kib) * 1.024 / (2 * size)
                    await asyncio.to_thread(second.stop)
                await asyncio.to_thread(first.stop)
    book.add(what="ours", engine="embedded", n=size, idle_for_s=idle_s, **figures)


def steady_many(size: int, idle_s: float, book: Book) -> None:
    """Measure the server alone, with members in many processes."""
    few = size // 10
    with Server() as server, crowd_of(few, server, "first") as first:
        first.form()
        time.sleep(1.0)
        before_kib = server.rss_kib()
        with crowd_of(size - few, server, "second") as second:
            second.form()
            time.sleep(1.0)
            kb = (server.rss_kib() - before_kib) * 1.024 / (size - few)
            before_s, began_at = server.cpu_s(), time.monotonic()
            time.sleep(idle_s)
            used = (server.cpu_s() - before_s) / (time.monotonic() - began_at)
            second.kill()
        first.kill()
    book.add(what="ours", engine="embedded", n=size, idle_for_s=idle_s, server_cpu=used, kb_per_member=kb)


def crowd_of(size: int, server: Server, run_id: str) -> Crowd:
    processes = -(-size // 500)
    return Crowd("members", server.address, size, processes=processes, run_id=run_id, warm=True, at_once=800 // processes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--idle", type=float, default=10.0)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book("steady", args.out)
    for size in args.members:
        if size <= TAPPED_MAX:
            asyncio.run(steady(size, args.idle, book))
        else:
            steady_many(size, args.idle, book)


if __name__ == "__main__":
    main()
