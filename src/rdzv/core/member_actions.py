"""The actions that a member's machine (`member.py`) asks its runner to carry out."""

from __future__ import annotations

import msgspec

from .model import Head, RankEntry


class MemberAction(msgspec.Struct, frozen=True, gc=False):
    """Something for the runner to carry out."""


class Connect(MemberAction, frozen=True):
    """Look for an engine and register, until the machine says otherwise."""


class Bind(MemberAction, frozen=True):
    """Release the bootstrap socket that is bound, and bind a new one at this address."""

    addr: str


class ForgetShown(MemberAction, frozen=True):
    """Forget what the watch has shown of own entries: only what comes now, or another read, gives a round."""


class EndPresence(MemberAction, frozen=True):
    """End the present presence, and its key now rather than with its lease."""


class GiveRound(MemberAction, frozen=True):
    """Make a world of this round for the callers of `join`."""

    head: Head
    entry: RankEntry


class MoveWorld(MemberAction, frozen=True):
    """The world held goes on with the present presence."""


class EndWorld(MemberAction, frozen=True):
    """The world held is over: waits in its store end."""

    reason: str


class Examine(MemberAction, frozen=True):
    """Read own key, head and own entry in this table at one revision (T3.2)."""

    table: str


class PutReady(MemberAction, frozen=True):
    """Write the own record with the highest round given up and a fresh bootstrap socket (T4.3)."""


class Raise(MemberAction, frozen=True, gc=True):
    """The join fails."""

    error: Exception


class Tell(MemberAction, frozen=True):
    """A notice about this member."""

    kind: str
    reason: str


class TellHead(MemberAction, frozen=True):
    """The notices that follow from a new head."""

    old: Head | None
    new: Head


class Wake(MemberAction, frozen=True):
    """Let everybody who waits look at the state again."""


WAKE = Wake()
Actions = list[MemberAction]
