"""`EtcdRendezvousBackend`: a dynamic rendezvous' one state object in an etcd v3, with a fencing token.

The token is the revision at which the state was written; a write with an old one is refused, and the present state comes back
instead. A write whose answer was lost is looked up, not repeated: the state carries the id of the write that made it.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from ...core.keys import ROOT
from ...engines.port import EngineReset, Get, Item, LeaseGone, Modified, Put
from ...errors import SettingsError, Unreachable
from ...system.node import LocalNode
from ...system.timers import sleep
from .etcd_client import EtcdClient, client_of
from .etcd_store import EtcdStore

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

STATE_MAX = 1024 * 1024
"""Bytes; torch's state of 10,000 nodes has more, and etcd would refuse that too."""
RETRY_S = 0.1


class _Held(msgspec.Struct, frozen=True, array_like=True):
    """What is stored."""

    operation: str
    state: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Held).decode


class EtcdRendezvousBackend(RendezvousBackend):
    """See the module's docstring. `ttl`: seconds for which the state outlives its last write (2 hours)."""

    _DEFAULT_TTL = 7200

    def __init__(
        self, client: EtcdClient, run_id: str, key_prefix: str | None = None, ttl: int | None = None
    ) -> None:
        if not run_id:
            raise ValueError("the run id is empty: it must name the run")
        self._client = client
        name = f"{key_prefix}/{run_id}" if key_prefix else run_id
        self._key = f"{ROOT}state/{name.strip('/')}"
        self._ttl_s = ttl if ttl and ttl > 0 else self._DEFAULT_TTL
        self._node = LocalNode()
        self._lease = 0

    @property
    def name(self) -> str:
        """As torchrun's users know it."""
        return "etcd-v3"

    def get_state(self) -> tuple[bytes, Token] | None:
        """The state and its token; None: there is none yet. Raises RendezvousConnectionError, RendezvousStateError."""
        item = self._run(self._get())
        return None if item is None else (self._read(item).state, item.modified)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write if the token is still the state's (None: if there is none); the state afterwards, and whether it is ours."""
        if len(state) > STATE_MAX:
            raise RendezvousStateError(f"the state has {len(state)} bytes, at most {STATE_MAX} are allowed")
        try:
            expected = int(token) if token else 0
        except (TypeError, ValueError):
            expected = -1  # No revision: it refuses itself.
        held = _Held(self._node.token(), state)
        item = self._run(self._set(held, expected))
        if item is None:
            return None
        found = self._read(item)
        return found.state, item.modified, found.operation == held.operation

    def _run(self, work: Coroutine[Any, Any, Item | None]) -> Item | None:
        try:
            return self._client.run(work)
        except EngineReset:
            self._client.renounce()
            self._lease = 0
            raise RendezvousConnectionError(f"engine {self._client.endpoint} is another now, or was emptied") from None
        except (Unreachable, SettingsError) as error:
            raise RendezvousConnectionError(str(error)) from error

    def _read(self, item: Item) -> _Held:
        try:
            return _decode(item.value)
        except msgspec.MsgspecError as error:
            raise RendezvousStateError(f"the state at {self._key!r} in etcd is not one: {error}") from error

    # ---- in the background thread

    async def _get(self) -> Item | None:
        session = await self._client.session()
        return (await session.txn(then=[Get(self._key)])).item(0)

    async def _set(self, held: _Held, expected: int) -> Item | None:
        session = await self._client.session()
        if expected < 0:
            return await self._get()
        deadline = self._node.now() + self._client.read_timeout_s
        while True:
            try:
                put = Put(self._key, _encode(held), await self._own_lease())
                outcome = await session.txn([Modified(self._key, expected)], [put, Get(self._key)], [Get(self._key)])
            except LeaseGone:
                self._lease = 0
            except Unreachable:
                # Whether or not it took effect: the same compare decides, and the operation's id tells afterwards.
                if self._node.now() >= deadline:
                    raise
                await sleep(self._node, RETRY_S)
            else:
                return outcome.item(1 if outcome.succeeded else 0)

    async def _own_lease(self) -> int:
        """The state hangs on the lease of its last writer, whose time each write starts anew."""
        session = await self._client.session()
        if self._lease:
            await session.renew(self._lease)
        else:
            self._lease = await session.grant(self._ttl_s)
        return self._lease


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, Store]:
    """A backend and a store on the etcd that the parameters name.

    Keys: read_timeout (60 s), protocol (http or https), ssl_cert, ssl_cert_key, ca_cert, token_file.
    """
    client = client_of(params)
    backend = EtcdRendezvousBackend(client, params.run_id, key_prefix="torch/elastic/rendezvous")
    return backend, EtcdStore(client, f"torch/elastic/store/{params.run_id}")
