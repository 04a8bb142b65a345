"""Rendezvous handlers of torchrun in threads: torch's own (c10d) and ours, made and called in the same way, by turns.

python bench/threads.py [--members 2 4 64] [--hosted 64] [--repeat 5] [--torch-repeat 3] [--processes 2] [--out bench/results]

n handlers, spread over two processes, have a thread each; the server (a TCPStore for c10d, ours for rdzv) is one more process.
All handlers are made in advance, with their connections, and call `next_rendezvous` at one instant. With n=2 the second calls
when the first waits; the time is from that call until both have the world.

"Hosted" is torchrun without a separate server: the first handler serves, in its process, beside the threads of the others.
"""

from __future__ import annotations

import argparse
import itertools

from common import Book, Crowd, Server, allow_files

from rdzv.engines.etcd.server import free_ports

LIMIT_S = 200
"""Some calls of torch never end: handlers that lose a compare-and-swap all retry together."""
BACKENDS = {"ours": ("rdzv", "rdzv", "embedded"), "torch": ("tcpstore", "c10d", "TCPStore")}


class Side:
    """One of the two backends: its server, and processes that stay, because importing torch takes seconds."""

    def __init__(self, what: str, processes: int) -> None:
        kind, self._backend, self.engine = BACKENDS[what]
        self._processes = processes
        self._server = Server(kind)
        self._crowd: Crowd | None = None
        self._runs = itertools.count()

    def once(self, size: int, hosted: bool) -> dict[str, float]:
        spec = {"backend": self._backend, "run_id": f"bench{next(self._runs)}", "hosted": hosted, "limit_s": LIMIT_S}
        address = f"127.0.0.1:{free_ports(1)[0]}" if hosted else self._server.address
        if self._crowd is None:
            self._crowd = Crowd("handlers", address, size, processes=self._processes, **spec)
        else:
            self._crowd.prepare(address, size, **spec)
        try:
            found = self._crowd.form(gap_s=2.5 if size == 2 else 0.0)
            self._crowd.leave()
        except RuntimeError as problem:
            if "RendezvousTimeoutError" not in str(problem):
                raise
            crowd, self._crowd = self._crowd, None
            crowd.kill()
            return {"took_s": LIMIT_S, "last_s": LIMIT_S, "given_up_s": LIMIT_S}
        return found

    def stop(self) -> None:
        if self._crowd is not None:
            self._crowd.stop()
        self._server.stop()


def measure(size: int, hosted: bool, repeats: dict[str, int], sides: dict[str, Side], book: Book) -> None:
    found: dict[str, list[dict[str, float]]] = {what: [] for what in sides}
    for turn in range(max(repeats.values())):
        for what, side in sides.items():
            if turn < repeats[what]:
                found[what].append(side.once(size, hosted))
    for what, turns in found.items():
        if turns:
            figures = {name: [turn[name] for turn in turns if name in turn] for turn in turns for name in turn}
            mode = "hosted" if hosted else "late" if size == 2 else "together"
            book.add(what=what, engine=sides[what].engine, n=size, mode=mode, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="*", default=[2, 4, 64])
    parser.add_argument("--hosted", type=int, nargs="*", default=[64])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--torch-repeat", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--name", default="threads")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book(args.name, args.out)
    sides = {what: Side(what, args.processes) for what in BACKENDS}
    try:
        for size, hosted in (*((size, False) for size in args.members), *((size, True) for size in args.hosted)):
            torch_repeat = args.torch_repeat if size <= 64 else 1  # Above 64 it takes minutes.
            measure(size, hosted, {"ours": args.repeat, "torch": torch_repeat}, sides, book)
    finally:
        for side in sides.values():
            side.stop()


if __name__ == "__main__":
    main()
