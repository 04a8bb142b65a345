"""Why a member of an etcd cluster cannot be used, found out by asking it in another way than gRPC, which says little.

Every etcd answers `GET /version` on its client port. What happens to that question tells a closed port from one that speaks
TLS, a certificate that is not trusted from one that is missing, and an old etcd from something else altogether.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from contextlib import suppress

from .access import Access

ANSWER_MAX = 16 * 1024
VERSION_MIN = (3, 4)
"""The oldest with watches whose number we choose and a JSON gateway of v3; Debian 12 has it."""


async def diagnose(host: str, port: int, access: Access, timeout_s: float) -> str:
    """What is wrong, as far as can be seen from here; empty: nothing."""
    try:
        return await asyncio.wait_for(_diagnose(host, port, access), timeout_s)
    except asyncio.TimeoutError:
        return f"no answer within {timeout_s:g} s"


async def _diagnose(host: str, port: int, access: Access) -> str:
    try:
        reader, writer = await asyncio.open_connection(host, port, ssl=access.context() if access.tls else None)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted ({error.verify_message}); check tls_ca and the host's name"
    except ssl.SSLError as error:
        return _tls_trouble(error)
    except OSError as error:
        return f"it cannot be connected to: {error.strerror or error}"
    try:
        writer.write(f"GET /version HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        answer = await _read(reader)
    except ssl.SSLError as error:
        return _tls_trouble(error)
    except OSError:
        answer = b""
    finally:
        writer.close()
        with suppress(OSError, ssl.SSLError):
            await writer.wait_closed()
    return _judge(answer, access)


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
        return "it speaks no TLS; write etcd:// instead of etcds://"
    if "alert" in reason or "certificate" in reason:
        return f"it refuses our certificate ({reason}); give a tls_cert and tls_key that it trusts"
    return f"no TLS connection could be made ({reason})"


def _judge(answer: bytes, access: Access) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"HTTPS server" in body:
        return "it speaks TLS; write etcds:// instead of etcd://"
    if not answer:
        if access.tls and not access.cert:
            return "it hangs up after the TLS handshake, as if it wanted a certificate; give tls_cert and tls_key"
        return "it hangs up without an answer; is it etcd, and does it want TLS (etcds://)?"
    version = version_of(body)
    if not version:
        return f"something answers there that is not etcd: {head[:60].decode(errors='replace').splitlines()[:1]}"
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
