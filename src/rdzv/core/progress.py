"""The progress of one member's workers in one round: how far they are, how fast, and since when nothing moved. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from .model import BEHIND_MAX, ProgressReport, StallReport

SAMPLES_MAX = 60
"""Looks from which the rate is measured, the newest of them."""


class WorkerSteps:
    """The steps of a member's workers as they were seen last. Every `now` is a reading of one monotonic clock."""

    def __init__(self, table: str) -> None:
        self.table = table
        self._steps: dict[int, int] = {}
        self._changed_at: dict[int, float] = {}
        self._samples: deque[tuple[float, int]] = deque(maxlen=SAMPLES_MAX)
        """The lowest step at each look."""
        self._low_at = 0.0

    def see(self, steps: Mapping[int, int], now: float) -> None:
        """Note the step of every worker that runs and has told one, by its rank."""
        before = self._low
        for rank, step in steps.items():
            if self._steps.get(rank) != step:
                self._changed_at[rank] = now
        self._steps = dict(steps)
        if self._low is not None:
            if self._low != before:
                self._low_at = now
            if self._samples and self._low < self._samples[-1][1]:
                self._samples.clear()  # A worker went back, or a slow one has come: an older rate says nothing.
            self._samples.append((now, self._low))

    @property
    def _low(self) -> int | None:
        return min(self._steps.values(), default=None)

    def report(self, now: float) -> ProgressReport | None:
        """Return what the others may know; None: no worker has told a step."""
        low = self._low
        if low is None:
            return None
        high = max(self._steps.values())
        (first_at, first), (last_at, last) = self._samples[0], self._samples[-1]
        rate = (last - first) / (last_at - first_at) if last_at > first_at else 0.0
        return ProgressReport(
            table=self.table, low=low, high=high, rate=round(rate, 3), slowest=self._ranks_at(low),
            workers=len(self._steps), since_s=round(now - self._low_at, 1),
        )  # fmt: skip

    def stall(self, now: float, limit_s: float) -> StallReport | None:
        """Return where the last workers stand if any has not moved for `limit_s`; None: all move."""
        still_s = {rank: now - self._changed_at[rank] for rank in self._steps}
        if max(still_s.values(), default=-1.0) < limit_s:
            return None
        # Workers stop one after the other, and the one that all wait for may be seen last. But one that is merely slower is
        # not behind: it moves.
        steps = {rank: step for rank, step in self._steps.items() if still_s[rank] >= limit_s / 2}
        step = min(steps.values())
        ranks = tuple(sorted(rank for rank, one in steps.items() if one == step)[:BEHIND_MAX])
        return StallReport(table=self.table, step=step, ranks=ranks, for_s=round(max(still_s[rank] for rank in ranks), 1))

    def _ranks_at(self, step: int) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, one in self._steps.items() if one == step)[:BEHIND_MAX])
