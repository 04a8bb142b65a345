"""Elastic rendezvous for distributed training: which nodes take part, which rank each has, and why.

    with rdzv.Rendezvous("node1:29400", run_id="job", min_nodes=2, max_nodes=4) as r:
        world = r.join()

`Rendezvous` is a member of a run, `World` its place in a round, `Store` the round's key-value store, and `errors` has every
exception. `rdzv.aio` has the first three for an event loop. The other names are the types of what these take and return.
docs/api.md describes all of them, and says what is public.

The names are loaded when they are first used, because asyncio and msgspec take longer to import than all the rest. A program
that imports rdzv but makes no rendezvous does not pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import errors
from ._version import __version__

if TYPE_CHECKING:
    from . import aio
    from .blocking import Rendezvous, Store, World
    from .config.endpoint import Endpoint
    from .config.options import Options
    from .config.secret import Secret
    from .core.member_rules import Change, ChangeKind
    from .core.model import CauseKind, Era, ProgressReport, WorkerRanks
    from .core.status import MemberStatus, RunChange, RunEvents, RunProgress, Status
    from .core.worker_messages import EndNotice
    from .engines.port import Driver
    from .member.notices import Notice, Observer, Totals
    from .member.world import Peer
    from .system.bootstrap import Bootstrap
else:
    _NAMES_OF = {
        "blocking": "Rendezvous Store World",
        "config.endpoint": "Endpoint",
        "config.options": "Options",
        "config.secret": "Secret",
        "core.member_rules": "Change ChangeKind",
        "core.model": "CauseKind Era ProgressReport WorkerRanks",
        "core.status": "MemberStatus RunChange RunEvents RunProgress Status",
        "core.worker_messages": "EndNotice",
        "engines.port": "Driver",
        "member.notices": "Notice Observer Totals",
        "member.world": "Peer",
        "system.bootstrap": "Bootstrap",
    }
    _MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names.split()}

    def __getattr__(name: str) -> object:
        if name == "aio":
            return importlib.import_module(".aio", __name__)
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


__all__ = [
    "Bootstrap",
    "CauseKind",
    "Change",
    "ChangeKind",
    "Driver",
    "EndNotice",
    "Endpoint",
    "Era",
    "MemberStatus",
    "Notice",
    "Observer",
    "Options",
    "Peer",
    "ProgressReport",
    "Rendezvous",
    "RunChange",
    "RunEvents",
    "RunProgress",
    "Secret",
    "Status",
    "Store",
    "Totals",
    "WorkerRanks",
    "World",
    "__version__",
    "aio",
    "errors",
]


def __dir__() -> list[str]:
    return __all__
