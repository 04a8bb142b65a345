"""`rdzv demo`: the whole job in one command, on this machine: a server, members that form a round, one killed, one late.

Everything is real: the server and each member are processes of their own, the kill is SIGKILL, and what is shown is what the
members printed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import dataclass

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table

from .exit_codes import ExitCode

MEMBERS = 4
LIMIT_S = 30.0
"""For each act. They take about a second; a loaded machine may need more."""
QUICK = ("last_call=0.5", "settle=0.3", "lease=3", "grow_every=0")


@dataclass
class DemoNode:
    """One member's process, as far as its lines tell."""

    name: str
    process: asyncio.subprocess.Process
    round: int = 0
    rank: int = -1
    size: int = 0
    state: str = "starting"
    reason: str = ""


class Demo:
    """The stage: who is there, and what is shown of it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_at = time.monotonic()
        self._nodes: list[DemoNode] = []
        self._news = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []
        self._live = Live(console=console, get_renderable=self._table, auto_refresh=False)

    async def play(self) -> int:
        """Four acts; exit code 0 if all went as they should."""
        server = await self._start("serve", "--bind", "127.0.0.1:0")
        assert server.stdout is not None, "piped"
        place = (await server.stdout.readline()).decode().split()[-1]
        self._tell(f"a server is at {place}")
        try:
            if self._console.is_terminal:
                self._live.start()
            return await self._acts(place)
        except asyncio.TimeoutError:
            self._tell(f"not done within {LIMIT_S:g} s: {', '.join(f'{one.name} {one.state}' for one in self._nodes)}")
            return ExitCode.TIMEOUT
        finally:
            self._live.stop()
            # The server last: members that cannot say goodbye wait for it a while.
            await _end([node.process for node in self._nodes])
            await _end([server])
            for reader in self._readers:
                reader.cancel()

    async def _acts(self, place: str) -> int:
        for number in range(MEMBERS):
            await self._add(f"node{number}", place)
        await self._until(MEMBERS)
        victim = self._nodes[1]
        victim.process.kill()
        victim.state, victim.reason = "killed", "SIGKILL"
        self._tell(f"{victim.name} is killed")
        await self._until(MEMBERS - 1)
        await self._add("node9", place)
        await self._until(MEMBERS)
        for node in self._nodes:
            node.state = "leaving" if node.state == "in" else node.state
        return ExitCode.OK

    async def _start(self, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rdzv", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )

    async def _add(self, name: str, place: str) -> None:
        settings = [word for pair in (*QUICK, f"slot={name}") for word in ("--conf", pair)]
        process = await self._start("join", place, "--run-id", "demo", "--nnodes", f"2:{MEMBERS}", "--json", *settings)
        node = DemoNode(name, process)
        self._nodes.append(node)
        self._tell(f"{name} starts")
        self._readers.append(asyncio.ensure_future(self._read(node)))

    async def _read(self, node: DemoNode) -> None:
        """Follow what it prints."""
        assert node.process.stdout is not None, "piped"
        async for line in node.process.stdout:
            said = msgspec.json.decode(line)
            if said["event"] == "world":
                node.round, node.rank, node.size = said["round"], said["rank"], said["size"]
                node.state, node.reason = "in", f"bootstrap {said['bootstrap']}"
                self._tell(f"{node.name} is in round {node.round}: rank {node.rank} of {node.size}")
            elif said["kind"] == "broken" and node.state == "in":
                node.state, node.reason = "stopping", said["reason"]
                self._tell(f"{node.name} is told: round {said['round']} broken: {said['reason']}")
            self._news.set()

    async def _until(self, size: int) -> None:
        """All who live are in one round of that size."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            living = [node for node in self._nodes if node.state != "killed"]
            rounds = {(node.round, node.size) for node in living}
            if len(rounds) == 1 and all(node.state == "in" for node in living) and rounds.pop()[1] == size:
                self._tell(f"all {size} agree on round {living[0].round}")
                return
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), deadline - time.monotonic())

    # ---- showing it

    def _tell(self, text: str) -> None:
        elapsed_ms = (time.monotonic() - self._began_at) * 1000
        self._console.print(f"{elapsed_ms:8.0f} ms  {text}", highlight=False)
        if self._console.is_terminal:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table("member", "state", "round", "rank", "reason", title="rdzv demo")
        for node in self._nodes:
            rank = f"{node.rank} of {node.size}" if node.round else ""
            table.add_row(node.name, node.state, str(node.round or ""), rank, node.reason)
        return table


async def _end(processes: list[asyncio.subprocess.Process]) -> None:
    for process in processes:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
    await asyncio.gather(*(process.wait() for process in processes))
