"""`EtcdStore`: a torch.distributed.Store in etcd, with torch's name.

    store = EtcdStore(client, "job-17")
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)

The store belongs to no rendezvous: processes that use the same prefix share it. All its keys are attached to one lease, which
every process that uses the store renews. When the last process is gone, the keys expire. A wait watches only its own keys. A
write whose reply was lost is not repeated blindly, so `add` counts exactly once; `member.store` does that work.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import quote

from ...core.keys import ROOT
from ...engines.port import Created, EngineReset, Get, LeaseGone, Put, Session
from ...errors import RoundOver, StoreTimeout, Unreachable
from ...member.store import AsyncStore
from ...system.node import LocalNode
from ..dist_store import DistStore
from .etcd_client import EtcdClient

T = TypeVar("T")

TTL_S = 7200
"""How long unused keys stay. torch uses the same value for the state of a run."""
BATCH_BYTES = 1024 * 1024
"""Bytes per transaction; etcd's default limit is 1.5 MiB."""
RETRY_S = 0.2


class EtcdStore(DistStore):
    """A store under one prefix of etcd. Raises torch's DistStoreError (timeout) and DistNetworkError (outage)."""

    def __init__(self, etcd_client: EtcdClient, etcd_store_prefix: str, timeout: timedelta | None = None) -> None:
        self.client = etcd_client
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else etcd_store_prefix + "/"
        super().__init__(EtcdSpace(etcd_client, etcd_store_prefix), timeout)

    def clone(self) -> EtcdStore:
        """Return another store over the same keys, on the same connection."""
        return EtcdStore(self.client, self.prefix, self.timeout)


class EtcdSpace:
    """The `KeyValueSpace` of one prefix."""

    def __init__(self, client: EtcdClient, prefix: str, ttl_s: float = TTL_S) -> None:
        self._client = client
        self._prefix = _LeasedPrefix(client, prefix, ttl_s)
        self._store: AsyncStore | None = None
        self._renewal: Any = None

    def multi_set(self, values: Mapping[str, bytes | str]) -> None:
        """Write several keys. Readers see a batch at once."""
        for batch in _batches(values, self._prefix.writes_max):
            self._run(lambda store, batch=batch: store.multi_set(batch))  # type: ignore[misc]

    def add(self, key: str, amount: int) -> int:
        return self._run(lambda store: store.add(key, amount))

    def append(self, key: str, value: bytes | str) -> None:
        self._run(lambda store: store.append(key, value))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._run(lambda store: store.compare_set(key, expected, desired))

    def delete(self, key: str) -> bool:
        return self._run(lambda store: store.delete(key))

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Wait for the values of all keys, as many per request as etcd allows."""
        found: list[bytes] = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for start in range(0, len(keys), self._prefix.writes_max):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            some = keys[start : start + self._prefix.writes_max]
            found += self._run(lambda store, some=some, left_s=left_s: store.multi_get(some, left_s))  # type: ignore[misc]
        return found

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        self.multi_get(keys, timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        return self._run(lambda store: store.check(keys))

    def num_keys(self) -> int:
        return self._run(lambda store: store.num_keys())

    def _run(self, act: Callable[[AsyncStore], Awaitable[T]]) -> T:
        async def work() -> T:
            if self._store is None:
                await self._prefix.open()
            if self._store is None:  # Another thread may have made it meanwhile.
                self._store = AsyncStore(self._prefix, "", 0, LocalNode())  # type: ignore[arg-type]
                self._store.set_timeout(self._client.read_timeout_s)
            if self._renewal is None:
                renewing = _renew_forever(weakref.ref(self._prefix))
                self._renewal = asyncio.get_running_loop().create_task(renewing, name="rdzv store lease")
            return await act(self._store)

        try:
            return self._client.run(work())
        except StoreTimeout as error:
            raise EtcdStoreTimeout(self._prefix.name, error) from None
        except RoundOver:
            self._store = None
            raise Unreachable(self._client.endpoint, f"what the store {self._prefix.name!r} held has expired") from None
        except Unreachable:
            # etcd was away for long, or came back empty. The next call starts from the beginning.
            self._store = None
            self._client.drop_session()
            raise


class EtcdStoreTimeout(StoreTimeout):
    """A timeout whose message names the store, because this store belongs to no round."""

    def __init__(self, store: str, late: StoreTimeout) -> None:
        super().__init__(late.keys, late.waited_s, late.round_number)
        self.store = store

    @property
    def sentence(self) -> str:
        return super().sentence.replace(f"store of round {self.round_number}", f"etcd store {self.store!r}", 1)


class _LeasedPrefix:
    """The prefix and lease of one store. It has the attributes that `AsyncStore` reads from a member.

    The entry of a member in the rank table guards its writes to a round's store. Here the guard is the one key that carries
    the store's lease: while it exists, so do all keys of the store.
    """

    writes_max = 100

    def __init__(self, client: EtcdClient, prefix: str, ttl_s: float) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self.name = prefix.strip("/")
        self._root = f"{ROOT}store/{quote(self.name, safe='')}/"
        self._anchor = self._root + "lease"
        self.keys = self
        node = LocalNode()
        self.id = node.token()
        self.session: Session
        self.run_lease = 0
        self.own_guard = Created(self._anchor, 0)

    def kv(self, _table: str) -> str:
        return self._root

    def entry_guard(self, _table: str) -> Created:
        return self.own_guard

    async def open(self) -> None:
        """Find the store's lease, or make it if there is none. Raises Unreachable."""
        deadline = time.monotonic() + self._client.read_timeout_s
        while True:
            try:
                self.session = await self._client.session()
                await self._find_or_make_lease()
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            except LeaseGone:
                continue  # The lease ended after it was found and before it was renewed.
            else:
                return

    async def _find_or_make_lease(self) -> None:
        session = self.session
        found = (await session.txn(then=[Get(self._anchor)])).item(0)
        if found is None:
            lease = await session.grant(self._ttl_s)
            made = await session.txn(
                [Created(self._anchor, 0)], [Put(self._anchor, b"", lease), Get(self._anchor)], [Get(self._anchor)]
            )
            found = made.item(1 if made.succeeded else 0)
            if not made.succeeded:
                await session.revoke(lease)
        assert found is not None, "this or another process has put it"
        await session.renew(found.lease)
        self.run_lease, self.own_guard = found.lease, Created(self._anchor, found.created)

    async def renew(self) -> None:
        """Renew the lease. If it has ended, the next call notices."""
        with contextlib.suppress(Unreachable, LeaseGone, EngineReset):
            await self.session.renew(self.run_lease)

    @property
    def renew_s(self) -> float:
        return self._ttl_s / 3


async def _renew_forever(prefix: weakref.ref[_LeasedPrefix]) -> None:
    """Renew the lease until this process drops the store."""
    while True:
        living = prefix()
        if living is None:
            return
        pause_s = living.renew_s
        await living.renew()
        del living
        await asyncio.sleep(pause_s)


def _batches(values: Mapping[str, bytes | str], count_max: int) -> Iterator[dict[str, bytes | str]]:
    """Split a write into as few transactions as etcd's limits allow."""
    batch: dict[str, bytes | str] = {}
    size = 0
    for key, value in values.items():
        if batch and (len(batch) == count_max or size + len(value) > BATCH_BYTES):
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += len(value) + len(key)
    if batch:
        yield batch
