"""The states of a member, and the table of transitions between them. `member.py` alone changes a member's state."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from . import member_events as events
from .member_events import MemberEvent
from .member_rules import Change
from .model import NO_ROUND, Head, RankEntry, RoundId, RoundReport


class Standing(str, Enum):
    """Where a member stands with the engine."""

    IDLE = "idle"
    """The member has not joined yet."""
    AWAY = "away"
    """The member looks for an engine, or registers with one."""
    PRESENT = "present"
    """The member's key is on the engine."""
    EVICTED = "evicted"
    """The others, or the end of the lease, removed the key. The next join is that of a new member."""
    ENDED = "ended"
    """Something final: the run is closed, or the member may not or cannot take part."""
    LEAVING = "leaving"
    """The member is saying goodbye."""
    LEFT = "left"


class Holding(str, Enum):
    """The share that a member has in rounds."""

    NOTHING = "nothing"
    HOLDING = "holding"
    OWING = "owing"
    """The member gave up a round of which its presence has an entry, and has not told the others yet (T4)."""


class Identity(msgspec.Struct, frozen=True):
    """The settings of a member that decide anything here. Times in seconds."""

    run_id: str
    name: str
    endpoint: str = ""
    lease: float = 10.0
    outage_grace: float = 300.0
    closed_for: float = 60.0
    capacity: int = 1
    """The largest size of a round."""


class MemberState(msgspec.Struct):
    """All that a member knows about itself. Only `member.step` changes it; others read."""

    me: Identity
    standing: Standing = Standing.IDLE
    end: Exception | None = None
    """Evicted or ended: why."""
    change: Change | None = None
    """The change that the holder must be told of (T10)."""

    # Rounds, over all presences.
    holding: Holding = Holding.NOTHING
    holds: RoundReport | None = None
    entry: RankEntry | None = None
    """Entry of this member in the table of the round it holds, or held last on this instance."""
    heard: Head | None = None
    """The newest head, on whatever instance."""
    heard_rank: int = -1
    """Own rank in the table of `heard`, if it is known."""
    left: RoundId = NO_ROUND
    """Highest round given up."""
    fence: int = 0
    """Highest fence of all heads seen or sent."""
    fence_place: str = ""
    """Where the engine ran that had it."""
    role: str = ""
    workers: int = 0
    """Role and number of the workers that the holder starts in each round."""
    done: bool = False
    drain: str = ""
    """Why the holder wants to go; empty: it does not."""
    drained_at: float | None = None
    """When the holder said so first."""
    grace: float = 0.0
    """How long its workers had to save then; 0: no less than the others."""
    noticed: int = 0
    """How many drains of the round had had their notice then."""

    # The present instance.
    head: Head | None = None
    examined: str = ""
    """The table that was found to have no entry of this member, or was given up."""
    spare: bool = False
    """The round examined last was full without this member."""
    asked: str = ""
    """Why an operator asks this member to drain."""
    renewed_at: float = 0.0
    """When the last renewal that was answered was sent."""
    silent_at: float | None = None
    """Since when no renewal has been answered; None: the last one was."""
    silent: bool = False
    """The engine does not answer, and the observer has been told."""

    # Looking for an engine.
    engine_place: str = ""
    """Where the engine runs that answered last."""
    place: str = ""
    """Where the engine runs on which this member was present last."""
    promised: str = ""
    """The name that the platform gave to the server there; empty: none (T16.4)."""
    began_at: float = 0.0
    """When that server was started, by the member's own clock."""
    away_at: float | None = None
    trouble: str = ""
    """The error of the last request that was not answered."""
    complained: bool = False
    """The observer has been told that the engine is away."""
    refused: str = ""
    """The place that was refused last (T16)."""


# Names of their own, because 1,000 members in one process notice what reading a member of an enum takes.
IDLE, AWAY, PRESENT, EVICTED, ENDED, LEAVING, LEFT = Standing
NOTHING, HOLDING, OWING = Holding
TRANSITIONS: Mapping[Standing, Mapping[type[MemberEvent], tuple[Standing, ...]]] = {
    IDLE: {events.Join: (AWAY,), events.Leave: (LEAVING,)},
    AWAY: {
        events.Connected: (AWAY,), events.Registered: (PRESENT,),
        events.EngineAway: (AWAY,), events.Elsewhere: (AWAY, ENDED),
        events.HeadSeen: (AWAY, EVICTED, ENDED), events.KeyGone: (EVICTED,), events.Failed: (ENDED,),
        events.Join: (AWAY,), events.WorkDone: (AWAY,), events.Draining: (AWAY,), events.Leave: (LEAVING,),
    },
    PRESENT: {
        events.HeadSeen: (PRESENT, AWAY, EVICTED, ENDED), events.KeyGone: (EVICTED,), events.Failed: (ENDED,),
        events.Examined: (PRESENT,), events.ReadyPut: (PRESENT,), events.Leads: (PRESENT,), events.HeadSent: (PRESENT,),
        events.Renewed: (PRESENT,), events.RenewalFailed: (PRESENT,), events.EngineAway: (AWAY,),
        events.DrainAsked: (PRESENT,), events.Draining: (PRESENT,), events.WorkDone: (PRESENT,),
        events.Join: (PRESENT,), events.Leave: (LEAVING,),
    },
    EVICTED: {events.Join: (AWAY,), events.Leave: (LEAVING,)},
    ENDED: {events.Join: (AWAY, ENDED), events.Leave: (LEAVING,)},
    LEAVING: {events.HeadSeen: (LEAVING,), events.Left: (LEFT,)},
    LEFT: {},
}  # fmt: skip
"""The events that count in each standing, and the standings that each may lead to."""

HOLDINGS: Mapping[Holding, Mapping[type[MemberEvent], tuple[Holding, ...]]] = {
    NOTHING: {events.Examined: (HOLDING, OWING), events.Registered: (OWING,)},
    HOLDING: {events.Join: (OWING, NOTHING)},
    OWING: {
        events.ReadyPut: (NOTHING,), events.Connected: (NOTHING,), events.Registered: (NOTHING,), events.Examined: (HOLDING,),
    },
}  # fmt: skip
"""The events that change the holding. All others leave it as it is."""


def diagram() -> str:
    """Draw the table of standings in Mermaid's language, without the events that do not change the standing."""
    edges: dict[tuple[str, str], list[str]] = {}
    for standing, row in TRANSITIONS.items():
        for event, targets in row.items():
            for target in targets:
                if target is not standing:
                    edges.setdefault((standing.value, target.value), []).append(event.__name__)
    lines = [f"    {old} --> {new}: {', '.join(names)}" for (old, new), names in edges.items()]
    first, last = f"    [*] --> {Standing.IDLE.value}", f"    {Standing.LEFT.value} --> [*]"
    return "\n".join(["stateDiagram-v2", first, *lines, last])
