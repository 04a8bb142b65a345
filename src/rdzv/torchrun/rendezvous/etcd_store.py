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
import os
import random
import time
import weakref
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import quote

from ...blocking import Store
from ...core.keys import ROOT
from ...engines.port import Created, EngineReset, Get, LeaseGone, Put, Session
from ...errors import RoundOver, StoreTimeout, Unreachable
from ...member.store import AsyncStore
from ...system.node import LocalNode
from ..dist_store import DistStore
from .etcd_client import EtcdClient

T = TypeVar("T")

TTL_S = 7200  # How long unused keys stay. torch uses the same value for the state of a run.
BATCH_KEYS = 100
BATCH_BYTES = 1024 * 1024  # Bytes per transaction; etcd's default limit is 1.5 MiB.
RETRY_S = 0.2
CAS_DELAY_S = 0.1


def cas_delay() -> None:
    """Sleep for a random time up to 0.1 s, for programs that pause before a write. Stores here need no such pause."""
    time.sleep(random.random() * CAS_DELAY_S)  # noqa: S311


class EtcdStore(DistStore):
    """A store under one prefix of etcd. Raises torch's DistStoreError (timeout) and DistNetworkError (outage)."""

    def __init__(self, etcd_client: EtcdClient, etcd_store_prefix: str, timeout: timedelta | None = None) -> None:
        self.client = etcd_client
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else etcd_store_prefix + "/"
        super().__init__(EtcdSpace(etcd_client, etcd_store_prefix), timeout)

    def clone(self) -> EtcdStore:
        """Return another store over the same keys, on the same connection."""
        return EtcdStore(self.client, self.prefix, self.timeout)


class EtcdSpace(Store):
    """A round's store without a round: the keys of one prefix, for any number of processes."""

    def __init__(self, client: EtcdClient, prefix: str, ttl_s: float = TTL_S) -> None:
        leased = _LeasedPrefix(client, prefix, ttl_s)
        store = AsyncStore(leased, "", 0, LocalNode())  # type: ignore[arg-type]
        store.set_timeout(client.read_timeout_s)
        super().__init__(leased, store)  # type: ignore[arg-type]

    def multi_set(self, values: Mapping[str, bytes | str]) -> None:
        """Write several keys. Readers see a batch at once."""
        for batch in _batches(values):
            super().multi_set(batch)

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Wait for the values of all keys, as many per request as etcd allows."""
        found: list[bytes] = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for start in range(0, len(keys), BATCH_KEYS):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            found += super().multi_get(keys[start : start + BATCH_KEYS], left_s)
        return found

    def wait(self, keys: Iterable[str], timeout_s: float | None = None) -> None:
        self.multi_get(list(keys), timeout_s)


class EtcdStoreTimeout(StoreTimeout):
    """A timeout whose message names the store, because this store belongs to no round."""

    def __init__(self, store: str, late: StoreTimeout) -> None:
        super().__init__(late.keys, late.waited_s, late.round_number)
        self.store = store

    @property
    def sentence(self) -> str:
        return super().sentence.replace(f"store of round {self.round_number}", f"etcd store {self.store!r}", 1)


class _LeasedPrefix:
    """The prefix and lease of one store. It has the attributes that `Store` and `AsyncStore` read from a member.

    The entry of a member in the rank table guards its writes to a round's store. Here the guard is the one key that carries
    the store's lease: while it exists, so do all keys of the store.
    """

    asks_directly = False  # etcd's sessions take no calls of other threads.

    def __init__(self, client: EtcdClient, prefix: str, ttl_s: float) -> None:
        self._client = client
        self.ttl_s = ttl_s
        self._name = prefix.strip("/")
        self._root = f"{ROOT}store/{quote(self._name, safe='')}/"
        self._anchor = self._root + "lease"
        self.keys = self
        self.session: Session
        self._begin()
        self.run_lease = 0
        self.own_guard = Created(self._anchor, 0)

    def _begin(self) -> None:
        """Set what belongs to one process: its session, its renewal, and the id that tells its writes from others."""
        self._pid = os.getpid()
        self._is_open = False
        self._renewal: asyncio.Task[None] | None = None
        self.id = LocalNode().token()

    def run(self, coroutine: Coroutine[Any, Any, T], call: str = "") -> T:  # noqa: ARG002
        """Run a call of the store, and find or make the lease before the first one."""

        async def work() -> T:
            try:
                if self._pid != os.getpid():  # This is a forked child.
                    self._begin()
                if not self._is_open:
                    await self._open()
                if self._renewal is None:
                    renewing = _renew_forever(weakref.ref(self))
                    self._renewal = asyncio.get_running_loop().create_task(renewing, name="rdzv store lease")
                return await coroutine
            finally:
                coroutine.close()

        try:
            return self._client.run(work())
        except StoreTimeout as error:
            raise EtcdStoreTimeout(self._name, error) from None
        except RoundOver:
            self._is_open = False
            raise Unreachable(self._client.endpoint, f"what the store {self._name!r} held has expired") from None
        except Unreachable:
            # etcd was away for long, or came back empty. The next call starts from the beginning.
            self._is_open = False
            self._client.drop_session()
            coroutine.close()  # A closed client has not begun it.
            raise

    def kv(self, _table: str) -> str:
        return self._root

    def entry_guard(self, _table: str) -> Created:
        return self.own_guard

    async def _open(self) -> None:
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
            lease = await session.grant(self.ttl_s)
            get = Get(self._anchor)
            made = await session.txn([Created(self._anchor, 0)], [Put(self._anchor, b"", lease), get], [get])
            found = made.item(1 if made.succeeded else 0)
            if not made.succeeded:
                await session.revoke(lease)
        assert found is not None, "this or another process has put it"
        await session.renew(found.lease)
        self.run_lease, self.own_guard = found.lease, Created(self._anchor, found.created)
        self._is_open = True


async def _renew_forever(prefix: weakref.ref[_LeasedPrefix]) -> None:
    """Renew the lease until this process drops the store. If the lease has ended, the next call notices."""
    while (living := prefix()) is not None:
        pause_s = living.ttl_s / 3
        with contextlib.suppress(Unreachable, LeaseGone, EngineReset):
            await living.session.renew(living.run_lease)
        del living
        await asyncio.sleep(pause_s)


def _batches(values: Mapping[str, bytes | str]) -> Iterator[dict[str, bytes | str]]:
    """Split a write into as few transactions as etcd's limits allow."""
    batch: dict[str, bytes | str] = {}
    size = 0
    for key, value in values.items():
        if batch and (len(batch) == BATCH_KEYS or size + len(value) > BATCH_BYTES):
            yield batch
            batch, size = {}, 0
        batch[key] = value
        size += len(value) + len(key)
    if batch:
        yield batch
