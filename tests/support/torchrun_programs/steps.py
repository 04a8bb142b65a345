"""A worker that counts steps into a file that all nodes share, and goes on from there: training without the mathematics.

It ends with the exit code that the test writes into the file `finish`. On SIGTERM, rank 0 takes its time to save.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

SAVE_S = 1.5
FOLDER = Path(os.environ.get("SLURM_SUBMIT_DIR", "."))
RANK, FENCE = int(os.environ["RANK"]), int(os.environ["RDZV_FENCE"])


def write(name: str, text: str) -> None:
    part = FOLDER / f"{name}.{FENCE}.part"
    part.write_text(text)
    part.replace(FOLDER / name)


def main() -> None:
    signal.alarm(3600)  # No test lasts an hour: without this it would go on for ever if the test is killed.
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    step = int((FOLDER / "steps").read_text()) if (FOLDER / "steps").exists() else 0
    print(f"fence {FENCE}: rank {RANK} of {os.environ['WORLD_SIZE']} from step {step}", flush=True)  # noqa: T201
    finish = FOLDER / "finish"
    while not finish.exists():
        time.sleep(0.1)
        step += 1
        if stopping and RANK == 0:
            time.sleep(SAVE_S)
            write("saved", str(step))
        if stopping:
            sys.exit(128 + stopping[0])
        if RANK == 0:
            write("steps", str(step))
    sys.exit(int(finish.read_text()))


if __name__ == "__main__":
    main()
