"""The workers of one node in one round: started together, watched, and stopped together."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import SettingsError
from . import stacks
from .environment import NodeInRound, of_worker
from .failure import ERROR_FILE_MAX, Failure, exception_of_error_file, last_exception
from .orphans import OrphanKiller
from .output import Destinations, OutputCopy

logger = logging.getLogger("rdzv.launch")

STACKS_S = 10.0
"""How long a worker may take to write its stacks."""
UNKILLED_S = 30.0
"""How often to tell that a worker does not even end on SIGKILL."""
LOOK_S = (0.01, 0.1)
"""First and longest pause between two looks whether the children of a worker have ended."""
OUTPUT_S = 5.0
"""How long to wait for the end of the output once the workers have ended."""


class Worker:
    """One process and its children, which are one process group."""

    def __init__(self, rank: int, local_rank: int, error_file: Path) -> None:
        self.rank = rank
        self.local_rank = local_rank
        self.error_file = error_file
        self.outputs: dict[int, OutputCopy] = {}
        """Copies of stdout (1) and stderr (2)."""
        self.pid = 0
        self.is_gone = False
        """The process and its children have ended, so its number may be that of others."""
        self._process: asyncio.subprocess.Process | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} (local rank {self.local_rank}, pid {self.pid})"

    async def start(self, command: Sequence[str], environ: Mapping[str, str], sinks: Destinations, round: int) -> None:
        """Start the process. Raises OSError."""
        try:
            self.error_file.unlink(missing_ok=True)  # Of an earlier run with this id.
            for descriptor in (1, 2) if sinks.copies_stdout else (2,):
                name = f"{'stdout' if descriptor == 1 else 'stderr'} of rank {self.rank}"
                self.outputs[descriptor] = OutputCopy(name, sinks.sinks(round, self.rank, descriptor))
            pipes = {number: copy.pipe for number, copy in self.outputs.items()}
            self._process = await asyncio.create_subprocess_exec(
                *command, env=environ, stdout=pipes.get(1), stderr=pipes.get(2), start_new_session=True
            )
            self.pid = self._process.pid
        except RuntimeError as error:  # No room for a thread: for the output or, before Python 3.12, for asyncio's wait.
            raise OSError(errno.EAGAIN, str(error)) from None
        finally:
            for copy in self.outputs.values():
                copy.started()

    @property
    def code(self) -> int | None:
        """The exit code; None: it still runs, or was never started."""
        return None if self._process is None else self._process.returncode

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def group_lives(self) -> bool:
        """Whether the process has not ended, or any of its children that this process may signal.

        A child of another user, such as of sudo, cannot be ended: nobody waits for it.
        """
        if self.runs:
            return True
        if not self.pid or self.is_gone:
            return False
        try:
            os.killpg(self.pid, 0)
        except (ProcessLookupError, PermissionError):
            return False
        # The group may consist of ended processes that nobody has asked for, as in a container without an init.
        return any(stacks.may_signal(pid) for pid in stacks.living(self.pid))

    async def wait(self) -> None:
        if self._process is not None:
            await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and its children."""
        if self.pid and not self.is_gone:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def exception(self) -> str:
        """Return the exception that ended the program, as far as it can be known; empty if it cannot."""
        with suppress(OSError), self.error_file.open("rb") as file:
            said = exception_of_error_file(file.read(ERROR_FILE_MAX))
            if said:
                return said
        # A signal ends a program whatever exception it may have shown before.
        if self.code is None or self.code < 0 or 2 not in self.outputs:
            return ""
        return last_exception(self.outputs[2].tail.decode(errors="replace"))


async def finish_output(workers: Sequence[Worker]) -> None:
    """Wait for the end of the output of workers that have ended."""
    deadline = time.monotonic() + OUTPUT_S

    def finish() -> None:
        for worker in workers:
            for copy in worker.outputs.values():
                copy.finish(max(0.0, deadline - time.monotonic()))

    with suppress(RuntimeError):  # No room for a thread: the workers have ended all the same.
        await asyncio.get_running_loop().run_in_executor(None, finish)


class WorkerGroup:
    """Workers of this node. They are stopped together."""

    def __init__(self, workers: list[Worker], sinks: Destinations, stop_s: float, round: int = 0) -> None:
        self._sinks = sinks
        self._stop_s = stop_s
        self._round = round
        self.workers = workers
        self._ended: list[Worker] = []
        """Those that have ended, in that order."""
        self._watches: list[asyncio.Task[None]] = []
        self._orphans = OrphanKiller()

    async def _watch(self, worker: Worker) -> None:
        await worker.wait()
        self._ended.append(worker)
        if not worker.group_lives:
            self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        """Send nothing more to its process group: hours may pass until all workers have ended."""
        worker.is_gone = True
        self._orphans.remove(worker.pid)

    @property
    def _failed(self) -> Worker | None:
        return next((worker for worker in self._ended if worker.code != 0), None)

    async def stop(self) -> Failure | None:
        """End all workers and their children, and return the first failure, if there was one before this call.

        SIGTERM comes first. Workers that do not stop in time show their stacks and are killed.
        """
        failed = self._failed
        try:
            running = [worker for worker in self.workers if worker.runs]
            for worker in running:
                worker.signal(signal.SIGTERM)
            stuck = await self._left_after(self._stop_s, running)
            if stuck:
                await self._left_after(STACKS_S, await self._show_stacks(stuck))
        finally:
            # Always: this wait may have been cancelled, and children may outlive their worker.
            await self._kill()
        return self._describe(failed) if failed is not None else None

    async def _left_after(self, limit_s: float, workers: list[Worker]) -> list[Worker]:
        """Return those that still run after the limit. A worker that is a shell may end before the program in it."""
        deadline, (pause_s, longest_s) = time.monotonic() + limit_s, LOOK_S
        while (workers := [worker for worker in workers if worker.group_lives]) and time.monotonic() < deadline:
            waits = [watch for watch in self._watches if not watch.done()]
            await (asyncio.wait(waits, timeout=pause_s) if waits else asyncio.sleep(pause_s))
            pause_s = min(2 * pause_s, longest_s)
        return workers

    async def _show_stacks(self, stuck: list[Worker]) -> list[Worker]:
        """Let workers show their stacks, which ends them. Return those that do."""
        loop, showing = asyncio.get_running_loop(), []
        for worker in stuck:
            pids = await loop.run_in_executor(None, stacks.catching, worker.pid)  # It reads all of /proc.
            then = "its Python stacks follow on its stderr, then it is killed" if pids else "it is killed"
            logger.warning("%s did not stop within %g s of SIGTERM: %s", worker, self._stop_s, then)
            stacks.show(pids)
            showing += [worker] if pids else []
        return showing

    async def _kill(self) -> None:
        await self._kill_all(self.workers)
        if self._watches:
            await asyncio.wait(self._watches)
        await self._orphans.close()
        await finish_output(self.workers)

    async def _kill_all(self, workers: list[Worker]) -> None:
        """Kill workers and their children, and wait until all have ended.

        There is no limit: the next round may not begin while a process of this one runs. One that waits in the kernel, such as
        for a lost file server, ends when the kernel lets it.
        """
        for worker in workers:
            worker.signal(signal.SIGKILL)
        while left := await self._left_after(UNKILLED_S, workers):
            for worker in left:
                one = worker if worker.runs else f"a child of {worker}"
                logger.warning("%s has not ended %g s after SIGKILL: this node waits for it", one, UNKILLED_S)

    def _describe(self, worker: Worker) -> Failure:
        assert worker.code is not None, "it has ended"
        # A worker that stays has another rank in each round. Its files are named by the one on this node.
        log = self._sinks.file(self._round, worker.rank if self._round else worker.local_rank, "err")
        return Failure(
            worker.rank, worker.local_rank, worker.pid, worker.code, worker.exception(), str(log) if log is not None else ""
        )


class RoundWorkers(WorkerGroup):
    """All workers of this node in one round. They succeed together; the first that fails fails them all."""

    def __init__(self, node: NodeInRound, sinks: Destinations, scratch: Path, stop_s: float) -> None:
        self._node = node
        workers = [self._worker(sinks, local_rank, scratch) for local_rank in range(node.workers)]
        super().__init__(workers, sinks, stop_s, node.round)

    def _worker(self, sinks: Destinations, local_rank: int, scratch: Path) -> Worker:
        round, rank = self._node.round, self._node.ranks.first + local_rank
        error_file = sinks.file(round, rank, "error.json") or scratch / f"round-{round}-rank-{rank}.json"
        return Worker(rank, local_rank, error_file)

    async def start(self, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start all workers, or none. Raises SettingsError if the program cannot be run."""
        try:
            await self._orphans.start()
            for worker in self.workers:
                own = of_worker(environ, self._node, worker.local_rank, str(worker.error_file))
                await worker.start(command, own, self._sinks, self._node.round)
                self._orphans.add(worker.pid)
                self._watches.append(asyncio.ensure_future(self._watch(worker)))
        except OSError as error:
            await self._kill()
            problem = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            raise SettingsError(f"program {command[0]!r} cannot be run: {problem}") from None
        except BaseException:  # Such as a cancelled start: no worker may be forgotten.
            for worker in self.workers:
                worker.signal(signal.SIGKILL)
            raise

    async def wait(self) -> None:
        """Wait until all workers have succeeded, or one has failed."""
        pending: set[asyncio.Task[None]] = set(self._watches)
        while pending and self._failed is None:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
