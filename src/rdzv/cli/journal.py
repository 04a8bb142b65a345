"""`rdzv journal`: what happened in a run, from its engine, or from the files that its agents kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec

from ..config.auto_endpoint import AUTO
from ..errors import NotFound, SettingsError
from ..member.journal_file import SUFFIX
from ..member.sentences import percent, seconds_text
from ..operate import account
from ..operate import journal as journals
from ..operate.account import RunAccount
from ..operate.journal import Duration, Restart, RunHistory
from . import options
from .exit_codes import ExitCode
from .options import ask, no_such_run, settings_for
from .output import complain, json_text, say
from .viewer import named_or_only_run
from .words import Argument, Option

Places = Annotated[
    list[str],
    Argument(
        metavar="ENDPOINT|FILE...", envvar="RDZV_ENDPOINT",
        help="where the run is kept, or journal files, or folders with some",
    ),
]
RunIdOrAll = Annotated[
    str, Option("--run-id", envvar="RDZV_RUN_ID", help="names the run; without it, the only run that is there; for files: all")
]

Outcome = Annotated[
    bool, Option("--outcome", help="exit code for how the run ended: 0 all done, 4 closed otherwise, 7 not at all")
]


@options.with_settings
def journal(
    endpoint: Places, given: options.Given, run_id: RunIdOrAll = "", outcome: Outcome = False, json: options.Json = False
) -> None:
    """Show what happened in a run: each round, the cause of each restart, and its cost in seconds.

    Given an endpoint, it asks the engine, which keeps the last 256 steps of a run for as long as it keeps the run.
    Given files or folders, it merges what the agents of several nodes kept into one account with the availability.
    Timestamps are from the writers' own clocks; durations are measured and do not depend on them. Exit code 7: there
    is no journal of that run. Without --run-id it shows the only run of the engine, or lists all of them.
    """
    places = endpoint  # Named for the variable and the pages of all commands.
    ends = _show_files(places, run_id, json) if _are_files(places) else _show_run(places[0], run_id, given, json)
    if outcome and not ends:
        raise SettingsError("--outcome is about one run: name it with --run-id")
    if outcome:
        _exit_as_it_ended(ends)


def _show_files(places: list[str], run_id: str, json: bool) -> list[tuple[bool, str]]:
    """Show the account of each life of each run. Return whether it succeeded, and why it was closed, if it was."""
    merged = account.accounts(account.read_files(account.find_files(places)))
    found = [one for one in merged if run_id in ("", one.run_id)]
    if not found and run_id:
        raise NotFound(run_id, f"none of the files has a journal of it: {', '.join(places)}")
    if not found:
        raise SettingsError(f"no journal is in {', '.join(places)}")
    for one in found:
        say("\n".join(_account_json(one) if json else _account_text(one)))
    return [(one.succeeded, one.end) for one in found]


def _show_run(endpoint: str, run_id: str, given: options.Given, json: bool) -> list[tuple[bool, str]]:
    """Show what the engine has. Return how the last life of the run ended, as `_show_files` does; nothing if it lists runs."""
    # With auto the environment tells the id of the job, too.
    is_auto = endpoint.strip() == AUTO
    settings = settings_for(endpoint, run_id, given) if is_auto else named_or_only_run(endpoint, run_id, given, json)
    if settings is None:
        return []
    histories = ask(settings, lambda session: journals.read(session, settings.run_id))
    if not histories:
        raise no_such_run(settings)
    for history in histories:
        say("\n".join(_history_json(history) if json else _history_text(settings.run_id, history)))
    last = histories[-1]
    return [(last.succeeded, last.end)]


def _exit_as_it_ended(ends: list[tuple[bool, str]]) -> None:
    """End with the code for how the run ended. Of several lives, one that succeeded is enough."""
    if any(succeeded for succeeded, _ in ends):
        return
    closed = [end for _, end in ends if end]
    if closed:
        complain(f"the run failed: {closed[-1]}")
        sys.exit(ExitCode.CLOSED)
    complain("the run did not end: it was interrupted, or still runs")
    sys.exit(ExitCode.ABSENT)


def _are_files(places: list[str]) -> bool:
    """Whether these are files, and not one endpoint. An endpoint has a slash only behind its scheme."""
    first = places[0]
    is_path = "/" in first and "://" not in first
    if len(places) > 1 or is_path or SUFFIX in first or first.endswith(".jsonl"):
        return True
    try:
        return Path(first).expanduser().exists()
    except (OSError, RuntimeError):  # The name is too long for a file, or that of a home that nobody has.
        return False


def _history_json(history: RunHistory) -> list[str]:
    lines: list[dict[str, object]] = []
    for step in history.steps:
        entry = msgspec.to_builtins(step.entry)
        del entry["type"]
        lines.append({"event": "line", "at_s": step.at.seconds, "exact": step.at.exact, "text": step.text, **entry})
    lines += [{"event": "restart", "run": history.run, **_flat(restart)} for restart in history.restarts]
    return [json_text(line) for line in lines]


def _history_text(run_id: str, history: RunHistory) -> list[str]:
    begin = "" if history.whole else "; its first lines were overwritten by later ones"
    lines = [f"run {run_id!r}, incarnation {history.run}{begin}"]
    for step in history.steps:
        at = f"{'+' if step.at.exact else '>'}{step.at.seconds:.1f} s"
        lines.append(f"{step.entry.stamp:20} {at:>10}  {step.text} (written by {step.entry.by})")
    lines += [_restart_text(restart) for restart in history.restarts]
    return [*lines, f"{_many(len(history.restarts), 'restart')}, {history.cost} in total"]


def _account_json(one: RunAccount) -> list[str]:
    common = {"run_id": one.run_id, "run": one.incarnation}
    lines: list[dict[str, object]] = [{"event": "round", **common, **_flat(this)} for this in one.rounds]
    lines += [{"event": "restart", **common, **_flat(restart)} for restart in one.restarts]
    lines += [{"event": "incident", **common, **msgspec.to_builtins(incident)} for incident in one.incidents]
    total = {"members": one.members, "rounds": len(one.rounds), "restarts": len(one.restarts), "end": one.end,
             "succeeded": one.succeeded}
    lines.append({"event": "total", **common, **total, **_seconds("ran", one.ran), **_seconds("cost", one.cost),
                  "availability": one.availability})  # fmt: skip
    return [json_text(line) for line in lines]


def _account_text(one: RunAccount) -> list[str]:
    nodes = f"{_many(len(one.members), 'node')}: {', '.join(one.members)}"
    lines = [f"run {one.run_id!r}, incarnation {one.incarnation or 'unknown'}, as told by {nodes}"]
    restarts = {restart.round: restart for restart in one.restarts}
    for this in one.rounds:
        formed = f"formed in {this.formed}, " if this is one.rounds[0] else ""
        lines.append(f"round {this.number}: {_many(this.size, 'node')}, {formed}ran {this.ran}")
        incidents = [item for item in one.incidents if item.round == this.number]
        lines += [f"  round {this.number}, {item.member}: {item.text}" for item in incidents]
        if this.number in restarts:
            lines.append(_restart_text(restarts[this.number]))
    if one.end:
        lines.append(f"closed: {one.end}")
    caused: dict[str, int] = {}
    for restart in one.restarts:
        for name in restart.members:
            caused[name] = caused.get(name, 0) + 1
    if caused:
        most = sorted(caused.items(), key=lambda item: (-item[1], item[0]))
        lines.append(f"restarts caused by: {', '.join(f'{name} ({count})' for name, count in most)}")
    share = "" if one.availability is None else f"; availability {percent(one.availability)} of {_whole(one)}"
    return [*lines, f"{_many(len(one.restarts), 'restart')}, {one.cost} in total{share}"]


def _whole(one: RunAccount) -> str:
    return seconds_text(one.ran.seconds + one.cost.seconds)


def _restart_text(restart: Restart) -> str:
    after = f"round {restart.next_round} with {restart.next_size}" if restart.next_round else "no round yet"
    who = f" (by {', '.join(restart.members)})" if restart.members else ""
    kind = restart.kind.value if restart.kind else "unknown"
    return f"restart after round {restart.round}: {kind}{who}, cost {restart.cost}, then {after}: {restart.reason}"


def _flat(value: msgspec.Struct) -> dict[str, object]:
    """Return the fields, with a duration as two: seconds, and whether they are exact."""
    fields: dict[str, object] = {}
    for name in value.__struct_fields__:
        one = getattr(value, name)
        fields.update(_seconds(name, one) if isinstance(one, Duration) else {name: msgspec.to_builtins(one)})
    return fields


def _seconds(name: str, duration: Duration) -> dict[str, object]:
    return {f"{name}_s": duration.seconds, f"{name}_exact": duration.exact}


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"
