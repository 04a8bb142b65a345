"""T1: how a member registers with a run.

One transaction puts its key, if the run's settings are its own, its id is new and its host is not banned. The
transaction is tried before anything was read, because that is right for nearly all members. For the others, the refusal
brings what they need to know. The first member creates the settings in the same transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import msgspec

from .._version import __version__
from ..config import settings as settings_module
from ..config.settings import Settings
from ..core import wire
from ..core.member import closed_error
from ..core.member_state import MemberState
from ..core.model import Ban, MemberRecord, Phase, RankEntry, RunSettings
from ..core.text import NAME_MAX, clip
from ..core.topology import with_host
from ..engines import port
from ..engines.port import Compare, Empty, Equals, Get, Item, List, Modified, Operation, Order, Outcome, Put, WatchPlan
from ..errors import Banned, Incompatible, SettingsError
from ..system.node import Node

if TYPE_CHECKING:
    from .presence import Presence

_Way: TypeAlias = tuple[list[Compare], list[Operation]]
"""Compares and writes of a transaction."""
_SETTINGS, _HEAD, _BAN, _ANYBODY, _OWN = range(5)


class Found(msgspec.Struct, frozen=True):
    """A member's key, and what there was when it was put (or, after a lost answer, a little later)."""

    created: int
    """Create revision of the key; -1: it was there and is gone again."""
    record: MemberRecord
    predecessor: str
    """Key of a member that came earlier; empty: none."""
    head: Item | None
    revision: int
    run_lease: int
    made_settings: bool = False
    """The settings were put with the key, and hang on no lease yet."""
    watch: port.Watch | None = None
    """The watch that every member has, from `revision` on, if it began with the transaction that put the key."""


class Registration:
    """One attempt to register. It may be repeated after any failure: the key's id tells whether it was put."""

    def __init__(self, presence: Presence, entry: RankEntry | None) -> None:
        self._session = presence.session
        self._keys = presence.keys
        self._settings = presence.settings
        self._agreed = presence.agreed
        self._agreed_value = wire.encode(presence.agreed)
        self._record = presence.record
        self._show_head = presence.show_head
        self._me = presence.state.me
        self._own = presence.keys.member(presence.id)
        self._watch_plan = WatchPlan(self._keys.watched_by(presence.id, self._session.stars), (self._own,), (0, 1))
        self._ban = presence.keys.ban(presence.record.host)
        self._entrance = Put(self._own, wire.encode(presence.record), presence.lease)
        self._welcome: tuple[Compare, ...] = (port.Created(self._own, 0), port.Created(self._ban, 0))
        """The id is new, and the host is not banned."""
        self._entry: tuple[str, RankEntry] | None = None
        """Key and entry of the round that is held, to be put with the own key (T13.4)."""
        if entry is not None and presence.record.holds is not None:
            key = presence.keys.entry(presence.record.holds.table, presence.id)
            self._entry = key, msgspec.structs.replace(entry, created=0)
        self._run_lease = 0

    async def come_in(self) -> Found:
        """Try until the key is there. Raises Closed, SettingsError, Banned, LeaseGone, Unreachable, EngineReset."""
        keys = self._keys
        # Every member that is here came earlier. Ids are random, so members that take the next one by key spread over
        # all, and no engine needs to read all members to find it.
        before = [List(keys.members, Order.ANY, limit=1, after=self._own), List(keys.members, Order.ANY, limit=1)]
        around: list[Operation] = [Get(keys.settings), Get(keys.head), Get(self._ban), before[1], Get(self._own)]
        seen: Outcome | None = None
        while True:
            ways = [port.Case(tuple(one), (*before, *writes, Get(keys.head))) for one, writes in self.ways(seen)]
            then, instead = ways[0].then, ways[1:]
            outcome, watch = await self._session.txn_then_watch(
                self._watch_plan, ways[0].compares, then, around, instead
            )
            if outcome.succeeded:
                made_settings = any(type(one) is Put and one.key == keys.settings for one in ways[outcome.case].then)
                predecessor = next(iter(self._watch_plan.found(outcome)), "")
                created, head = outcome.revision, outcome.item(-1)
                return Found(created, self._record, predecessor, head, created, self._run_lease, made_settings, watch)
            own = outcome.item(_OWN)
            if own is not None:
                return await self._recognize(own)
            seen = outcome

    async def _recognize(self, own: Item) -> Found:
        """An earlier attempt took effect, but its answer was lost. The record of that attempt counts (T1.6)."""
        before = List(self._keys.members, Order.NEWEST, limit=1, created_below=own.created)
        outcome = await self._session.txn(then=[before, Get(self._keys.head), Get(self._own)])
        still = outcome.item(2)
        created = own.created if still is not None and still.created == own.created else -1
        predecessor = next((item.key for item in outcome.reads[0]), "")
        head, revision = outcome.item(1), outcome.revision
        return Found(created, wire.decode(MemberRecord, own.value), predecessor, head, revision, self._run_lease)

    def ways(self, seen: Outcome | None) -> list[_Way]:
        """The transactions by which this member can come in; the engine does the first whose compares hold.

        Before anything was read there are two: the run has this member's settings, or there are none and it makes them.
        So a join is one request, whether the member comes first, among others, or with a thousand in one millisecond,
        most of which would be refused otherwise: because there are no settings, then because another member has made
        them. Only the latter is tried if there is more to do than to come in: a closed head to replace, an entry to put
        under the run's lease.
        """
        ways = [self._plan(seen)]
        if seen is None and self._entry is None and not self._settings.incarnation:
            agreed = Equals(self._keys.settings, self._agreed_value)
            ways.insert(0, ([agreed, *self._welcome], [self._entrance]))
        return ways

    def _plan(self, seen: Outcome | None) -> _Way:
        """The transaction that fits what was seen. Before anything was read: that of the first member."""
        settings = None if seen is None else seen.item(_SETTINGS)
        nobody = seen is None or not seen.reads[_ANYBODY]
        ban = None if seen is None else seen.item(_BAN)
        if ban is not None:
            raise Banned(self._settings.run_id, self._record.host, wire.reason_of(Ban, ban.value))
        compares: list[Compare] = [Modified(self._keys.settings, settings.modified if settings else 0), *self._welcome]
        writes = self.replace_closed(seen, nobody, compares)
        writes += self._settle(settings, nobody, compares)
        writes.append(self._entrance)
        if self._entry is not None:
            writes.append(Put(self._entry[0], wire.encode(self._entry[1]), self._run_lease))
        return compares, writes

    def replace_closed(self, seen: Outcome | None, nobody: bool, compares: list[Compare]) -> list[Operation]:
        """T1.4: a higher incarnation is a new attempt at the job, which need not wait until the close has expired."""
        item = None if seen is None else seen.item(_HEAD)
        head = None if item is None else wire.read_head(item.value)
        if item is None or head is None or seen is None or head.phase is not Phase.CLOSED:
            return []
        if not nobody or self._settings.incarnation <= head.incarnation:
            self._show_head(item, seen.revision)
            raise closed_error(self._me, head)
        compares += [Empty(self._keys.members), Modified(self._keys.head, item.modified)]
        # The next head is made anew, and its rounds must be above those of this one (T1.4).
        self._record = msgspec.structs.replace(self._record, fence=max(self._record.fence, head.fence))
        self._entrance = msgspec.structs.replace(self._entrance, value=wire.encode(self._record))
        return [port.Delete(self._keys.head)]

    def _settle(self, settings: Item | None, nobody: bool, compares: list[Compare]) -> list[Operation]:
        """The settings, if they are this member's to make: there are none, or no member is here that agreed on them.

        They are put without a lease. The first leader puts them under the run's lease when it lists the run: otherwise
        each member of a burst would have granted a lease of a day for nothing.
        """
        self._run_lease = settings.lease if settings else 0
        differences = []
        if settings is not None:
            try:
                differences = settings_module.differences(self._agreed, wire.decode(RunSettings, settings.value))
            except Incompatible as error:
                if not nobody:
                    raise
                differences = [error.sentence]
            if not differences:
                return []
        if differences and not nobody:
            problem = f"run {self._settings.run_id!r} was started with other settings: {'; '.join(differences)}"
            raise SettingsError(f"{problem}; give all members the same")
        if differences:
            compares.append(Empty(self._keys.members))
        return [Put(self._keys.settings, self._agreed_value, self._run_lease)]


def member_name(settings: Settings, node: Node) -> str:
    """Host, and slot if there is one: stable over restarts, so that the rank is stable too."""
    return clip(f"{node.host}/{settings.slot}" if settings.slot else node.host, NAME_MAX)


def record_for(
    settings: Settings, node: Node, state: MemberState, addr: str, boot: str, same_port: bool = False
) -> MemberRecord:
    """This member as the others see it."""
    host = clip(node.host, NAME_MAX)
    return MemberRecord(
        name=state.me.name, host=host, addr=addr, pid=node.pid, boot=boot, same_port=same_port,
        order=settings.order, topology=with_host(settings.topology, host), version=__version__, info=dict(settings.info),
        role=state.role, workers=state.workers, drain=state.drain, grace=state.grace, done=state.done,
        fence=state.fence, fence_place=state.fence_place if state.fence else "",
    )  # fmt: skip
