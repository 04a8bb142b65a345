"""The world that a member is given: its rank in one sealed round, and what belongs to that round."""

from __future__ import annotations

import socket

import msgspec

from ..core.model import Era, Head, RankEntry, WorkerRanks
from ..core.ranks import digest
from ..engines.port import EngineReset, List
from ..errors import Incompatible, RoundOver, Unreachable
from ..system.bootstrap import Bootstrap
from ..system.timers import OutOfTime, TimeLimit
from .presence import Presence
from .run_mirror import RunMirror
from .store import AsyncStore


class Peer(msgspec.Struct, frozen=True):
    """A member of a world, as its peers see it. One that has died since has no address and no info."""

    rank: int
    name: str
    """Its host, with the slot if it has one: the name that logs and commands use."""
    host: str
    addr: str = ""
    """How others reach its node."""
    pid: int = 0
    """The number of its process on its host."""
    info: dict[str, str] = {}
    """Its setting `info`."""


class RoundFacts:
    """The facts of one sealed round, for one of its members. They are the same in the blocking and the asyncio API."""

    def __init__(self, run_id: str, head: Head, entry: RankEntry, bootstrap: Bootstrap) -> None:
        self._facts = run_id, head, entry, bootstrap

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.size}, bootstrap {self.bootstrap}"
        return f"<World {self.run_id!r} round {self.round}: {where}>"

    @property
    def run_id(self) -> str:
        """The name of the run."""
        return self._facts[0]

    @property
    def round(self) -> int:
        """The number of the round, for people. It begins at 1 again when a run id is reused: compare `fence` instead."""
        return self._facts[1].number

    @property
    def rank(self) -> int:
        """This member's place in the round, from 0 to `size` - 1."""
        return self._facts[2].rank

    @property
    def size(self) -> int:
        """The number of members of the round."""
        return self._facts[1].size

    @property
    def worker_ranks(self) -> WorkerRanks | None:
        """Ranks of the workers that `join(workers=...)` announced; None: not every member said how many workers it has."""
        return self._facts[2].workers

    @property
    def bootstrap(self) -> Bootstrap:
        """The address where rank 0 serves, the same for all members. Rank 0 holds its socket until it takes or releases it."""
        return self._facts[3]

    @property
    def fence(self) -> int:
        """A number above those of all earlier rounds, for what workers write elsewhere (docs/concepts.md)."""
        return self._facts[1].fence

    @property
    def reason(self) -> str:
        """Why the round before this one ended, the same for all members; empty for a first round."""
        cause = self._facts[1].cause
        return "" if cause is None else cause.text

    @property
    def era(self) -> Era:
        """The line of rounds that this one belongs to. A new one begins when an engine comes back empty."""
        return self._facts[1].era

    @property
    def digest(self) -> str:
        """A hash of the member list, which all members of the round agree on."""
        return self._facts[1].digest

    @property
    def incarnation(self) -> str:
        """The random id of this life of the run id."""
        return self._facts[1].run

    @property
    def table(self) -> str:
        """The random id of the round's rank table. No two rounds have the same."""
        return self._facts[1].table


class AsyncWorld(RoundFacts):
    """A member's rank in a round. Its store ends with the round; everything else is constant."""

    def __init__(self, presence: Presence, head: Head, entry: RankEntry, address: Bootstrap) -> None:
        super().__init__(presence.settings.run_id, head, entry, address)
        self.given_by = (presence.session.instance, presence.id, presence.taken_at)
        """Engine instance, own id and revision of the read that gave the round, for audits."""
        self._presence = presence
        self._store = AsyncStore(presence, head.table, head.number, presence.node)

    @property
    def store(self) -> AsyncStore:
        """The round's key-value store. It ends with the round."""
        return self._store

    def take_bootstrap_socket(self) -> socket.socket:
        """Take rank 0's listening socket, to serve at `bootstrap` with it: once, before the member joins again or leaves."""
        return self.bootstrap.take_socket()

    async def members(self) -> list[Peer]:
        """List all members of the round in rank order. Remote, O(n). Raises RoundOver; Unreachable after `read_timeout`."""
        presence, keys = self._presence, self._presence.keys
        limit_s = presence.settings.read_timeout
        try:
            with TimeLimit(presence.node, limit_s):
                listed = await presence.session.txn(then=[List(keys.table(self.table)), List(keys.members)])
        except OutOfTime:
            raise Unreachable("of this run", "no answer", limit_s) from None
        except EngineReset:
            raise Unreachable("of this run", "it was restarted a moment ago") from None
        mirror = RunMirror(keys, [*listed.reads[0], *listed.reads[1]], listed.revision)
        entries = mirror.tables.get(self.table, {})
        if len(entries) < self.size:
            raise RoundOver(self.round, self.store.over or "its member list is gone")
        if digest(entries.values()) != self.digest:
            raise Incompatible(f"member list of round {self.round}", "it does not match the digest that was agreed on")
        peers = []
        for id, entry in entries.items():
            peer, live = Peer(entry.rank, entry.name, entry.host), mirror.members.get(id)
            if live is not None and live.created == entry.created:
                record = live.record
                peer = msgspec.structs.replace(peer, addr=record.addr, pid=record.pid, info=record.info)
            peers.append(peer)
        return sorted(peers, key=lambda peer: peer.rank)

    def moved_to(self, presence: Presence) -> None:
        """Go on with a new presence: the engine came back empty, and the contents of the store are gone."""
        self._presence = presence
        self.store.moved_to(presence)

    def end(self, reason: str) -> None:
        """End the round for this member: waits in its store end."""
        self.store.end(reason)


