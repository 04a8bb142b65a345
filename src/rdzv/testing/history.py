"""What happened in a run, as seen by somebody who sees everything: the only thing that checkers look at.

Observations are stamped with virtual time when they are added. They are of three sources: the engines (`Commit`), the
applications on the machines (`Given`, `Changed`, `EvictedTold`, `ClosedTold`, `Acted`) and the scenario (`Fault`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeVar

import msgspec

from ..core.model import NO_ROUND, Era, RoundId
from ..engines.port import Batch, Compare, Event, Operation
from ..member.world import AsyncWorld
from .server import SimServer
from .virtual_loop import VirtualLoop

O = TypeVar("O", bound="Observation")  # noqa: E741
SHOWN_MAX = 6
"""Keys of one commit that a line shows."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that happened at one instant of virtual time."""

    at: float = -1.0
    actor: str = ""
    """Name of the machine it happened to or came from; empty: the engine's or scenario's own doing."""

    def __str__(self) -> str:
        return f"{self.at:10.4f} {self.actor or '-':<8} {type(self).__name__.lower():<8} {self.tell()}"

    def tell(self) -> str:
        """The part of its line that differs from kind to kind."""
        fields = msgspec.structs.asdict(self)
        return " ".join(f"{name}={value}" for name, value in fields.items() if name not in ("at", "actor"))


class Commit(Observation, frozen=True, kw_only=True):
    """An engine changed. `kind`: "then", "otherwise", "revoked" or "expired"."""

    server: str
    instance: str
    place: str
    revision: int
    kind: str
    events: tuple[Event, ...]

    def tell(self) -> str:
        """Put keys with +, deleted ones with -."""
        keys = [("+" if event.item else "-") + event.key for event in self.events[:SHOWN_MAX]]
        more = f" and {len(self.events) - SHOWN_MAX} more" if len(self.events) > SHOWN_MAX else ""
        return f"{self.server}@{self.revision} {self.kind} {' '.join(keys)}{more}"


class Given(Observation, frozen=True, kw_only=True):
    """A member was given a world, by the read at `revision` of `instance`."""

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

    @classmethod
    def of(cls, actor: str, world: AsyncWorld) -> Given:
        """What that machine was given."""
        instance, member, revision = world.given_by
        return cls(
            actor=actor,
            member=member,
            instance=instance,
            revision=revision,
            run=world.incarnation,
            era=world.era,
            number=world.round,
            table=world.table,
            size=world.size,
            rank=world.rank,
            digest=world.digest,
            boot=str(world.bootstrap),
        )

    def tell(self) -> str:
        """Round, rank and table; the rest follows from the table if G1 holds."""
        era = f"{self.era.level}.{self.era.id[:4]}"
        return f"{self.member} round {era}/{self.number} rank {self.rank} of {self.size} table {self.table} {self.boot}"


class Changed(Observation, frozen=True, kw_only=True):
    """A member was told that the round it holds is over or about to be."""

    round: RoundId
    kind: str
    reason: str

    def tell(self) -> str:
        """The cause as the member got it."""
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
    """An application did something. `what`: joined, ready, done, left, failed, closed, drained, or a word of its own."""

    what: str
    detail: str = ""
    round: RoundId = NO_ROUND

    def tell(self) -> str:
        """What it did."""
        return f"{self.what} {self.detail}".rstrip()


class Fault(Observation, frozen=True, kw_only=True):
    """The scenario did something to `target`, or stopped doing it."""

    kind: str
    target: str
    stop: bool = False
    detail: str = ""

    def tell(self) -> str:
        """What, to whom."""
        return f"{'end of ' if self.stop else ''}{self.kind} {self.target} {self.detail}".rstrip()


class History:
    """Append-only."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._observations: list[Observation] = []

    def __len__(self) -> int:
        return len(self._observations)

    def __iter__(self) -> Iterator[Observation]:
        return iter(self._observations)

    def __str__(self) -> str:
        return "\n".join(map(str, self._observations))

    def add(self, observation: Observation) -> None:
        """Stamp it and keep it. What tasks say while they are unwound after the run's end did not happen in it."""
        if not self._loop.unwinding:
            self._observations.append(msgspec.structs.replace(observation, at=self._loop.time()))

    def follow(self, server: SimServer) -> None:
        """Add every commit of that server, over all its lives."""
        server.commits.append(self._committed)

    def of(self, kind: type[O]) -> list[O]:
        """Those of one kind, in order."""
        return [one for one in self._observations if isinstance(one, kind)]

    def digest(self) -> str:
        """Equal for equal histories, also between processes."""
        return hashlib.sha256(msgspec.msgpack.encode(self._observations)).hexdigest()

    def _committed(
        self,
        server: SimServer,
        actor: str,
        batch: Batch,
        kind: str,
        _compares: tuple[Compare, ...],
        _operations: tuple[Operation, ...],
    ) -> None:
        self.add(
            Commit(
                actor=actor,
                server=server.name,
                instance=server.instance,
                place=server.place,
                revision=batch.revision,
                kind=kind,
                events=batch.events,
            )
        )
