"""The reason why a member of an etcd cluster cannot be used. gRPC's own errors say little about it.

Every etcd answers `GET /version` on its client port. The outcome of that request distinguishes a closed port from one
with TLS, an untrusted certificate from a missing one, and an old etcd from a different program.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
from contextlib import suppress

from .credentials import Credentials

REPLY_MAX = 16 * 1024
NO_TLS = "it speaks no TLS; write etcd:// instead of etcds://"
VERSION_MIN = (3, 4)
"""The oldest version in which the client chooses the ids of watches and the JSON gateway speaks v3. Debian 12 has it."""


async def diagnose(host: str, port: int, credentials: Credentials, timeout_s: float) -> str:
    """Return what is wrong as far as it can be seen from here; empty if nothing is."""
    try:
        return await asyncio.wait_for(_diagnose(host, port, credentials), timeout_s)
    except asyncio.TimeoutError:
        return f"no answer within {timeout_s:g} s"


async def _diagnose(host: str, port: int, credentials: Credentials) -> str:
    try:
        reply = await _get_version(host, port, credentials.ssl_context() if credentials.tls else None)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted ({error.verify_message}); check tls_ca and the host's name"
    except ssl.SSLError as error:
        return _tls_trouble(error)
    except OSError as error:
        # A server without TLS may reset the connection instead of answering the handshake.
        if credentials.tls and isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
            with suppress(OSError):
                if version_of(await _get_version(host, port, None)):
                    return NO_TLS
        return f"it cannot be connected to: {_reason(error)}"
    if not reply and not credentials.tls and await _speaks_tls(host, port):
        return "it speaks TLS; write etcds:// instead of etcd://"
    return _judge(reply, credentials)


async def _speaks_tls(host: str, port: int) -> bool:
    """Whether the port speaks TLS. A server that demands a client certificate answers with a TLS alert and counts too."""
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # Safe here: no data is sent.
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=unverified)
    except OSError as error:
        return isinstance(error, ssl.SSLError) and "alert" in str(error).lower()
    writer.close()
    return True


async def _get_version(host: str, port: int, context: ssl.SSLContext | None) -> bytes:
    """Return the reply to `GET /version`; empty if the server hangs up. Raises OSError, also ssl.SSLError."""
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    reply = b""
    try:
        writer.write(f"GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        while len(reply) < REPLY_MAX and (more := await reader.read(REPLY_MAX)):
            reply += more
    except OSError as error:
        if isinstance(error, ssl.SSLError):
            raise
        reply = b""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    return reply


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error) or type(error).__name__


def _tls_trouble(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "wrong version number" in reason or "record layer failure" in reason or "packet length" in reason:
        return NO_TLS
    if "alert" in reason or "certificate" in reason:
        return f"it refuses our certificate ({reason}); give a tls_cert and tls_key that it trusts"
    return f"no TLS connection could be made ({reason})"


def _judge(reply: bytes, credentials: Credentials) -> str:
    head, _, body = reply.partition(b"\r\n\r\n")
    if not reply:
        if credentials.tls and not credentials.cert:
            return "it hangs up after the TLS handshake, as if it wanted a certificate; give tls_cert and tls_key"
        return "it hangs up without an answer, as etcd never does"
    version = version_of(body)
    if not version:
        start = head.partition(b"\r")[0][:60].decode(errors="replace")
        return f"something answers there that is not etcd: {start!r}"
    return too_old(version)


def version_of(body: bytes) -> str:
    """Return etcd's version from its reply to `GET /version`; empty if the server is not etcd."""
    found = re.search(rb"\{.*\}", body, re.DOTALL)
    with suppress(ValueError, AttributeError, RecursionError):
        return str(json.loads(found[0] if found else b"").get("etcdserver", ""))
    return ""


def too_old(version: str) -> str:
    """Return a sentence if rdzv does not work with this version of etcd, otherwise an empty string."""
    numbers = re.findall(r"\d+", version)[:2]
    if len(numbers) == 2 and tuple(map(int, numbers)) >= VERSION_MIN:
        return ""
    least = ".".join(map(str, VERSION_MIN))
    return f"it is etcd {version[:20]}, which does not have what rdzv needs; use {least} or later"
