"""`EtcdRendezvousHandler` and `create_rdzv_handler`: torch's etcd rendezvous, on an rdzv member over etcd v3.

What the old rendezvous promised holds, by other means:

    setup      nobody has come yet: the first to come makes the run's head
    joinable   members gather; once the minimum is there the last call runs, and the maximum ends it at once
    frozen     the round is sealed: who comes now waits for the next one
    final      every member has taken it
    closed     the run is over

Ranks, size and the store of a version are the same for all of its members; a lost member makes a new version; who waits is
counted. What its users worked around is gone: a waiting member that dies is no longer counted, a version whose members died
does not need a waiting one to notice it, and `shutdown` leaves instead of ending the run for everybody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
)

from ...blocking import Rendezvous, World
from ...config.endpoint import Endpoint
from ...core.model import Phase
from ...errors import Closed, Evicted, JoinTimeout, NotJoined, RdzvError, RoundOver, StoreTimeout, Unreachable
from ..conf import Conf
from ..dist_store import DistStore
from ..handler import Handler
from .etcd_client import EtcdClient, client_of

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

PREFIX = "torchelastic/p2p"
"""torch's default for `etcd_prefix`."""
TIMEOUT_S = 600
LAST_CALL_S = 30


class EtcdRendezvousRetryableFailure(Exception):
    """Try again. Kept for programs that catch it; nothing here raises it, because a member tries again by itself."""


class EtcdRendezvousRetryImmediately(Exception):
    """Try again at once. Kept for programs that catch it."""


class EtcdRendezvous:
    """One member of a run, with torch's vocabulary: a version is a round. Nothing happens before the first call."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: float,
        last_call_timeout: float,
    ) -> None:
        endpoint = Endpoint.parse(client.endpoint)
        path = "/".join(part for part in (endpoint.path, prefix.strip("/")) if part)
        self.conf = Conf(
            endpoint=Endpoint(endpoint.scheme, endpoint.hosts, path, endpoint.query),
            run_id=run_id,
            min_nodes=num_min_workers,
            max_nodes=num_max_workers,
            settings={"join_timeout": timeout, "last_call": last_call_timeout, **client.options},
        )
        self._member: Rendezvous | None = None
        self._world: World | None = None

    # ---- torch's interface

    def rendezvous_barrier(self) -> tuple[int, int, int]:
        """Version, rank and size, as soon as there is a version with us in it. Raises torch's errors."""
        try:
            while True:
                try:
                    self._world = self.member.join()
                except Evicted:
                    continue
                return self._world.round, self._world.rank, self._world.size
        except RdzvError as error:
            _refuse(error)

    def set_closed(self) -> None:
        """End the run for everybody."""
        try:
            self.member.close_run("closed by its program")
        except RdzvError as error:
            _refuse(error)

    def get_rdzv_state(self) -> dict[str, Any]:
        """The run as it is now: status, version, participants, and how many wait."""
        status = self.member.status()
        participants = sorted(member.rank for member in status.of("in"))
        word = "setup" if status.phase == "none" else "joinable"
        if status.phase == Phase.SEALED.value:
            word = "final" if len(participants) == status.size else "frozen"
        elif status.phase == Phase.CLOSED.value:
            word = "closed"
        return {
            "status": word,
            "version": str(status.round),
            "participants": participants,
            "num_workers_waiting": len(status.of("waiting")) + len(status.of("spare")),
            "reason": status.reason,
        }

    def store_extra_data(self, rdzv_version: int, key: str, value: str) -> None:
        """Leave something for the other members of that version."""
        try:
            self._world_of(rdzv_version).store.set(f"extra/{key}", value)
        except RdzvError as error:
            _refuse(error)

    def load_extra_data(self, rdzv_version: int, key: str, timeout: float | None = None) -> str:
        """What a member of that version left, waited for if need be."""
        try:
            return self._world_of(rdzv_version).store.get(f"extra/{key}", timeout).decode()
        except RdzvError as error:
            _refuse(error)

    def setup_kv_store(self, rdzv_version: int) -> DistStore:
        """The store of that version; its keys go with it."""
        return DistStore(self._world_of(rdzv_version).store)

    # ---- what the handler does with it

    @property
    def member(self) -> Rendezvous:
        """Made when it is first needed, unless a handler has lent us its own."""
        if self._member is None:
            conf = self.conf
            self._member = Rendezvous(
                conf.endpoint, run_id=conf.run_id, min_nodes=conf.min_nodes, max_nodes=conf.max_nodes, **conf.settings
            )
        return self._member

    def lend(self, member: Rendezvous) -> None:
        """The handler's member is ours."""
        self._member = member

    def entered(self, world: World) -> None:
        """The handler was given a round."""
        self._world = world

    def _world_of(self, version: int) -> World:
        world = self._world
        if world is None:
            raise NotJoined(self.conf.run_id, "rendezvous_barrier")
        if world.round != version:
            raise RoundOver(version, f"this member is in version {world.round}")
        return world


class EtcdRendezvousHandler(Handler):
    """What torchrun's agent calls; see `rdzv.torchrun.handler`."""

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        conf = rdzv_impl.conf
        if local_addr:
            conf = msgspec.structs.replace(conf, settings={**conf.settings, "local_addr": local_addr})
        super().__init__("etcd", conf)
        self._rdzv_impl = rdzv_impl
        rdzv_impl.lend(self._rendezvous)

    def _enter(self, world: World, reason: str) -> RendezvousInfo:
        self._rdzv_impl.entered(world)
        return super()._enter(world, reason)


def create_rdzv_handler(params: RendezvousParameters) -> RendezvousHandler:
    """A handler from torch's parameters.

    Keys: timeout (600 s), last_call_timeout (30 s), etcd_prefix, protocol, cert, key, cacert, read_timeout, token_file.
    """
    config = params.config
    implementation = EtcdRendezvous(
        client_of(params),
        str(config.get("etcd_prefix", PREFIX)),
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        float(config.get("timeout", TIMEOUT_S)),
        float(config.get("last_call_timeout", LAST_CALL_S)),
    )
    return EtcdRendezvousHandler(implementation, params.local_addr)


def _refuse(error: RdzvError) -> NoReturn:
    kinds: dict[type[RdzvError], type[Exception]] = {
        Closed: RendezvousClosedError,
        JoinTimeout: RendezvousTimeoutError,
        StoreTimeout: RendezvousTimeoutError,
        Unreachable: RendezvousConnectionError,
    }
    raise kinds.get(type(error), RendezvousError)(str(error)) from error
