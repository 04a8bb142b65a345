"""Forming over real sockets: members in this process, the server in another. Times, and the server's CPU.

python bench/form.py [--members 64 500]
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


async def formation(size: int) -> None:
    process = Process()
    try:
        group = Group(process, "job", size)
        before_s = process.cpu_s()
        took_s = await group.form()
        cpu_s = process.cpu_s() - before_s
        print(f"{size} members: formed in {took_s * 1000:.0f} ms, of which the server computed {cpu_s * 1000:.0f} ms")
        await group.leave()
    finally:
        process.stop()


def allow_files() -> None:
    """Each member has a connection, and one has a socket for the others."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--members", type=int, nargs="*", default=[64, 500])
    args = parser.parse_args()
    allow_files()
    for size in args.members:
        asyncio.run(formation(size))


if __name__ == "__main__":
    main()
