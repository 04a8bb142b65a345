"""Whether a simulated run has converged: no fault is left, nothing is owed, and only renewals would follow.

A run that has converged and stays so shows nothing new, so the scenario goes on to its end. What must hold then is what
the progress checkers ask at the end of the calm phase; a run in which any of it is missing is given all its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.keys import Keys
from ..core.model import Phase
from .history import Commit
from .replay import State

if TYPE_CHECKING:
    from .application import Application
    from .cluster import SimCluster


class Convergence:
    """Follows the commits of a cluster's engine."""

    def __init__(self, stage: SimCluster) -> None:
        self._stage = stage
        self._read = 0
        self._state = State("", Keys("sim"))

    @property
    def reached(self) -> bool:
        """Whether every living member is where it belongs, and the leader owes nothing."""
        stage, state = self._stage, self._replay()
        if state.owed is not None or state.can_grow:
            return False
        ids = {(one.record.host, one.record.pid): one.id for one in state.members.values()}
        cut = {node for node, _, _ in stage.network.cuts}
        return all(
            app.exited.done() or (app.node.name not in cut and _is_settled(app, state, ids.get((app.node.host, app.node.pid))))
            for app in stage.living()
        )

    def _replay(self) -> State:
        """Return the state of the engine's present instance."""
        history, instance = self._stage.history, self._stage.engine.instance
        if self._state.instance != instance:
            self._state, self._read = State(instance, Keys("sim")), 0
        for seen in history[self._read :]:
            if isinstance(seen, Commit) and seen.instance == instance:
                self._state.apply(seen)
        self._read = len(history)
        return self._state


def _is_settled(app: Application, state: State, member: str | None) -> bool:
    """Whether the application holds the round that its member is in, or waits for one."""
    head = state.head
    if member is None or app.node.held is not None or (head is not None and head.phase is Phase.CLOSED):
        return False
    if member not in state.seated:
        return app.joins
    if head is None or head.phase is not Phase.SEALED:
        return app.joins and state.has_left(state.members[member])
    return app.trains and not app.order and app.holds == head.round
