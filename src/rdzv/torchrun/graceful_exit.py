"""Whether this torch survives its own RendezvousGracefulExitError.

Up to 2.13 at least, an agent that is told so ends with an AttributeError: its `run` returns nothing, and the launcher asks that
nothing for its result. No version number tells when that changes, so it is tried.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NoReturn

from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError


def is_handled() -> bool:
    """True: the error may be raised. Anything else that goes wrong means that we do not know, so: False."""

    def refuse(role: str) -> NoReturn:  # noqa: ARG001
        raise RendezvousGracefulExitError("a trial")

    agent = SimpleNamespace(_invoke_run=refuse, _shutdown=lambda **_: None, _shutdown_timeout=0, _total_execution_time=0)
    try:
        return SimpleElasticAgent.run(agent) is not None
    except Exception:  # noqa: BLE001
        return False
