"""The workers of this node that stay: each is started when it is missing, and none is stopped between rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import SettingsError
from .environment import of_staying
from .failure import Failure
from .output import Destinations
from .workers import Worker, WorkerGroup, finish_output


class Crew(WorkerGroup):
    """The worker processes of a node, over all rounds. Files and lines name them by their local rank."""

    def __init__(
        self, command: Sequence[str], count: int, sinks: Destinations, scratch: Path, stop_s: float, news: Callable[[], None]
    ) -> None:
        """`news` is called when a worker has ended."""
        super().__init__([], sinks, stop_s)
        self._command = command
        self._count = count
        self._scratch = scratch
        self._news = news
        self._starts = 0
        self.succeeded: set[int] = set()
        """Local ranks of workers that have ended with exit code 0."""

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.runs]

    @property
    def all_succeeded(self) -> bool:
        return len(self.succeeded) == self._count

    @property
    def has_failed(self) -> bool:
        return self._failed is not None

    async def take_failure(self) -> Failure | None:
        """Return the first failure that was not taken yet, once the output of the worker has been read."""
        failed = self._failed
        if failed is None:
            return None
        await self._see_off(failed)
        return self._describe(failed)

    async def _see_off(self, worker: Worker) -> None:
        """Forget a worker that has ended: another process may get its number. Its children end, and its output is read."""
        await self._kill_all([worker])
        self._ended.remove(worker)
        self.workers.remove(worker)
        self._forget(worker)
        await finish_output([worker])

    async def start_missing(self, environ: Mapping[str, str]) -> None:
        """Start the workers that neither run nor have succeeded. Raises SettingsError if the program cannot be run."""
        if not self._starts:
            await self._orphans.start()
        here = {worker.local_rank for worker in self.workers} | self.succeeded
        for local_rank in sorted(set(range(self._count)) - here):
            self._starts += 1
            error_file = self._sinks.file(0, local_rank, "error.json")
            worker = Worker(local_rank, local_rank, error_file or self._scratch / f"{self._starts}.json")
            own = of_staying(environ, local_rank, self._count, str(worker.error_file))
            try:
                await worker.start(self._command, own, self._sinks, 0)
            except OSError as error:
                problem = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
                raise SettingsError(f"program {self._command[0]!r} cannot be run: {problem}") from None
            self.workers.append(worker)
            self._orphans.add(worker.pid)
            self._watches.append(asyncio.ensure_future(self._watch(worker)))

    async def _watch(self, worker: Worker) -> None:
        await super()._watch(worker)
        if worker.code == 0:
            self.succeeded.add(worker.local_rank)  # Before its output is read, or it would be missing meanwhile.
            await self._see_off(worker)
        self._news()

    def given_ranks(self, first: int) -> None:
        """Note the ranks of this round, by which a failure is told."""
        for worker in self.workers:
            worker.rank = first + worker.local_rank

    async def kill(self, local_ranks: set[int]) -> None:
        """Kill the workers that do not leave a round, once they have shown their stacks."""
        stuck = [worker for worker in self.running if worker.local_rank in local_ranks]
        await self._left_after(10.0, await self._show_stacks(stuck))
        await self._kill_all(stuck)
