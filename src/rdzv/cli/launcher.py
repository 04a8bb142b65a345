"""`rdzv join` and `rdzv run`: a member from the shell, and an elastic launcher for programs that know nothing of rdzv."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ..aio import AsyncRendezvous
from ..core.member_rules import Change, ChangeKind
from ..core.model import Phase
from ..errors import Closed, Evicted, RdzvError
from ..member.notices import Notice
from ..member.world import AsyncWorld
from .exit_codes import ExitCode
from .output import Printer

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """SIGTERM and SIGINT as an event; which of them came first. A second one ends a goodbye that takes too long."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._event = asyncio.Event()
        self._task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in STOPPING:
            loop.add_signal_handler(number, self._set, number)

    def _set(self, number: signal.Signals) -> None:
        if self.signal is not None and self._task is not None:
            self._task.cancel()
        self.signal = self.signal or number
        self._event.set()

    async def unless(self, work: Awaitable[Any]) -> Any:
        """The work's result, or None if a signal came first; the work is then cancelled."""
        working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            for task in (working, stopping):
                task.cancel()
            await asyncio.gather(working, stopping, return_exceptions=True)


async def join(make: Callable[[Callable[..., None]], AsyncRendezvous], voice: Printer) -> int:
    """Be in every round until told to stop or the run is over."""
    stop = Stop()
    over = asyncio.Event()

    def observe(notice: Notice) -> None:
        voice.notice(notice)
        if notice.kind == Phase.CLOSED.value:
            over.set()

    async with make(observe) as rendezvous:
        while stop.signal is None:
            try:
                world = await stop.unless(rendezvous.join())
                if world is None:
                    break
                voice.world(world)
                world.bootstrap.release()
                change = await stop.unless(_changed_or_over(rendezvous, over))
                if change is None:
                    break
                if change.kind is ChangeKind.CLOSED:
                    return _say(f"{change.reason} [{Closed.code}]", ExitCode.CLOSED)
                voice.changed(world.round, change)
            except Evicted as evicted:
                voice.changed(0, Change(ChangeKind.EVICTED, evicted.reason))
    return ExitCode.OK


async def _changed_or_over(rendezvous: AsyncRendezvous, over: asyncio.Event) -> Change | None:
    """Until the world no longer stands. None: all were done, which changes nothing for whoever holds it."""
    waits = [asyncio.ensure_future(rendezvous.wait_changed()), asyncio.ensure_future(over.wait())]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return rendezvous.changed
    finally:
        for wait in waits:
            wait.cancel()


def _say(sentence: str, code: ExitCode) -> int:
    sys.stderr.write(f"rdzv: {sentence}\n")
    return code


class Program:
    """The command, in one world; it and its children are one process group."""

    def __init__(self, command: list[str], stop_s: float) -> None:
        self._command = command
        self._stop_s = stop_s
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, world: AsyncWorld, reason: str) -> None:
        """With the variables that training programs read."""
        environ = {
            **os.environ,
            "RANK": str(world.rank),
            "WORLD_SIZE": str(world.size),
            "MASTER_ADDR": world.bootstrap.host,
            "MASTER_PORT": str(world.bootstrap.port),
            "RDZV_ROUND": str(world.round),
            "RDZV_RUN_ID": world.run_id,
            "RDZV_REASON": reason,
        }
        # The program of rank 0 binds the port itself.
        world.bootstrap.release()
        self._process = await asyncio.create_subprocess_exec(*self._command, env=environ, start_new_session=True)

    async def wait(self) -> int:
        """Its exit code."""
        assert self._process is not None, "started before"
        return await self._process.wait()

    async def stop(self) -> int:
        """SIGTERM, then, if it does not end in time, SIGKILL; the whole group."""
        assert self._process is not None, "started before"
        try:
            if self._process.returncode is None:
                self._signal(signal.SIGTERM)
                await asyncio.wait_for(asyncio.shield(self._process.wait()), self._stop_s)
        except asyncio.TimeoutError:
            sys.stderr.write(f"rdzv: the program did not stop within {self._stop_s:g} s and is killed\n")
        finally:
            # Also if we are told to be quick; and what the program started may outlive it.
            self._signal(signal.SIGKILL)
        return await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "started before"
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class Launcher:
    """`rdzv run`: the command in each world; stopped and started again when the round changes."""

    def __init__(
        self,
        make: Callable[[Callable[..., None] | None], AsyncRendezvous],
        command: list[str],
        *,
        stop_s: float,
        max_restarts: int,
    ) -> None:
        self._make = make
        self._command = command
        self._stop_s = stop_s
        self._restarts_left = max_restarts

    async def run(self) -> int:
        """Ends with the command's exit code, or as `rdzv join` would."""
        self._stop = Stop()
        reason = "this node came to join"
        async with self._make(None) as rendezvous:
            while True:
                try:
                    world = await self._stop.unless(rendezvous.join())
                except Evicted as evicted:
                    reason = evicted.reason
                    continue
                if world is None:
                    return self._by_signal()
                code, reason = await self._in_world(rendezvous, world, reason)
                if self._stop.signal is not None:
                    return self._by_signal()
                if code == 0:
                    with suppress(RdzvError):  # The others may have closed the run, or gone on without us, at this moment.
                        await rendezvous.done()
                    return ExitCode.OK
                if code is not None and self._restarts_left == 0:
                    await rendezvous.leave(failed=True, reason=f"rank {world.rank}: {reason}")
                    _say(f"the program failed: {reason}", ExitCode.FAILED)
                    return code
                self._restarts_left -= code is not None

    async def _in_world(self, rendezvous: AsyncRendezvous, world: AsyncWorld, reason: str) -> tuple[int | None, str]:
        """The command's exit code, or None if the round changed (or a signal came) first; and what to say of it."""
        program = Program(self._command, self._stop_s)
        await program.start(world, reason)
        ended = asyncio.ensure_future(program.wait())
        changed = asyncio.ensure_future(rendezvous.wait_changed())
        try:
            await self._stop.unless(asyncio.wait([ended, changed], return_when=asyncio.FIRST_COMPLETED))
            if ended.done():
                code = _shell_code(ended.result())
                return code, f"exit code {code}"
            if self._stop.signal is not None:
                with suppress(RdzvError):  # The others re-form while our program is still stopping.
                    await rendezvous.drain(f"{self._stop.signal.name} received")
                return None, "stopped"
            change = changed.result()
            why = change.reason if change is not None else "this member left"
            sys.stderr.write(f"rdzv: round {world.round} is over: {why}; stopping the program\n")
            return None, why
        finally:
            changed.cancel()
            await program.stop()

    def _by_signal(self) -> int:
        return 128 + int(self._stop.signal or 0)


def _shell_code(returncode: int) -> int:
    """As a shell shows it: death by a signal is 128 plus its number."""
    return 128 - returncode if returncode < 0 else returncode
