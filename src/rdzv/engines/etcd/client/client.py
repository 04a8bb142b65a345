"""A thin client for etcd v3: what rendezvous and its store need of it, and nothing else.

    client = Client([("h1", 2379), ("h2", 2379)], Access())
    await client.put(b"k", b"v")

It belongs to one event loop. Errors are those of `faults`. It is written here because no client for Python has TLS, a choice
among members that notices a frozen one, watches that resume rightly, renewed tokens, and writes that happen at most once.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress

from ....errors import LimitExceeded
from .cluster import Cluster
from .counting import KeyCounter
from .credentials import Credentials
from .errors import LeaseExists, LeaseNotFound, RequestRefused
from .keepalive import KeepAlive
from .messages import (
    OPERATIONS_MAX,
    REQUEST_MAX,
    Compare,
    DeleteRequest,
    Header,
    KeyValue,
    LeaseResponse,
    PutRequest,
    RangeRequest,
    RangeResponse,
    Request,
    StatusResponse,
    TxnBranch,
    TxnResponse,
    decode_header,
    decode_lease,
    decode_range,
    decode_status,
    decode_txn,
    encode_compaction,
    encode_lease,
    encode_txn,
)
from .watches import Listener, Subscription, Watches

_KV = "/etcdserverpb.KV/"
_LEASE = "/etcdserverpb.Lease/"
_BARREN = b"\0never there"
"""Behind a key: deleting that does nothing, but makes a transaction one that etcd has its quorum agree on."""


class Client:
    """See the module's docstring."""

    def __init__(self, hosts: Sequence[tuple[str, int]], access: Credentials, timeout_s: float = 10.0) -> None:
        self.cluster = Cluster(hosts, access, timeout_s)
        self.fragile = True
        """It may be an etcd that crashes when a transaction of nothing but reads is given up; `status` tells."""
        self._renewals = KeepAlive(self.cluster)
        self._watches = Watches(self.cluster)
        self.census = KeyCounter(lambda ranges: self.txn((), ranges))

    def on_header(self, listener: Callable[[Header], None]) -> Callable[[], None]:
        """Have it called with the header of every answer, until the function that this gives is called."""
        self.cluster.on_header.append(listener)
        return lambda: self.cluster.on_header.remove(listener)

    # ---- keys

    async def range(self, request: RangeRequest, timeout_s: float | None = None) -> tuple[Header, RangeResponse]:
        """Read keys."""
        return decode_range(await self._ask(_KV + "Range", request.encode(), repeat=True, timeout_s=timeout_s))

    async def get(self, key: bytes) -> KeyValue | None:
        """Read one key."""
        _, found = await self.range(RangeRequest(key))
        return found.items[0] if found.items else None

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Write a key; the revision it was written at."""
        return decode_header(await self._ask(_KV + "Put", PutRequest(key, value, lease).encode(), repeat=False)).revision

    async def delete(self, key: bytes, end: bytes = b"") -> int:
        """Delete a key, or all up to `end`; the revision of the store afterwards."""
        return decode_header(await self._ask(_KV + "DeleteRange", DeleteRequest(key, end).encode(), repeat=False)).revision

    async def txn(
        self,
        compares: Sequence[Compare] = (),
        then: Sequence[Request] = (),
        otherwise: Sequence[Request] = (),
        timeout_s: float | None = None,
        instead: Sequence[TxnBranch] = (),
        *,
        repeat: bool = False,
    ) -> TxnResponse:
        """Compare, then do one thing or the other, at one revision.

        It is repeated freely if it only reads, or if who asks knows that no harm comes of it (`repeat`).
        """
        cases = [part for case in instead for part in (case.compares, case.then)]
        operations = (*then, *otherwise, *(one for case in instead for one in case.then))
        reads = all(isinstance(one, RangeRequest) for one in operations)
        if reads and self.fragile and (then or otherwise):
            otherwise = [*otherwise, DeleteRequest((*then, *otherwise)[0].key + _BARREN)]
        for what in (compares, then, otherwise, *cases):
            if len(what) > OPERATIONS_MAX:
                problem = f"a transaction of {len(what)} compares or operations; etcd takes {OPERATIONS_MAX}"
                raise ValueError(problem)
        request = encode_txn(compares, then, otherwise, instead)
        if len(request) > REQUEST_MAX:
            raise LimitExceeded("a transaction", len(request), REQUEST_MAX)
        return decode_txn(await self._ask(_KV + "Txn", request, repeat=repeat or reads, timeout_s=timeout_s))

    async def compact(self, revision: int) -> None:
        """Have etcd forget what was before that revision."""
        await self._ask(_KV + "Compact", encode_compaction(revision), repeat=True)

    # ---- leases

    async def grant(self, ttl_s: int) -> LeaseResponse:
        """Make a lease. We choose its id, so that one whose answer was lost is found and not made twice."""
        lease = secrets.randbits(62) + 1
        request = encode_lease(lease, ttl_s)
        try:
            return decode_lease(await self._ask(_LEASE + "LeaseGrant", request, repeat=True))
        except LeaseExists:
            return LeaseResponse(Header(), lease, ttl_s)

    async def renew(self, lease: int, timeout_s: float | None = None) -> int:
        """Start its time anew; how many seconds that is. Raises LeaseNotFound."""
        limit_s = self.cluster.timeout_s if timeout_s is None else timeout_s
        ttl_s = await self._renewals.renew(lease, limit_s)
        if ttl_s <= 0 and await self.time_to_live(lease) > 0:
            # A member that has just become etcd's leader may not have heard yet of a lease that was granted before.
            ttl_s = await self._renewals.renew(lease, limit_s)
        if ttl_s <= 0:
            raise LeaseNotFound(f"lease {lease} has ended")
        return ttl_s

    async def revoke(self, lease: int) -> None:
        """End it. Raises LeaseNotFound."""
        await self._ask(_LEASE + "LeaseRevoke", encode_lease(lease), repeat=True)

    async def time_to_live(self, lease: int) -> int:
        """How many seconds it has left; at most 0: it has ended."""
        with suppress(RequestRefused):  # We may not read that, but before it says so the member catches up with the others.
            await self.range(RangeRequest(b"\0", count_only=True))
        try:
            return decode_lease(await self._ask(_LEASE + "LeaseTimeToLive", encode_lease(lease), repeat=True)).ttl_s
        except LeaseNotFound:
            return -1

    # ---- watches

    def watch(self, key: bytes, end: bytes, start: int, listener: Listener) -> Subscription:
        """Tell the listener of all changes from revision `start` on."""
        return self._watches.add(key, end, start, listener)

    def unwatch(self, subscription: Subscription) -> None:
        """No more of it."""
        self._watches.remove(subscription)

    # ---- the cluster

    async def status(self, timeout_s: float | None = None) -> StatusResponse:
        """How the member in use sees itself."""
        answer = await self._ask("/etcdserverpb.Maintenance/Status", b"", repeat=True, timeout_s=timeout_s)
        status = decode_status(answer)
        self.fragile = is_fragile(status.version)
        return status

    async def close(self) -> None:
        """Give everything back, except leases: revoke first what should end now."""
        if self.cluster.forked:
            return
        self.census.close()
        await self._renewals.close()
        await self._watches.close()
        await self.cluster.close()

    async def _ask(self, method: str, request: bytes, *, repeat: bool, timeout_s: float | None = None) -> bytes:
        return await self.cluster.ask(method, request, repeat=repeat, timeout_s=timeout_s)


def is_fragile(version: str) -> bool:
    """Etcd #14110 and #14891: reads in a transaction whose caller is gone crashed the server. Mended in 3.4.23 and 3.5.7."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return numbers < (3, 4, 23) or (3, 5) <= numbers < (3, 5, 7)
