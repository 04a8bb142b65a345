"""Notice: one of n members is killed (SIGKILL). Measures the time until the last of the others was told.

python bench/notice.py [--engine embedded] [--members 3 100 1000] [--repeat 3] [--out bench/results]

The killed member has its own process and joined last, so it does not lead. With default settings, a broken connection to the
embedded server may come back within the linger of 1 s, which is most of the time measured. On etcd, most of it is the time
that the sentinel of the killed process needs to import gRPC.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from common import Book, Crowd, Server, allow_files

from rdzv.engines.etcd.server import EtcdServer


@contextmanager
def serving(engine: str) -> Iterator[str]:
    if engine == "etcd":
        with EtcdServer() as etcd:
            yield f"{etcd.url}/bench"
    else:
        with Server() as server:
            yield server.address


def once(engine: str, size: int) -> float:
    with serving(engine) as address, Crowd("members", address, size, alone=True) as crowd:
        crowd.form(gap_s=0.5 + size / 1000)
        told = crowd.told()
        time.sleep(0.5)  # Let all begin to wait.
        killed_at = time.monotonic()
        os.kill(crowd.pids[-1], signal.SIGKILL)
        return told() - killed_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", nargs="+", default=["embedded"], choices=["embedded", "etcd"])
    parser.add_argument("--members", type=int, nargs="+", default=[3, 100, 1000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book("notice", args.out)
    for engine in args.engine:
        for size in args.members:
            book.add(what="ours", engine=engine, n=size, told_s=[once(engine, size) for _ in range(args.repeat)])


if __name__ == "__main__":
    main()
