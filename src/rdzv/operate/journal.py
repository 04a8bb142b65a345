"""The journal of a run, read after the fact: what happened, who caused each restart, and what it cost in seconds.

Every write of the head leaves a line, in the same transaction. A line says how long the head before it had stood, by the clock
of the leader that replaced it; so the durations add up although leaders change and no two clocks are ever compared. Where a
writer could not know (it came after the former head was written, or is an operator), sums are lower bounds and say so.
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
    """A duration put together from several lines."""

    seconds: float = 0.0
    exact: bool = True
    """False: some part of it is not known, so it is at least this long."""

    def plus(self, lasted_s: float | None) -> Duration:
        """One line more."""
        return Duration(round(self.seconds + (lasted_s or 0.0), 3), self.exact and lasted_s is not None)

    def __str__(self) -> str:
        return f"{'' if self.exact else 'at least '}{self.seconds:.1f} s"


class JournalStep(msgspec.Struct, frozen=True):
    """One line, and when it was written."""

    at: Duration
    """Since the first line kept of this life of the run."""
    text: str
    entry: JournalEntry


class Restart(msgspec.Struct, frozen=True):
    """A round that was broken, and what it took to get the next one."""

    round: int
    kind: CauseKind | None
    members: tuple[str, ...]
    """Who caused it."""
    reason: str
    by: str
    """The leader that broke the round."""
    ran: Duration
    """How long the round had stood."""
    cost: Duration
    """From the break to the next seal, to the close, or to the last line there is."""
    size: int
    next_round: int = 0
    """0: there is none yet, or the run was closed instead."""
    next_size: int = 0
    came: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


class RunHistory(msgspec.Struct, frozen=True):
    """One incarnation of a run id, from the first line that is kept of it."""

    run: str
    whole: bool
    """False: its first lines were overwritten by later ones."""
    moments: tuple[JournalStep, ...]
    restarts: tuple[Restart, ...]

    @property
    def cost(self) -> Duration:
        """Of all restarts together."""
        total = Duration()
        for restart in self.restarts:
            total = Duration(round(total.seconds + restart.cost.seconds, 3), total.exact and restart.cost.exact)
        return total


async def read(session: Session, run_id: str) -> list[RunHistory]:
    """All that is kept, oldest first. Raises Unreachable, EngineReset."""
    keys = Keys(run_id)
    listed = await session.txn(then=[List(keys.journal)])
    entries = []
    # By revision: the ring's keys are in no order, and every life of a run id counts from 1.
    for item in sorted(listed.reads[0], key=lambda item: item.modified):
        with suppress(Incompatible):
            entries.append(wire.decode(JournalEntry, item.value))
    return lives(entries)


def lives(entries: Iterable[JournalEntry]) -> list[RunHistory]:
    """Lines in the order in which they were written, told apart by the life they belong to."""
    by_run: dict[str, list[JournalEntry]] = {}
    for entry in entries:
        by_run.setdefault(entry.run, []).append(entry)
    return [_life(run, lines) for run, lines in by_run.items()]


class _HistoryReader:
    """Goes through the lines of one life."""

    def __init__(self) -> None:
        self.at = Duration()
        self.ran: Duration | None = None
        """How long the present round has stood; None: its seal is not among the lines."""
        self.number = 0
        self.broken: Restart | None = None
        self.restarts: list[Restart] = []

    def tell(self, entry: JournalEntry, is_first: bool) -> str:
        """What people are told of a line."""
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
        if entry.phase is Phase.CLOSED:
            self.over()
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
            self.over()
        self.number, self.ran = entry.number, Duration()
        return text

    def _broken(self, entry: JournalEntry) -> str:
        ran = self.ran or Duration(0.0, exact=False)
        cause = entry.cause
        reason = cause.text if cause else entry.reason
        self.broken = Restart(
            round=entry.number,
            kind=cause.kind if cause else None,
            members=cause.members if cause else (),
            reason=reason,
            by=entry.by,
            ran=ran,
            cost=Duration(),
            size=entry.size,
        )
        self.ran = None
        return f"round {entry.number} broken after {ran}: {reason}"

    def _replace(self, **changes: object) -> None:
        assert self.broken is not None, "asked while a round is broken"
        self.broken = msgspec.structs.replace(self.broken, **changes)

    def over(self) -> None:
        """Whatever was broken has come to its end."""
        if self.broken is not None:
            self.restarts.append(self.broken)
            self.broken = None


def _life(run: str, lines: Sequence[JournalEntry]) -> RunHistory:
    teller = _HistoryReader()
    moments = []
    for index, entry in enumerate(lines):
        text = teller.tell(entry, index == 0)
        moments.append(JournalStep(teller.at, text, entry))
    teller.over()  # One that nobody has got over yet.
    return RunHistory(run, lines[0].seq == 1, tuple(moments), tuple(teller.restarts))


def _listed(start: str, names: Sequence[str]) -> str:
    return start + ", ".join(names) if names else ""
