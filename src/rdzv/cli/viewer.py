"""Commands that change nothing: `rdzv status`, `rdzv watch`, `rdzv journal` and `rdzv doctor`."""

from __future__ import annotations

import asyncio
import sys
import time

import msgspec
from rich.console import Console

from ..config.settings import Settings
from ..operate import journal as journals
from ..operate.doctor import PROBLEM, Doctor
from ..operate.journal import RunHistory
from ..operate.run_viewer import RunViewer
from . import options
from .exit_codes import ExitCode
from .options import ask, no_such_run, settings_for
from .output import json_text, say
from .watch import Watcher, status_table


@options.with_settings
def status(endpoint: options.Endpoint, run_id: options.RunId, given: options.Given, json: options.Json = False) -> None:
    """Show the members of a run, their states, and what the run is waiting for. Asks once. Exit code 7: no such run."""
    settings = settings_for(endpoint, run_id, given)
    seen = ask(settings, lambda session: RunViewer(session, settings.run_id, time.monotonic).look())
    if seen is None:
        raise no_such_run(settings)
    if json:
        say(json_text(seen))
    else:
        say(str(seen))
        if seen.members:
            Console().print(status_table(seen))


@options.with_settings
def watch(endpoint: options.Endpoint, run_id: options.RunId, given: options.Given, json: options.Json = False) -> None:
    """Show a run as it changes, until it is closed or you stop: a live table, or a line per change without a terminal.

    It waits for a run that does not exist yet, and continues through outages of the engine. Exit code 4: the run was closed,
    and not because all members were done.
    """
    sys.exit(asyncio.run(Watcher(settings_for(endpoint, run_id, given), Console(), json).run()))


@options.with_settings
def journal(
    endpoint: options.Endpoint, run_id: options.RunId, given: options.Given, json: options.Json = False
) -> None:
    """Show what happened in a run: each round, the cause of each restart, and its cost in seconds.

    The timestamps are from the writers' own clocks; durations are measured and do not depend on them. Exit code 7: the engine
    has no journal of that run.
    """
    settings = settings_for(endpoint, run_id, given)
    histories = ask(settings, lambda session: journals.read(session, settings.run_id))
    if not histories:
        raise no_such_run(settings)
    for history in histories:
        say("\n".join(_json_lines(history) if json else _text_lines(settings.run_id, history)))


def _json_lines(history: RunHistory) -> list[str]:
    lines: list[dict[str, object]] = []
    for step in history.steps:
        entry = msgspec.to_builtins(step.entry)
        del entry["type"]
        lines.append({"event": "line", "at_s": step.at.seconds, "exact": step.at.exact, "text": step.text, **entry})
    for restart in history.restarts:
        fields = msgspec.to_builtins(restart)
        for name in ("ran", "cost"):
            duration = fields.pop(name)
            fields[f"{name}_s"], fields[f"{name}_exact"] = duration["seconds"], duration["exact"]
        lines.append({"event": "restart", "run": history.run, **fields})
    return [json_text(line) for line in lines]


def _text_lines(run_id: str, history: RunHistory) -> list[str]:
    begin = "" if history.whole else "; its first lines were overwritten by later ones"
    lines = [f"run {run_id!r}, incarnation {history.run}{begin}"]
    for step in history.steps:
        at = f"{'+' if step.at.exact else '>'}{step.at.seconds:.1f} s"
        lines.append(f"{step.entry.stamp:20} {at:>10}  {step.text} (written by {step.entry.by})")
    for restart in history.restarts:
        after = f"round {restart.next_round} with {restart.next_size}" if restart.next_round else "no round yet"
        who = f" (by {', '.join(restart.members)})" if restart.members else ""
        kind = restart.kind.value if restart.kind else "unknown"
        lines.append(f"restart after round {restart.round}: {kind}{who}, cost {restart.cost}, then {after}: {restart.reason}")
    many = "1 restart" if len(history.restarts) == 1 else f"{len(history.restarts)} restarts"
    lines.append(f"{many}, {history.cost} in total")
    return lines


@options.with_settings
def doctor(
    endpoint: options.Endpoint, given: options.Given, run_id: options.AnyRunId = "doctor", json: options.Json = False
) -> None:
    """Check each step from here to an endpoint: names, routes, ports, the server, trust, rights, clock, torch.

    Changes nothing. Each line is ok, a warning or a problem, with the remedy. Exit code 1: there is a problem.
    """
    sys.exit(asyncio.run(_examine(settings_for(endpoint, run_id, given), json)))


async def _examine(settings: Settings, as_json: bool) -> int:
    code = ExitCode.OK
    async for finding in Doctor(settings).examine():
        if finding.level == PROBLEM:
            code = ExitCode.FAILED
        number = f" [{finding.code}]" if finding.code else ""
        remedy = f"\n{'':21}-> {finding.remedy}" if finding.remedy else ""
        text = f"{finding.level:8} {finding.topic:10}  {finding.text}{number}{remedy}"
        say(json_text(finding) if as_json else text)
    return code
