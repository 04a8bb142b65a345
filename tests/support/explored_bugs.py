"""The small world in which exploration finds each planted bug, and words of what is then wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rdzv.testing.explore import WORLDS
from rdzv.testing.small_world import WorldPlan


def _world(name: str, *faults: str, **changes: Any) -> WorldPlan:
    """Return a world of the table with these faults only, so that the bug is met early."""
    return replace(WORLDS[name], faults=faults, **changes)


_LONE: dict[str, Any] = {"options": {"min_nodes": 1, "max_nodes": 2}, "chooses_reads": False}
"""Each of two members may go on alone."""

EXPLORED_BUGS: dict[str, tuple[WorldPlan, str]] = {
    "an instant is written": (_world("two form", faults_max=0), "G10"),
    "engine that came back is not told": (_world("two re-form", "restart"), "G7"),
    "evicted member acts": (_world("three re-form", "expire"), "G8"),
    "former leader's write is accepted": (_world("two form", "expire"), "G8"),
    "ghost is sealed in": (_world("two form", "expire", "crash"), "G4"),
    "late writer reaches the store": (WORLDS["two use the store"], "G8"),
    "ready is not tied to a round": (_world("three re-form", "crash", "newcomer", "fail"), "G3"),
    "seals below quorum": (_world("three re-form", "crash"), "G2"),
    "settings are taken for one's own without a compare": (WORLDS["other settings"], "T1"),
    "store of the old round is visible": (WORLDS["two use the store"], "G8"),
    "two worlds from two engines": (WORLDS["two engines"], "G8"),
    "world is given from memory": (_world("two form", "expire", "crash"), "no progress"),
}
