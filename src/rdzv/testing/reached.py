"""The triples of rule, phase and fault that seeds have reached: a report of what they have seen and what they have not.

A seed reaches a triple if the rule decides about a head in that phase while the fault is active, or soon after it struck.
`python -m rdzv.testing.sim --seed 0 --count 1000 --reached` prints the table.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ..core.member_rules import ChangeKind
from .decisions import MOMENTS, Decided, Moment
from .history import Changed, ClosedTold, EvictedTold, Fault, Given, History, Observation
from .scenario import FAULTS

AFTER_S = 5.0
"""A fault counts for this long after its end, because its effects go on: leases end, members reconnect."""
NO_FAULT = "no fault"
KINDS = (NO_FAULT, *FAULTS)

TOLD = tuple(Moment("told", word) for word in ("given", *(kind.value for kind in ChangeKind if kind is not ChangeKind.LEFT)))
"""The member's side: its application is given a round, or told of a change. Its own leave is no news to it."""

IMPOSSIBLE = {
    Moment("close_after_success", "open"): "an open head has no rank table, so no member of it is done",
    Moment("close_after_failure", "open"): "an open head has no rank table, so no member of it gave up or was lost",
    Moment("name_root_cause", "open"): "an open head has no cause",
    Moment("evict_stragglers", "open"): "no round was sealed, so no member runs workers of it",
    Moment("evict_away", "open"): "no round was sealed, so no member runs workers of it",
}
"""Moments that cannot come, and why: open and broken heads share one list of rules."""

Triple = tuple[Moment, str]
POSSIBLE: tuple[Triple, ...] = tuple((moment, kind) for moment in MOMENTS if moment not in IMPOSSIBLE for kind in KINDS)
"""All triples of rule, phase and fault that are not known to be impossible."""


@dataclass
class Reached:
    """The number of seeds that reached each triple, and of all seeds."""

    seeds: int = 0
    counts: Counter[Triple] = field(default_factory=Counter)

    def see(self, history: History, decisions: Iterable[Decided]) -> None:
        """Count what one seed reached."""
        self.seeds += 1
        spans = list(_spans(history.of(Fault)))
        moments = [(one.at, one.moment) for one in decisions]
        moments += [(seen.at, told) for seen in history if (told := _told(seen)) is not None]
        self.counts.update({(moment, _last_fault(spans, at)) for at, moment in moments})

    def merge(self, other: Reached) -> None:
        """Add what other seeds reached."""
        self.counts.update(other.counts)
        self.seeds += other.seeds

    def encode(self) -> bytes:
        """Return the counts as JSON, one moment per line."""
        rows = {str(moment): {kind: n for kind in KINDS if (n := self.counts[moment, kind])} for moment in MOMENTS}
        lines = [f"  {json.dumps(moment)}: {json.dumps(row)}" for moment, row in rows.items()]
        return ("{\n" + ",\n".join([f'  "seeds": {self.seeds}', *lines]) + "\n}\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Reached:
        """Return the counts of `encode`. Rules and faults that are no longer known do no harm."""
        rows = json.loads(data)
        seen = {(moment, kind): rows.get(str(moment), {}).get(kind, 0) for moment in MOMENTS for kind in KINDS}
        return cls(rows["seeds"], Counter(seen))

    def __str__(self) -> str:
        """Return the table: rules by phase, faults as columns, and what was not reached."""
        found = sum(1 for triple in POSSIBLE if self.counts[triple])
        width = max(len(str(moment)) for moment in (*MOMENTS, *TOLD))
        heights = max(map(len, KINDS))
        # The names of the faults stand upright, so that 30 columns fit on a screen.
        titles = [" " * width + "".join(f"{kind.rjust(heights)[line]:>5}" for kind in KINDS) for line in range(heights)]
        rows = [
            f"{moment!s:<{width}}" + (f"  impossible: {IMPOSSIBLE[moment]}" if moment in IMPOSSIBLE else self._row(moment))
            for moment in (*MOMENTS, *TOLD)
        ]
        total = f"{self.seeds} seeds reached {found} of {len(POSSIBLE)} triples of rule, phase and fault"
        return "\n".join([*titles, *rows, "", f"{total}; each number counts seeds, and '.' is none"])

    def _row(self, moment: Moment) -> str:
        return "".join(f"{self.counts[moment, kind] or '.':>5}" for kind in KINDS)


def _told(seen: Observation) -> Moment | None:
    if isinstance(seen, Given):
        return Moment("told", "given")
    if isinstance(seen, Changed):
        return Moment("told", seen.kind)
    if isinstance(seen, EvictedTold):
        return Moment("told", ChangeKind.EVICTED.value)
    return Moment("told", ChangeKind.CLOSED.value) if isinstance(seen, ClosedTold) else None


def _spans(faults: list[Fault]) -> Iterator[tuple[float, float, str]]:
    """Yield begin, end and kind of each fault."""
    begun: dict[tuple[str, str], list[float]] = {}
    for fault in faults:
        starts = begun.setdefault((fault.kind, fault.target), [])
        if fault.kind in FAULTS and not fault.stop:
            starts.append(fault.at)
        elif starts:
            yield starts.pop(0), fault.at, fault.kind
    for (kind, _), starts in begun.items():
        yield from ((start, float("inf"), kind) for start in starts)


def _last_fault(spans: list[tuple[float, float, str]], at: float) -> str:
    """Return the fault that struck last, of those that are active or ended at most AFTER_S ago."""
    # A fault that strikes at the very moment counts: the request has arrived, and its answer is on the way.
    near = [(start, kind) for start, end, kind in spans if start <= at <= end + AFTER_S]
    return max(near, default=(0.0, NO_FAULT))[1]
