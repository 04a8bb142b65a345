"""Forming: n members start together. Measures the time until the last has its world and the cost, beside floor and peer.

python bench/form.py [--what cold warm floor lighthouse] [--members 2 64 1000 10000] [--repeat 5] [--out bench/results]

  cold        with connecting
  warm        connections are made in advance; all join
  again       (with warm) all hold a round, give it up and join again
  crowded     warm, 1,000 members in as many processes as 10,000 have: what more processes cost, without more members
  late        all but one wait: from the arrival of the last until all have their world (the only mode with two members)
  floor       the same exchange by bare protocols (floor.py)
  lighthouse  torchft: all request one quorum, connected in advance

Server and members run in different processes. Counts come from one more repetition that is not timed (tap.py). A process has
500 members at most, and 16 or more are spread over two processes, unless `--processes` says otherwise; in a job each has its
own. (The clients of the lighthouse wait outside of Python and share one process.)
"""

from __future__ import annotations

import argparse
import asyncio

from common import Book, Crowd, Server, allow_files
from tap import Tap

WHAT = ("cold", "warm", "crowded", "late", "floor", "lighthouse")
CROWD = 500
"""Most members of one process."""
SPREAD = 16
"""Members from which on there are two processes."""
PEERS_MAX = 1000
"""Most members of the lighthouse, whose time grows as n squared, and of a cold start, which shows nothing new above."""
CROWDED = 20
"""Processes of 10,000 members."""
COUNTED_MAX = 4000
"""Most members whose frames are counted: the relay needs two files for each, and counts do not change above."""
STRANGERS = 800
"""Most connections that are being made at once. A server keeps no more than 1,000 that have not said hello."""
LATE = (2, 64, 1000)
"""Sizes of the late mode: it takes a second per thousand members until all but one wait."""


def crowds(what: str, size: int) -> int:
    """Return the number of processes for so many members."""
    if what == "crowded":
        return CROWDED
    if what == "lighthouse" or size < SPREAD:
        return 1
    return max(2, -(-size // CROWD))


def once(what: str, size: int, processes: int, exchange: dict[str, int]) -> dict[str, dict[str, float]]:
    """Run one repetition on a fresh server and return the figures by mode."""
    server = Server("lighthouse", str(size)) if what == "lighthouse" else Server()
    kind = {"floor": "floor", "lighthouse": "lighthouse"}.get(what, "members")
    how = {"warm": what != "cold", "at_once": min(200, STRANGERS // processes), **exchange}
    with server, Crowd(kind, server.address, size, processes=processes, **how) as crowd:
        modes = {"warm": ("warm", "again")}.get(what, (what,))
        found = {}
        for mode in modes:
            before_s = server.cpu_s()
            found[mode] = crowd.form(gap_s=0.3 + size / 1000 if mode == "late" else 0.0)
            found[mode]["server_cpu_s"] = server.cpu_s() - before_s
        crowd.kill()  # The server ends, too, so nobody needs to leave.
        return found


async def count(size: int, kind: str = "members", **exchange: int) -> dict[str, dict[str, float]]:
    """Return requests, frames and bytes per member, of forming and of forming again.

    The relay slows members down. The long lease keeps the count free of members that could not renew in time.
    """
    found = {}
    patient = {"lease": 120}
    with Server() as server:
        async with Tap(server.address) as tap:
            crowd = await asyncio.to_thread(Crowd, kind, tap.address, size, warm=True, settings=patient, **exchange)
            try:
                for mode in ("warm", "again") if kind == "members" else ("floor",):
                    tap.reset()
                    await asyncio.to_thread(crowd.form)
                    total = tap.total()
                    found[mode] = {
                        "requests": total.requests / size,
                        "txns": total.txns / size,
                        "news": total.told["WatchNews"] / size,
                        "bytes": total.bytes / size,
                    }
            finally:
                await asyncio.to_thread(crowd.stop)
    return found


def exchange_of(size: int = 64) -> dict[str, int]:
    """Return the transactions and heads of a real join, for the floor to repeat."""
    counts = asyncio.run(count(size))["warm"]
    return {"joins": int(counts["txns"]), "heads": int(counts["news"])}


def measure(size: int, whats: list[str], repeat: int, processes: int, exchange: dict[str, int], book: Book) -> None:
    """Measure the kinds by turns, so that other load on the node hits all alike."""
    skipped = {"lighthouse": size > PEERS_MAX, "cold": size > PEERS_MAX, "crowded": size != 1000, "late": size not in LATE}
    whats = [what for what in whats if not skipped.get(what) and (size > 2 or what == "late")]
    counts = asyncio.run(count(size)) if "warm" in whats and size <= COUNTED_MAX else {}
    if "floor" in whats and size <= PEERS_MAX:
        counts |= asyncio.run(count(size, "floor", **exchange))
    found: dict[str, list[dict[str, float]]] = {}
    failed = 0
    for _ in range(repeat):
        for what in whats:
            try:
                figures_by_mode = once(what, size, processes or crowds(what, size), exchange)
            except RuntimeError as problem:  # For example on a node too busy for so many members.
                failed += 1
                print(f"{what}, n={size}: {problem}", flush=True)
                continue
            for mode, figures in figures_by_mode.items():
                found.setdefault(mode, []).append(figures)
    for mode, turns in found.items():
        figures = {name: [turn[name] for turn in turns] for name in turns[0]}
        what = mode if mode in ("floor", "lighthouse") else "ours"
        engine = "torchft" if mode == "lighthouse" else "embedded"
        more = {} if what != "ours" else {"mode": mode}
        if failed:
            more["failed"] = failed
        book.add(what=what, engine=engine, n=size, **more, **figures, **counts.get(mode, {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", nargs="+", default=list(WHAT), choices=WHAT)
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 64, 256, 1000, 4000, 10_000])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--processes", type=int, default=0, help="0: as said above")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book("form", args.out)
    exchange = exchange_of()
    for size in args.members:
        measure(size, args.what, args.repeat, args.processes, exchange, book)


if __name__ == "__main__":
    main()
