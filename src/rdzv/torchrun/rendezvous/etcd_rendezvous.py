"""`EtcdRendezvousHandler` and `create_rdzv_handler`: torch's etcd rendezvous, on an rdzv member over etcd v3.

The states of the old rendezvous, in the words of rdzv:

    setup      no member has joined yet; the first one writes the run's head
    joinable   members gather; the last call runs once the minimum is there, and the maximum ends it at once
    frozen     the round is sealed; members that come now wait for the next one
    final      all members of the round have their world
    closed     the run is over

All members of a version have the same size and store, a lost member makes a new version, and waiting members are counted.
Three faults of the old one are gone: a waiting member that dies is no longer counted, a version whose members died needs no
waiting member to notice it, and `shutdown` leaves the run instead of ending it for all.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec
from torch.distributed.elastic.rendezvous import RendezvousInfo

from ...blocking import Rendezvous, World
from ...config.endpoint import Endpoint
from ...errors import Evicted, NotJoined, RoundOver
from ..conf import Conf
from ..dist_store import DistStore
from ..handler import Handler, torch_errors
from .etcd_client import EtcdClient, client_of

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

PREFIX = "torchelastic/p2p"  # torch's default for `etcd_prefix`.
TIMEOUT_S = 600
LAST_CALL_S = 30

# The lifetimes of torch's keys in etcd, in seconds, for programs that read them. A member here has leases instead.
CONST_ETCD_SETUP_TTL = 5
CONST_ETCD_FROZEN_TTL = 10
CONST_ETCD_JOINABLE_EPHEMERAL_TTL = 10
CONST_WORKER_KEEPALIVE_TTL = 10
CONST_RUNID_SUBROOT_TTL = 7200


class EtcdRendezvousRetryableFailure(Exception):
    """Kept for programs that catch it. rdzv never raises it, because a member retries by itself."""


class EtcdRendezvousRetryImmediately(Exception):
    """Kept for programs that catch it. rdzv never raises it."""


class EtcdRendezvous:
    """One member of a run, in torch's words: a version is a round. Connects with the first call."""

    def __init__(
        self, client: EtcdClient, prefix: str, run_id: str, num_min_workers: int, num_max_workers: int,
        timeout: float, last_call_timeout: float,
    ) -> None:  # fmt: skip
        endpoint = Endpoint.parse(client.endpoint)
        path = "/".join(part for part in (endpoint.path, prefix.strip("/")) if part)
        endpoint = Endpoint(endpoint.scheme, endpoint.hosts, path, endpoint.query)
        settings = {"join_timeout": timeout, "last_call": last_call_timeout, **client.options}
        self.conf = Conf(endpoint, run_id, num_min_workers, num_max_workers, settings)
        self._member: Rendezvous | None = None
        self._world: World | None = None

    def rendezvous_barrier(self) -> tuple[int, int, int]:
        """Wait for a version with this member in it, and return the version, rank and size. Raises torch's errors."""
        with torch_errors():
            while True:
                with suppress(Evicted):
                    self._world = self.member.join()
                    return self._world.round, self._world.rank, self._world.size

    def set_closed(self) -> None:
        """End the run for all members."""
        with torch_errors():
            self.member.close_run("closed by its program")

    def get_rdzv_state(self) -> dict[str, Any]:
        """Return the run's status, version, participants, and the number of waiting members."""
        status = self.member.status()
        participants = sorted(member.rank for member in status.of("in"))
        words = {"none": "setup", "closed": "closed", "sealed": "frozen"}
        is_final = status.phase == "sealed" and len(participants) == status.size
        return {
            "status": "final" if is_final else words.get(status.phase, "joinable"),
            "version": str(status.round),
            "participants": participants,
            "num_workers_waiting": len(status.of("waiting")) + len(status.of("spare")),
            "reason": status.reason,
        }

    def store_extra_data(self, rdzv_version: int, key: str, value: str) -> None:
        """Store a value for the other members of that version."""
        with torch_errors():
            self._world_of(rdzv_version).store.set(f"extra/{key}", value)

    def load_extra_data(self, rdzv_version: int, key: str, timeout: float | None = None) -> str:
        """Wait for a value that a member of that version stored."""
        with torch_errors():
            return self._world_of(rdzv_version).store.get(f"extra/{key}", timeout).decode()

    def setup_kv_store(self, rdzv_version: int) -> DistStore:
        """Return the store of that version. Its keys end with the version."""
        return DistStore(self._world_of(rdzv_version).store)

    @property
    def member(self) -> Rendezvous:
        """The member, made when it is first needed, unless a handler has set its own."""
        if self._member is None:
            self._member = self.conf.member()
        return self._member

    def use(self, member: Rendezvous, world: World | None = None) -> None:
        """Use the member of a handler, and the world that the handler got."""
        self._member, self._world = member, world

    def _world_of(self, version: int) -> World:
        world = self._world
        if world is None:
            raise NotJoined(self.conf.run_id, "rendezvous_barrier")
        if world.round != version:
            raise RoundOver(version, f"this member is in version {world.round}")
        return world


class EtcdRendezvousHandler(Handler):
    """The handler of `rdzv.torchrun.handler`, which shares its member with an `EtcdRendezvous`."""

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        conf = rdzv_impl.conf
        if local_addr:
            conf = msgspec.structs.replace(conf, settings={**conf.settings, "local_addr": local_addr})
        super().__init__("etcd", conf)
        self._rdzv_impl = rdzv_impl
        rdzv_impl.use(self._rendezvous)

    def _start_round(self, world: World, reason: str) -> RendezvousInfo:
        self._rdzv_impl.use(self._rendezvous, world)
        return super()._start_round(world, reason)


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """Make a handler from torch's parameters.

    Keys: timeout (600 s), last_call_timeout (30 s), etcd_prefix, protocol, cert, key, cacert, read_timeout, token_file.
    """
    config = params.config
    timeouts_s = float(config.get("timeout", TIMEOUT_S)), float(config.get("last_call_timeout", LAST_CALL_S))
    nodes, prefix = (params.min_nodes, params.max_nodes), str(config.get("etcd_prefix", PREFIX))
    implementation = EtcdRendezvous(client_of(params), prefix, params.run_id, *nodes, *timeouts_s)
    return EtcdRendezvousHandler(implementation, params.local_addr)
