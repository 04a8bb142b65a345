"""A description of a run for people: its members, what each one counts as, and what the run waits for."""

# No key holds the status. The caller lists the run and asks the leader's rules for the reason, so only status requests
# cost anything; a summary key would cost a write per change.

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from .choice import choose
from .model import BEHIND_MAX, CauseKind, JournalEntry, Phase, ProgressReport, RankEntry
from .rules import lead
from .view import LiveMember, View


class RunProgress(msgspec.Struct, frozen=True):
    """How far the workers of a round are, as far as they tell. The slowest decide."""

    step: int
    """The lowest step of all workers."""
    furthest: int
    rate: float
    """Steps per second of the slowest member."""
    workers: int
    behind: tuple[int, ...] = ()
    """Ranks of workers at the lowest step if others are further, a few at most."""
    age_s: float | None = None
    """About how long ago the lowest step was reached, by the clocks of this machine and of that node; None: not known."""


class MemberStatus(msgspec.Struct, frozen=True):
    """One member and its state."""

    id: str
    name: str
    host: str
    state: str
    """One of: in, ready, straggling, waiting, spare, draining, unhealthy, quarantined, done, banned, lost, left, gave up."""
    rank: int = -1
    info: dict[str, str] = {}
    here: bool = True
    """Whether the engine has the member's record. False: it was in the round and is gone, in the way that `state` says."""
    problem: str = ""
    """Why it is unhealthy or quarantined."""
    progress: ProgressReport | None = None
    """How far its workers are in this round; None: they do not tell."""


class RunChange(msgspec.Struct, frozen=True):
    """A change of the run's head, as its writer entered it in the journal."""

    text: str
    round: int
    phase: str
    by: str
    """Name of the leader or operator that wrote it."""
    cause: CauseKind | None = None
    members: tuple[str, ...] = ()
    """Names of the members that caused it, a few at most."""
    stamp: str = ""
    """The writer's wall clock."""
    lasted_s: float | None = None
    """How long the state before it had lasted; None: the writer does not know."""


class RunEvents(msgspec.Struct, frozen=True):
    """The last change of a run and its last break, as far as the journal tells them."""

    last: RunChange
    broken: RunChange | None = None
    """The last break of a round, if it is not `last` itself: why there is a new round."""


class Status(msgspec.Struct, frozen=True):
    """A run at one revision."""

    run_id: str
    round: int
    """The number of the last round; 0: none was sealed yet."""
    phase: str
    """One of: open, sealed, broken, closed."""
    size: int
    """Nodes of that round."""
    reason: str
    """Why the run waits, or what its round does, in the words of logs and errors."""
    leader: str
    """Name of the member that applies the rules; empty: none is there."""
    members: tuple[MemberStatus, ...]
    """All members, in the order in which they came."""
    min_nodes: int = 0
    max_nodes: int = 0
    ready: int = 0
    """The number of members that a round sealed now would have if there were room. Quorum is counted by this."""
    call: str = "none"
    """The timer that runs: none, last, regroup, settle or notice."""
    leader_id: str = ""
    events: RunEvents | None = None
    """None: the journal was not read, or has no entry of this head."""
    served_by: str = ""
    """The engine that keeps the run, for people; empty: not known."""
    engine: tuple[str, ...] = ()
    """One line for each member of an engine that the job runs on several hosts; empty for other engines."""
    age_s: float | None = None
    """About how long ago the run began, by the clocks of this machine and of its first leader; None: not known."""
    changed_s: float | None = None
    """The same for the last change."""
    progress: RunProgress | None = None
    """How far the workers of the round are; None: none of them tells."""

    def of(self, state: str) -> tuple[MemberStatus, ...]:
        """Return the members in that state."""
        return tuple(member for member in self.members if member.state == state)

    def titles(self) -> dict[str, str]:
        """Return each member's name by its id. Names that several members have are followed by the id."""
        count = Counter(one.name for one in self.members)
        return {one.id: f"{one.name} ({one.id})" if count[one.name] > 1 else one.name for one in self.members}

    def __repr__(self) -> str:
        # The sentence, not the 20 fields: an interactive session and a failed assertion show this.
        return f"<Status {self}>"

    def __str__(self) -> str:
        counts = Counter(member.state for member in self.members)
        shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        reason = self.reason.removeprefix(f"{self.phase}: ")
        return f"run {self.run_id!r}, round {self.round} {self.phase}: {reason} ({shown or 'no members'})"


def describe(run_id: str, view: View) -> Status:
    """Return the status of the run, with the reason that its leader would give."""
    head = view.head
    by_age = sorted(view.members.values(), key=lambda live: live.created)
    room = view.capacity - len(view.survivors)
    left_over = _left_over(view)
    shown = []
    for live in by_age:
        state = _state(view, live, 0 if live.id in left_over else room)
        if state in ("ready", "waiting") and live.id not in view.in_table:
            room -= 1
        rank = view.entries[live.id].rank if live.id in view.in_table else -1
        problem = live.record.unhealthy if state == "unhealthy" else ""
        problem = view.quarantined[live.record.host] if state == "quarantined" else problem
        shown.append(MemberStatus(
            live.id, live.record.name, live.record.host, state, rank, live.record.info, problem=problem,
            progress=_progress_of(view, live),
        ))  # fmt: skip
    for id, entry in view.entries.items():
        if id not in view.in_table:
            shown.append(MemberStatus(id, entry.name, entry.host, _state_of_gone(view, entry), entry.rank, here=False))
    return Status(
        run_id=run_id, reason=lead(view).reason, members=tuple(shown),
        leader=by_age[0].record.name if by_age else "", leader_id=by_age[0].id if by_age else "",
        min_nodes=view.settings.min_nodes, max_nodes=view.settings.max_nodes, ready=len(view.ready),
        round=head.number if head else 0, size=head.size if head else 0,
        phase=head.phase.value if head else "none", call=head.call.value if head else "none",
        progress=progress_of_run(one.progress for one in shown),
    )  # fmt: skip


def _progress_of(view: View, live: LiveMember) -> ProgressReport | None:
    """Return what the member's workers told in the round that runs."""
    found = view.progress.get(live.id)
    is_ours = found is not None and view.head is not None and found.table == view.head.table and live.id in view.in_table
    return found if is_ours and view.head is not None and view.head.phase is Phase.SEALED else None


def progress_of_run(
    told: Iterable[ProgressReport | None], ages: Mapping[str, float | None] | None = None
) -> RunProgress | None:
    """Return the progress of a round. `ages`: seconds that have passed since a stamp."""
    reports = [one for one in told if one is not None]
    if not reports:
        return None
    low, high = min(one.low for one in reports), max(one.high for one in reports)
    slowest = [one for one in reports if one.low == low]
    behind = sorted(rank for one in slowest for rank in one.slowest)
    passed = [(ages or {}).get(one.stamp) for one in slowest]
    known = [one.since_s + age_s for one, age_s in zip(slowest, passed, strict=True) if age_s is not None]
    return RunProgress(
        low, high, min(one.rate for one in slowest), sum(one.workers for one in reports),
        tuple(behind[:BEHIND_MAX]) if low < high else (), max(known, default=None),
    )  # fmt: skip


def _left_over(view: View) -> set[str]:
    """Ids of newcomers that are in no whole segment."""
    if view.settings.segment == 1:
        return set()
    lives = [*view.survivors, *view.newcomers]
    chosen = {live.id for live in choose(view, lives, view.fits(lives) or view.usable(lives))}
    return {live.id for live in view.newcomers if live.id not in chosen}


def describe_events(entries: Sequence[JournalEntry]) -> RunEvents | None:
    """Return what happened last, from the newest journal entries of one incarnation, newest first."""
    if not entries:
        return None
    broken = next((entry for entry in entries[1:] if entry.phase is Phase.BROKEN and entry.cause is not None), None)
    return RunEvents(_change(entries[0]), None if broken is None else _change(broken))


def _change(entry: JournalEntry) -> RunChange:
    cause, why = entry.cause, entry.cause.text if entry.cause else entry.reason
    text = {
        Phase.SEALED: f"round {entry.number} sealed with {'1 node' if entry.size == 1 else f'{entry.size} nodes'} ({why})",
        Phase.BROKEN: f"round {entry.number} broken: {why}",
        Phase.CLOSED: f"closed: {why}",
    }.get(entry.phase, entry.reason)
    if entry.phase is Phase.SEALED and entry.number > 1:
        text += f"; came in: {', '.join(entry.came)}" if entry.came else ""
        text += f"; no longer in: {', '.join(entry.gone)}" if entry.gone else ""
    return RunChange(
        text, entry.number, entry.phase.value, entry.by, cause.kind if cause else None, cause.members if cause else (),
        entry.stamp, entry.lasted_s,
    )  # fmt: skip


def _state_of_gone(view: View, entry: RankEntry) -> str:
    """Return the word for a member of the table whose record is gone."""
    if entry.done:
        return "done"
    if entry.gave_up:
        return "gave up"
    if entry.host in view.banned:
        return "banned"
    # Members leave after the close, so nobody is lost in a closed run.
    is_over = view.head is not None and view.head.phase is Phase.CLOSED
    return "left" if entry.went or is_over else "lost"


def _state(view: View, live: LiveMember, room: int) -> str:
    if live.record.host in view.banned:
        return "banned"
    if live.record.done:
        return "done"
    if view.is_draining(live):
        return "draining"
    if live.record.unhealthy:
        return "unhealthy"
    if live.id in view.kept_out:
        return "quarantined"
    phase = view.head.phase if view.head is not None else Phase.OPEN
    if live.id in view.in_table:
        if view.is_ready(live):
            return "ready"
        return "in" if phase in (Phase.SEALED, Phase.CLOSED) else "straggling"
    if room <= 0:
        return "spare"
    return "waiting" if phase is Phase.SEALED else "ready"
