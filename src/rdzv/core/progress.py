"""The progress of one member's workers in one round: how far they are, how fast, and since when nothing moved. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from .model import BEHIND_MAX, ProgressReport, StallReport

SAMPLES_MAX = 60
"""Looks from which the rate is measured, the newest of them."""
GAP_MAX_S = 15.0
"""Time between two looks counts up to this. If the agent did not look for longer, its whole machine may have stood still, and
then it is no fault of the workers that they did not move."""


class WorkerSteps:
    """The steps of a member's workers at the last look. Times are those of the agent's own clock."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._steps: dict[int, int] = {}
        self._time_s = 0.0
        """Time that has passed from the first look to the last, without gaps."""
        self._looked_at: float | None = None
        self._changed_s: dict[int, float] = {}
        """When the step of each rank changed last."""
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX)
        """The lowest step at each look."""
        self._low_s = 0.0

    def see(self, steps: Mapping[int, int], now: float) -> None:
        """Note the step of every worker that runs and has told one, by its rank."""
        if self._looked_at is not None:
            self._time_s += min(now - self._looked_at, GAP_MAX_S)
        self._looked_at = now
        before = self._low
        for rank, step in steps.items():
            if self._steps.get(rank) != step:
                self._changed_s[rank] = self._time_s
        self._steps = dict(steps)
        low = self._low
        if low is None:
            return
        if low != before:
            self._low_s = self._time_s
        if self._samples and low < self._samples[-1][1]:
            self._samples.clear()  # A worker went back, or a slow one has come: an older rate says nothing.
        self._samples.append((self._time_s, low))

    @property
    def _low(self) -> int | None:
        return min(self._steps.values(), default=None)

    def report(self) -> ProgressReport | None:
        """Return what the others may know; None: no worker has told a step."""
        low = self._low
        if low is None:
            return None
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        rate = (last - first) / (last_s - first_s) if last_s > first_s else 0.0
        return ProgressReport(
            table=self.table, low=low, high=max(self._steps.values()), rate=round(rate, 3), slowest=_ranks_at(low, self._steps),
            workers=len(self._steps), since_s=round(self._time_s - self._low_s, 1),
        )  # fmt: skip

    def stall(self, limit_s: float) -> StallReport | None:
        """Return where the last workers stand if any has not moved for `limit_s`; None: all move."""
        still_s = {rank: self._time_s - self._changed_s[rank] for rank in self._steps}
        if max(still_s.values(), default=-1.0) < limit_s:
            return None
        # Workers stop one after the other, and the one that all wait for may be seen last. But one that is merely slower is
        # not behind: it moves.
        steps = {rank: step for rank, step in self._steps.items() if still_s[rank] >= limit_s / 2}
        step = min(steps.values())
        ranks = _ranks_at(step, steps)
        for_s = round(max(still_s[rank] for rank in ranks), 1)
        return StallReport(table=self.table, step=step, ranks=ranks, for_s=for_s, furthest=max(self._steps.values()))


def _ranks_at(step: int, steps: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, one in steps.items() if one == step)[:BEHIND_MAX])
