"""The small world in which exploration finds each planted bug, and words of what is then wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rdzv.testing.explore import WORLDS
from rdzv.testing.small_world import WorldPlan


def _world(name: str, *faults: str, **changes: Any) -> WorldPlan:
    """Return a world of the table with these faults only, so that the bug is met early."""
    return replace(WORLDS[name], faults=faults, **changes)


EXPLORED_BUGS: dict[str, tuple[WorldPlan, str]] = {
    "a lost connection is taken for the end of a process": (_world("two re-form: slow stops", "fail", "reset"), "T8"),
    "address of the former round is used again": (WORLDS["three re-form: same ports"], "G1"),
    "an instant is written": (_world("two form", faults_max=0), "G10"),
    "close ends a later incarnation": (_world("three re-form: losses", "close", "stall"), "no progress"),
    "engine that came back is not told": (_world("two re-form", "restart"), "G7"),
    "engine's return is not waited for": (_world("lone survivors", "restart", "crash"), "G7"),
    "drain is not told to the workers": (WORLDS["three re-form: notices"], "T7"),
    "evicted member acts": (_world("three re-form: losses", "expire"), "G8"),
    "failure closes although others could go on": (_world("three re-form: ends", "give up", "fail"), "G9"),
    "fence of a restarted server begins at what it is told": (
        _world("lone survivors", "restart unseen", "host down"), "fences",
    ),
    "former leader's write is accepted": (_world("two form", "expire"), "G8"),
    "ghost is sealed in": (_world("two form", "expire", "crash"), "G4"),
    "growth counts as a round without progress": (WORLDS["three re-form: in vain"], "T11"),
    "last-call age is taken from another machine's clock": (_world("three form: last call", "crash"), "no progress"),
    "late writer reaches the store": (WORLDS["two use the store"], "G8"),
    "leader is taken for dead without asking": (_world("three miss their leader", "fail", "pause"), "T8"),
    "leader of a running round is evicted": (_world("three miss their leader", "fail", "crash late"), "T8"),
    "leader's gap is not re-listed": (_world("two re-form", "gap", "crash", "newcomer"), "no progress"),
    "loss is not published": (_world("three re-form: losses", "crash"), "no progress"),
    "one who came later is watched": (_world("three re-form: losses", "crash", "gap"), "no progress"),
    "outage is told at once": (_world("two re-form", "restart", "hold"), "G7"),
    "quarantined host is let in without need": (WORLDS["three re-form: quarantine"], "G7"),
    "rank table of another attempt is used": (_world("three re-form: losses", "fail", "expire", writes_max=4), "G2"),
    "ready is not tied to a round": (_world("three re-form: losses", "crash", "newcomer", "fail"), "G3"),
    "round is broken before all have saved": (WORLDS["three re-form: notices"], "T7"),
    "round number is reused after a restart": (_world("lone survivors", "restart unseen", "host down"), "G3"),
    "seals below quorum": (_world("three re-form: losses", "crash"), "G2"),
    "segments are cut across racks": (WORLDS["three re-form: racks"], "G2"),
    "settings are taken for one's own without a compare": (WORLDS["other settings"], "T1"),
    "settings mismatch is ignored": (WORLDS["other settings"], "T1"),
    "spare disturbs the round": (_world("two form", "newcomer", formed=True, options={"max_nodes": 2}), "G7"),
    "store of the old round is visible": (WORLDS["two use the store"], "G8"),
    "stragglers are taken for dead without asking": (_world("three re-form: losses", "fail", "pause"), "T8"),
    "strikes are counted at the break only": (WORLDS["three re-form: quarantine"], "T17"),
    "success closes too early": (_world("three re-form: ends", "done"), "G9"),
    "two worlds from two engines": (WORLDS["two engines"], "G8"),
    "unhealthy member is sealed in": (WORLDS["three re-form: sick nodes"], "G4"),
    "watch gap is not re-listed": (_world("two re-form", "gap", "crash", "expire"), "no progress"),
    "world is given from memory": (_world("two form", "expire", "crash"), "no progress"),
    "worker ranks are those of a world of one's own": (_world("two form", faults_max=0), "G2"),
}
