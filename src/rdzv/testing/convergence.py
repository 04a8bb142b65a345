"""Whether a simulated run has converged: no fault is left, nothing is owed, and only renewals would follow.

A run that has converged and stays so shows nothing new, so the scenario goes on to its end. What must hold then is what
the progress checkers ask at the end of the calm phase; a run in which any of it is missing is given all its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..core.keys import Keys
from ..core.member import unrenewed_s
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
        apps = [app for app in self._stage.living() if not app.exited.done()]
        cut = {node for node, _, _ in self._stage.network.cuts}
        if not all(_is_in_touch(app) and app.node.name not in cut for app in apps):
            return False
        state = self._replay()
        if state.owed is not None or state.can_grow or (state.head is not None and state.head.phase is Phase.CLOSED):
            return False
        ids = {(one.record.host, one.record.pid): one.id for one in state.members.values()}
        settled = all(_is_settled(app, state, ids.pop((app.node.host, app.node.pid), "")) for app in apps)
        return settled and not ids  # The rest are keys of the dead, whose leases have yet to end.

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


def _is_in_touch(app: Application) -> bool:
    """Whether the application waits for others, and its member has renewed its lease not long ago."""
    return app.rests and app.node.held is None and unrenewed_s(app.member.state, app.node.now()) < app.settings.lease / 2


def _is_settled(app: Application, state: State, member: str) -> bool:
    """Whether the application holds the round that its member is in, or waits for one."""
    if member not in state.seated:
        return app.joins and member in state.members
    if state.head is None or state.head.phase is not Phase.SEALED:
        return app.joins and state.has_left(state.members[member])
    return app.trains and app.holds == state.head.round
