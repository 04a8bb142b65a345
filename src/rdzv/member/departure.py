"""T11: how a member says goodbye: its entry tells why, its key ends, and the last one closes a finished run."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from ..core.acts import WriteHead
from ..core.model import Phase
from ..core.rules import close_after_success
from ..engines.port import Empty, EngineReset, List, Modified, Order
from ..errors import Unreachable
from .presence import Presence
from .run_mirror import read_run


async def say_goodbye(presence: Presence, failed: bool, why: str) -> bool:
    """T11.6: mark the entry and end the key. False: the engine is away, and the end of the lease tells the others."""
    state, done = presence.state, presence.record.done
    mark = {"done": True} if done else {"gave_up": why} if failed else {"went": why}
    entry = None if state.entry is None else msgspec.structs.replace(state.entry, **mark)
    # A member that gives up between two rounds says so in the table of the head.
    table = state.holds.table if state.holds else state.head.table if state.head else ""
    with suppress(Unreachable, EngineReset):
        await presence.go(table, entry)
        await presence.session.revoke(presence.lease)
        if done:
            await _close_if_last(presence)
        return True
    return False


async def _close_if_last(presence: Presence) -> None:
    """T11.9: close a run in which all are done, if no member is left to lead it.

    A leader would close it. But when all go at once there is none, so the last one does.
    """
    keys, session = presence.keys, presence.session
    if (await session.txn(then=[List(keys.members, Order.NEWEST, limit=1)])).reads[0]:
        return
    view = await read_run(session, presence.settings, presence)
    if view.members or view.head is None or view.head.phase not in (Phase.SEALED, Phase.BROKEN):
        return
    verdict = close_after_success(view)
    if verdict is not None and isinstance(verdict.act, WriteHead):
        guard = (Empty(keys.members), Modified(keys.head, view.head_modified))
        await presence.write_head(verdict.act.head, verdict.reason, guard)
