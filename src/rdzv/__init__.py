"""Elastic rendezvous for distributed training: which nodes take part, which rank each has, and why.

The names below are loaded when they are first used, because asyncio and msgspec take longer to import than all the rest. A
program that imports rdzv but makes no rendezvous does not pay for them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from . import errors
from ._version import __version__

if TYPE_CHECKING:
    from . import aio
    from .blocking import Rendezvous, World
    from .core.member_rules import Change
    from .core.status import Status
    from .member.notices import Notice
else:
    _MODULE_OF = {
        "Change": "core.member_rules",
        "Notice": "member.notices",
        "Rendezvous": "blocking",
        "Status": "core.status",
        "World": "blocking",
    }

    def __getattr__(name: str) -> object:
        if name == "aio":
            return importlib.import_module(".aio", __name__)
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)


__all__ = ["Change", "Notice", "Rendezvous", "Status", "World", "__version__", "aio", "errors"]


def __dir__() -> list[str]:
    return __all__
