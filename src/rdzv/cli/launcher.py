"""`rdzv join` and `rdzv run`: a member in the shell, and an elastic launcher for programs that do not import rdzv."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from ..aio import AsyncRendezvous
from ..core.member_rules import Change, ChangeKind
from ..core.model import Phase
from ..errors import Closed, Evicted, RdzvError
from ..member import log
from ..member.notices import Notice
from ..member.world import AsyncWorld
from .exit_codes import ExitCode
from .output import complain, json_text, say

STOPPING = (signal.SIGTERM, signal.SIGINT)
IMPATIENT_S = 1.0
"""A signal that comes sooner after the first one is the same signal again, sent by a wrapper."""
MemberFactory = Callable[[Callable[[Notice], None] | None], AsyncRendezvous]  # Makes a member with an observer.


class Printer:
    """Prints lines to stdout: the log of the member for people, or all that it is told as JSON for programs."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json

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
        if not self._as_json:
            say(record.getMessage())
        return False

    def world(self, world: AsyncWorld) -> None:
        """Print a world, with all fields that a reader needs to compare it with the worlds of other members."""
        fields = {name: getattr(world, name) for name in ("incarnation", "era", "round", "fence", "rank", "size", "digest")}
        self.line({"event": "world", "run": world.run_id, **fields, "bootstrap": str(world.bootstrap)})

    def notice(self, notice: Notice) -> None:
        fields = {"kind": notice.kind, "round": notice.round, "member": notice.member, "reason": notice.reason}
        self.line({"event": "notice", **fields})

    def changed(self, round: int, change: Change) -> None:
        """Print that the world of that round (0: there was none) is no longer valid."""
        self.line({"event": "changed", "kind": change.kind, "round": round, "reason": change.reason})

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
            loop.add_signal_handler(number, self._set, number)

    def _set(self, number: signal.Signals) -> None:
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
        return await _join_rounds(make, printer)


async def _join_rounds(make: MemberFactory, printer: Printer) -> int:
    stop = StopSignal()
    over = asyncio.Event()

    def observe(notice: Notice) -> None:
        printer.notice(notice)
        if notice.kind == Phase.CLOSED.value:
            over.set()

    async with make(observe) as rendezvous:
        while stop.signal is None:
            try:
                world = await stop.run_until(rendezvous.join())
                if world is None:
                    break
                printer.world(world)
                world.bootstrap.release()
                change = await stop.run_until(_changed_or_over(rendezvous, over))
                if change is None:
                    break
                if change.kind is ChangeKind.CLOSED:
                    complain(f"{change.reason} [{Closed.code}]")
                    return ExitCode.CLOSED
                printer.changed(world.round, change)
            except Evicted as evicted:
                printer.changed(0, Change(ChangeKind.EVICTED, evicted.reason))
    return ExitCode.OK


async def _changed_or_over(rendezvous: AsyncRendezvous, over: asyncio.Event) -> Change | None:
    """Wait until the world is no longer valid. Return None if all members were done, which leaves the world valid."""
    waits = [asyncio.ensure_future(rendezvous.wait_changed()), asyncio.ensure_future(over.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return rendezvous.changed
    finally:
        for wait in waits:
            wait.cancel()


class Program:
    """One run of the command, in one world. It and its children are one process group."""

    def __init__(self, process: asyncio.subprocess.Process, stop_s: float) -> None:
        self._process = process
        self._stop_s = stop_s
        self.wait = process.wait

    @classmethod
    async def start(cls, command: list[str], stop_s: float, world: AsyncWorld, reason: str) -> Program:
        """Start the command with the variables that training programs read."""
        environ = {
            **os.environ,
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "MASTER_ADDR": world.bootstrap.host,
            "MASTER_PORT": str(world.bootstrap.port),
            "RDZV_ROUND": str(world.round),
            "RDZV_FENCE": str(world.fence),
            "RDZV_RUN_ID": world.run_id,
            "RDZV_REASON": reason,
        }
        # The program of rank 0 binds the port itself.
        world.bootstrap.release()
        return cls(await asyncio.create_subprocess_exec(*command, env=environ, start_new_session=True), stop_s)

    async def stop(self) -> None:
        """Send SIGTERM to the group, and SIGKILL if the program does not end in time."""
        try:
            if self._process.returncode is None:
                self._signal(signal.SIGTERM)
                await asyncio.wait_for(asyncio.shield(self.wait()), self._stop_s)
        except asyncio.TimeoutError:
            complain(f"the program did not stop within {self._stop_s:g} s and is killed")
        finally:
            # Always: this wait may have been cancelled, and the program's children may outlive it.
            self._signal(signal.SIGKILL)
        await self.wait()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


async def run(make: MemberFactory, command: list[str], *, stop_s: float, max_restarts: int) -> int:
    """Run the command in each world, and restart it when the round changes. Return the exit code of `rdzv run`.

    stdout is the program's. The log of the member goes to stderr, as that of torchrun.
    """
    with log.taken_over():
        log.set_up()
        return await _run_in_rounds(make, command, stop_s, max_restarts)


async def _run_in_rounds(make: MemberFactory, command: list[str], stop_s: float, max_restarts: int) -> int:
    stop = StopSignal()
    reason = "this node came to join"
    held = False
    async with make(None) as rendezvous:
        while True:
            try:
                world = await stop.run_until(rendezvous.join())
            except Evicted as evicted:
                reason = evicted.reason
                continue
            code = None
            if world is not None:
                if held:  # The cause may have been found while this member waited.
                    reason = world.reason or reason
                held = True
                program = await Program.start(command, stop_s, world, reason)
                code, reason = await _until_changed(program, rendezvous, stop)
            if stop.signal is not None:
                return 128 + stop.signal
            if code == 0:
                with suppress(RdzvError):  # The others may have closed the run, or evicted this member, just now.
                    await rendezvous.done()
                return ExitCode.OK
            if code is not None and max_restarts == 0:
                await rendezvous.leave(failed=True, reason=f"rank {world.rank}: {reason}")
                complain(f"the program failed: {reason}")
                return code
            max_restarts -= code is not None


async def _until_changed(program: Program, rendezvous: AsyncRendezvous, stop: StopSignal) -> tuple[int | None, str]:
    """Wait for the program. Return its exit code, or None if the round changed or a signal came first; and the reason."""
    ended = asyncio.ensure_future(program.wait())
    changed = asyncio.ensure_future(rendezvous.wait_changed())
    try:
        await stop.run_until(asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED))
        if ended.done():
            code = ended.result()
            code = 128 - code if code < 0 else code  # As in a shell: signal n is 128 + n.
            return code, f"exit code {code}"
        if stop.signal is not None:
            with suppress(RdzvError):  # The others re-form while our program is still stopping.
                await rendezvous.drain(f"{stop.signal.name} received")
            return None, "stopped"
        change = changed.result()
        return None, change.reason if change is not None else "this member left"
    finally:
        changed.cancel()
        await program.stop()
