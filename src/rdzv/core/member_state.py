"""The states of a member, and the table of transitions between them. `member.py` alone changes a member's state."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from .member_events import (
    Connected,
    DrainAsked,
    Draining,
    Elsewhere,
    EngineAway,
    Examined,
    Failed,
    HeadSeen,
    Join,
    KeyGone,
    Leads,
    Leave,
    Left,
    MemberEvent,
    ReadyPut,
    Registered,
    RenewalFailed,
    Renewed,
    WorkDone,
)
from .member_rules import Change
from .model import NO_ROUND, Head, RankEntry, RoundId, RoundReport


class Standing(Enum):
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


class Holding(Enum):
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
    """All that a member knows about itself. Only this module changes it; others read."""

    me: Identity
    standing: Standing = Standing.IDLE
    end: Exception | None = None
    """Evicted or ended: why."""
    told_of: Exception | None = None
    """The eviction that the holder knows of. An eviction is told once, by `changed` or by the next call."""
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
    done: bool = False
    drain: str = ""
    """Why the holder wants to go; empty: it does not."""

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
    place: str = ""
    """Where the engine runs on which this member was present last."""
    away_at: float | None = None
    trouble: str = ""
    """The error of the last request that was not answered."""
    complained: bool = False
    """The observer has been told that the engine is away."""
    refused: str = ""
    """The place that was refused last (T16)."""


_IDLE, _AWAY, _PRESENT, _EVICTED, _ENDED, _LEAVING, _LEFT = Standing
TRANSITIONS: Mapping[Standing, Mapping[type[MemberEvent], tuple[Standing, ...]]] = {
    _IDLE: {Join: (_AWAY,), Leave: (_LEAVING,)},
    _AWAY: {
        Connected: (_AWAY,),
        Registered: (_PRESENT,),
        EngineAway: (_AWAY,),
        Elsewhere: (_AWAY, _ENDED),
        HeadSeen: (_AWAY, _EVICTED, _ENDED),
        KeyGone: (_EVICTED,),
        Failed: (_ENDED,),
        Join: (_AWAY,),
        WorkDone: (_AWAY,),
        Draining: (_AWAY,),
        Leave: (_LEAVING,),
    },
    _PRESENT: {
        HeadSeen: (_PRESENT, _AWAY, _EVICTED, _ENDED),
        Examined: (_PRESENT,),
        ReadyPut: (_PRESENT,),
        Renewed: (_PRESENT,),
        RenewalFailed: (_PRESENT,),
        Leads: (_PRESENT,),
        DrainAsked: (_PRESENT,),
        EngineAway: (_AWAY,),
        KeyGone: (_EVICTED,),
        Failed: (_ENDED,),
        Join: (_PRESENT,),
        WorkDone: (_PRESENT,),
        Draining: (_PRESENT,),
        Leave: (_LEAVING,),
    },
    _EVICTED: {Join: (_AWAY,), Leave: (_LEAVING,)},
    _ENDED: {Join: (_AWAY, _ENDED), Leave: (_LEAVING,)},
    _LEAVING: {HeadSeen: (_LEAVING,), Left: (_LEFT,)},
    _LEFT: {},
}
"""The events that count in each standing, and the standings that each may lead to."""


HOLDINGS: Mapping[Holding, Mapping[type[MemberEvent], tuple[Holding, ...]]] = {
    Holding.NOTHING: {Examined: (Holding.HOLDING, Holding.OWING), Registered: (Holding.OWING,)},
    Holding.HOLDING: {Join: (Holding.OWING, Holding.NOTHING)},
    Holding.OWING: {
        ReadyPut: (Holding.NOTHING,),
        Connected: (Holding.NOTHING,),
        Registered: (Holding.NOTHING,),
        Examined: (Holding.HOLDING,),
    },
}
"""The events that change the holding. All others leave it as it is."""


def diagram() -> str:
    """Draw the table of standings in Mermaid's language, without the events that do not change the standing."""
    edges: dict[tuple[str, str], list[str]] = {}
    for standing, events in TRANSITIONS.items():
        for event, targets in events.items():
            for target in targets:
                if target is not standing:
                    edges.setdefault((standing.value, target.value), []).append(event.__name__)
    lines = [f"    {old} --> {new}: {', '.join(names)}" for (old, new), names in edges.items()]
    first, last = f"    [*] --> {Standing.IDLE.value}", f"    {Standing.LEFT.value} --> [*]"
    return "\n".join(["stateDiagram-v2", first, *lines, last])
