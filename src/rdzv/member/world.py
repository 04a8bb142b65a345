"""The world that a member is given: its rank in one sealed round, and what belongs to that round."""

from __future__ import annotations

import socket

import msgspec

from ..core.model import Era, Head, RankEntry
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
    host: str
    addr: str = ""
    pid: int = 0
    info: dict[str, str] = {}


class AsyncWorld:
    """A member's rank in a round. Its store and bootstrap socket end with the round; everything else is constant."""

    def __init__(self, presence: Presence, head: Head, entry: RankEntry, address: Bootstrap) -> None:
        self.run_id = presence.settings.run_id
        self.round = head.number
        self.rank = entry.rank
        self.size = head.size
        self.worker_ranks = entry.workers
        """Ranks of this member's workers; None: not every member said how many workers it has."""
        self.bootstrap = address
        self.fence = head.fence
        """A number above those of all earlier rounds, for what workers write elsewhere (docs/concepts.md)."""
        self.reason = head.cause.text if head.cause is not None else ""
        """Why the round before this one ended, the same for all members; empty for a first round."""
        self.era: Era = head.era
        self.digest = head.digest
        self.incarnation = head.run
        """Random id of this incarnation of the run."""
        self.table = head.table
        self.given_by = (presence.session.instance, presence.id, presence.taken_at)
        """Engine instance, own id and revision of the read that gave the round, for audits."""
        self._presence = presence
        self.store = AsyncStore(presence, head.table, head.number, presence.node)

    def __repr__(self) -> str:
        where = f"rank {self.rank} of {self.size}, bootstrap {self.bootstrap}"
        return f"<World {self.run_id!r} round {self.round}: {where}>"

    def take_bootstrap_socket(self) -> socket.socket:
        """Take rank 0's listening socket, to serve at `bootstrap` with it. It can be taken once."""
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
        """End the round for this member: waits in its store end, and a socket that was not taken is closed."""
        self.store.end(reason)
        self.bootstrap.release()


