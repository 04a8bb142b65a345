"""Revokes leases of etcd with the standard library alone: one gRPC call for each, as HTTP/2 frames written by hand.

A sentinel needs nothing else of gRPC, and importing that would take ten times as long as the calls: on a busy machine most of
the time until a death is noticed. It is enough for an etcd without TLS and without users. Whatever it does not understand it
leaves to the real client.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

LEASES_MAX = 1000  # At once, on one connection: their frames are less than the first window of HTTP/2 allows.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY = 0, 1, 3, 4, 6, 7
END_STREAM, ACK, END_HEADERS = 1, 1, 4
FRAME_MAX = 1 << 16  # etcd sends frames of a few dozen bytes here.


def revoke(hosts: Sequence[tuple[str, int]], leases: Sequence[int], attempt_s: float, pause_s: float, limit_s: float) -> bool:
    """Revoke the leases by all of etcd's members at once, again and again. Return whether they are gone for sure.

    A dead or frozen member then costs no time, and a second request does no harm. False: no member can be asked in this way,
    one has refused, as it does for a lease that has ended, or the time is over.
    """
    if len(leases) > LEASES_MAX:
        return False
    answers: list[bool] = []
    came = threading.Condition()
    deadline = time.monotonic() + limit_s

    def ask(host: str, port: int) -> None:
        while time.monotonic() < deadline and not answers:
            try:
                answer = _revoke_by(host, port, leases, attempt_s)
            except OSError:
                time.sleep(pause_s)
                continue
            with came:
                answers.append(answer)
                came.notify()
            return

    for host, port in hosts:
        threading.Thread(target=ask, args=(host, port), daemon=True).start()
    with came:
        came.wait_for(lambda: answers, limit_s)
        return bool(answers) and answers[0]


def _revoke_by(host: str, port: int, leases: Sequence[int], timeout_s: float) -> bool:
    """Ask one member. Return whether it has revoked all. Raises OSError if there is no answer within the time."""
    with socket.create_connection((host, port), timeout_s) as connection:
        requests = [_request(f"{host}:{port}", 2 * index + 1, lease) for index, lease in enumerate(leases)]
        connection.sendall(b"".join([PREFACE, _frame(SETTINGS, 0, 0, b""), *requests]))
        left = {2 * index + 1 for index in range(len(leases))}
        frames = _frames(connection, time.monotonic() + timeout_s)
        while left:
            kind, flags, stream, body = next(frames)
            if kind in (SETTINGS, PING) and not flags & ACK:
                connection.sendall(_frame(kind, ACK, 0, body if kind == PING else b""))
            elif kind == DATA and stream in left:
                left.remove(stream)  # Only a success has a message. A refusal consists of headers.
            elif kind == GO_AWAY or (stream in left and (kind == RESET or (kind == HEADERS and flags & END_STREAM))):
                return False
        return True


def _request(authority: str, stream: int, lease: int) -> bytes:
    headers = {
        ":method": "POST", ":scheme": "http", ":path": "/etcdserverpb.Lease/LeaseRevoke", ":authority": authority,
        "content-type": "application/grpc", "te": "trailers",
    }  # fmt: skip
    # Each as a literal that no table keeps, which is the simplest form that HTTP/2 allows.
    block = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
    message = b"\x08" + _varint(lease)  # Field 1, a number.
    body = struct.pack(">BI", 0, len(message)) + message
    return _frame(HEADERS, END_HEADERS, stream, block) + _frame(DATA, END_STREAM, stream, body)


def _text(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > 126:
        raise OSError("a name that is too long")
    return bytes([len(raw)]) + raw


def _varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _frames(connection: socket.socket, deadline: float) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield the frames that come. Raises OSError at the end of the connection, of the time, or for what is no HTTP/2."""
    data = b""
    while True:
        while len(data) >= 9 and len(data) >= 9 + (size := int.from_bytes(data[:3], "big")):
            kind, flags, stream = struct.unpack(">BBI", data[3:9])
            yield kind, flags, stream & 0x7FFFFFFF, data[9 : 9 + size]
            data = data[9 + size :]
        if len(data) > FRAME_MAX:
            raise OSError("not HTTP/2")
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(FRAME_MAX)
        if not more:
            raise OSError("the connection has ended")
        data += more
