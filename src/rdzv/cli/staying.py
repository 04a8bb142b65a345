"""`rdzv run --stay`: the workers of this node stay while rounds come and go. The agent is the member, one per node.

cold      a worker is being started: this node is present and takes no part, so nobody waits for it
warm      all workers wait for a round: the node says ready
in        each worker has a rank; the round ends when the run says so, or a worker leaves it or ends
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..aio import AsyncRendezvous
from ..core.stay_messages import STAY_ENV
from ..errors import Closed, Evicted, RdzvError, SettingsError
from ..launch.crew import Crew
from ..launch.environment import NodeInRound
from ..launch.output import Destinations
from ..launch.stay_channel import StayChannel
from ..member import log
from ..member.member import TELL_S
from ..member.world import AsyncWorld
from .exit_codes import ExitCode
from .launcher import MemberFactory, RunOptions, StopSignal, taking_part
from .output import complain

logger = logging.getLogger("rdzv.launch")

DRAIN_S = 5.0
"""After a signal: how long the others have to form a round without this node. Then its workers are stopped anyway."""


async def stay_in_rounds(make: MemberFactory, options: RunOptions, scratch: Path) -> int:
    """Keep the workers through all rounds. Return the exit code of `rdzv run`."""
    stop = StopSignal()
    async with taking_part(make(None)) as rendezvous:
        return await StayingNode(rendezvous, options, scratch, stop).run(os.environ)


class StayingNode:
    """The workers of one node, and its membership."""

    def __init__(self, rendezvous: AsyncRendezvous, options: RunOptions, scratch: Path, stop: StopSignal) -> None:
        self._rendezvous = rendezvous
        self._options = options
        self._stop = stop
        self._news = asyncio.Event()
        """Set when anything happened that the loops must look at."""
        prefixed = options.workers > 1 if options.prefix is None else options.prefix
        sinks = Destinations(rendezvous.run_id, options.log_dir, tee=options.tee, prefixed=prefixed)
        self._crew = Crew(options.command, options.workers, sinks, scratch, options.stop_s, self._news.set)
        self._channel = StayChannel(options.workers, self._news.set, self._close_run)
        self._closing: asyncio.Task[None] | None = None
        self._restarts = 0
        self._has_joined = False
        self._reason = "this node came to join"

    async def run(self, environ: Mapping[str, str]) -> int:
        """Take part until the work is done, a signal comes or workers fail too often. Return the exit code."""
        try:
            path = await self._channel.open()
        except OSError as error:
            raise SettingsError(f"no socket for the workers can be made: {error.strerror or error}; set TMPDIR") from None
        run_id = self._rendezvous.run_id
        self._environ = {
            **environ, STAY_ENV: path, "RDZV_WORKER": await self._rendezvous.serve_workers(), "RDZV_RUN_ID": run_id,
            "ROLE_NAME": self._options.role, "TORCHELASTIC_RUN_ID": run_id,
        }  # fmt: skip
        try:
            await self._crew.start_missing(self._environ)
            while True:
                world = await self._next_world()
                if world is None:
                    return self._code
                if not await self._train(world):
                    return self._code
        except Closed as closed:
            self._channel.end_run(run_id, closed.reason, closed.success)
            if closed.success:  # They may have something to save.
                await self._until(lambda: not self._crew.running, self._options.stop_s)
            raise
        finally:
            await self._crew.stop()
            self._channel.close()

    async def _next_world(self) -> AsyncWorld | None:
        """Start what is missing, and join. Only the first join waits until all workers are warm. None: this node goes."""
        joining: asyncio.Future[AsyncWorld] | None = None
        try:
            while joining is None or not joining.done():
                if self._is_over() or not await self._mend():
                    return None
                cold = self._cold()
                if self._has_joined:
                    self._rendezvous.keep_out(cold)
                if joining is None and (self._has_joined or not cold):
                    self._has_joined = True
                    asked = self._rendezvous.join(workers=self._options.workers, role=self._options.role)
                    joining = asyncio.ensure_future(asked)
                await self._wait(joining)
            return joining.result()
        except Evicted as evicted:
            self._reason = evicted.reason
            return await self._next_world()
        finally:
            if joining is not None:
                joining.cancel()  # It may have failed already, because this node has left.
                await asyncio.gather(joining, return_exceptions=True)

    async def _train(self, world: AsyncWorld) -> bool:
        """Give the workers their ranks, and wait for the end of the round. Return whether another one follows."""
        options, reason = self._options, world.reason or self._reason
        node = NodeInRound.of(world, options.workers, options.role, reason, self._restarts, options.max_restarts)
        world.bootstrap.release()
        self._crew.given_ranks(node.ranks.first)
        changed = asyncio.ensure_future(self._rendezvous.wait_changed())
        newcomers = 0
        try:
            # Else a worker has ended since the node said ready, and the round cannot be used.
            if not (self._cold() or self._crew.has_failed):
                self._channel.give(world, node)
                while not (self._is_over() or self._is_left(world.round)):
                    # A worker that has ended well has seen that all others of the round have done their work, too.
                    if changed.done() and not self._crew.succeeded:
                        change = changed.result()
                        self._reason = change.reason if change is not None else "this member left"
                        newcomers = change.newcomers if change is not None else 0
                        break
                    await self._wait(None if self._crew.succeeded else changed)
            if self._stop.signal is not None:
                with suppress(RdzvError):  # The others re-form while our workers still run.
                    await self._rendezvous.drain(f"{self._stop.signal.name} received", TELL_S)
                    await self._rendezvous.wait_drained()
                    await asyncio.wait([changed], timeout=DRAIN_S)
                self._reason = f"{self._stop.signal.name} received"
        finally:
            changed.cancel()
        self._channel.end_round(world.round, self._reason, newcomers)
        if self._is_over():
            if self._crew.all_succeeded:
                with suppress(RdzvError):  # The others may have closed the run, or evicted this member, just now.
                    await self._rendezvous.done()
            return False
        await self._leave_round()
        return True

    def _is_left(self, round: int) -> bool:
        """Whether a worker has left the round by itself, or has failed."""
        if self._crew.has_failed:
            self._reason = "a worker of this node failed"
            return True
        left = sorted(rank for rank, worker in self._channel.workers.items() if worker.is_ready and worker.round == round)
        if left:
            self._reason = f"worker {left[0]} of this node left the round"
        return bool(left)

    async def _leave_round(self) -> None:
        """Wait until no worker runs anything of the round: joining again says so (T4.2). Kill those that stay in it.

        After a signal to this node they are stopped like all others.
        """

        def inside() -> set[int]:
            running = {worker.local_rank for worker in self._crew.running}
            return {rank for rank, one in self._channel.workers.items() if rank in running and not one.is_ready}

        if not await self._until(lambda: not inside(), self._options.stop_s) and self._stop.signal is None:
            await self._crew.kill(inside())

    async def _mend(self) -> bool:
        """Start workers that failed again. Return False if that was too often."""
        failure = await self._crew.take_failure()
        if failure is None:
            return True
        if self._restarts == self._options.max_restarts:
            with log.leaves_without_reason():
                await self._rendezvous.leave(failed=True, reason=failure.reason)
            complain(failure.sentence)
            self._failed_code = failure.exit_code
            return False
        self._channel.drop(failure.local_rank)
        self._restarts += 1
        self._reason = failure.reason
        logger.warning("%s; restart %d of %d", failure.sentence, self._restarts, self._options.max_restarts)
        self._crew.succeeded.clear()  # As without --stay: the next round needs all workers of the node.
        await self._crew.start_missing({**self._environ, "TORCHELASTIC_RESTART_COUNT": str(self._restarts)})
        return True

    _failed_code: int | None = None

    @property
    def _code(self) -> int:
        if self._failed_code is not None:
            return self._failed_code
        return int(ExitCode.OK) if self._stop.signal is None else 128 + self._stop.signal

    def _is_over(self) -> bool:
        return self._stop.signal is not None or self._crew.all_succeeded

    def _cold(self) -> str:
        """Why the workers cannot begin a round; empty: they can."""
        count = self._options.workers
        cold = [rank for rank in range(count) if not self._is_warm(rank)]
        return f"{len(cold)} of {count} workers of this node are being started" if cold else ""

    def _is_warm(self, local_rank: int) -> bool:
        worker = self._channel.workers.get(local_rank)
        return worker is not None and worker.is_ready

    def _close_run(self, reason: str) -> None:
        async def close() -> None:
            with suppress(RdzvError):
                await self._rendezvous.close_run(reason)

        if self._closing is None:
            self._closing = asyncio.ensure_future(close())

    # ---- waiting

    async def _wait(self, other: asyncio.Future[Any] | None, timeout_s: float | None = None) -> None:
        """Wait for news, for that future, or for a signal."""
        news = asyncio.ensure_future(self._news.wait())
        waits = [news, other] if other is not None else [news]
        try:
            await self._stop.run_until(asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED))
        finally:
            news.cancel()
        self._news.clear()

    async def _until(self, holds: Callable[[], bool], limit_s: float) -> bool:
        """Wait until that holds, and return whether it does. A signal ends the wait, too."""
        deadline = time.monotonic() + limit_s
        while not holds() and self._stop.signal is None and time.monotonic() < deadline:
            await self._wait(None, deadline - time.monotonic())
        return holds()
