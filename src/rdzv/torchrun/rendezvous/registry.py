"""The handler for each backend name: torch's names with our handlers, and the plug-ins that torch would find."""

from __future__ import annotations

import logging
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points

from ..plugin import create_etcd_v3
from .api import RendezvousHandler, RendezvousParameters, rendezvous_handler_registry

__all__ = ["get_rendezvous_handler"]

logger = logging.getLogger("rdzv.torchrun")

GROUP = "torchrun.handlers"


def get_rendezvous_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler for `params.backend`. Raises ValueError if there is none of that name."""
    return rendezvous_handler_registry.create_handler(params)


def _c10d(params: RendezvousParameters) -> RendezvousHandler:
    from .c10d_rendezvous_backend import create_backend  # noqa: PLC0415
    from .dynamic_rendezvous import create_handler  # noqa: PLC0415

    backend, store = create_backend(params)
    return create_handler(store, backend, params)


def _from_module(name: str, params: RendezvousParameters) -> RendezvousHandler:
    handler: RendezvousHandler = import_module(f".{name}", __package__).create_rdzv_handler(params)
    return handler


def _register() -> None:
    """Register torch's names first, so that no plug-in takes them. A broken plug-in must not break the others."""
    rendezvous_handler_registry.register("etcd", partial(_from_module, "etcd_rendezvous"))
    # torch keeps one state in etcd and polls it; this handler, the same as for `etcd-v3`, uses watches.
    rendezvous_handler_registry.register("etcd-v2", partial(create_etcd_v3, backend="etcd-v2"))
    rendezvous_handler_registry.register("c10d", _c10d)
    rendezvous_handler_registry.register("static", partial(_from_module, "static_tcp_rendezvous"))
    for entry in entry_points(group=GROUP):
        try:
            rendezvous_handler_registry.register(entry.name, entry.load()())
        except Exception:
            logger.exception("the plug-in %r of %s cannot be used", entry.name, entry.value)


_register()
