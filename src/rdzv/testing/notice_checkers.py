"""The checkers of two settings: workers are told before a drain (T7.17, T7.18), and rounds in vain close the run (T11.13)."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core import wire
from ..core.model import Call, CauseKind, Head, Phase
from .checkers import DRIFT, Checker
from .history import Commit
from .replay import State

_FAILED = frozenset({CauseKind.LOST, CauseKind.RESTARTED, CauseKind.GAVE_UP, CauseKind.STALLED})


def written_head(checker: Checker, commit: Commit) -> Head | None:
    """Return the head that a commit writes."""
    key = checker.context.keys.head
    items = [event.item for event in commit.events if event.key == key and event.item is not None]
    return wire.read_head(items[-1].value) if items else None


@dataclass(eq=False)
class T7Notices(Checker):
    """No round is broken for a drain before all its members have answered the notice, or had its time."""

    name = "T7 notices"
    given: int = 0
    """How many notices were given."""
    _began_at: dict[tuple[str, str, int], float] = field(default_factory=dict)
    """When each notice was written, by instance, table and the write that set the call."""

    def before(self, commit: Commit, state: State) -> None:
        head, old, settings = written_head(self, commit), state.head, state.settings
        if head is None or settings is None:
            return
        if head.call is Call.NOTICE and (old is None or old.call_seq != head.call_seq):
            self.given += 1
            self._began_at[state.instance, head.table, head.call_seq] = commit.at
        is_over = old is not None and head.call is not Call.NOTICE and old.call is Call.NOTICE
        is_drained = head.phase is Phase.BROKEN and head.cause is not None and head.cause.kind is CauseKind.DRAINED
        if old is None or not settings.drain_notice or head.table != old.table:
            return
        if is_drained and old.phase is Phase.SEALED and old.notice is None:
            self.report(commit.at, f"round {head.number} was broken for a drain of which no worker was told")
        goes_on = head.phase is Phase.SEALED and head.notice is not None
        if is_over and (is_drained or goes_on) and old.notice is not None:
            self._check_time(commit, state, old, old.notice.limit_s)

    def _check_time(self, commit: Commit, state: State, old: Head, limit_s: float) -> None:
        missing = [
            one.record.name for one in state.seated.values() if not one.record.done and one.record.saved != old.call_seq
        ]
        lasted_s = commit.at - self._began_at.get((state.instance, old.table, old.call_seq), commit.at)
        if missing and lasted_s * DRIFT < limit_s:
            had = f"{lasted_s:.2f} s of {limit_s:.2f} s"
            self.report(commit.at, f"{', '.join(missing)} had {had} to answer the notice of round {old.number}")


@dataclass(eq=False)
class T11Futile(Checker):
    """A run is closed for lack of progress exactly when so many rounds in a row have failed without more."""

    name = "T11 futile rounds"
    closed: int = 0
    _counts: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """By instance and run: the highest step, and how many rounds have failed since."""

    def before(self, commit: Commit, state: State) -> None:
        head, old, settings = written_head(self, commit), state.head, state.settings
        if head is not None and head.seq == 1:  # Made anew, perhaps from reports, which do not tell how far a run has got.
            self._counts.pop((state.instance, head.run), None)
        if head is None or old is None or settings is None or not settings.futile_rounds:
            return
        is_close = head.phase is Phase.CLOSED and head.cause is not None and head.cause.kind is CauseKind.FUTILE
        is_seal = head.phase is Phase.SEALED and head.table != old.table
        if old.phase is not Phase.BROKEN or not (is_close or is_seal):
            return
        key = state.instance, old.run
        step, rounds = self._counts.get(key, (-1, 0))
        told = max((one.record.reached for one in state.seated.values() if state.has_left(one)), default=-1)
        if told > step:
            step, rounds = told, 0
        elif step >= 0 and old.cause is not None and old.cause.kind in _FAILED:
            rounds += 1
        self._counts[key] = step, rounds
        self.closed += is_close
        if is_close is not (rounds >= settings.futile_rounds):
            done = "closed" if is_close else "sealed"
            self.report(commit.at, f"{done} when {rounds} rounds had got no further than step {step}")
