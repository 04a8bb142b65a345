"""Forming over real sockets: members in this process, the server in another. Times, CPU and memory of the server.

python bench/form.py [--members 64 500] [--memory 200 1000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from rdzv.drivers.remote import RemoteDriver
from rdzv.endpoint import Endpoint
from rdzv.machine import RealMachine
from rdzv.member import Member
from rdzv.settings import Settings

SERVER = """
import asyncio
from rdzv.server.server import Server

async def main():
    server = Server(("127.0.0.1", 0))
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
TICKS = os.sysconf("SC_CLK_TCK")


class Process:
    """A server of its own, and what it costs."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        self._proc = Path(f"/proc/{self._process.pid}")

    def cpu_s(self) -> float:
        user, system = (self._proc / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / TICKS

    def rss_kib(self) -> int:
        status = (self._proc / "status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Group:
    """Members of one run."""

    def __init__(self, process: Process, run_id: str, size: int) -> None:
        self._endpoint = Endpoint.parse(f"127.0.0.1:{process.port}")
        self._settings = Settings.make(self._endpoint, run_id=run_id, min_nodes=size, max_nodes=size)
        self.members = [self._member(f"node{n}") for n in range(size)]

    def _member(self, host: str) -> Member:
        driver = RemoteDriver(self._endpoint, run_id=self._settings.run_id)
        return Member(driver, self._settings, RealMachine(host))

    async def form(self) -> float:
        began_at = time.perf_counter()
        worlds = await asyncio.gather(*(member.join() for member in self.members))
        took_s = time.perf_counter() - began_at
        assert {world.size for world in worlds} == {len(self.members)}
        assert {world.rank for world in worlds} == set(range(len(self.members)))
        return took_s

    async def leave(self) -> None:
        await asyncio.gather(*(member.leave() for member in self.members))


async def formation(size: int, idle_s: float) -> None:
    process = Process()
    try:
        group = Group(process, "job", size)
        before_s = process.cpu_s()
        took_s = await group.form()
        cpu_s = process.cpu_s() - before_s
        print(f"{size} members: formed in {took_s * 1000:.0f} ms, of which the server computed {cpu_s * 1000:.0f} ms")
        before_s = process.cpu_s()
        await asyncio.sleep(idle_s)
        used = (process.cpu_s() - before_s) / idle_s
        print(f"{size} members: idle for {idle_s:g} s, the server uses {used:.2%} of a core")
        await group.leave()
    finally:
        process.stop()


async def memory(low: int, high: int) -> None:
    process = Process()
    try:
        first = Group(process, "first", low)
        await first.form()
        before = process.rss_kib()
        second = Group(process, "second", high - low)
        await second.form()
        slope = (process.rss_kib() - before) / (high - low)
        print(f"{low} to {high} members: {slope:.1f} KiB of the server's memory each (RSS {process.rss_kib()} KiB)")
        await asyncio.gather(first.leave(), second.leave())
    finally:
        process.stop()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, nargs="*", default=[64, 500])
    parser.add_argument("--memory", type=int, nargs=2, default=[200, 1000])
    parser.add_argument("--idle", type=float, default=10.0)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    for size in args.members:
        asyncio.run(formation(size, args.idle))
    asyncio.run(memory(*args.memory))


if __name__ == "__main__":
    main()
