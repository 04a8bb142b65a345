"""`rdzv demo`: a server, members that form a round, one that is killed, and one that comes late, on this machine.

The server and each member are processes of their own, the kill is SIGKILL, and the demo shows what the members printed.
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

from ..errors import NotStarted
from ..launch.orphans import OrphanKiller
from .exit_codes import ExitCode, exit_on_error

MEMBERS = 4
LIMIT_S = 30.0  # Timeout of each step. A step takes about a second; a loaded machine may need more.
QUICK = ("last_call=0.5", "settle=0.3", "grow_every=0")


@dataclass
class DemoNode:
    """One member's process, and its state according to its output."""

    name: str
    process: asyncio.subprocess.Process
    round: int = 0
    rank: int = -1
    size: int = 0
    state: str = "starting"
    reason: str = ""


class Demo:
    """The processes of the demo, and the table that shows them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_at = time.monotonic()
        self._nodes: list[DemoNode] = []
        self._updated = asyncio.Event()
        self._readers: list[asyncio.Task[None]] = []
        self._orphans = OrphanKiller()
        self._live = Live(console=console, get_renderable=self._table, auto_refresh=False)

    async def run(self) -> int:
        """Run the demo and return the exit code: 0 if every step succeeded."""
        await self._orphans.start()
        server = await self._start("serve", "--bind", "127.0.0.1:0")
        try:
            address = await self._address_of(server)
            self._print(f"a server is at {address}")
            if self._console.is_terminal:
                self._live.start()
            return await self._steps(address)
        except asyncio.TimeoutError:
            states = ", ".join(f"{one.name} {one.state}" for one in self._nodes) or "the server has not started"
            self._print(f"not done within {LIMIT_S:g} s: {states}")
            return ExitCode.TIMEOUT
        finally:
            self._live.stop()
            # The server ends last: members that cannot reach it would wait for it before they end.
            await end([node.process for node in self._nodes])
            await end([server])
            await self._orphans.close()
            for reader in self._readers:
                reader.cancel()

    async def _address_of(self, server: asyncio.subprocess.Process) -> str:
        """Return where the server listens. Its first line says so."""
        assert server.stdout is not None, "piped"
        line = await asyncio.wait_for(server.stdout.readline(), LIMIT_S)
        if not line:
            code = await asyncio.wait_for(server.wait(), LIMIT_S)
            raise NotStarted("the server", f"it ended with code {code}; `rdzv serve --bind 127.0.0.1:0` says why")
        return line.decode().split()[-1]

    async def _steps(self, address: str) -> int:
        for number in range(MEMBERS):
            await self._add(f"node{number}", address)
        await self._wait_for_round(MEMBERS)
        victim = self._nodes[1]
        victim.process.kill()
        victim.state, victim.reason = "killed", "SIGKILL"
        self._print(f"{victim.name} is killed")
        await self._wait_for_round(MEMBERS - 1)
        await self._add("node9", address)
        await self._wait_for_round(MEMBERS)
        for node in self._nodes:
            node.state = "leaving" if node.state == "in" else node.state
        return ExitCode.OK

    async def _start(self, *words: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rdzv", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        self._orphans.add(process.pid)
        return process

    async def _add(self, name: str, address: str) -> None:
        settings = [word for pair in (*QUICK, f"slot={name}") for word in ("--conf", pair)]
        process = await self._start("join", address, "--run-id", "demo", "--nnodes", f"2:{MEMBERS}", "--json", *settings)
        node = DemoNode(name, process)
        self._nodes.append(node)
        self._print(f"{name} starts")
        self._readers.append(asyncio.ensure_future(self._read(node)))

    async def _read(self, node: DemoNode) -> None:
        """Follow the output of one member."""
        assert node.process.stdout is not None, "piped"
        async for line in node.process.stdout:
            said = msgspec.json.decode(line)
            if node.state == "leaving":  # On a busy machine those that leave later form one more round. That is no part of it.
                continue
            if said["event"] == "world":
                node.round, node.rank, node.size = said["round"], said["rank"], said["size"]
                node.state, node.reason = "in", f"bootstrap {said['bootstrap']}"
                self._print(f"{node.name} is in round {node.round}: rank {node.rank} of {node.size}")
            elif said["kind"] == "broken" and node.state == "in":
                node.state, node.reason = "stopping", said["reason"]
                self._print(f"{node.name} is told: round {said['round']} broken: {said['reason']}")
            self._updated.set()

    async def _wait_for_round(self, size: int) -> None:
        """Wait until all members that were not killed are in one round of that size."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            living = [node for node in self._nodes if node.state != "killed"]
            rounds = {(node.round, node.size) for node in living}
            if len(rounds) == 1 and all(node.state == "in" for node in living) and rounds.pop()[1] == size:
                self._print(f"all {size} agree on round {living[0].round}")
                return
            self._updated.clear()
            await asyncio.wait_for(self._updated.wait(), deadline - time.monotonic())

    def _print(self, text: str) -> None:
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


async def end(processes: list[asyncio.subprocess.Process], limit_s: float = LIMIT_S) -> None:
    """Ask the processes to end, and kill those that do not: one that hangs may be why a step was not done in time."""
    for process in processes:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
    ending = asyncio.gather(*(process.wait() for process in processes))
    await asyncio.wait([ending], timeout=limit_s)
    for process in processes:
        if process.returncode is None:
            process.kill()
    await ending


def demo() -> None:
    """Show rdzv on this machine: a server and four members; one is killed, the others re-form, a late one joins."""
    with exit_on_error():
        sys.exit(asyncio.run(Demo(Console()).run()))
