"""What torch finds: the entry points of the group `torchrun.handlers`.

torch loads them in every process that imports its rendezvous package, agents or not, so nothing is imported here before a
handler is asked for. Each entry returns a function of this module and not a closure: torch registers a name a second time
only if it gets the same object again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def rdzv() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point `rdzv`."""
    return create_rdzv


def etcd_v3() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The entry point `etcd-v3`."""
    return create_etcd_v3


def create_rdzv(parameters: RendezvousParameters) -> RendezvousHandler:
    """A handler for any engine; the endpoint says which."""
    from .conf import read  # noqa: PLC0415
    from .handler import Handler  # noqa: PLC0415

    return Handler("rdzv", read(parameters))


def create_etcd_v3(parameters: RendezvousParameters) -> RendezvousHandler:
    """The same for those who come from `etcd-v2`: the endpoint is an etcd's, with or without the scheme."""
    from .conf import read_etcd  # noqa: PLC0415
    from .handler import Handler  # noqa: PLC0415

    return Handler("etcd-v3", read_etcd(parameters))
