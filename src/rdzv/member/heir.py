"""The heir: a follower that asks the engine whether the leader is dead, while nobody goes on from a round that it gave up.

Until the key of a dead leader is gone, nobody leads. The heir lists the run as a leader would, asks the rule (T8.6), and
deletes the leader's key if the engine finds that its process has ended. All the rest is up to the next leader.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from ..core.acts import Evict
from ..core.evictions import HEIRS_MAX, QUESTIONS, evict_leader, is_left_alone, is_worth_asking
from ..engines import port
from ..engines.port import Compare, Delete, Modified
from ..errors import Unreachable
from ..system.timers import sleep
from .run_mirror import read_run

if TYPE_CHECKING:
    from .presence import Presence


class Heir:
    """Asks from a quarter of a linger after its presence gave up a round, for as long as nobody goes on from there."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self.pause_s = presence.settings.linger / 4 if presence.session.sees_ends else 0.0
        """Time before each question; 0: the engine does not see the end of a process, and is not asked."""

    @property
    def is_needed(self) -> bool:
        """Whether nobody has gone on from the round that the presence gave up, and it may ask about that."""
        presence = self._presence
        head = presence.tracker.head
        if presence.leader is not None or head is None or not is_left_alone(head, presence.record.left):
            return False
        return is_worth_asking(head)

    async def run(self) -> None:
        """Ask a few times, and end when somebody leads, or when too many came earlier. Raises EngineReset."""
        for _ in range(QUESTIONS):
            with suppress(Unreachable):
                if not self.is_needed or not await self._is_near():
                    return
                await self._ask()
            await sleep(self._presence.node, self.pause_s)

    async def _is_near(self) -> bool:
        """Whether so few came earlier that this member may be the heir. That costs the engine next to nothing."""
        presence = self._presence
        earlier = port.List(presence.keys.members, port.Order.OLDEST, HEIRS_MAX + 1, created_below=presence.created)
        return len((await presence.session.txn(then=[earlier])).reads[0]) <= HEIRS_MAX

    async def _ask(self) -> None:
        presence, keys = self._presence, self._presence.keys
        view = await read_run(presence.session, presence.settings, presence)
        verdict = evict_leader(msgspec.structs.replace(view, linger_s=4 * self.pause_s))
        act = None if verdict is None else verdict.act
        if not isinstance(act, Evict):
            return
        for id in act.ids:
            key = keys.member(id)
            guard: list[Compare] = [presence.own_guard, Modified(keys.head, view.head_modified)]
            guard += [Modified(key, view.members[id].modified), *self.is_away(key, act)]
            await presence.session.txn(guard, [Delete(key), Delete(keys.ask(id))])

    def is_away(self, key: str, act: Evict) -> list[Compare]:
        """Compare that the process behind the key has ended, which only the engine knows."""
        return [] if act.away_s is None else [port.Away(key, act.away_s)]
