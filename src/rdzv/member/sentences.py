"""The sentence that people read for each notice, and its level. Pure functions, shared by log, commands and pages."""

from __future__ import annotations

import logging

from ..printable import clean
from .notices import Notice

LOUD = frozenset({"engine away", "engine back", "evicted"})
"""Kinds that are warnings, seen without any configuration. All others are expected, or raised to the caller."""


def level_of(notice: Notice) -> int:
    """Return the level of a log line: a person who watches a job wants to know all that is INFO or above, once."""
    kind = notice.kind
    if kind in LOUD:
        return logging.WARNING
    if kind == "joining":
        if notice.cause == "outage":
            return logging.WARNING  # Nothing else says why the workers were stopped: the others have not been heard.
        # After a change the reason was told already.
        return logging.INFO if notice.cause in ("", "restarted") else logging.DEBUG
    if kind == "sealed":
        # The line about the world that follows says more, but a round that is kept is not given again.
        return logging.INFO if _is_kept(notice) else logging.DEBUG
    if kind == "drained":
        return logging.DEBUG if notice.cause else logging.INFO
    quiet = ("present", "leading", "promoted", "lost", "left", "banned", "gave up")
    return logging.DEBUG if kind in quiet else logging.INFO


def sentence(notice: Notice) -> str:
    """Return one printable line about the notice."""
    write = _SENTENCES.get(notice.kind)
    return clean(f"{notice.member}: {notice.kind}: {notice.reason}" if write is None else write(notice))


def seconds_text(seconds: float) -> str:
    """Return a duration as people read it: two decimals below a second, none from 100 s on."""
    return f"{seconds:.{2 if seconds < 1 else 1 if seconds < 100 else 0}f} s"


def _after(notice: Notice, word: str) -> str:
    return "" if notice.seconds is None else f" {word} {seconds_text(notice.seconds)}"


def _joining(notice: Notice) -> str:
    if not notice.cause:
        return f"{notice.member} joins {notice.reason}"
    if notice.cause == "restarted":
        return f"round {notice.round}: the workers of this node have stopped; it asks for a new round"
    if notice.cause == "outage":
        return f"round {notice.round}: the workers of this node have stopped: {notice.reason}"
    return f"the workers of this node have stopped; it is ready for the round after round {notice.round}"


def _given(notice: Notice) -> str:
    text = f"round {notice.round}: rank {notice.rank} of {notice.size}"
    came = f"; came in: {', '.join(notice.came)}" if notice.came not in ((), notice.members) else ""
    if not notice.cause:
        return f"{text}, formed{_after(notice, 'in')}{came}"
    if notice.size != notice.size_before:
        text += f" ({notice.size_before} before)"
    who = f": {', '.join(notice.members)}" if notice.members else ""
    return f"{text}, re-formed{_after(notice, 'in')} ({notice.cause.replace('_', ' ')}{who}){came}"


def _engine_back(notice: Notice) -> str:
    # A member may notice an outage only when it ends, by a server that has forgotten it. A moment tells nothing then.
    lasted = _after(notice, "after") if notice.seconds is not None and notice.seconds >= 1 else ""
    return f"engine back{lasted}: {notice.reason}"


def _is_kept(notice: Notice) -> bool:
    return notice.reason.startswith("kept")


def _leaving(notice: Notice) -> str:
    text = f"leaves the run{_after(notice, 'after')}"
    totals = notice.totals
    if totals is not None and totals.rounds:
        text += f", {_many(totals.rounds, 'round')} and {_many(totals.restarts, 'restart')}"
        if totals.restarts:
            text += f" that took {seconds_text(totals.lost_s)}"
        if totals.availability is not None:
            text += f" ({percent(totals.availability)} of the time in a round)"
    return f"{text}: {notice.reason}"


def percent(share: float) -> str:
    """Return a share of 1 in percent, rounded down so that 100 % means that nothing was lost."""
    return f"{int(share * 1000) / 10:g} %"


def _many(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


_SENTENCES = {
    "joining": _joining,
    "present": lambda notice: f"{notice.member} is present {notice.reason}",
    "waiting": lambda notice: f"waits{_after(notice, 'since')}: {notice.reason}",
    "outside": lambda notice: f"round {notice.round} runs without this node: {notice.reason}",
    "given": _given,
    "sealed": lambda notice: f"round {notice.round} {'goes on' if _is_kept(notice) else 'sealed'}: {notice.reason}",
    "broken": lambda notice: f"round {notice.round} broken{_after(notice, 'after')}: {notice.reason}",
    "evicted": lambda notice: f"this node was evicted{_after(notice, 'from its round after')}: {notice.reason}",
    "closed": lambda notice: f"the run is closed: {notice.reason}",
    "ended": lambda notice: f"this node can take no further part: {notice.reason}",
    "done": lambda notice: f"round {notice.round}: {notice.reason}; it waits for the others",
    "engine away": lambda notice: f"engine away: {notice.reason}",
    "engine back": _engine_back,
    "drained": lambda notice: f"{notice.member} is about to leave: {notice.reason}",
    "leaving": _leaving,
}
