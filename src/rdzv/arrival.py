"""T1: how a member comes into a run.

One transaction puts its key, if the settings are still those that were read, its id is new and its host is not banned; the
first to come creates the settings in the same transaction. It is tried before anything was read, because for the first that
is right and for the others the refusal brings what they need to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from . import settings as settings_module
from .core import wire
from .core.model import Agreed, Ban, Head, Member, Phase
from .drivers.base import Compare, Created, Delete, Empty, Get, Item, List, Modified, Operation, Order, Outcome, Put
from .errors import Banned, SettingsError

if TYPE_CHECKING:
    from .presence import Presence

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
        session = self._presence.session
        seen: Outcome | None = None
        while True:
            reads: list[Operation] = [List(self._presence.keys.members, Order.NEWEST, limit=2), Get(self._presence.keys.head)]
            compares, writes = self._plan(seen)
            outcome = await session.txn(compares, [*writes, *reads], self._look_around())
            if outcome.succeeded:
                self._note(outcome, len(writes))
                return
            own = outcome.item(_OWN)
            if own is not None:
                # An earlier attempt took effect, though its answer was lost; what it said of us is what counts.
                self._presence.record = wire.decode(Member, own.value)
                reads[0] = List(self._presence.keys.members, Order.NEWEST, limit=2, created_below=own.created + 1)
                self._note(await session.txn(then=reads), 0)
                return
            seen = outcome

    def _note(self, outcome: Outcome, index: int) -> None:
        """Who was before us, and the head, as of the moment we came (or, after a lost answer, a little later)."""
        presence = self._presence
        newest = outcome.reads[index]
        presence.created = next((item.created for item in newest if item.key == self._own), -1)
        self.predecessor = next((item.key for item in newest if item.created < presence.created), "")
        self.head = outcome.item(index + 1)
        self.revision = outcome.revision

    def _look_around(self) -> list[Operation]:
        keys = self._presence.keys
        ban = keys.ban(self._presence.record.host)
        return [Get(keys.settings), Get(keys.head), Get(ban), List(keys.members, Order.ANY, limit=1), Get(self._own)]

    def _plan(self, seen: Outcome | None) -> tuple[list[Compare], list[Operation]]:
        """By which transaction we can come in; without a look around we take it that nobody was here before."""
        presence, keys = self._presence, self._presence.keys
        settings = None if seen is None else seen.item(_SETTINGS)
        nobody = seen is None or not seen.reads[_ANYBODY]
        ban = None if seen is None else seen.item(_BAN)
        if ban is not None:
            raise Banned(presence.settings.run_id, presence.record.host, wire.decode(Ban, ban.value).reason)
        compares: list[Compare] = [
            Modified(keys.settings, settings.modified if settings else 0),
            Created(self._own, 0),
            Created(keys.ban(presence.record.host), 0),
        ]
        writes = self._replace_closed(seen, nobody, compares)
        writes += self._settle(settings, nobody, compares)
        writes.append(Put(self._own, wire.encode(presence.record), presence.lease))
        if presence.line is not None and presence.record.holds is not None:
            entry = keys.entry(presence.record.holds.table, presence.id)
            line = msgspec.structs.replace(presence.line, created=0)
            writes.append(Put(entry, wire.encode(line), presence.run_lease))
        return compares, writes

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
        """The settings, if they are ours to make: there are none, or nobody is here who agreed on them."""
        presence, mine = self._presence, self._presence.settings.agreed()
        presence.run_lease = settings.lease if settings else 0
        differences = []
        if settings is not None:
            differences = settings_module.differences(mine, wire.decode(Agreed, settings.value))
            if not differences:
                return []
        if differences and not nobody:
            problem = f"run {presence.settings.run_id!r} was started with other settings: {'; '.join(differences)}"
            raise SettingsError(f"{problem}; give all members the same")
        if differences:
            compares.append(Empty(presence.keys.members))
        return [Put(presence.keys.settings, wire.encode(mine), presence.run_lease)]
