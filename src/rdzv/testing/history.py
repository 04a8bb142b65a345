"""The history of a run: all that the checkers look at.

Observations are stamped with virtual time when they are added. They have three sources: the engines (`Commit`), the
applications on the nodes (`Given`, `Changed`, `EvictedTold`, `ClosedTold`, `Acted`) and the scenario (`Fault`).
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from ..core.model import NO_ROUND, Era, RoundId, WorkerRanks
from ..engines.port import Batch, Event
from ..member.world import AsyncWorld
from .server import SimServer
from .virtual_loop import VirtualLoop

O = TypeVar("O", bound="Observation")  # noqa: E741


class Observation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An event at one instant of virtual time."""

    at: float = -1.0
    actor: str = ""
    """Name of the node concerned; empty for the engine and the scenario."""

    def __str__(self) -> str:
        return f"{self.at:10.4f} {self.actor or '-':<8} {type(self).__name__.lower():<8} {self.tell()}"

    def tell(self) -> str:
        """Return the part of the line that differs from kind to kind."""
        fields = msgspec.structs.asdict(self)
        return " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("at", "actor"))


class Commit(Observation, frozen=True, kw_only=True):
    """A change of an engine. `kind`: "then", "otherwise", "revoked" or "expired"."""

    server: str
    instance: str
    revision: int
    kind: str
    events: tuple[Event, ...]

    def tell(self) -> str:
        keys = [("+" if event.item else "-") + event.key for event in self.events[:6]]
        more = f" and {len(self.events) - 6} more" if len(self.events) > 6 else ""
        return f"{self.server}@{self.revision} {self.kind} {' '.join(keys)}{more}"


class Given(Observation, frozen=True, kw_only=True):
    """A member was given a world by the read at `revision` of `instance`."""

    member: str
    instance: str
    revision: int
    run: str
    era: Era
    number: int
    table: str
    size: int
    rank: int
    digest: str
    boot: str
    workers: WorkerRanks | None = None
    fence: int = 0

    @classmethod
    def of(cls, actor: str, world: AsyncWorld) -> Given:
        instance, member, revision = world.given_by
        return cls(
            actor=actor, member=member, instance=instance, revision=revision,
            run=world.incarnation, era=world.era, number=world.round, table=world.table,
            size=world.size, rank=world.rank, digest=world.digest, boot=str(world.bootstrap),
            workers=world.worker_ranks, fence=world.fence,
        )  # fmt: skip

    def tell(self) -> str:
        era = f"{self.era.level}.{self.era.id[:4]}"
        return f"{self.member} round {era}/{self.number} rank {self.rank} of {self.size} table {self.table} {self.boot}"


class Changed(Observation, frozen=True, kw_only=True):
    """A member was told that its round is over or about to be."""

    round: RoundId
    kind: str
    reason: str

    def tell(self) -> str:
        return f"round {self.round.era.level}/{self.round.number} {self.kind}: {self.reason}"


class EvictedTold(Observation, frozen=True, kw_only=True):
    """A member was told that the others went on without it."""

    member: str
    reason: str


class ClosedTold(Observation, frozen=True, kw_only=True):
    """A member was told that the run is over."""

    member: str
    reason: str
    success: bool = False


class Acted(Observation, frozen=True, kw_only=True):
    """An act of an application. `what`: joined, ready, done, left, failed, closed, drained, or another word."""

    what: str
    detail: str = ""
    round: RoundId = NO_ROUND

    def tell(self) -> str:
        return f"{self.what} {self.detail}".rstrip()


class Fault(Observation, frozen=True, kw_only=True):
    """A fault that the scenario began at `target`, or ended."""

    kind: str
    target: str
    stop: bool = False
    detail: str = ""

    def tell(self) -> str:
        return f"{'end of ' if self.stop else ''}{self.kind} {self.target} {self.detail}".rstrip()


class MessageLost(Observation, frozen=True, kw_only=True):
    """A request of a node, or the answer to it, was lost with its connection: by chance, or as the scenario asked."""

    way: str


class History(list[Observation]):
    """The observations of a run, in order. They are only added."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    def add(self, observation: Observation) -> None:
        """Stamp the observation and keep it."""
        if not self._loop.unwinding:  # What tasks do while they are unwound is not part of the run.
            self.append(msgspec.structs.replace(observation, at=self._loop.now))

    def follow(self, server: SimServer) -> None:
        """Add every commit of that server, over all its restarts."""
        server.commits.append(self._committed)

    def of(self, kind: type[O]) -> list[O]:
        return [one for one in self if isinstance(one, kind)]

    def digest(self) -> str:
        """Return a hash that is equal for equal histories, also between processes."""
        return hashlib.sha256(msgspec.msgpack.encode(list(self))).hexdigest()

    def _committed(self, server: SimServer, actor: str, batch: Batch, kind: str) -> None:
        name, instance = server.name, server.instance
        seen = Commit(actor=actor, server=name, instance=instance, revision=batch.revision, kind=kind, events=batch.events)
        self.add(seen)
