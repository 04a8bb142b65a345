"""`rdzv join` and `rdzv run`: a member in the shell, and an elastic launcher for programs that do not import rdzv."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ..aio import AsyncRendezvous, departure_of
from ..core.member_rules import Change, ChangeKind
from ..core.model import Phase
from ..errors import Closed, Evicted, RdzvError, SettingsError
from ..launch.environment import NodeInRound
from ..launch.failure import Failure
from ..launch.output import Destinations
from ..launch.workers import RoundWorkers
from ..member import log
from ..member.member import TELL_S
from ..member.notices import Notice
from ..member.world import AsyncWorld
from .exit_codes import ExitCode
from .output import complain, json_text, say

logger = logging.getLogger("rdzv.launch")

STOPPING = (signal.SIGTERM, signal.SIGINT)
IMPATIENT_S = 1.0
"""A signal that comes sooner after the first one is the same signal again, sent by a wrapper."""
MemberFactory = Callable[[Callable[[Notice], None] | None], AsyncRendezvous]  # Makes a member with an observer.


class Printer:
    """Prints lines to stdout: the log of the member for people, or all that it is told as JSON for programs."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._close = ""
        self.is_lost = False
        """Whether anything could not be printed."""
        self.ends: Callable[[], None] = lambda: None
        """Ends the command, because nobody reads its lines any more."""

    @contextmanager
    def taking_log(self) -> Iterator[None]:
        """Print what the member logs about itself here, and not on stderr. Other loggers of rdzv keep to stderr."""
        level = log.logger.level
        log.logger.setLevel(min(log.logger.getEffectiveLevel(), logging.INFO))
        log.logger.addFilter(self._take)
        try:
            yield
        finally:
            log.logger.removeFilter(self._take)
            log.logger.setLevel(level)

    def _take(self, record: logging.LogRecord) -> bool:
        if getattr(record, "rdzv_kind", "") == Phase.CLOSED.value:
            self._close = record.getMessage()
        elif not self._as_json:
            self._tell(record.getMessage())
        return False

    def _tell(self, text: str) -> None:
        """Print what the member is told. Nothing is raised: the caller is the member.

        A full disk does not end a membership, and is reported once. A reader that is gone ends it, as it ends any command.
        """
        try:
            say(text)
        except OSError as error:
            is_first, self.is_lost = not self.is_lost, True
            if is_first and isinstance(error, BrokenPipeError):
                self.ends()
            elif is_first:
                complain(f"this member goes on, but what it is told cannot be printed: {error.strerror}")

    def over(self) -> None:
        """Print that the run is over, for a member whose work is. To any other it is an error, which says the same."""
        if self._close and not self._as_json:
            self._tell(self._close)

    def world(self, world: AsyncWorld) -> None:
        """Print a world, with all fields that a reader needs to compare it with the worlds of other members."""
        fields = {name: getattr(world, name) for name in ("incarnation", "era", "round", "fence", "rank", "size", "digest")}
        self._event({"event": "world", "run": world.run_id, **fields, "bootstrap": str(world.bootstrap)})

    def notice(self, notice: Notice) -> None:
        fields = {"kind": notice.kind, "round": notice.round, "member": notice.member, "reason": notice.reason}
        self._event({"event": "notice", **fields})

    def changed(self, round: int, change: Change) -> None:
        """Print that the world of that round (0: there was none) is no longer valid."""
        self._event({"event": "changed", "kind": change.kind, "round": round, "reason": change.reason})

    def _event(self, fields: dict[str, Any]) -> None:
        if self._as_json:
            self._tell(json_text(fields))

    def line(self, fields: dict[str, Any], text: str = "") -> None:
        """Print the fields as JSON for programs, or the text, if any, for people."""
        if self._as_json:
            say(json_text(fields))
        elif text:
            say(text)


class StopSignal:
    """The first SIGTERM or SIGINT. A later one cancels the task, which ends a leave that takes too long.

    Wrappers such as timeout, srun and a terminal's Ctrl-C reach a process twice within milliseconds. So a second signal counts
    only after `IMPATIENT_S`.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._came_at = 0.0
        self._event = asyncio.Event()
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self.set, number)

    def set(self, number: signal.Signals) -> None:
        """Note that the signal came."""
        now = asyncio.get_running_loop().time()
        if self.signal is None:
            self._came_at = now
        elif self._task is not None and now - self._came_at >= IMPATIENT_S:
            self._task.cancel()
        self.signal = self.signal or number
        self._event.set()

    async def run_until(self, work: Awaitable[Any]) -> Any:
        """Return the result of the work; if a signal comes first, cancel the work and return None."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, stopping):
                task.cancel()
            # Awaited, because a cancelled call must have ended before its member is used again.
            await asyncio.gather(working, stopping, return_exceptions=True)


async def join(make: MemberFactory, printer: Printer) -> int:
    """Join every round until a signal, or until the run is over. Return the exit code."""
    with printer.taking_log():
        try:
            await _join_rounds(make, printer)
        except Closed as closed:
            if not closed.success:
                raise
            printer.over()
    return ExitCode.FAILED if printer.is_lost else ExitCode.OK


@asynccontextmanager
async def taking_part(member: AsyncRendezvous) -> AsyncIterator[AsyncRendezvous]:
    """Leave at the end of the block. An error that ends the command is shown by itself, and not in the line about leaving."""
    async with member:
        try:
            yield member
        except RdzvError as error:
            failed, reason = departure_of(error)
            with log.leaves_without_reason():
                await member.leave(failed=failed, reason=reason)
            raise


async def _join_rounds(make: MemberFactory, printer: Printer) -> None:
    stop = StopSignal()
    printer.ends = partial(stop.set, signal.SIGPIPE)
    over = asyncio.Event()

    def observe(notice: Notice) -> None:
        printer.notice(notice)
        if notice.kind == Phase.CLOSED.value:
            over.set()

    async with taking_part(make(observe)) as rendezvous:
        while stop.signal is None:
            try:
                world = await stop.run_until(rendezvous.join())
                if world is None:
                    break
                printer.world(world)
                world.bootstrap.release()
                change = await stop.run_until(_changed_or_over(rendezvous, over))
                if change is None:
                    printer.over()
                    break
                if change.kind is not ChangeKind.CLOSED:  # The next join raises that.
                    printer.changed(world.round, change)
            except Evicted as evicted:
                printer.changed(0, Change(ChangeKind.EVICTED, evicted.reason))


async def _announce(rendezvous: AsyncRendezvous, name: str) -> None:
    """Tell the others that this node goes, so that they re-form while its workers still stop, and let all workers save."""
    with suppress(RdzvError):
        await rendezvous.drain(f"{name} received", TELL_S)
        await rendezvous.wait_drained()


async def _first_of(ended: asyncio.Future[None], other: Coroutine[Any, Any, None]) -> None:
    """Wait until the workers have ended, or the other thing has. A later signal ends this."""
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait([ended, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _changed_or_over(rendezvous: AsyncRendezvous, over: asyncio.Event) -> Change | None:
    """Wait until the world is no longer valid. Return None if all members were done, which leaves the world valid."""
    waits = [asyncio.ensure_future(rendezvous.wait_changed()), asyncio.ensure_future(over.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return rendezvous.changed
    finally:
        for wait in waits:
            wait.cancel()


class RunOptions(msgspec.Struct, frozen=True):
    """The options of `rdzv run`, the same in every round."""

    command: list[str]
    workers: int = 1
    role: str = "default"
    stop_s: float = 30.0
    max_restarts: int = 0
    log_dir: str = ""
    tee: bool = False
    prefix: bool | None = None
    """Whether lines on the console begin with the rank; None: if there are several workers."""


RoundLoop = Callable[[MemberFactory, RunOptions, Path], Coroutine[Any, Any, int]]


async def run(make: MemberFactory, options: RunOptions, rounds: RoundLoop | None = None) -> int:
    """Run the workers in each world, and restart them when the round changes. Return the exit code of `rdzv run`.

    `rounds`: another loop, which does not restart them.

    stdout is the program's. The log of the member goes to stderr, as that of torchrun.
    """
    try:
        folder = TemporaryDirectory(prefix="rdzv-run-")
    except OSError as error:  # Such as in a container whose file system is read-only.
        problem = error.strerror or error
        raise SettingsError(f"no temporary folder can be made: {problem}; set TMPDIR to a folder that can be written") from None
    with log.taken_over(), folder as scratch:
        log.set_up()
        return await (rounds or run_in_rounds)(make, options, Path(scratch))


async def run_in_rounds(make: MemberFactory, options: RunOptions, scratch: Path) -> int:
    stop = StopSignal()
    prefixed = options.workers > 1 if options.prefix is None else options.prefix
    reason = "this node came to join"
    held = False
    restarts = 0
    async with taking_part(make(None)) as rendezvous:
        output = Destinations(rendezvous.run_id, options.log_dir, tee=options.tee, prefixed=prefixed)
        while True:
            try:
                world = await stop.run_until(rendezvous.join(workers=options.workers, role=options.role))
            except Evicted as evicted:
                reason = evicted.reason
                continue
            ending = Ending(reason)
            if world is not None:
                if held:  # The cause may have been found while this member waited.
                    reason = world.reason or reason
                held = True
                node = NodeInRound.of(world, options.workers, options.role, reason, restarts, options.max_restarts)
                node = msgspec.structs.replace(node, channel=await rendezvous.serve_workers())
                # The worker with rank 0 binds the port itself.
                world.bootstrap.release()
                workers = RoundWorkers(node, output, scratch, options.stop_s)
                await workers.start(options.command, os.environ)
                ending = await _until_changed(workers, rendezvous, stop)
            reason = ending.reason
            if stop.signal is not None:
                return 128 + stop.signal
            if ending.succeeded:
                with suppress(RdzvError):  # The others may have closed the run, or evicted this member, just now.
                    await rendezvous.done()
                return ExitCode.OK
            failure = ending.failure
            if failure is not None and restarts == options.max_restarts:
                with log.leaves_without_reason():
                    await rendezvous.leave(failed=True, reason=failure.reason)
                complain(failure.sentence)
                return failure.exit_code
            if failure is not None:
                restarts += 1
                logger.warning("%s; restart %d of %d", failure.sentence, restarts, options.max_restarts)


class Ending(msgspec.Struct, frozen=True):
    """Why the workers of this node run no more: they succeeded, one failed, or (neither) they were stopped."""

    reason: str
    succeeded: bool = False
    failure: Failure | None = None


async def _until_changed(workers: RoundWorkers, rendezvous: AsyncRendezvous, stop: StopSignal) -> Ending:
    """Wait for the workers, for the end of the round or for a signal. Whatever comes first, no worker runs afterwards."""
    ended = asyncio.ensure_future(workers.wait())
    changed = asyncio.ensure_future(rendezvous.wait_changed())
    try:
        await stop.run_until(asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED))
        by_themselves = ended.done()
        if not by_themselves and stop.signal is not None:
            await _first_of(ended, _announce(rendezvous, stop.signal.name))
        change = changed.result() if changed.done() else None
    finally:
        for wait in (ended, changed):
            wait.cancel()
        failure = await workers.stop()
    if by_themselves:
        return Ending(failure.reason if failure is not None else "done", failure is None, failure)
    if stop.signal is not None:
        return Ending("stopped")
    return Ending(change.reason if change is not None else "this member left")
