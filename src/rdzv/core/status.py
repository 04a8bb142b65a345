"""A description of a run for people: its members, what each one counts as, and what the run waits for."""

# No key holds the status. The caller lists the run and asks the leader's rules for the reason, so only status requests
# cost anything; a summary key would cost a write per change.

from __future__ import annotations

import msgspec

from .model import Phase
from .rules import lead
from .view import LiveMember, View


class MemberStatus(msgspec.Struct, frozen=True):
    """One member and its state."""

    id: str
    name: str
    host: str
    state: str
    """One of: in, ready, straggling, waiting, spare, draining, done, banned, lost; in a closed run, left."""
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
    members: tuple[MemberStatus, ...]
    min_nodes: int = 0
    max_nodes: int = 0
    ready: int = 0
    """The number of members that a round sealed now would have if there were room. Quorum is counted by this."""
    call: str = "none"
    """The timer that runs: none, last, regroup or settle."""

    def of(self, state: str) -> tuple[MemberStatus, ...]:
        """Return the members in that state."""
        return tuple(member for member in self.members if member.state == state)

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for member in self.members:
            counts[member.state] = counts.get(member.state, 0) + 1
        shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        reason = self.reason.removeprefix(f"{self.phase}: ")
        return f"run {self.run_id!r}, round {self.round} {self.phase}: {reason} ({shown or 'no members'})"


def describe(run_id: str, view: View) -> Status:
    """Return the status of the run, with the reason that its leader would give."""
    head = view.head
    by_age = sorted(view.members.values(), key=lambda live: live.created)
    room = view.capacity - len(view.survivors)
    shown = []
    for live in by_age:
        state = _state(view, live, room)
        if state in ("ready", "waiting") and live.id not in view.in_table:
            room -= 1
        rank = view.entries[live.id].rank if live.id in view.in_table else -1
        shown.append(MemberStatus(live.id, live.record.name, live.record.host, state, rank, live.record.info))
    # Members leave after the close, so nobody is lost in a closed run.
    gone = "left" if head is not None and head.phase is Phase.CLOSED else "lost"
    for id, entry in view.entries.items():
        if id not in view.in_table:
            shown.append(MemberStatus(id, entry.name, entry.host, "done" if entry.done else gone, entry.rank))
    return Status(
        run_id=run_id, reason=lead(view).reason, leader=by_age[0].record.name if by_age else "", members=tuple(shown),
        min_nodes=view.settings.min_nodes, max_nodes=view.settings.max_nodes, ready=len(view.ready),
        round=head.number if head else 0, size=head.size if head else 0,
        phase=head.phase.value if head else "none", call=head.call.value if head else "none",
    )  # fmt: skip


def _state(view: View, live: LiveMember, room: int) -> str:
    if live.record.host in view.banned:
        return "banned"
    if live.record.done:
        return "done"
    if view.is_draining(live):
        return "draining"
    phase = view.head.phase if view.head is not None else Phase.OPEN
    if live.id in view.in_table:
        if view.is_ready(live):
            return "ready"
        return "in" if phase in (Phase.SEALED, Phase.CLOSED) else "straggling"
    if room <= 0:
        return "spare"
    return "waiting" if phase is Phase.SEALED else "ready"
