"""`rdzv watch`: shows a run as it changes, as a table with a progress bar or a line per change."""

from __future__ import annotations

import asyncio
import re
import signal
from contextlib import suppress
from typing import Any

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from ..config.settings import Settings
from ..core.status import RunChange, Status
from ..drivers import open_driver
from ..engines.port import Driver, EngineReset, Session
from ..errors import RdzvError, Unreachable
from ..operate.run_viewer import RunViewer
from .exit_codes import ExitCode
from .launcher import Printer
from .output import complain, say
from .tables import change, draw_table, member_rows, progress, story

RETRY_S = 0.5  # Pause between two attempts to reach the engine.
REDRAW_S = 0.5
_COUNTDOWN = re.compile(r"\d+ s\b")


class Watcher:
    """Follows one run until it is over, or SIGINT or SIGTERM."""

    def __init__(self, settings: Settings, console: Console, as_json: bool) -> None:
        self._settings = settings
        self._console = console
        self._printer = Printer(as_json)
        self._as_json = as_json
        self._live: Live | None = None
        self._viewer: RunViewer | None = None
        self._outage = "not connected yet"
        self._printed: object = None
        self._told: RunChange | None = None
        """The last change that was printed."""
        self._states: dict[str, tuple[str, float, bool]] = {}
        """State of each member by id, since when, and whether it may have begun before the command started."""
        self._phase: tuple[object, float, bool] = (None, 0.0, False)

    async def run(self) -> int:
        """Follow the run and return the exit code."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(self._follow())
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
        drawing: asyncio.Future[None] | None = None
        if self._console.is_terminal and not self._as_json:
            self._live = Live(console=self._console, get_renderable=self._draw, auto_refresh=False)
            self._live.start()
            drawing = asyncio.ensure_future(self._redraw(self._live))
        try:
            return await task
        except asyncio.CancelledError:
            return ExitCode.OK
        finally:
            if drawing is not None and self._live is not None:
                drawing.cancel()
                self._live.stop()

    async def _redraw(self, live: Live) -> None:
        while True:
            live.refresh()
            await asyncio.sleep(REDRAW_S)

    async def _follow(self) -> int:
        driver = open_driver(self._settings)
        try:
            while True:
                try:
                    session = await driver.connect()
                except Unreachable as error:
                    self._set_outage(str(error))
                else:
                    code = await self._follow_session(session, driver)
                    if code is not None:
                        return code
                await asyncio.sleep(RETRY_S)
        finally:
            await driver.close()

    async def _follow_session(self, session: Session, driver: Driver) -> int | None:
        """Follow the run on one session. Return the exit code, or None if the engine is gone."""
        viewer = self._viewer = RunViewer(session, self._settings.run_id, asyncio.get_running_loop().time)
        self._states.clear()
        had_head = False
        try:
            async for status in viewer.follow():
                self._outage = ""
                self._update_ages(status)
                self._print_status(status)
                if status is not None and status.phase == "closed":
                    return ExitCode.OK if viewer.succeeded else ExitCode.CLOSED
                has_head = status is not None and status.phase != "none"
                # Within one life of the engine, a head goes only with its run. An engine that came back empty is another
                # session, and waits for the members.
                if had_head and not has_head and (status is None or not status.members):
                    complain(f"run {self._settings.run_id!r} is gone: all have left, and its records have expired")
                    return ExitCode.ABSENT
                had_head = had_head or has_head
        except EngineReset:
            self._set_outage(f"engine {driver.endpoint} was restarted")
        except Unreachable as error:
            self._set_outage(str(error))
        finally:
            with suppress(RdzvError):
                await session.close()
        return None

    def _update_ages(self, status: Status | None) -> None:
        """Note since when each state has been seen, by this process's own clock."""
        now = asyncio.get_running_loop().time()
        first = not self._states and self._phase[0] is None
        before, self._states = self._states, {}
        for member in status.members if status is not None else ():
            known = before.get(member.id)
            self._states[member.id] = known if known and known[0] == member.state else (member.state, now, first)
        phase = (status.round, status.phase) if status is not None else None
        if phase != self._phase[0]:
            self._phase = (phase, now, first)

    def _age(self, since_at: float, at_least: bool) -> str:
        seconds = asyncio.get_running_loop().time() - since_at
        return f"{'>' if at_least else ''}{seconds:.0f} s"

    def _set_outage(self, reason: str) -> None:
        self._outage = reason
        self._print_once(("away", reason), {"event": "away", "reason": reason}, f"engine away: {reason}")

    def _print_status(self, status: Status | None) -> None:
        if status is None:
            reason = f"no such run yet on engine {self._settings.endpoint}: nobody has joined it"
            self._print_once("none", {"event": "none", "reason": reason}, f"run {self._settings.run_id!r}: {reason}")
            return
        states = sorted((member.name, member.state) for member in status.members)
        # A countdown in the reason is no change.
        key = (status.round, status.phase, status.size, _COUNTDOWN.sub("", status.reason), states)
        last = status.events.last if status.events is not None else None
        if last is not None and last != self._told and self._live is None and not self._as_json:
            say(f"{last.stamp} {change(last)}")
        self._told = last
        self._print_once(key, {"event": "status", **msgspec.to_builtins(status)}, f"{status} {progress(status)}")

    def _print_once(self, key: object, fields: dict[str, Any], text: str) -> None:
        """Print a line unless the last one had the same key, or there is a live table."""
        if self._live is None and key != self._printed:
            self._printed = key
            self._printer.line(fields, text)

    def _draw(self) -> Group:
        if self._viewer is None or self._outage:
            return Group(Text(f"run {self._settings.run_id!r}: engine away: {self._outage}", style="red"))
        status = self._viewer.status()
        if status is None:
            return Group(Text(f"run {self._settings.run_id!r}: nobody has joined it yet on {self._settings.endpoint}"))
        phase = f"run {status.run_id!r}  round {status.round} {status.phase} for {self._age(*self._phase[1:])}"
        ages = {id: self._age(since_at, at_least) for id, (_, since_at, at_least) in self._states.items()}
        head = Text("\n".join((phase, progress(status), status.reason, *story(status))))
        return Group(head, draw_table(*member_rows(status, ages)))
