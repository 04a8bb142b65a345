"""A bidirectional stream that reopens on the member in use whenever it breaks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from .cluster import Cluster, ClusterMember
from .errors import EtcdError, TokenInvalid, error_of
from .messages import Header

logger = logging.getLogger("rdzv.etcd")


class Stream:
    """A stream that opens with the first `send`.

    `on_open` returns the messages to send first on every new connection. `on_message` gets every message received.
    """

    def __init__(
        self, cluster: Cluster, method: str, on_open: Callable[[], Iterable[bytes]],
        on_message: Callable[[bytes], Header],
    ) -> None:  # fmt: skip
        self._cluster = cluster
        self._method = method
        self._on_open = on_open
        self._on_message = on_message
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._connection: asyncio.Task[tuple[bool, EtcdError | None]] | None = None
        self._task: asyncio.Task[None] | None = None

    def send(self, message: bytes) -> None:
        """Queue a message for the current connection. If that breaks first, only `on_open` can send it again."""
        if self._task is None:
            if not self._cluster.closed:
                self._task = self._cluster.loop.create_task(self._run(), name=f"rdzv {self._method}")
            return
        self._outbox.put_nowait(message)

    def reopen(self) -> None:
        if self._connection is not None:
            self._connection.cancel()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        cluster = self._cluster
        cluster.start_use()
        cluster.on_switch.add(self.reopen)
        failures = 0
        try:
            while True:
                member = cluster.current
                self._connection = cluster.loop.create_task(self._connect(member), name=f"rdzv {self._method}")
                await asyncio.wait([self._connection])
                received, fault = (False, None) if self._connection.cancelled() else self._connection.result()
                if fault is None:
                    continue  # The cluster switched to another member.
                failures = 1 if received else failures + 1
                if not isinstance(fault, TokenInvalid):
                    cluster.mark_failed(member)
                await cluster.back_off(failures - 1)
        finally:
            cluster.on_switch.discard(self.reopen)
            cluster.end_use()
            if self._connection is not None:
                self._connection.cancel()

    async def _connect(self, member: ClusterMember) -> tuple[bool, EtcdError | None]:
        """Use one connection until it breaks. Return whether anything was received, and why it broke."""
        cluster, received = self._cluster, False
        token, fault = cluster.token, None
        call: Any = None
        writing: asyncio.Task[None] | None = None
        try:
            await cluster.log_in()
            token = cluster.token
            # "hasleader" makes a member without a leader end the stream. Otherwise it would stay open and silent.
            call = member.channel.stream_stream(self._method)(metadata=cluster.metadata(hasleader="true"))
            self._outbox = asyncio.Queue()  # Messages for the previous connection are void: `on_open` repeats the valid ones.
            for message in self._on_open():
                self._outbox.put_nowait(message)
            writing = cluster.loop.create_task(self._write(call), name=f"rdzv {self._method}")
            while (message := await call.read()) is not grpc.aio.EOF:
                cluster.note_reply(member, self._on_message(message))
                received = True
            fault = error_of(await call.code(), await call.details() or "the stream was ended")
        except grpc.aio.AioRpcError as error:
            fault = error_of(error.code(), error.details() or "")
        except EtcdError as error:
            fault = error
        except Exception as error:
            # An unreadable message or a bug in a listener must not end all other watches silently.
            logger.exception("etcd %s: %s", member.name, self._method)
            fault = EtcdError(repr(error))
        finally:
            if writing is not None:
                writing.cancel()
            if call is not None:
                call.cancel()
        if isinstance(fault, TokenInvalid):
            cluster.forget_token(token)
        return received, fault

    async def _write(self, call: Any) -> None:
        """Write the queued messages one by one: gRPC accepts no second message before the first is on its way."""
        while True:
            message = await self._outbox.get()
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # The reading side of `_connect` gets the reason.
