"""Notices: one frozen value per thing that happened to a member, or to its run as that member sees it.

A notice is the one event that all listeners share: the program's observer, the log (`log.py`), the journal file
(`journal_file.py`) and whatever counts or measures. `notifier.py` makes them and calls the listeners; `sentences.py`
turns one into the sentence that people read. A member derives them from what it sees anyway, so that no notice costs
the engine anything, except `waiting`, for which a member that logs asks for the status of its run every 30 s.

For measurements: `given` carries in `seconds` how long forming took. If `cause` is empty, the member came to join and
this is the time since then. Otherwise its last round ended for that cause, and this is the time without a round, which
is the cost of the restart. `broken` carries how long the round had run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

import msgspec

from ..core.model import CauseKind, Head, Phase

ABOUT_OTHERS = {
    CauseKind.LOST: "lost", CauseKind.BANNED: "banned", CauseKind.DRAINED: "drained", CauseKind.GAVE_UP: "gave up",
    CauseKind.LEFT: "left",
}  # fmt: skip


class Totals(msgspec.Struct, frozen=True):
    """The whole time of a member in a run, by its own clock."""

    rounds: int
    restarts: int
    ran_s: float
    """Seconds in which it held a valid round."""
    lost_s: float
    """Seconds between a round and the next one, and since the last one unless the run was closed then."""

    @property
    def availability(self) -> float | None:
        """The share of the time, from 0 to 1, in which there was a round; None if there was none."""
        whole_s = self.ran_s + self.lost_s
        return self.ran_s / whole_s if self.rounds and whole_s > 0 else None


class Notice(msgspec.Struct, frozen=True):
    """Something that happened in a run, as one member saw it."""

    kind: str
    run_id: str
    round: int
    member: str
    """The member concerned: the observer's own, or another one (lost, left, drained, banned, gave up)."""
    reason: str
    incarnation: str = ""
    """Random id of this life of the run id; empty before the first head was seen."""
    rank: int = -1
    size: int = 0
    """Nodes of the round."""
    size_before: int = 0
    """For `given`: nodes of the last round that this member held."""
    cause: str = ""
    """Why the round was broken, or the last one ended: a kind of cause, or `evicted` or `outage`."""
    members: tuple[str, ...] = ()
    """Names of the members that caused it, at most 8."""
    came: tuple[str, ...] = ()
    """For `given`: names of the members that were not in the round before, if they are at most 8."""
    seconds: float | None = None
    """How long the thing that ends with this notice had lasted, by the member's own clock; None if that is unknown."""
    totals: Totals | None = None
    """For `leaving`."""


Observer = Callable[[Notice], None]


class Timeline:
    """Adds durations and causes to the notices of one member, in the order in which it was told."""

    def __init__(self) -> None:
        self._joined_at: float | None = None
        self._given_at: float | None = None
        self._over_at: float | None = None
        """When the last round ended for this member; None while it holds one that stands."""
        self._is_closed = False
        self._away_at: float | None = None
        self._round, self._size = 0, 0
        self._cause, self._members = "", tuple[str, ...]()
        self._rounds = self._restarts = 0
        self._ran_s = self._lost_s = 0.0

    def timed(self, notice: Notice, now: float) -> Notice:
        """Return the notice with all that follows from the ones before it."""
        add = self._ADDS.get(notice.kind)
        return notice if add is None else msgspec.structs.replace(notice, **add(self, notice, now))

    def _joining(self, notice: Notice, now: float) -> dict[str, object]:
        if self._given_at is None:
            self._joined_at = now if self._joined_at is None else self._joined_at
            return {"cause": ""}
        if self._over_at is None:
            self._end_round(now, notice.cause or CauseKind.RESTARTED.value)
        return {"cause": self._cause}

    def _given(self, notice: Notice, now: float) -> dict[str, object]:
        before, cause, members = self._size, self._cause, self._members
        if cause and notice.cause:
            # The sealed head may know better: a loss is often noticed after the collectives that it made fail.
            cause, members = notice.cause, notice.members
        since = self._joined_at if self._over_at is None else self._over_at
        seconds = None if since is None else now - since
        self._rounds += 1
        if cause:
            self._restarts += 1
            self._lost_s += seconds or 0.0
        self._given_at, self._over_at, self._cause, self._members = now, None, "", ()
        self._round, self._size = notice.round, notice.size
        return {"seconds": seconds, "cause": cause, "members": members if cause else (), "size_before": before}

    def _broken(self, notice: Notice, now: float) -> dict[str, object]:
        if self._given_at is None or notice.round != self._round:
            return {}
        # The cause that the whole run agreed on replaces what this member knew alone.
        return {"seconds": self._end_round(now, notice.cause, notice.members)}

    def _evicted(self, _notice: Notice, now: float) -> dict[str, object]:
        stood = self._over_at is None
        ran_s = self._end_round(now, "evicted")
        return {"seconds": ran_s if stood else None, "cause": "evicted"}

    def _closed(self, notice: Notice, now: float) -> dict[str, object]:
        stood = self._over_at is None
        ran_s = self._end_round(now, notice.cause)
        self._is_closed = True
        return {"seconds": ran_s if stood else None}

    def _engine_away(self, _notice: Notice, now: float) -> dict[str, object]:
        self._away_at = now if self._away_at is None else self._away_at
        return {}

    def _engine_back(self, _notice: Notice, now: float) -> dict[str, object]:
        away_at, self._away_at = self._away_at, None
        return {} if away_at is None else {"seconds": now - away_at}

    def _leaving(self, notice: Notice, now: float) -> dict[str, object]:
        self._end_round(now, notice.cause)
        over_s = 0.0 if self._over_at is None or self._is_closed else now - self._over_at
        totals = Totals(self._rounds, self._restarts, self._ran_s, self._lost_s + over_s)
        return {"totals": totals, "seconds": None if self._joined_at is None else now - self._joined_at}

    def _end_round(self, now: float, cause: str, members: tuple[str, ...] = ()) -> float | None:
        """Note that the round is over, and return how long it ran."""
        if self._given_at is None:
            return None
        if self._over_at is None:
            self._over_at = now
            self._ran_s += now - self._given_at
        self._cause, self._members = cause or "unknown", members
        return self._over_at - self._given_at

    _ADDS: ClassVar[dict[str, Callable[[Timeline, Notice, float], dict[str, object]]]] = {
        "joining": _joining, "given": _given, "broken": _broken, "evicted": _evicted, "closed": _closed,
        "engine away": _engine_away, "engine back": _engine_back, "leaving": _leaving,
    }  # fmt: skip
    """The fields that each kind of notice gets."""


def about_head(run_id: str, member: str, old: Head | None, new: Head) -> Iterator[Notice]:
    """Derive notices from two heads: one per round, phase and cause, however many heads were missed in between."""
    same = old is not None and (old.run, old.round, old.phase, old.cause) == (new.run, new.round, new.phase, new.cause)
    if same:
        return
    if new.phase is Phase.SEALED:
        size = "1 node" if new.size == 1 else f"{new.size} nodes"
        again = "kept after the engine came back" if new.adopted else size
        yield Notice("sealed", run_id, new.number, member, again, new.run, size=new.size)
    elif new.phase is not Phase.OPEN:
        cause = new.cause
        text, kind, members = (cause.text, cause.kind.value, cause.members) if cause else ("", "", ())
        first = Notice(
            new.phase.value, run_id, new.number, member, text, new.run, size=new.size, cause=kind, members=members
        )
        yield first
        if cause is not None and new.phase is Phase.BROKEN and cause.kind in ABOUT_OTHERS:
            for name in members:
                yield msgspec.structs.replace(first, kind=ABOUT_OTHERS[cause.kind], member=name)
