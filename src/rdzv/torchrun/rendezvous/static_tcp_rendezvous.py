"""Static rendezvous: every node is given its rank and the address of rank 0, so there is nothing to agree on.

Agents and workers share one TCPStore at that address. A lost node is not noticed, and no node can join. For an elastic job with
fixed ranks, use `--rdzv-backend=rdzv` with the setting `rank`.
"""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistError, PrefixStore, TCPStore

from ...system.fork import never_free_in_children
from .api import RendezvousConnectionError, RendezvousHandler, RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from .utils import parse_rendezvous_endpoint

__all__ = ["StaticTCPRendezvous", "create_rdzv_handler"]

TIMEOUT_S = 600


class StaticTCPRendezvous(RendezvousHandler):
    """A handler that returns the rank and size that it was given."""

    def __init__(self, master_addr: str, master_port: int, rank: int, world_size: int, run_id: str, timeout: int) -> None:
        self.master_addr = master_addr
        self.master_port = master_port
        self.rank = rank
        self.world_size = world_size
        self.run_id = run_id
        self.timeout = timedelta(seconds=timeout)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        """Return True: workers use the TCPStore of rank 0's agent."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Connect in the first call; rank 0 serves. Raises RendezvousConnectionError."""
        if self._store is None:
            try:
                self._store = TCPStore(
                    self.master_addr, self.master_port, self.world_size, self.rank == 0, self.timeout, multi_tenant=True
                )
            except (DistError, ValueError, RuntimeError, TimeoutError) as error:
                role = "serve" if self.rank == 0 else "reach rank 0"
                raise RendezvousConnectionError(
                    f"rank {self.rank} of run {self.run_id!r} could not {role} at "
                    f"{self.master_addr}:{self.master_port}: {error}"
                ) from error
            never_free_in_children(self._store)
        info = RendezvousStoreInfo(self.master_addr, self.master_port)
        return RendezvousInfo(PrefixStore(self.run_id, self._store), self.rank, self.world_size, info)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: a static run has no state to close."""

    def num_nodes_waiting(self) -> int:
        """Return 0: static runs have no waiting nodes."""
        return 0

    def get_run_id(self) -> str:
        return self.run_id

    def shutdown(self) -> bool:
        return True


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler from `rank`, the endpoint and `timeout` (seconds). The size is `max_nodes`. Raises ValueError."""
    if "rank" not in params.config:
        raise ValueError("static rendezvous: the rank of this node is missing; give 'rank' (torchrun: --node-rank)")
    endpoint = (params.endpoint or "").strip()
    if not endpoint:
        raise ValueError("static rendezvous: the endpoint is missing; give rank 0's address as 'host:port'")
    host, port = parse_rendezvous_endpoint(endpoint, -1)
    if port == -1:
        raise ValueError(f"static rendezvous: endpoint {endpoint!r} has no port; give rank 0's address as 'host:port'")
    rank = int(params.config["rank"])
    if not 0 <= rank < params.max_nodes:
        raise ValueError(f"static rendezvous: rank is {rank}, of {params.max_nodes} nodes the last has {params.max_nodes - 1}")
    timeout = params.get_as_int("timeout", TIMEOUT_S) or TIMEOUT_S
    return StaticTCPRendezvous(host, port, rank, params.max_nodes, params.run_id, timeout)
