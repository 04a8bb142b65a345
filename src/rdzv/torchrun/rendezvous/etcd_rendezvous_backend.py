"""`EtcdRendezvousBackend`: the one state object of a dynamic rendezvous in etcd v3, with a fencing token.

The token is the revision at which the state was written. A write with an old token is refused and returns the current state. A
write whose reply was lost is not applied twice: the state holds the id of the write that made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import msgspec
from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from ...core.keys import ROOT
from ...engines.port import EngineReset, Get, Item, LeaseGone, Modified, Put
from ...errors import SettingsError, Unreachable
from ...member.member import CONNECT_S
from ...system.node import LocalNode
from ...system.timers import sleep
from .etcd_client import EtcdClient, client_of
from .etcd_store import EtcdStore

if TYPE_CHECKING:
    from torch.distributed import Store
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

STATE_MAX = 1024 * 1024  # Bytes. torch's state of 10,000 nodes is larger, and etcd would refuse it too.
RETRY_S = 0.1


class _StoredState(msgspec.Struct, frozen=True, array_like=True):
    """The value of the key."""

    operation: str
    state: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_StoredState).decode


class EtcdRendezvousBackend(RendezvousBackend):
    """The backend. The state outlives its last write by `ttl` seconds (2 hours).

    A call raises RendezvousConnectionError after the client's read timeout; one that has to connect, up to ten seconds later.
    """

    _DEFAULT_TTL = 7200

    def __init__(self, client: EtcdClient, run_id: str, key_prefix: str | None = None, ttl: int | None = None) -> None:
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
        """Torch's name: programs compare it, and a registry refuses a handler of another name."""
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None. Raises RendezvousConnectionError, RendezvousStateError."""
        item = self._run(self._get())
        return None if item is None else (self._read(item).state, item.modified)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Write if the token is current (None: if there is no state). Return the state, its token and whether it is ours."""
        if len(state) > STATE_MAX:
            raise RendezvousStateError(f"the state has {len(state)} bytes, at most {STATE_MAX} are allowed")
        try:
            expected = int(token) if token else 0
        except (TypeError, ValueError):
            expected = -1  # Not a token of ours: matches no state.
        stored = _StoredState(self._node.token(), state)
        item = self._run(self._set(stored, expected))
        if item is None:
            return None
        found = self._read(item)
        return found.state, item.modified, found.operation == stored.operation

    def _run(self, work: Coroutine[Any, Any, Item | None]) -> Item | None:
        """Run a call, for `read_timeout` and the time to connect at most."""
        limit_s = self._client.read_timeout_s + CONNECT_S
        try:
            return self._client.run(asyncio.wait_for(work, limit_s))
        except asyncio.TimeoutError:
            raise RendezvousConnectionError(f"engine {self._client.endpoint} did not answer within {limit_s:g} s") from None
        except EngineReset:
            self._client.drop_session()
            self._lease = 0
            raise RendezvousConnectionError(f"engine {self._client.endpoint} is another now, or was emptied") from None
        except (Unreachable, SettingsError) as error:
            work.close()  # A closed client has not begun it.
            raise RendezvousConnectionError(str(error)) from error

    def _read(self, item: Item) -> _StoredState:
        try:
            return _decode(item.value)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise RendezvousStateError(f"the state at {self._key!r} in etcd is not one: {error}") from error

    async def _get(self) -> Item | None:
        session = await self._client.session()
        return (await session.txn(then=[Get(self._key)])).item(0)

    async def _set(self, stored: _StoredState, expected: int) -> Item | None:
        session = await self._client.session()
        if expected < 0:
            return await self._get()
        deadline = self._node.now() + self._client.read_timeout_s
        while True:
            try:
                if self._lease:
                    await session.renew(self._lease)
                else:
                    self._lease = await session.grant(self._ttl_s)
                put = Put(self._key, _encode(stored), self._lease)
                outcome = await session.txn([Modified(self._key, expected)], [put, Get(self._key)], [Get(self._key)])
            except LeaseGone:
                self._lease = 0
            except Unreachable:
                # The write may have taken effect. Then the compare of a retry fails, and the operation's id shows whose it is.
                if self._node.now() >= deadline:
                    raise
                await sleep(self._node, RETRY_S)
            else:
                return outcome.item(1 if outcome.succeeded else 0)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, Store]:
    """Make a backend and a store on the etcd that the parameters name.

    Keys: read_timeout (60 s), protocol (http or https), ssl_cert, ssl_cert_key, ca_cert, token_file. Connects at once. Raises
    ValueError for a wrong parameter, and RendezvousConnectionError if etcd does not answer or refuses this client.
    """
    client = client_of(params)
    try:
        client.connect()
    except (Unreachable, SettingsError) as error:
        client.close()
        raise RendezvousConnectionError(str(error)) from error
    backend = EtcdRendezvousBackend(client, params.run_id, key_prefix="torch/elastic/rendezvous")
    return backend, EtcdStore(client, f"torch/elastic/store/{params.run_id}")
