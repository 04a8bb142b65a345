"""A thin client for etcd v3 with what rendezvous and its store need.

    client = Client([("h1", 2379), ("h2", 2379)], Credentials())
    await client.put(b"k", b"v")

A client belongs to one event loop and raises the errors of `errors`. No known client for Python has all of:
TLS, a choice among members that notices a frozen one, watches that resume correctly, renewed tokens, and writes that
happen at most once.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress

from ....errors import LimitExceeded
from . import messages
from .cluster import Cluster
from .counting import KeyCounter
from .credentials import Credentials
from .errors import LeaseExists, LeaseNotFound, RequestRefused, Unanswered
from .stream import Stream
from .watches import Watches

_KV = "/etcdserverpb.KV/"
_ABSENT_SUFFIX = b"\0never there"  # Appended to a key, it names a key that nobody writes: deleting that has no effect.


class KeepAlive:
    """One stream for all leases of a client. Each renewal is repeated, which is harmless, until its answer or timeout."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._waiting: dict[int, list[asyncio.Future[int]]] = {}
        self._stream = Stream(cluster, "/etcdserverpb.Lease/LeaseKeepAlive", self._pending, self._receive)

    async def renew(self, lease: int, timeout_s: float) -> int:
        """Return the seconds that the lease has from now on; 0 or less: it has ended. Raises Unanswered."""
        self._cluster.check_usable()
        waiter: asyncio.Future[int] = self._cluster.loop.create_future()
        waiters = self._waiting.setdefault(lease, [])
        waiters.append(waiter)
        if len(waiters) == 1:
            self._stream.send(messages.encode_lease(lease))
        timer = self._cluster.loop.call_later(timeout_s, self._give_up, waiter, timeout_s)
        try:
            return await waiter
        finally:
            timer.cancel()
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters and self._waiting.get(lease) is waiters:
                del self._waiting[lease]

    def _give_up(self, waiter: asyncio.Future[int], waited_s: float) -> None:
        if not waiter.done():
            # A stream that takes renewals and does not answer may be dead at the other end: try a fresh one.
            self._stream.reopen()
            waiter.set_exception(Unanswered(f"no answer to a renewal within {waited_s:g} s", applied=None))

    async def close(self) -> None:
        await self._stream.close()
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(Unanswered("the client is closed", applied=None))

    def _pending(self) -> Iterator[bytes]:
        return map(messages.encode_lease, tuple(self._waiting))

    def _receive(self, message: bytes) -> messages.Header:
        reply = messages.decode_lease(message)
        for waiter in self._waiting.pop(reply.id, ()):
            if not waiter.done():
                waiter.set_result(reply.ttl_s)
        return reply.header


class Client:
    """Requests, leases and watches of one cluster."""

    def __init__(self, hosts: Sequence[tuple[str, int]], credentials: Credentials, timeout_s: float = 10.0) -> None:
        self.cluster = Cluster(hosts, credentials, timeout_s)
        self.reads_can_crash_etcd = True
        """Whether to work around a bug of old versions (see `has_read_crash`). True until `status` knows the version."""
        self._call = self.cluster.call
        self._keepalive = KeepAlive(self.cluster)
        self._watches = Watches(self.cluster)
        self.watch, self.unwatch = self._watches.add, self._watches.remove
        self.counter = KeyCounter(self.read)

    # ---- keys

    async def range(self, request: messages.RangeRequest) -> tuple[messages.Header, messages.RangeResponse]:
        reply = await self._call(_KV + "Range", request.encode(), retry=True)
        return messages.decode_header(reply), messages.decode_range(reply)

    async def read(self, ranges: Sequence[messages.RangeRequest]) -> messages.TxnResponse:
        """Read several ranges in one transaction."""
        return await self.txn((), ranges)

    async def get(self, key: bytes) -> messages.KeyValue | None:
        _, found = await self.range(messages.RangeRequest(key))
        return found.items[0] if found.items else None

    async def put(self, key: bytes, value: bytes, lease: int = 0) -> int:
        """Write a key and return the revision of the write."""
        request = messages.PutRequest(key, value, lease).encode()
        return messages.decode_header(await self._call(_KV + "Put", request, retry=False)).revision

    async def txn(
        self, compares: Sequence[messages.Compare] = (), then: Sequence[messages.Request] = (),
        otherwise: Sequence[messages.Request] = (), timeout_s: float | None = None,
        instead: Sequence[messages.TxnBranch] = (), *, retry: bool = False,
    ) -> messages.TxnResponse:  # fmt: skip
        """Compare, then apply one branch, all at one revision.

        A transaction is repeated when no reply comes if it only reads, or if the caller knows that this is harmless (`retry`).
        """
        cases = [part for case in instead for part in (case.compares, case.then)]
        operations = (*then, *otherwise, *(one for case in instead for one in case.then))
        only_reads = all(isinstance(one, messages.RangeRequest) for one in operations)
        if only_reads and self.reads_can_crash_etcd and (then or otherwise):
            # A deletion of nothing, in the branch not taken, makes etcd apply the transaction through its log. There a
            # caller that goes away cannot cancel it, which is what crashes old versions.
            otherwise = [*otherwise, messages.DeleteRequest((*then, *otherwise)[0].key + _ABSENT_SUFFIX)]
        for part in (compares, then, otherwise, *cases):
            if len(part) > messages.OPERATIONS_MAX:
                most = messages.OPERATIONS_MAX
                raise ValueError(f"a transaction of {len(part)} compares or operations; etcd takes {most}")
        request = messages.encode_txn(compares, then, otherwise, instead)
        if len(request) > messages.REQUEST_MAX:
            raise LimitExceeded("a transaction", len(request), messages.REQUEST_MAX)
        return messages.decode_txn(await self._call(_KV + "Txn", request, retry=retry or only_reads, timeout_s=timeout_s))

    async def compact(self, revision: int) -> None:
        """Make etcd forget all changes before that revision."""
        await self._call(_KV + "Compact", messages.encode_compaction(revision), retry=True)

    # ---- leases

    async def grant(self, ttl_s: int) -> messages.LeaseResponse:
        """Grant a lease. The client chooses the id, so a retry after a lost reply finds the lease instead of making two."""
        lease = secrets.randbits(62) + 1
        try:
            return await self._lease("LeaseGrant", lease, ttl_s)
        except LeaseExists:
            return messages.LeaseResponse(messages.Header(), lease, ttl_s)

    async def renew(self, lease: int, timeout_s: float | None = None) -> int:
        """Restart the time of a lease and return it in seconds. Raises LeaseNotFound."""
        limit_s = self.cluster.timeout_s if timeout_s is None else timeout_s
        ttl_s = await self._keepalive.renew(lease, limit_s)
        if ttl_s <= 0 and await self.time_to_live(lease) > 0:
            # A member that has just become etcd's leader may not know yet of a lease that was granted before: ask again.
            ttl_s = await self._keepalive.renew(lease, limit_s)
        if ttl_s <= 0:
            raise LeaseNotFound(f"lease {lease} has ended")
        return ttl_s

    async def revoke(self, lease: int) -> None:
        """End a lease. Raises LeaseNotFound."""
        await self._lease("LeaseRevoke", lease)

    async def time_to_live(self, lease: int) -> int:
        """Return the seconds that a lease has left; 0 or less: it has ended."""
        # A linearizable read makes the member catch up with the others first, even if the user may not read this key.
        with suppress(RequestRefused):
            await self.range(messages.RangeRequest(b"\0", count_only=True))
        try:
            return (await self._lease("LeaseTimeToLive", lease)).ttl_s
        except LeaseNotFound:
            return -1

    async def _lease(self, method: str, lease: int, ttl_s: int = 0) -> messages.LeaseResponse:
        request = messages.encode_lease(lease, ttl_s)
        return messages.decode_lease(await self._call("/etcdserverpb.Lease/" + method, request, retry=True))

    # ---- the cluster

    async def status(self, timeout_s: float | None = None) -> messages.StatusResponse:
        """Return the status of the member in use."""
        method = "/etcdserverpb.Maintenance/Status"
        status = messages.decode_status(await self._call(method, b"", retry=True, timeout_s=timeout_s))
        self.reads_can_crash_etcd = has_read_crash(status.version)
        return status

    async def members(self) -> list[messages.MemberResponse]:
        """Return the members of the cluster."""
        return messages.decode_members(await self._call("/etcdserverpb.Cluster/MemberList", b"", retry=True))

    async def close(self) -> None:
        """Close streams and channels. Leases stay: revoke those that should end now."""
        if self.cluster.forked:
            return
        self.counter.close()
        await self._keepalive.close()
        await self._watches.close()
        await self.cluster.close()


def has_read_crash(version: str) -> bool:
    """Whether this version of etcd crashes when the caller of a read-only transaction is gone before it is applied.

    etcd #14110 and #14891, fixed in 3.4.23 and 3.5.7. Seen on 3.5.1 as soon as members left while requests were pending.
    """
    numbers = tuple(map(int, re.findall(r"\d+", version)[:3]))
    return numbers < (3, 4, 23) or (3, 5) <= numbers < (3, 5, 7)
