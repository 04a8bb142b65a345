"""Looks at the workers that are connected to this agent, and tells the run how far they are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ..core.model import ProgressReport, StallReport
from ..core.progress import WorkerSteps
from ..engines.port import EngineReset
from ..errors import Evicted, Unreachable
from ..printable import shown
from ..system.node import Node
from ..system.timers import sleep
from . import worker_stacks as stacks
from .worker_channel import WorkerChannel

if TYPE_CHECKING:
    from .presence import Presence
    from .world import AsyncWorld

logger = logging.getLogger("rdzv.workers")

LINE_MAX = 200
"""Characters of a line of a stack that are shown."""
LOOK_S = 1.0
"""How often the steps are read. Nothing is read while no worker is connected."""
REPORT_S = 5.0
"""Least time between two reports of a member."""
REPORTS_PER_S = 50
"""Reports of all members of a large run together, each second."""


class WorkerWatch:
    """One task, for as long as the member lives. `place` tells the present world and presence."""

    def __init__(
        self, node: Node, place: Callable[[], tuple[AsyncWorld | None, Presence | None]], stall_s: float = 0.0,
        news: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """`stall_s`: report workers that have not moved for this long; 0: never. `news`: called when a worker speaks."""
        self.channel = WorkerChannel(news)
        self._node = node
        self._place = place
        self._steps = WorkerSteps("")
        self._told: ProgressReport | None = None
        self._told_at = 0.0
        self._stall_s = stall_s
        self._stall: StallReport | None = None
        """The stall of the present round, once there is one. It is final: showing stacks may let a stopped worker move on."""
        self._stall_told_by = ""
        self._task: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> str:
        """Begin, and return the path of the socket; empty: none could be made, which must not keep workers from working."""
        async with self._starting:
            if self._task is None:
                try:
                    await self.channel.open()
                except OSError as error:
                    logger.warning("workers cannot tell how far they are, because no socket could be made: %s", error)
                    self.channel.close()
                    return ""
                self._task = asyncio.get_running_loop().create_task(self._run(), name="rdzv workers")
            return self.channel.path

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.channel.close()

    async def _run(self) -> None:
        while True:
            if not self.channel.workers:
                self.channel.came.clear()
                await self.channel.came.wait()
            await sleep(self._node, LOOK_S)
            world, presence = self._place()
            if world is None or presence is None or presence.is_over:
                continue
            self._look(world)
            with suppress(Unreachable, EngineReset, Evicted):  # The machine knows; the next look tries again.
                await self._tell(world, presence)
                await self._tell_stall(presence)

    def _look(self, world: AsyncWorld) -> None:
        """Read the steps of the workers of this round."""
        if self._steps.table != world.table:
            self._steps, self._told, self._stall, self._stall_told_by = WorkerSteps(world.table), None, None, ""
        mine = [worker for worker in self.channel.workers.values() if worker.round == world.round]
        self._steps.see({one.rank: step for one in mine if (step := one.step) is not None}, self._node.now())

    async def _tell(self, world: AsyncWorld, presence: Presence) -> None:
        now = self._node.now()
        report = self._steps.report()
        if report is None or now - self._told_at < max(REPORT_S, world.size / REPORTS_PER_S):
            return
        if self._told is not None and _facts(report) == _facts(self._told):
            return
        self._told_at = now
        await presence.put_progress(report)
        self._told = report

    async def _tell_stall(self, presence: Presence) -> None:
        """Show the stacks of workers that have stopped moving, and then let the leader know."""
        if self._stall is None and self._stall_s:
            self._stall = self._steps.stall(self._stall_s)
            if self._stall is not None:
                await self._show_stacks(self._stall)
        if self._stall is not None and self._stall_told_by != presence.id:
            await presence.put_record(stalled=self._stall)
            self._stall_told_by = presence.id

    async def _show_stacks(self, stall: StallReport) -> None:
        for worker in [self.channel.workers[rank] for rank in stall.ranks if rank in self.channel.workers]:
            state = stacks.state_of(worker.pid)
            text = await stacks.read(worker, self._node)
            told = "its stacks follow" if text else "it shows no stacks"
            logger.warning("%s has been at step %d for %.0f s%s: %s", worker, stall.step, stall.for_s, state, told)
            for line in text.splitlines():
                logger.warning("rank %d: %s", worker.rank, shown(line, LINE_MAX))


def _facts(report: ProgressReport) -> ProgressReport:
    """Return what is worth a write: not the passing of time."""
    return msgspec.structs.replace(report, rate=0.0, since_s=0.0)
