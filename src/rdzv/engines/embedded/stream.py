"""The asyncio side of a connection: moves bytes between a socket and a `FrameStream`, and decides nothing."""

from __future__ import annotations

import asyncio
import threading
from typing import cast

from ...system.fork import let_go_in_children
from .frame_stream import FrameStream
from .frames import READ_MAX


class _Buffers(threading.local):
    """One read buffer for each thread: it is empty again before another connection of that thread reads."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(READ_MAX))


_buffers = _Buffers()


class FramedProtocol(FrameStream, asyncio.BufferedProtocol):
    """A `FrameStream` that asyncio can drive. There are thousands: one object each, no task, no buffer of its own."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        let_go_in_children(self)

    def fileno(self) -> int:
        """Return the descriptor that a forked child must let go of; -1 once it is closed."""
        sock = self.transport.get_extra_info("socket")
        return -1 if sock is None else sock.fileno()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return _buffers.view

    def buffer_updated(self, nbytes: int) -> None:
        self.received(_buffers.view[:nbytes])
