"""T1: how a member comes into a run.

One transaction puts its key, if the run's settings are its own, its id is new and its host is not banned. It is tried before
anything was read, because that is right for nearly all: the refusal brings the others what they need to know. The first to come
creates the settings in the same transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from .._version import __version__
from ..config import settings as settings_module
from ..config.settings import Settings
from ..core import wire
from ..core.model import Ban, Head, MemberRecord, Phase, RunSettings
from ..core.text import NAME_MAX, clip
from ..engines.port import (
    Case,
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
    Session,
)
from ..errors import Banned, SettingsError
from ..system.node import Node

if TYPE_CHECKING:
    from .presence import Presence

_Way: TypeAlias = tuple[list[Compare], list[Operation]]
"""What a transaction compares and writes."""
_SETTINGS, _HEAD, _BAN, _ANYBODY, _OWN = range(5)


class Registration:
    """What is known while coming in. Safe to try again after any failure: the key's id tells whether it was put."""

    def __init__(self, presence: Presence) -> None:
        self._presence = presence
        self._own = presence.keys.member(presence.id)
        self._ban = presence.keys.ban(presence.record.host)
        self._welcome: tuple[Compare, ...] = (Created(self._own, 0), Created(self._ban, 0))
        """That we are new, and not banned."""
        self.predecessor = ""
        self.founds = False
        """The settings are ours, and hang on no lease yet."""
        self.head: Item | None = None
        self.revision = 0

    async def come_in(self) -> None:
        """Until our key is there. Raises Closed, SettingsError, Banned, LeaseGone, Unreachable, EngineReset."""
        keys, session = self._presence.keys, self._presence.session
        # Whoever is here comes before us. Ids are random, so those who take the next by key spread over all, and no engine
        # needs to read everybody to find it.
        before = [List(keys.members, Order.ANY, limit=1, after=self._own), List(keys.members, Order.ANY, limit=1)]
        self._entrance = Put(self._own, wire.encode(self._presence.record), self._presence.lease)
        seen: Outcome | None = None
        while True:
            ways = [Case(tuple(compares), (*before, *writes, Get(keys.head))) for compares, writes in self._ways(seen)]
            outcome = await session.txn(ways[0].compares, ways[0].then, self._look_around(), ways[1:])
            if outcome.succeeded:
                self._note(outcome, outcome.revision)
                self.founds = any(isinstance(one, Put) and one.key == keys.settings for one in ways[outcome.case].then)
                return
            own = outcome.item(_OWN)
            if own is not None:
                await self._recognize(own)
                return
            seen = outcome

    async def _recognize(self, own: Item) -> None:
        """An earlier attempt took effect, though its answer was lost; what it said of us is what counts."""
        presence, keys = self._presence, self._presence.keys
        presence.record = wire.decode(MemberRecord, own.value)
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
        return [Get(keys.settings), Get(keys.head), Get(self._ban), List(keys.members, Order.ANY, limit=1), Get(self._own)]

    def _ways(self, seen: Outcome | None) -> list[_Way]:
        """By which transactions we can come in, of which one is to be done.

        Without a look around the run may be there, agreed on what we were told too, or nobody was here before. Only the
        latter is tried if there is more to do than to come in: a closed head to replace, a line to put under the run's lease.
        """
        presence = self._presence
        ways = [self._plan(seen)]
        if seen is None and presence.line is None and not presence.settings.incarnation:
            agreed = Equals(presence.keys.settings, wire.encode(presence.agreed))
            ways.insert(0, ([agreed, *self._welcome], [self._entrance]))
        return ways

    def _plan(self, seen: Outcome | None) -> _Way:
        """By which transaction we can come in, after a look around; without one we take it that nobody was here before."""
        presence, keys = self._presence, self._presence.keys
        settings = None if seen is None else seen.item(_SETTINGS)
        nobody = seen is None or not seen.reads[_ANYBODY]
        ban = None if seen is None else seen.item(_BAN)
        if ban is not None:
            raise Banned(presence.settings.run_id, presence.record.host, wire.decode(Ban, ban.value).reason)
        compares: list[Compare] = [Modified(keys.settings, settings.modified if settings else 0), *self._welcome]
        writes = self._replace_closed(seen, nobody, compares)
        writes += self._settle(settings, nobody, compares)
        writes.append(self._entrance)
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
        presence, mine = self._presence, self._presence.agreed
        presence.run_lease = settings.lease if settings else 0
        differences = []
        if settings is not None:
            differences = settings_module.differences(mine, wire.decode(RunSettings, settings.value))
            if not differences:
                return []
        if differences and not nobody:
            problem = f"run {presence.settings.run_id!r} was started with other settings: {'; '.join(differences)}"
            raise SettingsError(f"{problem}; give all members the same")
        if differences:
            compares.append(Empty(presence.keys.members))
        return [Put(presence.keys.settings, wire.encode(mine), presence.run_lease)]


def member_name(settings: Settings, node: Node) -> str:
    """Host, and slot if there is one: stable over restarts, so that the rank can be."""
    return clip(f"{node.host}/{settings.slot}" if settings.slot else node.host, NAME_MAX)


def record_for(settings: Settings, node: Node, session: Session) -> MemberRecord:
    """Who we are, as the others see it."""
    return MemberRecord(
        name=member_name(settings, node),
        host=clip(node.host, NAME_MAX),
        addr=settings.local_addr or session.local_host or node.host,
        pid=node.pid,
        order=settings.order,
        topology=settings.topology,
        version=__version__,
        info=dict(settings.info),
    )
