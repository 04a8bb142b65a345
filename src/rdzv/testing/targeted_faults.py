"""Faults at the worst moment: each waits for the very request or commit that it is meant to hit.

Most interleavings that ever broke the protocol need two things to happen within a millisecond. Chance alone would need millions
of runs to meet them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.keys import Keys
from ..engines.embedded.features import Request
from ..engines.embedded.frames import Txn
from ..engines.port import Batch, Put
from .history import Fault
from .nodes import SimNode

if TYPE_CHECKING:
    from .cluster import SimCluster

AMBUSHES = (
    "expire at seal",
    "expire after seal",
    "restart at seal",
    "gap at head write",
    "gap at member write",
    "pause leader at seal",
    "crash after head write",
)


class TargetedFault:
    """A fault that waits at the cluster's engine and strikes once."""

    def __init__(self, stage: SimCluster, kind: str) -> None:
        self._stage = stage
        self._kind = kind
        self._keys = Keys("sim")
        self._engine = stage.engine
        self._engine.arrivals.append(self._arrival)
        self._engine.commits.append(self._commit)

    def _disarm(self) -> None:
        if self._arrival in self._engine.arrivals:
            self._engine.arrivals.remove(self._arrival)
            self._engine.commits.remove(self._commit)

    def _spring(self, target: str) -> None:
        self._disarm()
        self._stage.history.add(Fault(kind=self._kind, target=target, detail="sprung"))
        self._stage.history.add(Fault(kind=self._kind, target=target, stop=True))

    def _arrival(self, actor: str, request: Request) -> None:
        if not isinstance(request, Txn):
            return
        puts = {write.key: write.value for write in request.then if isinstance(write, Put)}
        head = puts.get(self._keys.head, b"")
        if self._kind == "expire at seal" and _seals(head):
            self._expire(actor)
        elif self._kind == "pause leader at seal" and _seals(head):
            self._spring(actor)
            node = self._stage.apps[actor].node
            node.pause()
            self._stage.loop.call_later(self._stage.rng.choice([1.0, 15.0]), node.resume)
        elif (
            self._kind == ("gap at head write" if head else "gap at member write")
            and (head or any(key.startswith(self._keys.members) for key in puts))
            and self._is_time(head)
        ):
            self._spring("")
            self._engine.drop_watches()

    def _commit(self, _server: object, actor: str, batch: Batch, _kind: str) -> None:
        heads = [event.item.value for event in batch.events if event.key == self._keys.head and event.item is not None]
        if not heads:
            return
        if self._kind == "crash after head write" and actor in self._stage.apps and self._is_time(heads[0]):
            self._spring(actor)
            app = self._stage.apps[actor]
            self._stage.loop.call_soon(app.node.crash)
            self._stage.loop.call_later(self._stage.rng.uniform(0.1, 6.0), self._stage.start, app.life)
        if not _seals(heads[0]):
            return
        if self._kind == "expire after seal":
            self._disarm()
            if self._stage.rng.random() < 0.5:
                self._hold_up(actor)
            self._stage.loop.call_later(self._stage.rng.uniform(0, 0.01), self._expire, actor)
        elif self._kind == "restart at seal":
            self._spring("")
            self._stage.loop.call_soon(self._restart)

    def _is_time(self, head: bytes) -> bool:
        """Whether to strike at this write. The first one finds few members to strike, so most faults wait for a later one."""
        is_first = b'"phase":"open"' in head and b'"call":"last"' not in head
        return self._stage.rng.random() < (0.2 if is_first else 0.6)

    def _hold_up(self, actor: str) -> None:
        """Pause another node for a moment, so that it hears of the seal when more has happened."""
        nodes = [app.node for app in self._stage.living() if app.node.name != actor and app.node.held is None]
        if nodes:
            node = self._stage.rng.choice(nodes)
            self._stage.history.add(Fault(kind="pause", target=node.name))
            node.pause()
            self._stage.loop.call_later(1.0, self._release, node)

    def _release(self, node: SimNode) -> None:
        node.resume()
        self._stage.history.add(Fault(kind="pause", target=node.name, stop=True))

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
