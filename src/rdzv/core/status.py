"""A run as people want to see it: who is in, ready, waiting, spare, done, lost, and the reason."""

from __future__ import annotations

import msgspec

from .rules import lead
from .view import Live, View


class Standing(msgspec.Struct, frozen=True):
    """One member and what it counts as."""

    id: str
    name: str
    host: str
    state: str
    """in, ready, straggling, waiting, spare, draining, done, banned or lost."""
    rank: int = -1
    info: dict[str, str] = {}


class Status(msgspec.Struct, frozen=True):
    """A run at one revision."""

    run_id: str
    round: int
    phase: str
    size: int
    reason: str
    leader: str
    members: tuple[Standing, ...]

    def of(self, state: str) -> tuple[Standing, ...]:
        """Those in that state."""
        return tuple(member for member in self.members if member.state == state)

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for member in self.members:
            counts[member.state] = counts.get(member.state, 0) + 1
        shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        return f"run {self.run_id!r}, round {self.round} {self.phase}: {self.reason} ({shown or 'no members'})"


def describe(run_id: str, view: View) -> Status:
    """The whole run, with the reason the leader would give."""
    head = view.head
    by_age = sorted(view.members.values(), key=lambda live: live.created)
    room = view.capacity - len(view.survivors)
    standings = []
    for live in by_age:
        state = _state(view, live, room)
        if state in ("ready", "waiting") and live.id not in view.in_table:
            room -= 1
        line = view.entries.get(live.id) if live.id in view.in_table else None
        rank = line.rank if line is not None else -1
        standings.append(Standing(live.id, live.record.name, live.record.host, state, rank, live.record.info))
    for id, line in view.entries.items():
        if id not in view.in_table:
            standings.append(Standing(id, line.name, line.host, "done" if line.done else "lost", line.rank))
    return Status(
        run_id=run_id,
        round=head.number if head else 0,
        phase=head.phase.value if head else "none",
        size=head.size if head else 0,
        reason=lead(view).reason,
        leader=by_age[0].record.name if by_age else "",
        members=tuple(standings),
    )


def _state(view: View, live: Live, room: int) -> str:
    if live.record.host in view.banned:
        return "banned"
    if live.record.done:
        return "done"
    if view.is_draining(live):
        return "draining"
    running = view.head is not None and view.head.phase.value == "sealed"
    if live.id in view.in_table:
        if view.is_ready(live):
            return "ready"
        return "in" if running else "straggling"
    if room <= 0:
        return "spare"
    return "waiting" if running else "ready"
