"""The world a member is given: its place in one sealed round, and what belongs to that round."""

from __future__ import annotations

import socket

import msgspec

from ..config.settings import Settings
from ..core.keys import Keys
from ..core.model import Era, Head, RankEntry
from ..core.ranks import digest
from ..engines.port import EngineReset, List
from ..errors import Incompatible, RoundOver, Unreachable
from ..system.bootstrap import Bootstrap
from ..system.node import Node
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
    """Who we are in a round. A value, but for its store and its bootstrap socket, which end with the round."""

    def __init__(
        self,
        presence: Presence,
        head: Head,
        line: RankEntry,
        address: Bootstrap,
        settings: Settings,
        node: Node,
    ) -> None:
        self.run_id = settings.run_id
        self.round = head.number
        self.rank = line.rank
        self.size = head.size
        self.bootstrap = address
        self.era: Era = head.era
        self.digest = head.digest
        self.incarnation = head.run
        """Random id of this life of the run id."""
        self.table = head.table
        self.given_by = (presence.session.instance, presence.id, presence.taken_at)
        """Engine instance, own id and revision of the read that gave it: what an audit needs."""
        self._presence = presence
        self.store = AsyncStore(presence, head.table, head.number, node)

    def __repr__(self) -> str:
        return f"<World {self.run_id!r} round {self.round}: rank {self.rank} of {self.size}, bootstrap {self.bootstrap}>"

    def take_bootstrap_socket(self) -> socket.socket:
        """Rank 0's listening socket, for whoever serves at `bootstrap`. It can be taken once."""
        return self.bootstrap.take_socket()

    async def members(self) -> list[Peer]:
        """All members of the round in rank order. Remote, O(n). Raises RoundOver, Unreachable."""
        presence = self._presence
        keys = Keys(self.run_id)
        try:
            listed = await presence.session.txn(then=[List(keys.table(self.table)), List(keys.members)])
        except EngineReset:
            raise Unreachable("of this run", "it was restarted a moment ago") from None
        mirror = RunMirror(keys, [*listed.reads[0], *listed.reads[1]], listed.revision)
        lines = mirror.tables.get(self.table, {})
        if len(lines) < self.size:
            raise RoundOver(self.round, self.store.over or "its member list is gone")
        if digest(lines.values()) != self.digest:
            raise Incompatible(f"member list of round {self.round}", "it does not match the digest that was agreed on")
        peers = []
        for id, line in lines.items():
            live = mirror.members.get(id)
            record = live.record if live is not None and live.created == line.created else None
            peers.append(
                Peer(line.rank, line.name, line.host, record.addr, record.pid, record.info)
                if record is not None
                else Peer(line.rank, line.name, line.host)
            )
        return sorted(peers, key=lambda peer: peer.rank)

    def moved_to(self, presence: Presence) -> None:
        """The engine came back empty and our presence is a new one. What the store held is gone."""
        self._presence = presence
        self.store.moved_to(presence)

    def end(self, reason: str) -> None:
        """The round is over for us: waits in its store end, and a bootstrap socket that nobody took is closed."""
        self.store.end(reason)
        self.bootstrap.release()


