"""A stream in both directions that is opened anew, on whichever member is in use, whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from .cluster import Cluster, ClusterMember
from .errors import EtcdError, TokenInvalid, error_of
from .messages import Header

logger = logging.getLogger("rdzv.etcd")


class Stream:
    """Opened with the first `send`. `greet` gives what must be said on every new connection, `hear` gets every message."""

    def __init__(
        self,
        cluster: Cluster,
        method: str,
        greet: Callable[[], Iterable[bytes]],
        hear: Callable[[bytes], Header],
    ) -> None:
        self._cluster = cluster
        self._method = method
        self._greet = greet
        self._hear = hear
        self._outbox: deque[bytes] = deque()
        self._more: asyncio.Future[None] | None = None
        self._talking: asyncio.Task[tuple[bool, EtcdError | None]] | None = None
        self._keeping: asyncio.Task[None] | None = None

    def send(self, message: bytes) -> None:
        """Say it soon, if the connection lasts until then; what must survive is said by `greet`."""
        if self._keeping is None:
            if not self._cluster.closed:
                self._keeping = self._cluster.loop.create_task(self._keep_open(), name=f"rdzv {self._method}")
            return
        self._outbox.append(message)
        self._wake()

    def reopen(self) -> None:
        """This connection is no good."""
        if self._talking is not None:
            self._talking.cancel()

    async def close(self) -> None:
        """Never again."""
        keeping = self._keeping
        if keeping is not None:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _keep_open(self) -> None:
        cluster = self._cluster
        cluster.use()
        cluster.on_switch.add(self.reopen)
        failures = 0
        try:
            while True:
                member = cluster.current
                self._talking = cluster.loop.create_task(self._talk(member), name=f"rdzv {self._method}")
                await asyncio.wait([self._talking])
                heard, fault = (False, None) if self._talking.cancelled() else self._talking.result()
                if fault is None:
                    continue  # We moved to another member.
                failures = 1 if heard else failures + 1
                if not isinstance(fault, TokenInvalid):
                    cluster.fail(member)
                await cluster.pause(failures - 1)
        finally:
            cluster.on_switch.discard(self.reopen)
            cluster.unuse()
            if self._talking is not None:
                self._talking.cancel()

    async def _talk(self, member: ClusterMember) -> tuple[bool, EtcdError | None]:
        """Until it breaks: whether anything was heard, and why it broke."""
        cluster, heard = self._cluster, False
        token, fault = cluster.token, None
        call: Any = None
        writing: asyncio.Task[None] | None = None
        try:
            await cluster.log_in()
            token = cluster.token
            # A member without a leader ends the stream then, instead of leaving us in silence.
            call = member.channel.stream_stream(self._method)(metadata=cluster.metadata(hasleader="true"))
            self._outbox = deque(self._greet())  # What was to be said on the last connection is void.
            writing = cluster.loop.create_task(self._write(call), name=f"rdzv {self._method}")
            while (message := await call.read()) is not grpc.aio.EOF:
                cluster.heard(member, self._hear(message))
                heard = True
            fault = error_of(await call.code(), await call.details() or "the stream was ended")
        except grpc.aio.AioRpcError as error:
            fault = error_of(error.code(), error.details() or "")
        except EtcdError as error:
            fault = error
        except Exception as error:
            # A message that we cannot read, or a defect of ours: it must not end all watches without a word.
            logger.exception("etcd %s: %s", member.name, self._method)
            fault = EtcdError(repr(error))
        finally:
            if writing is not None:
                writing.cancel()
            if call is not None:
                call.cancel()
        if isinstance(fault, TokenInvalid):
            cluster.forget_token(token)
        return heard, fault

    async def _write(self, call: Any) -> None:
        """One after the other: gRPC takes no second message before the first is on its way."""
        while True:
            while self._outbox:
                try:
                    await call.write(self._outbox.popleft())
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # Whoever reads finds out why.
            self._more = self._cluster.loop.create_future()
            await self._more

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)
