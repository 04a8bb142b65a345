"""What idle members cost the server: memory as the slope of its RSS between two sizes, CPU as a share of one core.

python bench/steady.py [--members 1000 3000] [--idle 20]

The members are in this process, the server in another, whose figures come from /proc. CPU time does not depend on what else the
machine does; the memory of a burst that the allocator keeps counts against us.
"""

from __future__ import annotations

import argparse
import asyncio

from form import Group, Process, allow_files

KB_MAX = 10.0
CPU_MAX = 0.03


async def idle(process: Process, members: int, idle_s: float) -> None:
    """The settings are the defaults: a lease of 10 s, renewed every third of it."""
    before_s = process.cpu_s()
    await asyncio.sleep(idle_s)
    used = (process.cpu_s() - before_s) / idle_s
    print(f"{members} idle members for {idle_s:g} s: {used:.2%} of one core (aim: under {CPU_MAX:.0%} for 1000)")


async def steady(low: int, high: int, idle_s: float) -> None:
    process = Process()
    try:
        first = Group(process, "first", low)
        await first.form()
        await idle(process, low, idle_s)
        before = process.rss_kib()
        second = Group(process, "second", high - low)
        await second.form()
        await asyncio.sleep(1.0)
        after = process.rss_kib()
        slope = (after - before) * 1.024 / (high - low)
        print(f"{low} to {high} members: {slope:.2f} KB each (aim: under {KB_MAX:g}); RSS {before} KiB, then {after} KiB")
        await asyncio.gather(first.leave(), second.leave())
    finally:
        process.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, nargs=2, default=[1000, 3000])
    parser.add_argument("--idle", type=float, default=20.0)
    args = parser.parse_args()
    allow_files()
    asyncio.run(steady(*args.members, args.idle))


if __name__ == "__main__":
    main()
