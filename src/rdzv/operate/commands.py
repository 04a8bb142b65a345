"""An operator's requests to a run: drain, ban, unban, close, adopt.

Every key has one writer. These functions write only keys of operators, with one exception: anyone may close a run.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from ..core import wire
from ..core.acts import because, close_head, journal_line
from ..core.duration import show_duration
from ..core.keys import Keys
from ..core.model import Ban, CauseKind, DrainRequest, Era, Head, MemberRecord, Phase, RunSettings
from ..core.text import NAME_MAX, REASON_MAX, clip
from ..engines.port import Delete, DeletePrefix, Get, Item, List, Modified, Put, Session
from ..errors import Incompatible, SettingsError
from ..member.head_write import write_head
from ..system.node import stamp

EVERYBODY = "*"
"""Whom to drain, if all members are to leave."""


async def drain(session: Session, run_id: str, who: str, reason: str) -> list[str]:
    """Ask the members with that id, name or host to leave, or all of them (`*`), and return their names."""
    keys = Keys(run_id)
    listed = await session.txn(then=[List(keys.members), Get(keys.settings)])
    settings = listed.item(1)
    # Requests and bans are attached to the run's lease, so that they end with the run.
    lease = settings.lease if settings is not None else 0
    asked = {
        id: name for id, (name, host) in _names(keys, listed.reads[0]).items() if who in (EVERYBODY, id, name, host)
    }
    value = wire.encode(DrainRequest(reason=clip(reason, REASON_MAX // 2)))
    puts = [Put(keys.ask(id), value, lease) for id in asked]
    for first in range(0, len(puts), session.writes_max):
        await session.txn(then=puts[first : first + session.writes_max])
    return sorted(asked.values())


def _names(keys: Keys, items: Iterable[Item]) -> dict[str, tuple[str, str]]:
    """Return name and host of each member, by id."""
    names = {}
    for item in items:
        id = item.key[len(keys.members) :]
        try:
            record = wire.decode(MemberRecord, item.value)
        except Incompatible:  # What one member wrote must not keep an operator from the others.
            names[id] = clip(id, NAME_MAX), clip(id, NAME_MAX)
        else:
            names[id] = record.name, record.host
    return names


async def ban(session: Session, run_id: str, host: str, reason: str, for_s: float | None = None) -> tuple[list[str], str]:
    """Keep a host out of a run, and evict its members: for as long as the run lives, or for `for_s` seconds.

    Return the names of these members, and the host of the member that has this for a name; empty: there is none.
    """
    _check_host(host)
    keys = Keys(run_id)
    text = clip(reason, REASON_MAX // 2)
    if for_s is None:
        settings = (await session.txn(then=[Get(keys.settings)])).item(0)
        lease = settings.lease if settings is not None else 0
    else:
        # The engine's clock alone ends the ban. A leader that counted would begin anew after each change of leaders, and
        # an instant would be one of this machine.
        lease = await session.grant(for_s)
        text += f" (for {show_duration(for_s)})"
    done = await session.txn(then=[List(keys.members), Put(keys.ban(host), wire.encode(Ban(reason=text)), lease)])
    names = _names(keys, done.reads[0]).values()
    return sorted(name for name, where in names if where == host), next((where for name, where in names if name == host), "")


async def unban(session: Session, run_id: str, host: str) -> bool:
    """Let a host in again, and return whether it was banned or quarantined. Its strikes are forgotten, too."""
    _check_host(host)
    keys = Keys(run_id)
    ban, quarantine = keys.ban(host), keys.quarantine(host)
    outcome = await session.txn(
        then=[Get(ban), Get(quarantine), Delete(ban), Delete(quarantine), DeletePrefix(keys.strikes_of(host))]
    )
    return any(outcome.reads)


def _check_host(host: str) -> None:
    """Raise SettingsError if no member can have that host: members clip theirs to the same bound."""
    if not host or clip(host, NAME_MAX) != host:
        raise SettingsError(
            f"host {clip(host, NAME_MAX)!r} is no name of a host: it must be printable text of 1 to {NAME_MAX} bytes, "
            "as `rdzv status` shows it"
        )


async def close(session: Session, run_id: str, reason: str, by: str, at: str | None = None) -> bool:
    """End the run for all members (T11). Return False if there is no run, or if it is closed already.

    `at` is the time that the journal shows; None: the wall clock. The simulator gives it, so that a seed repeats exactly.
    """
    keys = Keys(run_id)
    while True:  # The leader may replace the head between the read and the write; then the compare fails.
        seen = await session.txn(then=[Get(keys.head), Get(keys.settings)])
        item, settings = seen.item(0), seen.item(1)
        if item is None:
            return False
        head = wire.read_head(item.value) or _unknown_head()
        if head.phase is Phase.CLOSED:
            return False
        closed_for = CLOSED_FOR_S
        if settings is not None:
            with suppress(Incompatible):
                closed_for = wire.decode(RunSettings, settings.value).closed_for
        closed = close_head(head, because(CauseKind.CLOSED, f"{clip(reason, REASON_MAX // 2)} (by {by})"))
        journal = journal_line(closed, clip(by, NAME_MAX), reason, stamp=stamp() if at is None else at)
        guard, run_lease = [Modified(keys.head, item.modified)], settings.lease if settings is not None else 0
        outcome = await write_head(session, run_id, closed, journal, guard, run_lease=run_lease, closed_for=closed_for)
        if outcome.succeeded:
            return True


async def note(session: Session, run_id: str, by: str, text: str, at: str | None = None) -> None:
    """Write an operator's request to the journal: requests that change no head would leave no trace there.

    The line repeats the head and lasts no time, so it changes no sum. The oldest of NOTES_MAX notes is overwritten. `at`: as
    for `close`.
    """
    keys = Keys(run_id)
    seen = await session.txn(then=[Get(keys.head), Get(keys.settings), List(keys.notes)])
    item, settings, notes = seen.item(0), seen.item(1), seen.reads[2]
    head = wire.read_head(item.value) if item is not None else None
    if item is None or head is None:  # No head, no journal: the members have not begun yet, or the head cannot be read.
        return
    line = journal_line(head, clip(by, NAME_MAX), text, lasted_s=0.0, stamp=stamp() if at is None else at)
    oldest = min(notes, key=lambda one: one.modified).key if len(notes) >= NOTES_MAX else f"{keys.notes}{len(notes):02d}"
    lease = settings.lease if settings is not None else item.lease
    await session.txn(then=[Put(oldest, wire.encode(line), lease)])


NOTES_MAX = 64
CLOSED_FOR_S = 60.0  # How long the id is refused if the run's settings do not say.
ADOPT_S = 3600.0  # How long members may move. They retry about every half second, but their machine may sleep.


def _unknown_head() -> Head:
    """Return a head of no round, to close a run whose own head cannot be read."""
    era = Era(1, secrets.token_hex(8))
    return Head(run=secrets.token_hex(8), era=era, next_era=era)


async def adopt(session: Session, run_id: str, by: str) -> None:
    """Let members of a run move to this engine, although they know one at another place (T16)."""
    lease = await session.grant(ADOPT_S)
    await session.txn(then=[Put(Keys(run_id).adopt, msgspec.json.encode({"by": by}), lease)])
