"""TLS between a socket and one end of a connection.

It is driven by hand (`ssl.MemoryBIO`). asyncio's own TLS answers no client that speaks in the clear, tells the server nothing
of handshakes that failed, does not count a connection before its handshake is over, and (3.11) keeps a buffer of 256 KiB for
each of thousands of connections. Here the first bytes are looked at, so that a client without TLS gets a sentence; a connection
counts from its first moment; and it costs nothing until something has come.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from contextlib import suppress
from typing import Any, cast

from .stream import FramedProtocol
from .trust import Certificates, explain

_RECORDS = (0x15, 0x16)
"""The possible first bytes of TLS: an alert, or a handshake."""


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """A protocol to the socket and a transport to the end. The end is connected at once, and hears when the channel is safe."""

    __slots__ = (
        "_certificates", "_digest", "_end", "_heard", "_host", "_in", "_out", "_over", "_paused", "_queue", "_raw", "_ready",
        "_tls",
    )  # fmt: skip

    _raw: asyncio.Transport
    _tls: ssl.SSLObject | None

    def __init__(self, end: FramedProtocol, certificates: Certificates, host: str | None = None) -> None:
        """`host`: the name to be found in the server's certificate; None: this side is the server."""
        super().__init__()
        self._end = end
        self._certificates = certificates
        self._host = host if host is None else certificates.name or host
        self._tls = None
        self._digest = b""
        self._heard = self._ready = self._paused = self._over = False
        self._queue: list[bytes] = []

    # ---- the stream's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connect the end. The client sends the first TLS record."""
        self._raw = cast("asyncio.Transport", transport)
        self._end.connection_made(self)
        if self._host is None:
            return
        try:
            self._begin()
        except ValueError as error:  # No certificate can be for such a name.
            self._over = True
            self._end.insecure(f"{self._host!r} cannot be looked for in its certificate: {error}", True)
        else:
            self._shake_hands()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the end, and let go of it and of TLS: the two hold each other, and thousands would wait for the collector."""
        self._over = True
        self._queue.clear()
        self._tls = None
        end = self._end
        del self._end
        end.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the end's own buffer: its contents are copied before it is used again."""
        return self._end.get_buffer(sizehint)

    def buffer_updated(self, nbytes: int) -> None:
        """Decrypt bytes that arrived."""
        data = self._end.get_buffer(-1)[:nbytes]
        if not self._heard:
            self._heard = True
            if data[0] not in _RECORDS:
                self._over = True
                self._end.in_the_clear(self._raw, bytes(data[:64]))
                return
        if self._over:
            return
        if self._tls is None:
            self._begin()
        self._in.write(data)
        if self._ready:
            self._read()
        else:
            self._shake_hands()

    def eof_received(self) -> None:
        """Pass it on. It may be the end of the process: TLS's own end, which a live one sends, is read before."""
        self._end.eof_received()

    def pause_writing(self) -> None:
        self._end.pause_writing()

    def resume_writing(self) -> None:
        self._end.resume_writing()

    # ---- TLS

    def _begin(self) -> None:
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        if self._host is None:
            context, self._digest = self._certificates.server()
            self._tls = context.wrap_bio(self._in, self._out, server_side=True)
        else:
            context = self._certificates.client()
            self._tls = context.wrap_bio(self._in, self._out, server_hostname=self._host)

    def _shake_hands(self) -> None:
        assert self._tls is not None, "begun before"
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._flush()
            return
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._ready = True
        if self._host is not None:
            self._digest = hashlib.sha256(self._tls.getpeercert(binary_form=True) or b"").digest()
        # Send this with the last record of the handshake, not after it. If the server refuses that record, a later segment
        # would meet a closed connection, and the reason would be lost.
        queue, self._queue = self._queue, []
        self._encrypt(b"".join(queue))
        self._flush()
        self._read()

    def _read(self) -> None:
        assert self._tls is not None, "begun before"
        buffer = self._end.get_buffer(-1)
        try:
            while not self._paused and not self._over and not self._raw.is_closing():
                size = cast("int", self._tls.read(len(buffer), buffer))  # With a buffer it is the number of bytes.
                if not size:
                    break
                self._end.buffer_updated(size)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self._raw.close()
        except ssl.SSLError as error:
            self._fail(error)
            return
        self._flush()

    def _fail(self, error: ssl.SSLError) -> None:
        self._flush()  # The other side gets the alert before the connection ends.
        self._over = True
        problem, is_trust = explain(error, self._host or "")
        self._end.insecure(problem, is_trust)

    def _encrypt(self, data: bytes) -> None:
        assert self._tls is not None, "begun before"
        rest = memoryview(data)
        while rest:
            rest = rest[self._tls.write(rest) :]

    def _flush(self) -> None:
        if self._out.pending and not self._raw.is_closing():
            self._raw.write(self._out.read())

    # ---- the end's side

    def write(self, data: Any) -> None:
        """Encrypt and write; until the handshake is over, keep the data."""
        if self._over:
            return
        if not self._ready:
            self._queue.append(bytes(data))
            return
        self._encrypt(data)
        self._flush()

    def close(self) -> None:
        """Send the end of TLS, and close when all has been sent."""
        if self._ready and not self._over and self._tls is not None:
            with suppress(ssl.SSLError):
                self._tls.unwrap()
            self._flush()
        self._raw.close()

    def abort(self) -> None:
        self._raw.abort()

    def is_closing(self) -> bool:
        return self._raw.is_closing()

    def pause_reading(self) -> None:
        """Stop reading and decrypting."""
        self._paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        """Read again, first what has come already. Not within this call: its caller may be reading."""
        self._paused = False
        self._raw.resume_reading()
        asyncio.get_running_loop().call_soon(self._read_on)

    def _read_on(self) -> None:
        if self._ready and not self._over:
            self._read()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return the socket's value; or, for `binding`, the digest of the certificate, which no one in between can show."""
        return self._digest if name == "binding" else self._raw.get_extra_info(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._raw.get_write_buffer_size()
