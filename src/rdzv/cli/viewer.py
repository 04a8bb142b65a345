"""Commands that change nothing: `rdzv runs`, `rdzv status`, `rdzv watch` and `rdzv doctor`."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from typing import Annotated

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config.settings import Settings
from ..errors import NotFound, SettingsError
from ..operate.doctor import NO_RUN, PROBLEM, WARNING, Doctor, Finding
from ..operate.run_viewer import RunViewer
from ..operate.runs import RUNS_MAX, RunList, SeenRun, list_runs, look_at_runs
from ..printable import clean
from . import options
from .exit_codes import ExitCode
from .options import ask, no_such_run, settings_for, viewer_settings
from .output import complain, json_text, say
from .tables import member_rows, print_table, run_rows, story
from .watch import Watcher
from .words import Option

Limit = Annotated[int, Option("--limit", metavar="N", min=1, max=RUNS_MAX, help="at most so many runs")]


@options.with_settings
def runs(endpoint: options.Endpoint, given: options.Given, limit: Limit = 200, json: options.Json = False) -> None:
    """List the runs that an engine keeps: phase, round, nodes, age, and what each is waiting for.

    A server with a secret tells them only to those who have it. Exit code 0, even if there is none.
    """
    settings = viewer_settings(endpoint, given)
    listed = asyncio.run(list_runs(settings, limit))
    _print_runs(settings, listed, json)


@options.with_settings
def status(
    endpoint: options.Endpoint, given: options.Given, run_id: options.OnlyRunId = "", json: options.Json = False
) -> None:
    """Show the members of a run, their states, what happened last, and what the run is waiting for. Asks once.

    Without --run-id it shows the only run that is there, or lists all of them. Exit code 7: no such run.
    """
    settings = named_or_only_run(endpoint, run_id, given, json)
    if settings is None:
        return
    seen = ask(settings, lambda session: RunViewer(session, settings.run_id, time.monotonic).look())
    if seen is None:
        raise no_such_run(settings)
    if json:
        say(json_text(seen))
        return
    say("\n".join((str(seen), *story(seen))))
    if seen.members:
        print_table(*member_rows(seen))


LISTED = 200  # Runs that `rdzv status` and `rdzv journal` list. `rdzv runs --limit` lists more.


def named_or_only_run(endpoint: str, run_id: str, given: options.Given, as_json: bool) -> Settings | None:
    """Return settings for the run of this id; without an id, for the only run. If there are several, list them."""
    if run_id:
        return settings_for(endpoint, run_id, given)
    anywhere = viewer_settings(endpoint, given)
    listed = asyncio.run(list_runs(anywhere, LISTED))
    only = _only_run(anywhere, listed)
    if only is None:
        _print_runs(anywhere, listed, as_json)
    return only


def _only_run(settings: Settings, listed: RunList) -> Settings | None:
    """Return settings for the only run of the list; None: there are several. Raise NotFound if there is none."""
    if not listed.runs:
        raise NotFound("", f"engine {settings.endpoint} keeps no run: nobody has joined one, or their records are gone")
    if len(listed.runs) > 1:
        return None
    only = listed.runs[0]
    return msgspec.structs.replace(settings, endpoint=only.endpoint, run_id=only.run_id)


def _print_runs(settings: Settings, listed: RunList, as_json: bool) -> None:
    seen = asyncio.run(look_at_runs(settings, listed.runs))
    if as_json:
        for one in seen:
            say(json_text(_run_fields(one)))
    elif seen:
        print_table(*run_rows(seen))
    else:
        say(f"engine {settings.endpoint} keeps no run")
    if listed.more:
        complain(f"there are more than {len(listed.runs)} runs: `rdzv runs --limit` lists more, and --run-id names one")


def _run_fields(one: SeenRun) -> dict[str, object]:
    """Return the fields of a run for programs: its status without the list of members."""
    fields: dict[str, object] = {"run_id": one.run.run_id, "kept_at": str(one.run.endpoint), "problem": one.problem}
    if one.status is not None:
        fields = {**msgspec.to_builtins(one.status), **fields}
        members = Counter(member.state for member in one.status.members)
        fields["members"] = dict(sorted(members.items()))
    if fields.get("age_s") is None:
        fields["age_s"] = one.run.age_s
    return {**fields, "silent_s": one.run.silent_s}


@options.with_settings
def watch(
    endpoint: options.Endpoint, given: options.Given, run_id: options.OnlyRunId = "", json: options.Json = False
) -> None:
    """Show a run as it changes, until it is over or you stop: a live table, or a line per change without a terminal.

    It waits for a run that does not exist yet, and continues through outages of the engine. Exit code 4: the run was closed,
    and not because all members were done. Exit code 7: its records are gone, and nobody has said how it ended.
    """
    if run_id:
        settings = settings_for(endpoint, run_id, given)
    else:
        anywhere = viewer_settings(endpoint, given)
        listed = asyncio.run(list_runs(anywhere, LISTED))
        only = _only_run(anywhere, listed)
        if only is None:
            names = ", ".join(repr(run.run_id) for run in listed.runs[:NAMED])
            more = ", ..." if len(listed.runs) > NAMED else ""
            raise SettingsError(f"engine {anywhere.endpoint} keeps several runs ({names}{more}): name one with --run-id")
        settings = only
    sys.exit(asyncio.run(Watcher(settings, Console(), json).run()))


NAMED = 8  # Runs that a message names.


@options.with_settings
def doctor(
    endpoint: options.Endpoint, given: options.Given, run_id: options.AnyRunId = NO_RUN, json: options.Json = False
) -> None:
    """Check each step from here to an endpoint: names, routes, ports, the server, trust, rights, clock, torch.

    Changes nothing. Each line is ok, a warning or a problem, with the remedy. Exit code 1: there is a problem.
    """
    sys.exit(asyncio.run(_examine(settings_for(endpoint, run_id, given), json)))


DRAWN_MIN = 40  # Columns of a terminal: the first two of a finding take 21, and its text has to be readable beside them.


async def _examine(settings: Settings, as_json: bool) -> int:
    code = ExitCode.OK
    async for finding in Doctor(settings).examine():
        if finding.level == PROBLEM:
            code = ExitCode.FAILED
        if as_json:
            say(json_text(finding))
            continue
        number = f" [{finding.code}]" if finding.code else ""
        console = Console()
        if sys.stdout.isatty() and console.width >= DRAWN_MIN:
            _draw_finding(console, finding, number)
        else:
            remedy = f"\n{'':21}-> {finding.remedy}" if finding.remedy else ""
            say(f"{finding.level:8} {finding.topic:10}  {finding.text}{number}{remedy}")
    return code


def _draw_finding(console: Console, finding: Finding, number: str) -> None:
    """Print a finding in colour, wrapped in a column of its own."""
    line = Table.grid(padding=(0, 1, 0, 0))
    line.add_column(width=8, style={PROBLEM: "bold red", WARNING: "yellow"}.get(finding.level, "green"))
    line.add_column(width=11)
    line.add_column(overflow="fold")
    line.add_row(finding.level, finding.topic, Text(clean(f"{finding.text}{number}")))
    if finding.remedy:
        line.add_row("", "", Text(clean(f"-> {finding.remedy}"), style="bold"))
    console.print(line)
