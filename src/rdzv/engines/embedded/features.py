"""Additions to the protocol since release 0.1.0, and how client and server tell each other which of them they know.

Frames refuse unknown fields, so a side may send an addition only to a peer that knows it. Both name all additions that they
know in the greeting:

- The client names them in the id of its session, after a plus sign: `0123456789abcdef+one,two`. To a server of 0.1.0 an id is
  any text, and it answers as always.
- A server that finds a plus sign answers with `WelcomeWithFeatures` in place of `Welcome`, which has one field more.

The additions so far:

- `watch`: a transaction that begins a watch (`TxnThenWatch`), and watches for deletions only (`EndsWatchStart`).

To make an addition: choose a name, add it to `FEATURES`, and send its frames or fields only if the peer's features hold the
name. A frame cannot grow, because all its fields are always sent: an addition is a frame with a tag of its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated

import msgspec

from . import frames
from .frames import Frame, Name, Number, Rejected, Txn, Welcome

WATCH = "watch"
FEATURES: frozenset[str] = frozenset({WATCH})
"""All additions that this version knows."""
FEATURES_MAX = 64
_MARK = "+"


class WelcomeWithFeatures(Welcome, frozen=True, tag=1):
    """The welcome for a client that named its features. The client reads the shorter one, too."""

    features: Annotated[tuple[Name, ...], msgspec.Meta(max_length=FEATURES_MAX)] | None = None
    """Additions that the server knows; None: it is of release 0.1.0."""


class TxnThenWatch(Txn, frozen=True, tag=14):
    """A transaction of the port with its `WatchPlan`. The answer is that to the transaction."""

    watch: Number = 0
    targets: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    first_of: tuple[Number, ...] = ()


class EndsWatchStart(Frame, frozen=True, tag=15):
    """Watch these targets, and the deletions of the keys in `ends`, for changes after a revision."""

    watch: Number
    targets: tuple[str, ...]
    since: Number
    ends: tuple[str, ...]


Request = frames.Request | TxnThenWatch | EndsWatchStart
request_decoder = msgspec.msgpack.Decoder(Request)
welcome_decoder = msgspec.msgpack.Decoder(WelcomeWithFeatures | Rejected)


def mark(session: str, features: frozenset[str] = FEATURES) -> str:
    """Return the session's id as the client sends it."""
    return f"{session}{_MARK}{','.join(sorted(features))}"


@lru_cache(64)
def _common(names: str) -> frozenset[str]:
    return FEATURES.intersection(names.split(","))


def read(session: str) -> tuple[str, frozenset[str] | None]:
    """Return the id of a session that a client sent, and the features that both know; None: the client is of release 0.1.0."""
    name, found, names = session.partition(_MARK)
    # All clients of one version name the same: one set serves all of them.
    return name, _common(names) if found else None
