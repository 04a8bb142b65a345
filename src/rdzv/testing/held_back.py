"""The time for which the requests of a node may have been held back, as the faults of a history tell."""

from __future__ import annotations

from dataclasses import dataclass, field

from .history import Fault, Observation

IN_FLIGHT_S = 1.5
"""Two slow messages: what a leader acts on may be gone for so long."""
_CUTS = frozenset({"cut", "cut requests", "cut answers", "cut in a collective"})
"""Faults that hold back what a node sends, or what it acts on."""
_STALLS = frozenset({"engine isolated", "engine stall"})
"""The same for all nodes."""


@dataclass
class HeldBack:
    """When each node was held back last: what its requests do was decided before, on what was true then."""

    _spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    """For each node, and "" for all of them: since when, and until when."""
    _active: dict[str, int] = field(default_factory=dict)
    """How many such faults there are at the moment."""

    def see(self, seen: Observation) -> None:
        if not isinstance(seen, Fault) or seen.kind not in _CUTS | _STALLS:
            return
        whose = "" if seen.kind in _STALLS else seen.target
        active = self._active[whose] = self._active.get(whose, 0) + (-1 if seen.stop else 1)
        since, until = self._spans.get(whose, (seen.at, seen.at))
        # A fault that begins when another has just ended, or before that, holds back the same requests.
        since = since if seen.stop or seen.at - until < IN_FLIGHT_S else seen.at
        self._spans[whose] = since, float("inf") if active else seen.at

    def held_s(self, node: str, at: float) -> float:
        """Return for how long the request of a node that arrives now may have been held back."""
        spans = [span for whose, span in self._spans.items() if whose in ("", node)]
        return max((at - since for since, until in spans if at - until < IN_FLIGHT_S), default=0.0)

    def in_flight_s(self, node: str, at: float) -> float:
        """Return how long ago a node may have decided on the write that arrives now."""
        return IN_FLIGHT_S + self.held_s(node, at)
