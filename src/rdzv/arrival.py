"""T1: how a member comes into a run.

One transaction puts its key, if the settings are what it judged, its id is new and its host is not banned; the first to come
creates the settings in the same transaction. It is tried before anything was read, as if others with our settings were here,
which is right for all but the first; the refusal brings what those need to know. A few come as if they were the first, so that
a crowd that starts at one moment is not refused as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from . import settings as settings_module
from .core import wire
from .core.model import Agreed, Ban, Head, Member, Phase
from .drivers.base import (
    Compare,
    Created,
    Delete,
    Empty,
    Equals,
    Get,
    Item,
    List,
    Modified,
    Operation,
    Order,
    Outcome,
    Put,
)
from .errors import Banned, SettingsError

if TYPE_CHECKING:
    from .presence import Presence

AS_FIRST = 1 / 16
"""How many of a crowd expect to find nobody. As many as are refused before one of them has come; both are a second attempt."""

_SETTINGS, _HEAD, _BAN, _ANYBODY, _OWN = range(5)


class Arrival:
    """What is known while coming in. Safe to try again after any failure: the key's id tells whether it was put."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._own = presence.keys.member(presence.id)
        self.predecessor = ""
        self.head: Item | None = None
        self.revision = 0

    async def come_in(self) -> None:
        """Until our key is there. Raises Closed, SettingsError, Banned, LeaseGone, Unreachable, EngineReset."""
        keys, session = self._presence.keys, self._presence.session
        # Whoever is here comes before us. Ids are random, so those who take the next by key spread over all, and no engine
        # needs to read everybody to find it.
        before = [List(keys.members, Order.ANY, limit=1, after=self._own), List(keys.members, Order.ANY, limit=1)]
        seen: Outcome | None = None
        while True:
            compares, writes = self._plan(seen)
            outcome = await session.txn(compares, [*before, *writes, Get(keys.head)], self._look_around())
            if outcome.succeeded:
                self._note(outcome, outcome.revision)
                return
            own = outcome.item(_OWN)
            if own is not None:
                await self._recognize(own)
                return
            seen = outcome

    async def _recognize(self, own: Item) -> None:
        """An earlier attempt took effect, though its answer was lost; what it said of us is what counts."""
        presence, keys = self._presence, self._presence.keys
        presence.record = wire.decode(Member, own.value)
        before = List(keys.members, Order.NEWEST, limit=1, created_below=own.created)
        outcome = await presence.session.txn(then=[before, Get(self._own), Get(keys.head)])
        still = outcome.item(1)
        self._note(outcome, own.created if still is not None and still.created == own.created else -1)

    def _note(self, outcome: Outcome, created: int) -> None:
        """Who was before us, and the head, as of the moment we came (or, after a lost answer, a little later)."""
        self._presence.created = created
        others = [item.key for item in (*outcome.reads[0], *outcome.reads[1]) if item.key != self._own]
        self.predecessor = others[0] if others else ""
        self.head = outcome.item(-1)
        self.revision = outcome.revision

    def _look_around(self) -> list[Operation]:
        keys = self._presence.keys
        ban = keys.ban(self._presence.record.host)
        return [Get(keys.settings), Get(keys.head), Get(ban), List(keys.members, Order.ANY, limit=1), Get(self._own)]

    def _plan(self, seen: Outcome | None) -> tuple[list[Compare], list[Operation]]:
        """By which transaction we can come in."""
        presence, keys = self._presence, self._presence.keys
        settings = self._imagined() if seen is None else seen.item(_SETTINGS)
        nobody = seen is None or not seen.reads[_ANYBODY]
        ban = None if seen is None else seen.item(_BAN)
        if ban is not None:
            raise Banned(presence.settings.run_id, presence.record.host, wire.decode(Ban, ban.value).reason)
        compares: list[Compare] = [Created(self._own, 0), Created(keys.ban(presence.record.host), 0)]
        writes = self._replace_closed(seen, nobody, compares)
        writes += self._settle(settings, nobody, compares)
        writes.append(Put(self._own, wire.encode(presence.record), presence.lease))
        if presence.line is not None and presence.record.holds is not None:
            entry = keys.entry(presence.record.holds.table, presence.id)
            line = msgspec.structs.replace(presence.line, created=0)
            writes.append(Put(entry, wire.encode(line), presence.run_lease))
        return compares, writes

    def _imagined(self) -> Item | None:
        """The settings before we have looked: ours, or none, as if we were the first.

        None is right for who would do more than put its key: replace a closed head, or bring its line in a table, which
        needs the run's lease.
        """
        presence = self._presence
        does_more = presence.settings.incarnation > 0 or presence.record.holds is not None
        if does_more or presence.machine.jitter() < AS_FIRST:
            return None
        return Item(presence.keys.settings, wire.encode(presence.agreed), 0, 0)

    def _replace_closed(self, seen: Outcome | None, nobody: bool, compares: list[Compare]) -> list[Operation]:
        """A higher incarnation is a new attempt at the same job: it need not wait until the close has expired."""
        item = None if seen is None else seen.item(_HEAD)
        head = None if item is None else wire.decode(Head, item.value)
        if item is None or head is None or seen is None or head.phase is not Phase.CLOSED:
            return []
        presence = self._presence
        if not nobody or presence.settings.incarnation <= head.incarnation:
            presence.sight.show(item, seen.revision)
            raise presence.closed(head)
        compares += [Empty(presence.keys.members), Modified(presence.keys.head, item.modified)]
        return [Delete(presence.keys.head)]

    def _settle(self, settings: Item | None, nobody: bool, compares: list[Compare]) -> list[Operation]:
        """The settings, if they are ours to make: there are none, or nobody is here who agreed on them.

        Those that we agree with are compared by value, since the leader puts them once more, under the run's lease.
        """
        presence, mine = self._presence, wire.encode(self._presence.agreed)
        presence.run_lease = settings.lease if settings else 0
        differences = []
        if settings is not None:
            if settings.value != mine:
                differences = settings_module.differences(presence.agreed, wire.decode(Agreed, settings.value))
            if not differences:
                compares.append(Equals(presence.keys.settings, settings.value))
                return []
        if differences and not nobody:
            problem = f"run {presence.settings.run_id!r} was started with other settings: {'; '.join(differences)}"
            raise SettingsError(f"{problem}; give all members the same")
        compares.append(Modified(presence.keys.settings, settings.modified if settings else 0))
        if differences:
            compares.append(Empty(presence.keys.members))
        return [Put(presence.keys.settings, mine, presence.run_lease)]
