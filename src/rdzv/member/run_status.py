"""The status of a run, and the error of a join that got no world in its time: who is here, and what is missing."""

from __future__ import annotations

from ..config.settings import Settings
from ..core import member as machine
from ..core.member_state import MemberState
from ..core.status import Status, describe
from ..engines.port import Driver, EngineReset, Session
from ..errors import JoinTimeout, RdzvError
from ..system.node import Node
from ..system.timers import with_timeout
from .presence import Presence
from .run_mirror import read_run

EXPLAIN_S = 2.0
"""How long a join that has failed may take to find out why, beyond the time it was given."""


async def read_status(settings: Settings, session: Session, presence: Presence | None) -> Status:
    """Read the whole run, and describe it as the rules see it."""
    return describe(settings.run_id, await read_run(session, settings, presence, with_progress=True))


async def read_status_from_outside(settings: Settings, driver: Driver) -> Status:
    """Read the same without being present."""
    session = await driver.connect()
    try:
        return await read_status(settings, session, None)
    finally:
        await session.close()


async def timed_out(
    settings: Settings, node: Node, state: MemberState, presence: Presence | None, waited_s: float
) -> JoinTimeout:
    """Return the error, with who is here and what is missing if the engine can be asked at all."""
    reason, present, remedy = f"the engine is away: {state.trouble}{_about_host(settings, state)}", [], ""
    if presence is not None and not machine.away_s(state, node.now()):
        reason, status = f"the engine does not answer: it was asked for {EXPLAIN_S:g} s who is here", None
        try:
            asking = read_status(settings, presence.session, presence)
            status = await with_timeout(node, EXPLAIN_S, asking, "rdzv asks why")
        except RdzvError as error:
            reason = f"the engine does not answer: {error.sentence}"
        except EngineReset as reset:
            reason = f"the engine was restarted: {reset}"
        if status is not None:
            reason = status.reason
            present = [member.name for member in status.members if member.here]
            sick = any(member.state == "unhealthy" for member in status.members)
            remedy = "mend what the check of a node says, or start nodes that are well" if sick else "start the missing nodes"
            if settings.endpoint.hosts:
                remedy += f", or run `rdzv doctor {settings.endpoint}` on them"
    return JoinTimeout(settings.run_id, waited_s, reason, present, settings.summary(), remedy)


def unanswered(settings: Settings, node: Node, state: MemberState, waited_s: float) -> JoinTimeout:
    """Return the error of a join whose time ran out during a request. The engine is not asked once more."""
    reason = f"the engine {settings.endpoint} does not answer"
    if machine.away_s(state, node.now()):
        reason = f"the engine is away: {state.trouble}"
    return JoinTimeout(settings.run_id, waited_s, reason + _about_host(settings, state), [], settings.summary())


def _about_host(settings: Settings, state: MemberState) -> str:
    """Return what to do about a lost engine that one of the nodes hosted; empty for others."""
    if settings.endpoint.scheme != "rdzv" or state.heard is None:
        return ""
    where = settings.endpoint
    return f"; bring the host of {where} back or start the job anew; etcd would survive the loss of a host"
