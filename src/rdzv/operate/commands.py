"""An operator's requests to a run: drain, ban, unban, close, adopt.

Every key has one writer. These functions write only keys of operators, with one exception: anyone may close a run.
"""

from __future__ import annotations

import msgspec

from ..core import wire
from ..core.acts import because, close_head, journal_line
from ..core.keys import Keys
from ..core.model import Ban, CauseKind, DrainRequest, Head, MemberRecord, Phase, RunSettings
from ..core.text import NAME_MAX, REASON_MAX, clip
from ..engines.port import Delete, Get, List, Modified, Operation, Put, Session
from ..member.head_write import write_head
from ..system.node import stamp


async def drain(session: Session, run_id: str, who: str, reason: str) -> list[str]:
    """Ask the members with that id, name or host to leave, and return their names."""
    keys = Keys(run_id)
    listed = await session.txn(then=[List(keys.members), Get(keys.settings)])
    settings = listed.item(1)
    # Requests and bans are attached to the run's lease, so that they end with the run.
    lease = settings.lease if settings is not None else 0
    asked: dict[str, str] = {}
    for item in listed.reads[0]:
        record, id = wire.decode(MemberRecord, item.value), item.key[len(keys.members) :]
        if who in (id, record.name, record.host):
            asked[id] = record.name
    value = wire.encode(DrainRequest(reason=clip(reason, REASON_MAX // 2)))
    writes: list[Operation] = [Put(keys.ask(id), value, lease) for id in asked]
    if writes:
        await session.txn(then=writes)
    return sorted(asked.values())


async def ban(session: Session, run_id: str, host: str, reason: str) -> None:
    """Keep a host out of a run, and evict its members."""
    keys = Keys(run_id)
    settings = (await session.txn(then=[Get(keys.settings)])).item(0)
    lease = settings.lease if settings is not None else 0
    await session.txn(then=[Put(keys.ban(host), wire.encode(Ban(reason=clip(reason, REASON_MAX // 2))), lease)])


async def unban(session: Session, run_id: str, host: str) -> bool:
    """Let a host in again, and return whether it was banned."""
    key = Keys(run_id).ban(host)
    outcome = await session.txn(then=[Get(key), Delete(key)])
    return bool(outcome.reads[0])


async def close(session: Session, run_id: str, reason: str, by: str) -> bool:
    """End the run for all members (T11). Return False if there is no run, or if it is closed already."""
    keys = Keys(run_id)
    while True:  # The leader may replace the head between the read and the write; then the compare fails.
        seen = await session.txn(then=[Get(keys.head), Get(keys.settings)])
        item, settings = seen.item(0), seen.item(1)
        head = None if item is None else wire.decode(Head, item.value)
        if item is None or head is None or head.phase is Phase.CLOSED:
            return False
        closed_for = wire.decode(RunSettings, settings.value).closed_for if settings is not None else 60.0
        closed = close_head(head, because(CauseKind.CLOSED, f"{clip(reason, REASON_MAX // 2)} (by {by})"))
        journal = journal_line(closed, clip(by, NAME_MAX), reason, stamp=stamp())
        guard, run_lease = [Modified(keys.head, item.modified)], settings.lease if settings is not None else 0
        outcome = await write_head(
            session, run_id, closed, journal, guard, run_lease=run_lease, closed_for=closed_for
        )
        if outcome.succeeded:
            return True


ADOPT_S = 3600.0
"""How long members may move. They retry about every half second, but their machine may sleep."""


async def adopt(session: Session, run_id: str, by: str) -> None:
    """Let members of a run move to this engine, although they know one at another place (T16)."""
    lease = await session.grant(ADOPT_S)
    await session.txn(then=[Put(Keys(run_id).adopt, msgspec.json.encode({"by": by}), lease)])
