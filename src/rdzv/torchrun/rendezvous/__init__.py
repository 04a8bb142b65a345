"""The names of `torch.distributed.elastic.rendezvous`: code written for that package moves here by changing its imports.

Modules have torch's module names, and every public name can also be imported from here. Types that torch's agent and launcher
must recognise (handlers, errors, parameters, settings, the base class of backends) are torch's own; the implementations are
ours. docs/torch-names.md lists every name. The import of this package fills its registry, as torch's does. A backend's module
is loaded when one of its names is first used, because it may need packages that are not installed.
"""

from __future__ import annotations

from importlib import import_module

from . import registry  # noqa: F401  Its import fills the registry.

_MODULES = {
    "api": (
        "RendezvousClosedError", "RendezvousConnectionError", "RendezvousError", "RendezvousGracefulExitError",
        "RendezvousHandler", "RendezvousHandlerCreator", "RendezvousHandlerRegistry", "RendezvousInfo",
        "RendezvousParameters", "RendezvousStateError", "RendezvousStoreInfo", "RendezvousTimeoutError",
        "rendezvous_handler_registry",
    ),
    "c10d_rendezvous_backend": ("C10dRendezvousBackend", "create_backend"),
    "dynamic_rendezvous": (
        "DynamicRendezvousHandler", "RendezvousBackend", "RendezvousSettings", "RendezvousTimeout", "Token",
        "create_handler",
    ),
    "etcd_rendezvous": ("EtcdRendezvousHandler",),
    "etcd_rendezvous_backend": ("EtcdRendezvousBackend",),
    "etcd_server": ("EtcdServer",),
    "etcd_store": ("EtcdStore",),
    "registry": ("get_rendezvous_handler",),
    "static_tcp_rendezvous": ("StaticTCPRendezvous", "create_rdzv_handler"),
    "utils": ("parse_rendezvous_endpoint",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
