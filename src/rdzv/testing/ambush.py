"""Faults at the worst moment: armed, and sprung by the very request or commit that they are meant to hit.

Most interleavings that ever broke the protocol need something to happen within a millisecond of something else. Chance alone
would need millions of runs to meet them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..core.keys import Keys
from ..drivers.base import AllCreated, Put
from .history import Fault

if TYPE_CHECKING:
    from .stage import Stage

AMBUSHES = (
    "expire at seal",
    "expire after seal",
    "restart at seal",
    "gap at head write",
    "gap at member write",
    "pause leader at seal",
)


class Ambush:
    """Waits at the stage's engine; springs once, then asks for the time its effect lasts."""

    def __init__(self, stage: Stage, kind: str) -> None:
        self._stage = stage
        self._kind = kind
        self._keys = Keys("sim")
        self._engine = stage.engine
        after = kind in ("expire after seal", "restart at seal")
        self._engine.arrivals.append(self._arrival)
        if after:
            self._engine.commits.append(self._commit)

    def disarm(self) -> None:
        """It is not wanted any more."""
        if self._arrival in self._engine.arrivals:
            self._engine.arrivals.remove(self._arrival)
        if self._commit in self._engine.commits:
            self._engine.commits.remove(self._commit)

    def _spring(self, target: str) -> None:
        self.disarm()
        self._stage.history.add(Fault(kind=self._kind, target=target, detail="sprung"))
        self._stage.history.add(Fault(kind=self._kind, target=target, stop=True))

    def _arrival(self, actor: str, verb: str, args: tuple[Any, ...]) -> None:
        if verb != "txn":
            return
        compares, writes, _ = args
        seals = any(isinstance(compare, AllCreated) for compare in compares)
        puts = [write.key for write in writes if isinstance(write, Put)]
        if self._kind == "expire at seal" and seals:
            self._expire(actor, next(one for one in compares if isinstance(one, AllCreated)).revisions)
        elif self._kind == "pause leader at seal" and seals:
            self._spring(actor)
            machine = self._stage.apps[actor].machine
            machine.pause()
            self._stage.loop.call_later(self._stage.rng.choice([1.0, 15.0]), machine.resume)
        elif self._kind == "gap at head write" and self._keys.head in puts:
            self._spring("")
            self._engine.drop_watches()
        elif self._kind == "gap at member write" and any(key.startswith(self._keys.members) for key in puts):
            self._spring("")
            self._engine.drop_watches()

    def _commit(self, _server: object, actor: str, batch: Any, *_: object) -> None:
        if not any(event.key == self._keys.head and event.item for event in batch.events):
            return
        head = next(event.item for event in batch.events if event.key == self._keys.head)
        if b'"phase":"sealed"' not in head.value or b'"adopted"' in head.value:
            return
        lines = [event.key for event in batch.events if event.key.startswith(self._keys.ranks) and event.item]
        members = {self._keys.member(key.rpartition("/")[2]): 0 for key in lines}
        if self._kind == "expire after seal" and members:
            self._stage.loop.call_later(self._stage.rng.uniform(0, 0.01), self._expire, actor, members)
            self.disarm()
        elif self._kind == "restart at seal":
            self._spring("")
            self._stage.loop.call_soon(self._restart)

    def _expire(self, actor: str, members: Any) -> None:
        """The lease of one of those members, of another machine than the actor's, runs out."""
        found = self._find(lambda key, owner: key in members and owner != actor)
        if found is not None:
            key, owner, lease = found
            self._spring(owner)
            self._engine.expire(lease)

    def _find(self, wanted: Callable[[str, str], bool]) -> tuple[str, str, int] | None:
        stage = self._stage
        candidates = [
            (item.key, owner, item.lease)
            for item, owner in stage.present()
            if wanted(item.key, owner)
        ]
        return stage.rng.choice(candidates) if candidates else None

    def _restart(self) -> None:
        """The engine is gone before anybody heard of the seal, and some come back much later than others."""
        stage = self._stage
        away = [app.machine for app in stage.living() if stage.rng.random() < 0.4]
        for machine in away:
            stage.history.add(Fault(kind="cut", target=machine.name))
            stage.network.cut(machine, self._engine)
        self._engine.restart()

        def heal() -> None:
            for machine in away:
                stage.network.heal(machine, self._engine)
                stage.history.add(Fault(kind="cut", target=machine.name, stop=True))

        stage.loop.call_later(stage.rng.choice([1.0, 6.0, 12.0]), heal)
