"""The status of a run as a table and a progress bar."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from ..core.status import Status

ROWS_MAX = 200
"""More than a terminal has room for; `--json` shows all members."""
_URGENT = ("lost", "straggling", "draining", "banned")
_COLORS = {"lost": "red", "straggling": "yellow", "draining": "yellow", "banned": "red", "in": "green", "ready": "green"}


def status_table(status: Status, since: Mapping[str, str] | None = None) -> Table:
    """Make a table with one row per member, those with problems first. `since` is the time of each in its state, by id."""
    columns = ["member", "host", "rank", "state", *(["for"] if since is not None else []), "info"]
    table = Table(*columns, title=None, expand=False)
    rows = sorted(status.members, key=lambda one: (one.state not in _URGENT, one.rank, one.name))
    for member in rows[:ROWS_MAX]:
        rank = str(member.rank) if member.rank >= 0 else ""
        state = f"[{_COLORS[member.state]}]{member.state}[/]" if member.state in _COLORS else member.state
        info = escape(" ".join(f"{name}={value}" for name, value in member.info.items()))
        age = [since.get(member.id, "")] if since is not None else []
        table.add_row(escape(member.name), escape(member.host), rank, state, *age, info)
    if len(rows) > ROWS_MAX:
        table.add_row(f"and {len(rows) - ROWS_MAX} more")
    return table


def progress(status: Status, width: int = 24) -> str:
    """Draw how many members are there, of the minimum and maximum. '|' marks the quorum."""
    there = status.ready if status.phase in ("none", "open", "broken") else status.size
    high = max(status.max_nodes, 1)
    filled = min(width, round(width * there / high))
    quorum = min(width - 1, max(0, round(width * status.min_nodes / high) - 1))
    bar = "".join("|" if index == quorum else "#" if index < filled else "." for index in range(width))
    word = "ready" if status.phase in ("none", "open", "broken") else "in"
    return f"[{bar}] {there} {word}, {status.min_nodes} needed, {status.max_nodes} at most"
