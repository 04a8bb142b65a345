"""torchrun's handlers in threads: torch's own (c10d) and ours, made and called in the same way, by turns.

python bench/threads.py [--members 4 16 64] [--repeat 5] [--torch-repeat 3] [--processes 2] [--out bench/results]

n handlers, spread over two processes, a thread each; the server (a TCPStore for c10d, ours for rdzv) is one more process. All
handlers are made beforehand and call `next_rendezvous` at one instant; torch's have made their connection by then, ours make it
within the call. With n=2 the second comes when the first waits: from that arrival until both have the world.
"""

from __future__ import annotations

import argparse

from common import Book, Crowd, Server, allow_files

BACKENDS = {"ours": ("rdzv", "rdzv", "embedded"), "torch": ("tcpstore", "c10d", "TCPStore")}


class Crowds:
    """A crowd for each backend. Its processes stay, since importing torch takes them seconds; server and handlers are new."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._crowds: dict[str, Crowd] = {}

    def once(self, what: str, size: int) -> dict[str, float]:
        kind, backend, _ = BACKENDS[what]
        with Server(kind) as server:
            if what in self._crowds:
                self._crowds[what].prepare(server.address, size, backend=backend)
            else:
                new = Crowd("handlers", server.address, size, processes=self._processes, backend=backend)
                self._crowds[what] = new
            found = self._crowds[what].form(gap_s=2.5 if size == 2 else 0.0)
            self._crowds[what].leave()
            return found

    def stop(self) -> None:
        for crowd in self._crowds.values():
            crowd.stop()


def measure(size: int, repeats: dict[str, int], crowds: Crowds, book: Book) -> None:
    found: dict[str, list[dict[str, float]]] = {what: [] for what in BACKENDS}
    for turn in range(max(repeats.values())):
        for what in BACKENDS:
            if turn < repeats[what]:
                found[what].append(crowds.once(what, size))
    for what, turns in found.items():
        if turns:
            figures = {name: [turn[name] for turn in turns] for name in turns[0]}
            mode = "late" if size == 2 else "together"
            book.add(what=what, engine=BACKENDS[what][2], n=size, mode=mode, **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[2, 4, 16, 64])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--torch-repeat", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--name", default="threads")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book(args.name, args.out)
    crowds = Crowds(args.processes)
    try:
        for size in args.members:
            torch_repeat = args.torch_repeat if size <= 16 else 1  # From there on it takes many seconds, then minutes.
            measure(size, {"ours": args.repeat, "torch": torch_repeat}, crowds, book)
    finally:
        crowds.stop()


if __name__ == "__main__":
    main()
