"""The leaders' decisions in a simulated run, as they show in what the leaders ask of the engine.

A leader carries out one act at a time. When one of its requests arrives at a server, its last verdict is the decision
that led to the request, or that still stands. The product knows nothing of this observer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from ..core.acts import Verdict
from ..core.model import Phase
from ..core.rules import RULES
from ..engines.embedded.features import Request
from .server import SimServer

if TYPE_CHECKING:
    from .application import Application
    from .cluster import SimCluster


class Moment(NamedTuple):
    """A rule that decides about a head in one phase; "no head": there is none yet."""

    rule: str
    phase: str

    def __str__(self) -> str:
        return f"{self.rule}, {self.phase}"


class Decided(NamedTuple):
    """A decision, when it reached the engine, and the node of the leader."""

    at: float
    actor: str
    moment: Moment


def phase_name(phase: Phase | None) -> str:
    return "no head" if phase is None else phase.value


MOMENTS = tuple(Moment(rule.__name__, phase_name(phase)) for phase, rules in RULES.items() for rule in rules)
"""All moments, in the order in which the rules are tried."""


class Decisions(list[Decided]):
    """The decisions of a run, in the order in which they reached an engine."""

    def __init__(self, stage: SimCluster) -> None:
        super().__init__()
        self._stage = stage
        self._last: dict[str, Verdict] = {}
        self._awaited: list[tuple[Moment, asyncio.Future[Application | None]]] = []

    def follow(self, server: SimServer) -> None:
        """Look at every request that arrives at that server."""
        server.arrivals.append(self._arrival)

    async def wait_for(self, moment: Moment, until: float) -> Application | None:
        """Wait for the next decision of that kind, and return its leader; None: there was none by then."""
        loop = self._stage.loop
        struck: asyncio.Future[Application | None] = loop.create_future()
        self._awaited.append((moment, struck))
        timer = loop.call_at(until, _settle, struck, None)
        leader = await struck
        timer.cancel()
        return leader

    def _arrival(self, actor: str, _request: Request) -> None:
        app = self._stage.apps.get(actor)
        if app is None or app.member.presence is None or app.member.presence.leader is None:
            return
        leader = app.member.presence.leader
        if leader.verdict is None or leader.verdict is self._last.get(actor):
            return
        assert leader.mirror is not None, "a verdict is about a mirror"
        self._last[actor] = leader.verdict
        head = leader.mirror.head
        moment = Moment(leader.verdict.rule, phase_name(None if head is None else head.phase))
        self.append(Decided(self._stage.loop.now, actor, moment))
        for awaited, struck in self._awaited:
            if awaited == moment:
                _settle(struck, app)


def _settle(future: asyncio.Future[Application | None], result: Application | None) -> None:
    if not future.done():
        future.set_result(result)
