"""`EtcdStore`: a torch.distributed.Store in an etcd, under the name that torch has for it.

    store = EtcdStore(client, "job-17")
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)

It belongs to no rendezvous: whoever names the same prefix has the same store. All its keys hang on one lease, which every
process that uses the store renews; when the last of them is gone they expire. Waits are watches of just the keys waited for.
A write whose answer was lost is not repeated blindly, so `add` counts exactly once: see `rdzv.store`, whose work this is.
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
"""How long the keys stay when nobody uses them any more; torch's figure for what belongs to a run."""
BATCH_BYTES = 1024 * 1024
"""Of a transaction; etcd takes one and a half."""
RETRY_S = 0.2


class EtcdStore(DistStore):
    """See the module's docstring. Raises torch's DistStoreError (timeout) and DistNetworkError (outage)."""

    def __init__(self, etcd_client: EtcdClient, etcd_store_prefix: str, timeout: timedelta | None = None) -> None:
        self.client = etcd_client
        self.prefix = etcd_store_prefix if etcd_store_prefix.endswith("/") else etcd_store_prefix + "/"
        super().__init__(EtcdSpace(etcd_client, etcd_store_prefix), timeout)

    def clone(self) -> EtcdStore:
        """Another store over the same keys, which shares the connection."""
        return EtcdStore(self.client, self.prefix, self.timeout)


class EtcdSpace:
    """The keys below one prefix, blocking: what `DistStore` asks of a space."""

    def __init__(self, client: EtcdClient, prefix: str, ttl_s: float = TTL_S) -> None:
        self._client = client
        self._tenant = _Tenant(client, prefix, ttl_s)
        self._store: AsyncStore | None = None
        self._keeper: Any = None

    # ---- writing

    def multi_set(self, values: Mapping[str, bytes | str]) -> None:
        """Write several keys; those of one batch at once."""
        for batch in _batches(values, self._tenant.writes_max):
            self._run(lambda store, batch=batch: store.multi_set(batch))  # type: ignore[misc]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and say what it is now."""
        return self._run(lambda store: store.add(key, amount))

    def append(self, key: str, value: bytes | str) -> None:
        """Put more bytes behind a value, which starts empty."""
        self._run(lambda store: store.append(key, value))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected` (empty: if there is none); return the value there is afterwards."""
        return self._run(lambda store: store.compare_set(key, expected, desired))

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._run(lambda store: store.delete(key))

    # ---- reading

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values, waited for if need be."""
        found: list[bytes] = []
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for start in range(0, len(keys), self._tenant.writes_max):
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            some = keys[start : start + self._tenant.writes_max]
            found += self._run(lambda store, some=some, left_s=left_s: store.multi_get(some, left_s))  # type: ignore[misc]
        return found

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Until all of the keys are set."""
        self.multi_get(keys, timeout_s)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys are set now."""
        return self._run(lambda store: store.check(keys))

    def num_keys(self) -> int:
        """How many keys there are."""
        return self._run(lambda store: store.num_keys())

    # ---- how

    def _run(self, act: Callable[[AsyncStore], Awaitable[T]]) -> T:
        async def work() -> T:
            if self._store is None:
                await self._tenant.settle()
            if self._store is None:  # Else another thread was here first.
                self._store = AsyncStore(self._tenant, "", 0, LocalNode())  # type: ignore[arg-type]
                self._store.set_timeout(self._client.read_timeout_s)
            if self._keeper is None:
                keeping = _keep(weakref.ref(self._tenant))
                self._keeper = asyncio.get_running_loop().create_task(keeping, name="rdzv store lease")
            return await act(self._store)

        try:
            return self._client.run(work())
        except StoreTimeout as error:
            raise StoreLate(self._tenant.name, error) from None
        except RoundOver:
            self._store = None
            raise Unreachable(self._client.endpoint, f"what the store {self._tenant.name!r} held has expired") from None
        except Unreachable:
            # Long away, or back and empty: whoever asks again does so from the beginning.
            self._store = None
            self._client.renounce()
            raise


class StoreLate(StoreTimeout):
    """A key did not come in time; this store belongs to no round, so the sentence names the store."""

    def __init__(self, store: str, late: StoreTimeout) -> None:
        super().__init__(late.keys, late.waited_s, late.round_number)
        self.store = store

    @property
    def sentence(self) -> str:
        """See `RdzvError`."""
        return super().sentence.replace(f"store of round {self.round_number}", f"etcd store {self.store!r}", 1)


class _Tenant:
    """What `rdzv.store.Store` asks of a member's presence, for one that is no member: by which right it writes, and where.

    A member's line in the rank table is the right to write to a round's store; here it is the one key that carries the
    store's lease. While it stands, so does everything in the store.
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
        """Where the keys are."""
        return self._root

    def entry_guard(self, _table: str) -> Created:
        """As `own_guard`: there is but one."""
        return self.own_guard

    async def settle(self) -> None:
        """Find the store's lease, or make it if we are the first. Raises Unreachable."""
        deadline = time.monotonic() + self._client.read_timeout_s
        while True:
            try:
                self.session = await self._client.session()
                await self._settle()
            except Unreachable:
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(RETRY_S)
            except LeaseGone:
                continue  # It ended between being found and being renewed.
            else:
                return

    async def _settle(self) -> None:
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
        assert found is not None, "one of us has put it"
        await session.renew(found.lease)
        self.run_lease, self.own_guard = found.lease, Created(self._anchor, found.created)

    async def renew(self) -> None:
        """Start the lease's time anew; if it has ended, the next call finds out."""
        with contextlib.suppress(Unreachable, LeaseGone, EngineReset):
            await self.session.renew(self.run_lease)

    @property
    def renew_s(self) -> float:
        """How often."""
        return self._ttl_s / 3


async def _keep(tenant: weakref.ref[_Tenant]) -> None:
    """Renew for as long as anybody has the store."""
    while True:
        living = tenant()
        if living is None:
            return
        pause_s = living.renew_s
        await living.renew()
        del living
        await asyncio.sleep(pause_s)


def _batches(values: Mapping[str, bytes | str], count_max: int) -> Iterator[dict[str, bytes | str]]:
    """As few as etcd's limits allow."""
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
