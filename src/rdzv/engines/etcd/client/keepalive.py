"""Renewal of leases: one stream for all leases of a client."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from .cluster import Cluster
from .errors import Unanswered
from .messages import Header, decode_lease, encode_lease
from .stream import Stream


class KeepAlive:
    """Sends renewals and repeats each, which is harmless, until it is answered or its timeout has passed."""

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
            self._stream.send(encode_lease(lease))
        try:
            return await asyncio.wait_for(waiter, timeout_s)
        except asyncio.TimeoutError:
            # A stream that takes renewals and does not answer may be dead at the other end: try a fresh one.
            self._stream.reopen()
            raise Unanswered(f"no answer to a renewal within {timeout_s:g} s", applied=None) from None
        finally:
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters and self._waiting.get(lease) is waiters:
                del self._waiting[lease]

    async def close(self) -> None:
        await self._stream.close()
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(Unanswered("the client is closed", applied=None))

    def _pending(self) -> Iterator[bytes]:
        return map(encode_lease, tuple(self._waiting))

    def _receive(self, message: bytes) -> Header:
        reply = decode_lease(message)
        for waiter in self._waiting.pop(reply.id, ()):
            if not waiter.done():
                waiter.set_result(reply.ttl_s)
        return reply.header
