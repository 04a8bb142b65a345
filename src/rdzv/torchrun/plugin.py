"""The entry points of the group `torchrun.handlers`, by which torch finds rdzv.

torch loads them in every process that imports its rendezvous package, agent or not. So this module imports nothing before a
handler is asked for. Each entry point returns a function of this module, not a closure: torch accepts a second registration
of a name only if it gets the same object again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def rdzv() -> Callable[[RendezvousParameters], RendezvousHandler]:
    return create_rdzv


def etcd_v3() -> Callable[[RendezvousParameters], RendezvousHandler]:
    return create_etcd_v3


def create_rdzv(parameters: RendezvousParameters) -> RendezvousHandler:
    """Make a handler for the engine that the endpoint names."""
    from ..member import log  # noqa: PLC0415
    from . import failure_line  # noqa: PLC0415
    from .conf import read  # noqa: PLC0415
    from .handler import Handler  # noqa: PLC0415

    failure_line.install()
    log.set_up()  # The choice of an endpoint is logged before there is a handler.
    return Handler("rdzv", read(parameters))


def create_etcd_v3(parameters: RendezvousParameters, backend: str = "etcd-v3") -> RendezvousHandler:
    """Make a handler for etcd, for users of `etcd-v2`: the endpoint needs no scheme."""
    from . import failure_line  # noqa: PLC0415
    from .conf import read_etcd  # noqa: PLC0415
    from .handler import Handler  # noqa: PLC0415

    failure_line.install()

    return Handler(backend, read_etcd(parameters))
