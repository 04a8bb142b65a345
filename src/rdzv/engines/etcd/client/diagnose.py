"""Why a member of an etcd cluster cannot be used, found out by asking it in another way than gRPC, which says little.

Every etcd answers `GET /version` on its client port. What happens to that question tells a closed port from one that speaks
TLS, a certificate that is not trusted from one that is missing, and an old etcd from something else altogether.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import ssl
from contextlib import suppress

from .credentials import Credentials

ANSWER_MAX = 16 * 1024
NO_TLS = "it speaks no TLS; write etcd:// instead of etcds://"
VERSION_MIN = (3, 4)
"""The oldest with watches whose number we choose and a JSON gateway of v3; Debian 12 has it."""


async def diagnose(host: str, port: int, access: Credentials, timeout_s: float) -> str:
    """What is wrong, as far as can be seen from here; empty: nothing."""
    try:
        return await asyncio.wait_for(_diagnose(host, port, access), timeout_s)
    except asyncio.TimeoutError:
        return f"no answer within {timeout_s:g} s"


async def _diagnose(host: str, port: int, access: Credentials) -> str:
    try:
        answer = await _ask(host, port, access.context() if access.tls else None)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted ({error.verify_message}); check tls_ca and the host's name"
    except ssl.SSLError as error:
        return _tls_trouble(error)
    except ConnectionError as error:
        if access.tls and error.errno != errno.ECONNREFUSED:
            with suppress(OSError):
                if version_of(await _ask(host, port, None)):
                    return NO_TLS
        return f"it cannot be connected to: {_reason(error)}"
    except OSError as error:
        return f"it cannot be connected to: {_reason(error)}"
    if not answer and not access.tls:
        stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # Whose it is does not matter: nothing is told to it.
        stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
        with suppress(OSError):
            if await _speaks_tls(host, port, stranger):
                return "it speaks TLS; write etcds:// instead of etcd://"
    return _judge(answer, access)


async def _speaks_tls(host: str, port: int, stranger: ssl.SSLContext) -> bool:
    """Also if it wants to see a certificate before it speaks."""
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=stranger)
    except ssl.SSLError as error:
        return "alert" in str(error).lower()
    writer.close()
    return True


async def _ask(host: str, port: int, context: ssl.SSLContext | None) -> bytes:
    """What it answers to the question for its version. Raises OSError, ssl.SSLError among them."""
    reader, writer = await asyncio.open_connection(host, port, ssl=context)
    try:
        writer.write(f"GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return await _read(reader)
    except ssl.SSLError:
        raise
    except OSError:
        return b""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _reason(error: OSError) -> str:
    return os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error) or type(error).__name__


async def _read(reader: asyncio.StreamReader) -> bytes:
    answer = b""
    while len(answer) < ANSWER_MAX:
        more = await reader.read(ANSWER_MAX)
        if not more:
            break
        answer += more
    return answer


def _tls_trouble(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).lower().replace("_", " ")
    if "wrong version number" in reason or "record layer failure" in reason or "packet length" in reason:
        return NO_TLS
    if "alert" in reason or "certificate" in reason:
        return f"it refuses our certificate ({reason}); give a tls_cert and tls_key that it trusts"
    return f"no TLS connection could be made ({reason})"


def _judge(answer: bytes, access: Credentials) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    if not answer:
        if access.tls and not access.cert:
            return "it hangs up after the TLS handshake, as if it wanted a certificate; give tls_cert and tls_key"
        return "it hangs up without an answer, as etcd never does"
    version = version_of(body)
    if not version:
        start = head.partition(b"\r")[0][:60].decode(errors="replace")
        return f"something answers there that is not etcd: {start!r}"
    return too_old(version)


def version_of(body: bytes) -> str:
    """Etcd's version from its answer to GET /version; empty: it is something else."""
    found = re.search(rb"\{.*\}", body, re.DOTALL)
    with suppress(ValueError, AttributeError):
        return str(json.loads(found[0] if found else b"").get("etcdserver", ""))
    return ""


def too_old(version: str) -> str:
    """A sentence if we cannot work with that version of etcd."""
    numbers = re.findall(r"\d+", version)[:2]
    if len(numbers) == 2 and tuple(map(int, numbers)) >= VERSION_MIN:
        return ""
    least = ".".join(map(str, VERSION_MIN))
    return f"it is etcd {version[:20]}, which does not have what rdzv needs; use {least} or later"
