"""The names of `torch.distributed.elastic.rendezvous`, here: code written against that package moves by changing its imports.

The modules are called as torch's are, and everything public is also importable from here. A type that torch's own agent and
launcher must recognise (handlers, errors, parameters, settings, the base class of backends) *is* torch's; what does the work
is ours. docs/torch-names.md lists every name.

Nothing is imported before it is asked for: a backend's module may need what is not installed.
"""

from __future__ import annotations

from importlib import import_module

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
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> object:
    module = _HOMES.get(name)
    if module is None:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f".{module}", __name__), name)
