"""How a member goes: its line says why, its key and lease end, and a run that is over does not stay open behind it."""

from __future__ import annotations

from typing import Any

from ..core import wire
from ..core.acts import WriteHead
from ..core.model import Phase, RoundReport
from ..core.rules import close_after_success
from ..core.text import clip
from ..engines.port import Empty, EngineReset, List, Modified, Order, Put
from ..errors import Unreachable
from .presence import Presence
from .run_snapshot import read_run


async def say_goodbye(presence: Presence, holds: RoundReport | None, failed: bool, reason: str) -> None:
    """T11. What cannot be said because the engine is away, our lease will say."""
    why = clip(reason) or "no reason was given"
    is_done = presence.record.done
    mark: dict[str, Any] = {"done": True} if is_done else {"gave_up": why} if failed else {"went": why}
    try:
        await presence.go(holds.table if holds else _table_of(presence), mark)
        await presence.session.revoke(presence.lease)
        if is_done:
            await _close_if_last(presence)
    except (Unreachable, EngineReset):
        pass


def _table_of(presence: Presence) -> str:
    """The head's table, if we have a line in it: who gives up between two rounds says so there."""
    head = presence.sight.head
    return head.table if head is not None and presence.line is not None else ""


async def _close_if_last(presence: Presence) -> None:
    """T11: a leader closes a run whose members are all done; when they go at once, the last leaves none behind to do it."""
    keys, session = presence.keys, presence.session
    if (await session.txn(then=[List(keys.members, Order.NEWEST, limit=1)])).reads[0]:
        return
    view = await read_run(session, presence.settings, presence)
    if view.members or view.head is None or view.head.phase not in (Phase.SEALED, Phase.BROKEN):
        return
    verdict = close_after_success(view)
    if verdict is not None and isinstance(verdict.act, WriteHead):
        head = verdict.act.head
        lease = await session.grant(presence.agreed.closed_for)
        await session.txn(
            [Empty(keys.members), Modified(keys.head, view.head_modified)],
            [Put(keys.head, wire.encode(head), lease), presence.journal(head, verdict.reason)],
        )
