"""The events that happen to a member: the input of its machine (`member.py`)."""

from __future__ import annotations

import msgspec

from .model import Head, RankEntry, RoundId


class MemberEvent(msgspec.Struct, frozen=True, gc=False):
    """Something happened."""


class Join(MemberEvent, frozen=True):
    """The holder joins: no worker of an earlier round runs any more (T4.2)."""

    role: str = ""
    workers: int = 0
    """How many workers the holder starts in each round; 0: it does not say."""


class Connected(MemberEvent, frozen=True):
    """An engine instance answers that may be followed. A new presence begins."""

    addr: str
    """The address at which others reach this node."""
    place: str = ""
    """Where the engine runs."""


class Elsewhere(MemberEvent, frozen=True):
    """An engine at another place answers, and neither an operator nor the platform lets members follow it (T16)."""

    place: str
    why: str = ""
    """Why the platform's promise does not allow it, if the platform promised anything."""


class EngineAway(MemberEvent, frozen=True):
    """The engine cannot be reached, or the instance of the present presence has ended."""

    trouble: str


class Registered(MemberEvent, frozen=True):
    """The member's key is on the engine (T1)."""

    created: int
    brought: bool
    """The record says that the member holds a round (T13)."""
    asked_at: float
    """When the lease was asked for."""
    place: str = ""
    promised: str = ""
    """The name that the platform gave to the server there (T16.4)."""
    began_at: float = 0.0
    """When a server with such a name was started, by the member's own clock."""


class HeadSeen(MemberEvent, frozen=True):
    """The head of this instance is another one now; None: it is gone."""

    head: Head | None


class HeadSent(MemberEvent, frozen=True):
    """The member writes a head with that fence, and may never hear whether that took effect."""

    fence: int


class KeyGone(MemberEvent, frozen=True):
    """The member's key is not on the engine any more."""

    reason: str


class Renewed(MemberEvent, frozen=True):
    """The lease was renewed."""

    sent_at: float


class RenewalFailed(MemberEvent, frozen=True):
    """A renewal was not answered."""

    sent_at: float
    trouble: str
    paused: bool = False
    """A request cannot take so long, so this process stood still, which says nothing about the engine."""


class DrainAsked(MemberEvent, frozen=True):
    """An operator asks this member to drain."""

    reason: str


class Leads(MemberEvent, frozen=True):
    """The member leads from now on: every member that came earlier is gone."""


class Examined(MemberEvent, frozen=True):
    """Head and own entry in `table`, as one transaction read them while the member's key stood (T3.2)."""

    table: str
    head: Head | None
    entry: RankEntry | None
    created: int
    """Create revision of the member's key."""


class ReadyPut(MemberEvent, frozen=True):
    """The record that says which rounds were given up is on the engine."""

    left: RoundId


class WorkDone(MemberEvent, frozen=True):
    """The holder's work succeeded."""


class Draining(MemberEvent, frozen=True):
    """The holder is about to go."""

    reason: str
    grace: float = 0.0
    """How long its workers have to save before; 0: as long as the run gives them."""


class Failed(MemberEvent, frozen=True, gc=True):
    """Something final happened to the member: a refusal, or a defect."""

    error: Exception


class Leave(MemberEvent, frozen=True):
    """The holder leaves."""


class Left(MemberEvent, frozen=True):
    """The goodbye is over, said or not."""
