"""torch's types for handlers, parameters and errors, which its agent recognises by class; and a registry of ours."""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.api import (  # isort: skip
    RendezvousClosedError, RendezvousConnectionError, RendezvousError, RendezvousGracefulExitError, RendezvousHandler,
    RendezvousHandlerCreator, RendezvousHandlerRegistry, RendezvousInfo, RendezvousParameters, RendezvousStateError,
    RendezvousStoreInfo, RendezvousTimeoutError,
)  # fmt: skip

__all__ = [
    "RendezvousClosedError", "RendezvousConnectionError", "RendezvousError", "RendezvousGracefulExitError",
    "RendezvousHandler", "RendezvousHandlerCreator", "RendezvousHandlerRegistry", "RendezvousInfo", "RendezvousParameters",
    "RendezvousStateError", "RendezvousStoreInfo", "RendezvousTimeoutError", "rendezvous_handler_registry",
]  # fmt: skip

rendezvous_handler_registry = RendezvousHandlerRegistry()
"""A registry apart from torch's, in which the same names mean torch's handlers. `registry` fills it."""
