"""From bytes to frames: one end of a connection, without I/O.

It reads the preamble of the other side, then whole frames, and hands each to the end that it is part of (`session.py` for the
server, `client_protocol.py` for the client).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from ...errors import Incompatible
from .frames import MAGIC, PREAMBLE, SIZE, SIZE_BYTES, describe


class Transport(Protocol):
    """The half of `asyncio.Transport` that a connection needs. The simulator has one of its own."""

    def write(self, data: bytes | memoryview) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...
    def is_closing(self) -> bool: ...
    def is_reading(self) -> bool: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int: ...
    def get_extra_info(self, name: str, default: Any = None) -> Any: ...


class FrameStream(ABC):
    """One end of a connection, without I/O: bytes come in by `received` and go out by the transport it is given.

    Only the beginning of an incomplete frame is kept. Server, client and simulator all read with this class.
    """

    __slots__ = ("__weakref__", "_greeted", "_need", "_rest", "frame_max", "is_held", "transport")

    transport: Transport

    def __init__(self, frame_max: int) -> None:
        self.frame_max = frame_max
        self._greeted = False
        self.is_held = False
        self._need = 0
        self._rest: bytearray | None = None

    # ---- for the two ends to fill in

    @abstractmethod
    def heard(self) -> None:
        """Called when bytes have arrived, before they are read."""

    def greeted(self) -> None:  # noqa: B027  Only the server answers.
        """Called when the other side's preamble has come and is right."""

    def keeps_some(self) -> None:  # noqa: B027  Only the server has to count.
        """Called when bytes of an incomplete frame are kept."""

    @abstractmethod
    def frame_received(self, payload: memoryview) -> None:
        """Handle a frame. The payload is valid only during the call. Incompatible ends the connection."""

    @abstractmethod
    def violated(self, problem: str, start: bytes = b"") -> None:
        """End the connection: the other side broke the protocol. `start`: its first bytes, if the preamble was wrong."""

    @abstractmethod
    def in_the_clear(self, transport: Transport, start: bytes) -> None:
        """End the connection: the other side does not speak TLS, as it should. `start`: its first bytes."""

    @abstractmethod
    def insecure(self, problem: str, untrusted: bool) -> None:
        """End the connection: TLS failed. `untrusted`: because one side does not trust the other."""

    # ---- reading

    def received(self, data: memoryview) -> None:
        """Read bytes that arrived, which may end anywhere."""
        self.heard()
        rest = self._rest
        if rest is None:
            self._read(data)
            return
        rest += data
        if len(rest) >= self._need:
            self._rest = None
            self._read(memoryview(rest))
        else:
            self.keeps_some()

    @property
    def kept(self) -> int:
        """Bytes of the incomplete frame."""
        return 0 if self._rest is None else len(self._rest)

    def hold(self) -> None:
        """Stop reading until `go_on`. Bytes that have arrived wait."""
        self.is_held = True
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def go_on(self) -> None:
        """Read again after `hold`."""
        self.is_held = False
        rest, self._rest = self._rest, None
        if rest is not None:
            self._read(memoryview(rest))
        if not self.is_held and not self.transport.is_closing():
            self.transport.resume_reading()

    def _read(self, data: memoryview) -> None:
        at = 0
        if not self._greeted:
            at = self._read_preamble(data)
            if not at:
                return
        end = len(data)
        need = 0
        while at < end and not self.is_held and not self.transport.is_closing():
            if end - at < SIZE_BYTES:
                need = SIZE_BYTES
                break
            (size,) = SIZE.unpack_from(data, at)
            if size > self.frame_max:
                self.violated(f"it sent a frame of {size} bytes, at most {self.frame_max} are allowed")
                return
            if end - at - SIZE_BYTES < size:
                need = SIZE_BYTES + size
                break
            at += SIZE_BYTES
            try:
                self.frame_received(data[at : at + size])
            except Incompatible as error:
                self.violated(f"it sent what cannot be read: {error.sentence}")
                return
            at += size
        if at < end:
            self._keep(data[at:], need)

    def _read_preamble(self, data: memoryview) -> int:
        """Return how many bytes it took; 0 if it is incomplete or not ours."""
        start = bytes(data[: len(PREAMBLE)])
        if start == PREAMBLE:
            self._greeted = True
            self.greeted()
            return len(start)
        # A version is only known once its digits are there.
        if PREAMBLE.startswith(start) or (start.startswith(MAGIC) and len(start) < len(PREAMBLE)):
            self._keep(data, len(data) + 1)  # Look again at the next byte: a stranger may never send a whole preamble.
        else:
            self.violated(describe(bytes(data[:64])), bytes(data[:64]))
        return 0

    def _keep(self, data: memoryview, need: int) -> None:
        if not self.transport.is_closing():
            self._rest = bytearray(data)
            self._need = need
            self.keeps_some()
