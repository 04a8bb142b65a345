"""Three processes that stay (`rdzv.torch.rounds`) and do nothing but all-reduce: what a loss, a newcomer and a drain cost.

python bench/stay.py [--linger 1 0.1] [--repeat 5] [--limit 60] [--out bench/results]

  shrunk    SIGKILL of a process that follows, until both survivors have completed an all-reduce in the next round
  beheaded  the same with the process that leads the run
  grown     a newcomer is let in: longest time between two all-reduces of a survivor, from one round to the next
  drained   one of four processes gets SIGTERM: the same

The default linger is 1 s. For comparison, three torchrun agents with torch's own rendezvous (c10d) lose one, once, as in
bench/recover.py: SIGKILL until the survivors train in a world of two, given up after the limit. 0 leaves that out.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from common import Book
from recover import measure

from support.staying import StayingJob, StayingProcess

PARTS = ("shrunk", "beheaded", "grown", "drained")
CALM_S = 1.0
"""Time between two events, so that each finds a round that runs."""


def interruption_s(survivors: list[StayingProcess], size: int, after: float) -> float:
    """Wait for a round of that size, and return the longest time between two all-reduces of a survivor."""
    gaps = []
    for one in survivors:
        first = one.until("step", size=size, after=after)
        last = [row.last for row in one.rows("stopped") if row.round < first.round][-1]
        gaps.append(first.at - last)
    return max(gaps)


def leader_of(job: StayingJob, living: list[StayingProcess]) -> StayingProcess:
    command = [sys.executable, "-m", "rdzv", "status", job.server.endpoint, "--run-id", "job", "--json"]
    status = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    return next(one for one in living if status["leader"].endswith(f"/{one.name}"))


def play(folder: Path, linger_s: float, repeat: int) -> dict[str, list[float]]:
    took: dict[str, list[float]] = {part: [] for part in PARTS}
    settings = {"linger": linger_s, "drain_settle": 0.1}
    with StayingJob(folder, (2, 4), only_reduce=True, settings=settings) as job:
        living = job.begin("abc")
        for turn in range(repeat):
            for part in ("shrunk", "beheaded"):
                time.sleep(CALM_S)
                leader = leader_of(job, living)
                killed = leader if part == "beheaded" else next(one for one in living if one is not leader)
                living.remove(killed)
                killed_at = time.monotonic()
                killed.kill()
                took[part].append(max(one.until("step", size=2, after=killed_at).at for one in living) - killed_at)
                for size in (3, 4) if part == "beheaded" else (3,):
                    time.sleep(CALM_S)
                    begun_at = time.monotonic()
                    newcomer = job.start(f"n{turn}{part[0]}{size}")
                    took["grown"].append(interruption_s(living, size, begun_at))
                    living.append(newcomer)
                    newcomer.until("step", size=size)
            time.sleep(CALM_S)
            told_at = time.monotonic()
            drained = living.pop(turn % 4)
            drained.send(signal.SIGTERM)
            took["drained"].append(interruption_s(living, 3, told_at))
            drained.ends()
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--linger", nargs="+", type=float, default=[1.0, 0.1])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds after which torch is given up; 0: torch is left out")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    book = Book("stay", args.out)
    for linger_s in args.linger:
        with tempfile.TemporaryDirectory() as folder:
            took = play(Path(folder), linger_s, args.repeat)
        case = {"what": "ours", "engine": "embedded", "n": 3, "mode": f"linger {linger_s:g} s"}
        book.add(**case, **{f"{part}_s": took[part] for part in PARTS})
    if args.limit:
        shrunk = measure("c10d", "collectives", "other", args.limit).get("shrunk")
        case = {"what": "torch", "engine": "TCPStore", "n": 3, "mode": "torchrun, c10d", "limit_s": args.limit}
        book.add(**case, shrunk_s=[] if shrunk is None else [shrunk])


if __name__ == "__main__":
    main()
