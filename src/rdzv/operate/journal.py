"""The history of a run from its journal: the rounds, the cause of each restart, and its cost in seconds.

Every write of the head adds a journal entry in the same transaction. The entry says how long the previous head was valid, by
the clock of the leader that replaced it. So durations can be added up although leaders change, and no clocks are compared. A
writer that came after the previous head was written, or an operator, does not know that time. Sums are then lower bounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from ..core import wire
from ..core.keys import Keys
from ..core.model import CauseKind, JournalEntry, Phase
from ..engines.port import List, Session
from ..errors import Incompatible


class Duration(msgspec.Struct, frozen=True):
    """A sum of durations from several entries."""

    seconds: float = 0.0
    exact: bool = True  # False if a part is unknown: then it is at least this long.

    def plus(self, lasted_s: float | None) -> Duration:
        return Duration(round(self.seconds + (lasted_s or 0.0), 3), self.exact and lasted_s is not None)

    def __str__(self) -> str:
        return f"{'' if self.exact else 'at least '}{self.seconds:.1f} s"


class JournalStep(msgspec.Struct, frozen=True):
    """One entry, and when it was written."""

    at: Duration  # Time since the first entry of this incarnation that is kept.
    text: str
    entry: JournalEntry


class Restart(msgspec.Struct, frozen=True):
    """A round that was broken, and the time until the next one."""

    round: int
    kind: CauseKind | None
    members: tuple[str, ...]  # The members that caused it.
    reason: str
    by: str  # The leader that broke the round.
    ran: Duration  # How long the round had run.
    cost: Duration  # Time from the break to the next seal or to the close; until then at least to the last entry.
    size: int
    next_round: int = 0  # 0 if there is none yet, or if the run was closed instead.
    next_size: int = 0
    came: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class RunHistory(msgspec.Struct, frozen=True):
    """One incarnation of a run id, from its first entry that is kept."""

    run: str
    whole: bool  # False if later entries have overwritten the first ones.
    steps: tuple[JournalStep, ...]
    restarts: tuple[Restart, ...]

    @property
    def end(self) -> str:
        """Why the run was closed; empty if it is not."""
        last = self.steps[-1].entry
        return "" if last.phase is not Phase.CLOSED else last.cause.text if last.cause else last.reason

    @property
    def succeeded(self) -> bool:
        """Whether the run was closed because all members of its last round were done."""
        last = self.steps[-1].entry
        return last.phase is Phase.CLOSED and last.cause is not None and last.cause.kind is CauseKind.SUCCESS

    @property
    def cost(self) -> Duration:
        """The cost of all restarts together."""
        costs = [restart.cost for restart in self.restarts]
        return Duration(round(sum(cost.seconds for cost in costs), 3), all(cost.exact for cost in costs))


async def read(session: Session, run_id: str) -> list[RunHistory]:
    """Read the journal, oldest incarnation first. Raises Unreachable, EngineReset."""
    listed = await session.txn(then=[List(Keys(run_id).journal)])
    entries = []
    # Sorted by revision: the keys of the ring are in no order, and every incarnation counts from 1.
    for item in sorted(listed.reads[0], key=lambda item: item.modified):
        with suppress(Incompatible):
            entries.append(wire.decode(JournalEntry, item.value))
    return histories(entries)


def histories(entries: Iterable[JournalEntry]) -> list[RunHistory]:
    """Split entries, in the order of writing, into one history per incarnation."""
    by_run: dict[str, list[JournalEntry]] = {}
    for entry in entries:
        by_run.setdefault(entry.run, []).append(entry)
    return [_history(run, own) for run, own in by_run.items()]


class _HistoryReader:
    """The state of reading the entries of one incarnation, in order."""

    def __init__(self) -> None:
        self.at = Duration()
        self.ran: Duration | None = None
        """How long the current round has run; None if its seal is not among the entries."""
        self.number = 0
        self.broken: Restart | None = None
        self.restarts: list[Restart] = []

    def read(self, entry: JournalEntry, is_first: bool) -> str:
        """Read one entry and return a text about it."""
        if not is_first:
            self.at = self.at.plus(entry.lasted_s)
            if self.ran is not None:
                self.ran = self.ran.plus(entry.lasted_s)
            if self.broken is not None:
                self._replace(cost=self.broken.cost.plus(entry.lasted_s))
        if entry.phase is Phase.SEALED and (self.number != entry.number or self.broken is not None or is_first):
            return self._sealed(entry)
        if entry.phase is Phase.BROKEN and self.broken is None:
            return self._broken(entry)
        if entry.phase is Phase.BROKEN and entry.cause is not None:  # The leader may have found the root cause meanwhile.
            self._replace(kind=entry.cause.kind, members=entry.cause.members, reason=entry.cause.text)
        if entry.phase is Phase.CLOSED:
            self.end_restart()
            return f"closed: {entry.cause.text if entry.cause else entry.reason}"
        return entry.reason

    def _sealed(self, entry: JournalEntry) -> str:
        nodes = "1 node" if entry.size == 1 else f"{entry.size} nodes"
        text = f"round {entry.number} sealed with {nodes} ({entry.reason})"
        if entry.number > 1:
            text += _listed("; came in: ", entry.came) + _listed("; no longer in: ", entry.gone)
        if self.broken is not None:
            text += f"; the restart took {self.broken.cost}"
            self._replace(next_round=entry.number, next_size=entry.size, came=entry.came, gone=entry.gone)
            self.end_restart()
        self.number, self.ran = entry.number, Duration()
        return text

    def _broken(self, entry: JournalEntry) -> str:
        ran = self.ran or Duration(0.0, exact=False)
        cause = entry.cause
        reason = cause.text if cause else entry.reason
        kind, members = (cause.kind, cause.members) if cause else (None, ())
        self.broken = Restart(entry.number, kind, members, reason, entry.by, ran, cost=Duration(), size=entry.size)
        self.ran = None
        return f"round {entry.number} broken after {ran}: {reason}"

    def _replace(self, **changes: object) -> None:
        assert self.broken is not None, "asked while a round is broken"
        self.broken = msgspec.structs.replace(self.broken, **changes)

    def end_restart(self, *, in_progress: bool = False) -> None:
        """Add the restart to the list, if there is one. One that is in progress takes longer than the entries say."""
        if self.broken is not None and in_progress:
            self._replace(cost=self.broken.cost.plus(None))
        if self.broken is not None:
            self.restarts.append(self.broken)
            self.broken = None


def _history(run: str, entries: Sequence[JournalEntry]) -> RunHistory:
    reader = _HistoryReader()
    steps = []
    for index, entry in enumerate(entries):
        text = reader.read(entry, index == 0)
        steps.append(JournalStep(reader.at, text, entry))
    reader.end_restart(in_progress=True)
    return RunHistory(run, _is_first(entries[0]), tuple(steps), tuple(reader.restarts))


def _is_first(entry: JournalEntry) -> bool:
    """Whether no entry of this incarnation came before this one."""
    # A run that fills at once has no head before its first seal, which bears the number it would have had after one.
    filled_at_once = entry.seq == 2 and entry.number == 1 and entry.phase is Phase.SEALED and entry.lasted_s is None
    return entry.seq == 1 or filled_at_once


def _listed(start: str, names: Sequence[str]) -> str:
    return start + ", ".join(names) if names else ""
