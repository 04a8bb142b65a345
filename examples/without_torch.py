"""An elastic program without torch, and without any import of rdzv: it reads the environment that `rdzv run` sets.

On each node (on one machine: in several shells, with `--conf slot=a`, `slot=b` and so on):

    rdzv run node1:29400 --run-id pi --nnodes 1:4 --max-restarts 10 -- python without_torch.py --progress shared/pi.json

All ranks together add up the area under 4 / (1 + x^2), slice by slice. Rank 0 listens at MASTER_ADDR:MASTER_PORT, which no
other program uses in this round, and collects the parts. When a node is lost or joins, `rdzv run` stops every program and
starts it again in the new world. The program then continues after the last slice in the progress file.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESS = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
POINTS = 10_000
"""The number of points per slice."""
PATIENCE_S = 60.0
"""Timeout for peers. If one is lost, `rdzv run` normally stops this program long before."""


def area(piece: int, pieces: int) -> float:
    """Return this rank's part of a slice."""
    width = 1 / (pieces * POINTS)
    first = piece * POINTS
    return sum(4 / (1 + ((first + n + 0.5) * width) ** 2) for n in range(RANK, POINTS, SIZE)) * width


class Peers:
    """Connections between rank 0 and the other ranks."""

    def __init__(self) -> None:
        if RANK == 0:
            with socket.create_server(ADDRESS, family=socket.AF_INET6 if ":" in ADDRESS[0] else socket.AF_INET) as server:
                server.settimeout(PATIENCE_S)
                connections = [server.accept()[0] for _ in range(SIZE - 1)]
        else:
            connections = [self._dial()]
        for connection in connections:
            connection.settimeout(PATIENCE_S)
        self._files = [connection.makefile("rw") for connection in connections]

    @staticmethod
    def _dial() -> socket.socket:
        """Connect to rank 0, and retry while its program does not listen yet."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return socket.create_connection(ADDRESS, timeout=PATIENCE_S)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def tell(self, value: float) -> None:
        """Send a value to all peers."""
        for file in self._files:
            file.write(f"{value!r}\n")
            file.flush()

    def hear(self) -> list[float]:
        """Receive one value from each peer."""
        return [float(file.readline()) for file in self._files]  # A lost peer gives '', so float() raises.


def main() -> None:
    """Rank 0 sends the number of the next slice and saves the result. A number below 0 means the end."""
    parser = argparse.ArgumentParser(description="an elastic sum")
    parser.add_argument("--progress", type=Path, required=True, help="a file that all nodes can reach")
    parser.add_argument("--slices", type=int, default=200)
    parser.add_argument("--slice-s", type=float, default=0.05, help="the least time a slice takes, to have time to watch")
    args = parser.parse_args()
    peers = Peers()
    if RANK > 0:
        while (piece := int(peers.hear()[0])) >= 0:
            peers.tell(area(piece, args.slices))
        return
    piece, total = json.loads(args.progress.read_text()) if args.progress.exists() else (0, 0.0)
    print(f"world of {SIZE} in round {os.environ['RDZV_ROUND']}, from slice {piece}", flush=True)
    while piece < args.slices:
        peers.tell(piece)
        total += area(piece, args.slices) + sum(peers.hear())
        piece += 1
        part = args.progress.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps([piece, total]))
        part.replace(args.progress)
        time.sleep(args.slice_s)
    peers.tell(-1)
    print(f"done in a world of {SIZE}: {total:.8f}", flush=True)


if __name__ == "__main__":
    main()
