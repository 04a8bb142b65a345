"""Runs and members as tables: drawn on a terminal, as aligned columns of plain text in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..core.status import RunChange, RunProgress, Status
from ..operate.runs import SeenRun
from ..printable import shown
from .output import say

ROWS_MAX = 200  # More than a terminal has room for; a pipe and `--json` show all members.
_URGENT = ("lost", "gave up", "straggling", "draining", "unhealthy", "quarantined", "banned")
_COLORS = {
    "lost": "red", "gave up": "red", "banned": "red", "straggling": "yellow", "draining": "yellow", "broken": "yellow",
    "unhealthy": "yellow", "quarantined": "yellow",
    "in": "green", "ready": "green", "sealed": "green",
}  # fmt: skip


def print_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows on stdout. In a pipe nothing is drawn, coloured or cut."""
    if sys.stdout.isatty():
        Console().print(draw_table(titles, rows))
    else:
        say("\n".join(_align([[title.upper() for title in titles], *rows])))


def draw_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Make a table for a terminal, with a colour for each state and phase."""
    table = Table(*titles, title=None, expand=False)
    for row in rows[:ROWS_MAX]:
        cells = [shown(cell) for cell in row]
        table.add_row(*(f"[{_COLORS[cell]}]{cell}[/]" if cell in _COLORS else escape(cell) for cell in cells))
    if len(rows) > ROWS_MAX:
        table.add_row(f"and {len(rows) - ROWS_MAX} more")
    return table


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[shown(cell) or "-" for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return [line.rstrip() for line in lines]


def member_rows(status: Status, since: Mapping[str, str] | None = None) -> tuple[list[str], list[list[str]]]:
    """Return titles and one row per member, those with problems first. `since`: the time of each in its state, by id."""
    steps = [] if status.progress is None else ["step"]
    titles = ["member", "host", "rank", "state", *(["for"] if since is not None else []), *steps, "info"]
    names, rows = status.titles(), []
    for one in sorted(status.members, key=lambda one: (one.state not in _URGENT, one.rank, one.name)):
        name = f"{names[one.id]} (leads)" if one.here and one.id == status.leader_id else names[one.id]
        age = [since.get(one.id, "")] if since is not None else []
        info = " ".join(f"{key}={value}" for key, value in one.info.items())
        state = f"{one.state}: {one.problem}" if one.problem else one.state
        step = [str(one.progress.low) if one.progress is not None else ""] if steps else []
        rows.append([name, one.host, str(one.rank) if one.rank >= 0 else "", state, *age, *step, info])
    return titles, rows


def run_rows(runs: Sequence[SeenRun]) -> tuple[list[str], list[list[str]]]:
    """Return titles and one row per run. A column says where each is kept, if that is not one place."""
    places = {run.run.endpoint for run in runs}
    titles, rows = ["run", "phase", "round", "nodes", "age", "reason"], []
    for one in runs:
        status = one.status
        if status is None:
            row = [one.run.run_id, "", "", "", duration(one.run.age_s), one.problem or "it has no records of a run"]
        else:
            age = duration(status.age_s if status.age_s is not None else one.run.age_s)
            reason = status.reason.removeprefix(f"{status.phase}: ")
            row = [status.run_id, status.phase, str(status.round), nodes(status), age, reason]
        rows.append(row + ([str(one.run.endpoint)] if len(places) > 1 else []))
    return titles + (["kept at"] if len(places) > 1 else []), rows


def nodes(status: Status) -> str:
    """Return how many nodes a run has, or had, and wants: "3 of 2..4"."""
    low, high = status.min_nodes, status.max_nodes
    there = status.ready if status.phase in ("none", "open", "broken") else status.size
    return f"{there} of {low}" if low == high else f"{there} of {low}..{high}"


def story(status: Status) -> list[str]:
    """Return lines about what happened last and who serves and leads, and one per member of a quorum."""
    lines = []
    if status.events is not None:
        ago = f"{duration(status.changed_s)} ago, " if status.changed_s is not None else ""
        lines.append(f"last change: {ago}{change(status.events.last)}")
        if status.events.broken is not None:
            lines.append(f"before that: {change(status.events.broken)}")
    lines += [steps(status.progress)] if status.progress is not None else []
    facts = [f"served by {status.served_by}" if status.served_by else ""]
    facts += [f"led by {status.titles().get(status.leader_id, status.leader)}" if status.leader else ""]
    facts += [f"began {duration(status.age_s)} ago" if status.age_s is not None else ""]
    told = "; ".join(fact for fact in facts if fact)
    return [*lines, *([told] if told else []), *(f"quorum  {line}" for line in status.engine)]


def steps(told: RunProgress) -> str:
    """Return how far the workers are, in one line."""
    step = f"step {told.step}" if told.step == told.furthest else f"steps {told.step} to {told.furthest}"
    age = f", {duration(told.age_s)} ago" if told.age_s is not None else ""
    behind = f"; behind: rank {', '.join(map(str, told.behind))}" if told.furthest > told.step + 1 else ""
    by = f"told by {told.workers} worker{'s' if told.workers > 1 else ''}"
    return f"progress: {step}, {told.rate:.3g} per second{age}, {by}{behind}"


def change(one: RunChange) -> str:
    return f"{one.text} (written by {one.by})"


def duration(seconds: float | None) -> str:
    """Return a time for people, in one unit; empty if it is not known."""
    if seconds is None:
        return ""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def progress(status: Status, width: int = 24) -> str:
    """Draw how many members are there, of the minimum and maximum. '|' marks the quorum."""
    there, word = status.ready, "ready"
    if status.phase not in ("none", "open", "broken"):
        # Of a round that is over, or is about to be broken, some may have gone.
        there, word = sum(one.state in ("in", "done") for one in status.members), "in"
    high = max(status.max_nodes, 1)
    filled = min(width, round(width * there / high))
    quorum = min(width - 1, max(0, round(width * status.min_nodes / high) - 1))
    bar = "".join("|" if index == quorum else "#" if index < filled else "." for index in range(width))
    return f"[{bar}] {there} {word}, {status.min_nodes} needed, {status.max_nodes} at most"
