"""Faults at the worst moment: each waits for the very request or commit that it is meant to hit.

Most interleavings that ever broke the protocol need two things to happen within a millisecond. Chance alone would need millions
of runs to meet them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from ..core.keys import Keys
from ..engines.port import Batch, Put
from .history import Fault

if TYPE_CHECKING:
    from .cluster import SimCluster

AMBUSHES = (
    "expire at seal",
    "expire after seal",
    "restart at seal",
    "gap at head write",
    "gap at member write",
    "pause leader at seal",
)


class TargetedFault:
    """A fault that waits at the cluster's engine and strikes once."""

    def __init__(self, stage: SimCluster, kind: str) -> None:
        self._stage = stage
        self._kind = kind
        self._keys = Keys("sim")
        self._engine = stage.engine
        after = kind in ("expire after seal", "restart at seal")
        self._engine.arrivals.append(self._arrival)
        if after:
            self._engine.commits.append(self._commit)

    def disarm(self) -> None:
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
        puts = {write.key: write.value for write in args[1] if isinstance(write, Put)}
        head = puts.get(self._keys.head, b"")
        if self._kind == "expire at seal" and _seals(head):
            self._expire(actor)
        elif self._kind == "pause leader at seal" and _seals(head):
            self._spring(actor)
            node = self._stage.apps[actor].node
            node.pause()
            self._stage.loop.call_later(self._stage.rng.choice([1.0, 15.0]), node.resume)
        elif self._kind == ("gap at head write" if head else "gap at member write") and self._concerns(puts):
            self._spring("")
            self._engine.drop_watches()

    def _concerns(self, puts: Collection[str]) -> bool:
        return self._keys.head in puts or any(key.startswith(self._keys.members) for key in puts)

    def _commit(self, _server: object, actor: str, batch: Batch, *_: object) -> None:
        heads = [event.item.value for event in batch.events if event.key == self._keys.head and event.item is not None]
        if not heads or not _seals(heads[0]):
            return
        if self._kind == "expire after seal":
            self.disarm()
            self._stage.loop.call_later(self._stage.rng.uniform(0, 0.01), self._expire, actor)
        elif self._kind == "restart at seal":
            self._spring("")
            self._stage.loop.call_soon(self._restart)

    def _expire(self, actor: str) -> None:
        """End the lease of a member of another node."""
        others = [(owner, item.lease) for item, owner in self._stage.present() if owner != actor]
        if others:
            owner, lease = self._stage.rng.choice(others)
            self._spring(owner)
            self._engine.expire(lease)

    def _restart(self) -> None:
        """Restart the engine right after the seal: some heard of the seal and come back late, the others know nothing of it."""
        stage = self._stage
        away = [app.node for app in stage.living() if stage.rng.random() < 0.4]
        for app in stage.living():
            if app.node not in away:
                stage.network.reset(app.node, self._engine)
        for node in away:
            stage.history.add(Fault(kind="cut", target=node.name))
            stage.network.cut(node, self._engine)
        self._engine.restart()

        def heal() -> None:
            for node in away:
                if not stage.isolated:
                    stage.network.heal(node, self._engine)
                stage.history.add(Fault(kind="cut", target=node.name, stop=True))

        stage.loop.call_later(stage.rng.choice([1.0, 6.0, 12.0]), heal)


def _seals(head: bytes) -> bool:
    return b'"phase":"sealed"' in head and b'"adopted"' not in head
