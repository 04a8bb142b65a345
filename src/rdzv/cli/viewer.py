"""What anybody may see of a run: `rdzv status`, `rdzv watch` and `rdzv journal`."""

from __future__ import annotations

import asyncio
import sys

import msgspec
import typer
from rich.console import Console

from ..config.settings import Settings
from ..core.status import Status
from ..operate import journal as journals
from ..operate.journal import RunHistory
from ..operate.run_viewer import RunViewer
from . import options
from .session import no_such_run, session_for, settings_for
from .tables import status_table
from .watch import Watcher


@options.with_settings
def status(
    endpoint: options.Endpoint,
    run_id: options.RunId,
    given: options.Given,
    json: options.Json = False,
) -> None:
    """Who is in a run, as what, and what it is waiting for. Asks once. Exit code 7: there is no such run."""
    settings = settings_for(endpoint, run_id, given)
    seen = asyncio.run(_look(settings))
    if json:
        typer.echo(msgspec.json.encode(seen).decode())
    else:
        typer.echo(str(seen))
        if seen.members:
            Console().print(status_table(seen))


async def _look(settings: Settings) -> Status:
    async with session_for(settings) as session:
        seen = await RunViewer(session, settings.run_id, asyncio.get_running_loop().time).look()
    if seen is None:
        raise no_such_run(settings)
    return seen


@options.with_settings
def watch(
    endpoint: options.Endpoint,
    run_id: options.RunId,
    given: options.Given,
    json: options.Json = False,
) -> None:
    """Show a run as it changes, until it is closed or you stop: a live table, or a line per change without a terminal.

    It waits for a run that is not there yet, and goes on through outages of the engine. Exit code 4: the run was closed, and
    not because all were done.
    """
    settings = settings_for(endpoint, run_id, given)
    sys.exit(asyncio.run(_watch(settings, json)))


async def _watch(settings: Settings, as_json: bool) -> int:
    return await Watcher(settings, Console(), as_json).run()


@options.with_settings
def journal(
    endpoint: options.Endpoint,
    run_id: options.RunId,
    given: options.Given,
    json: options.Json = False,
) -> None:
    """What happened in a run: each round, who caused each restart, and what it cost in seconds.

    The times in front are the writers' own clocks; durations are measured and do not depend on them. Exit code 7: the engine
    has no journal of that run.
    """
    settings = settings_for(endpoint, run_id, given)
    lives = asyncio.run(_read(settings))
    for life in lives:
        if json:
            typer.echo("\n".join(_json_lines(life)))
        else:
            typer.echo("\n".join(_text_lines(settings.run_id, life)))


async def _read(settings: Settings) -> list[RunHistory]:
    async with session_for(settings) as session:
        lives = await journals.read(session, settings.run_id)
    if not lives:
        raise no_such_run(settings)
    return lives


def _json_lines(life: RunHistory) -> list[str]:
    lines: list[dict[str, object]] = []
    for moment in life.moments:
        entry = msgspec.to_builtins(moment.entry)
        del entry["type"]
        lines.append({"event": "line", "at_s": moment.at.seconds, "exact": moment.at.exact, "text": moment.text, **entry})
    for restart in life.restarts:
        fields = msgspec.to_builtins(restart)
        for name in ("ran", "cost"):
            span = fields.pop(name)
            fields[f"{name}_s"], fields[f"{name}_exact"] = span["seconds"], span["exact"]
        lines.append({"event": "restart", "run": life.run, **fields})
    return [msgspec.json.encode(line).decode() for line in lines]


def _text_lines(run_id: str, life: RunHistory) -> list[str]:
    begin = "" if life.whole else "; its first lines were overwritten by later ones"
    lines = [f"run {run_id!r}, incarnation {life.run}{begin}"]
    for moment in life.moments:
        at = f"{'+' if moment.at.exact else '>'}{moment.at.seconds:.1f} s"
        lines.append(f"{moment.entry.stamp:20} {at:>10}  {moment.text} (written by {moment.entry.by})")
    for restart in life.restarts:
        after = f"round {restart.next_round} with {restart.next_size}" if restart.next_round else "no round yet"
        who = f" (by {', '.join(restart.members)})" if restart.members else ""
        kind = restart.kind.value if restart.kind else "unknown"
        lines.append(f"restart after round {restart.round}: {kind}{who}, cost {restart.cost}, then {after}: {restart.reason}")
    many = "1 restart" if len(life.restarts) == 1 else f"{len(life.restarts)} restarts"
    lines.append(f"{many}, {life.cost} in total")
    return lines
