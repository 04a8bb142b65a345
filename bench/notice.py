"""Notice: one of n members is killed (SIGKILL). Measures the time until the last of the others was told.

python bench/notice.py [--members 3 100 1000] [--repeat 3] [--out bench/results]

The killed member has its own process and joined last, so it does not lead. With default settings, a broken connection may come
back within the linger of 1 s, which is most of the time measured.
"""

from __future__ import annotations

import argparse
import os
import signal
import time

from common import Book, Crowd, Server, allow_files


def once(size: int) -> float:
    with Server() as server, Crowd("members", server.address, size, alone=True) as crowd:
        crowd.form(gap_s=0.5 + size / 1000)
        told = crowd.told()
        time.sleep(0.5)  # Let all begin to wait.
        killed_at = time.monotonic()
        os.kill(crowd.pids[-1], signal.SIGKILL)
        return told() - killed_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[3, 100, 1000])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    allow_files()
    book = Book("notice", args.out)
    for size in args.members:
        book.add(what="ours", engine="embedded", n=size, told_s=[once(size) for _ in range(args.repeat)])


if __name__ == "__main__":
    main()
