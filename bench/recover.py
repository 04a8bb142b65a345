"""An elastic job of three torchrun agents on this node, with torch's own rendezvous and with rdzv, by turns.

python bench/recover.py [--backend rdzv c10d] [--mode idle collectives] [--victim other rank0 server] [--turns 1] [--limit 60]
                        [--out bench/results]

In each turn, three agents form a world (`--nnodes 2:3`). One is killed with its worker, and the survivors train in a world of
two. A fresh agent starts, and they train in a world of three. Agents are ordinary processes, so their start includes the import
of torch; in mode `collectives` that of the workers does, too. A missing part, and all parts after it, did not happen within the
limit.

  formed    first agent started, until all three train
  told      SIGKILL, until `num_nodes_waiting()` was above 0 at the last survivor
  returned  last survivor ready (it called `next_rendezvous`), until all calls had returned
  shrunk    SIGKILL, until the survivors train in a world of two
  grown     fresh agent ready, until all train in a world of three
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import Book

from support.torchrun_jobs import Job

NODES = ("a", "b", "c")
PARTS = ("formed", "told", "returned", "shrunk", "grown")


class Turn:
    """One job, and the time of each part."""

    def __init__(self, job: Job, victim: str, limit_s: float) -> None:
        self._job = job
        self._victim = victim
        self._limit_s = limit_s
        self.took: dict[str, float] = {}

    def play(self) -> None:
        began_at = time.monotonic()
        for node in NODES:
            self._start(node)
        rows = self._job.world(NODES, 3, timeout_s=self._limit_s)
        self.took["formed"] = max(row.at for row in rows.values()) - began_at
        time.sleep(2)
        victim = self._choose(rows)
        survivors = [node for node in NODES if node != victim]
        killed_at = self._job.agents[victim].kill()
        after = self._job.world(survivors, 2, after=killed_at, timeout_s=self._limit_s)
        self.took["shrunk"] = max(row.at for row in after.values()) - killed_at
        told = [row.at for row in self._job.rows("told", after=killed_at)]
        if told:  # After a failed collective, an agent joins again without being told.
            self.took["told"] = max(told) - killed_at
        joins, joined = self._job.rows("joins", after=killed_at), self._job.rows("joined", after=killed_at)
        self.took["returned"] = joined[-1].at - joins[-1].at
        time.sleep(2)
        self._start("fresh")
        ready = self._job.row("joins", "fresh", timeout_s=self._limit_s)
        grown = self._job.world([*survivors, "fresh"], 3, after=ready.at, timeout_s=self._limit_s)
        self.took["grown"] = max(row.at for row in grown.values()) - ready.at

    def _start(self, node: str) -> None:
        if self._job.backend == "c10d":
            self._job.agent(node, is_host=str(node == "a").lower())
        else:
            self._job.agent(node)

    def _choose(self, rows) -> str:
        if self._victim == "rank0":
            return next(node for node in NODES if rows[node].rank == 0)
        server = self._job.server()
        if self._victim == "server":
            return server
        return next(node for node in NODES if node != server and rows[node].rank > 0)


def measure(backend: str, mode: str, victim: str, limit_s: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder, Job(Path(folder), "2:3", backend=backend, mode=mode, max_restarts=50) as job:
        turn = Turn(job, victim, limit_s)
        try:
            turn.play()
        except AssertionError as late:
            print(f"  {backend}: {str(late).splitlines()[0]}", file=sys.stderr)
        return turn.took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", nargs="+", default=["rdzv", "c10d"])
    parser.add_argument("--mode", nargs="+", default=["idle", "collectives"], choices=["idle", "collectives"])
    parser.add_argument("--victim", nargs="+", default=["other"], choices=["other", "rank0", "server"])
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which a part is given up")
    parser.add_argument("--name", default="recover")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    book = Book(args.name, args.out)
    for mode in args.mode:
        for victim in args.victim:
            found: dict[str, list[dict[str, float]]] = {backend: [] for backend in args.backend}
            for _ in range(args.turns):
                for backend in args.backend:
                    found[backend].append(measure(backend, mode, victim, args.limit))
            for backend, turns in found.items():
                what, engine = ("torch", "TCPStore") if backend == "c10d" else ("ours", "embedded")
                parts = {f"{part}_s": [took[part] for took in turns if part in took] for part in PARTS}
                case = {"n": 3, "mode": mode, "victim": victim, "survived": f"{len(parts['grown_s'])} of {args.turns}"}
                book.add(what=what, engine=engine, **case, limit_s=args.limit, **parts)


if __name__ == "__main__":
    main()
