"""A certificate that only holders of the shared secret can show: etcd knows no secrets, but it knows TLS.

The key is derived from the secret and the name of the quorum, so every node of the run makes the same one, and the certificate
is its own authority. Members and clients take nothing else: a program without the secret cannot have the key.

Anyone who connects is shown the certificate, and can try secrets on it: each guess costs the price of `config.secret`. So a
secret that can be guessed is refused here.

The files are in memory and end with the process. etcd, a child of the process, opens them through /proc.
"""

from __future__ import annotations

import atexit
import base64
import hashlib
import ipaddress
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import msgspec

from ...config.secret import Secret
from ...errors import SettingsError

Point: TypeAlias = "tuple[int, int]"

# The curve P-256 (FIPS 186-5): the modulus, the order, and the base point.
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)


class IdentityFiles(msgspec.Struct, frozen=True):
    """Paths of the certificate, which is its own authority, and of its key."""

    cert: str
    key: str


@lru_cache(maxsize=64)
def identity(secret: Secret, quorum: str, hosts: tuple[str, ...]) -> IdentityFiles:
    """Return the files of a quorum's certificate. Raises SettingsError for a secret that can be guessed."""
    if secret.can_be_guessed:
        raise SettingsError(
            "the secret can be guessed, and a quorum shows every stranger something to try guesses on: make one with "
            "`openssl rand -hex 32`, or give tls_cert, tls_key and tls_ca"
        )

    def number(*words: bytes) -> int:
        """Return a number from 1 to _N - 1 that only holders of the secret can compute."""
        wide = b"".join(secret.prove(b"rdzv quorum", quorum.encode(), bytes([half]), *words) for half in (0, 1))
        return int.from_bytes(wide, "big") % (_N - 1) + 1

    key = number(b"key")
    cert, private = certificate(key, hosts, lambda signed: number(b"nonce", signed))
    return IdentityFiles(_keep("cert", _pem("CERTIFICATE", cert)), _keep("key", _pem("EC PRIVATE KEY", private)))


def certificate(key: int, hosts: tuple[str, ...], nonce: Callable[[bytes], int]) -> tuple[bytes, bytes]:
    """Return a certificate for these hosts that is signed by its own key, and the key, in DER."""
    public = _raw(_times(key, _G))
    algorithm = _sequence(_oid("1.2.840.10045.4.3.2"))  # ECDSA with SHA-256.
    name = _sequence(_tagged(0x31, _sequence(_oid("2.5.4.3"), _tagged(0x0C, b"rdzv quorum"))))
    # Fixed times, so that all nodes make the same bytes. The secret decides who belongs to the run, not a date.
    validity = _sequence(_tagged(0x17, b"200101000000Z"), _tagged(0x18, b"20991231235959Z"))
    key_info = _sequence(_sequence(_oid("1.2.840.10045.2.1"), _oid("1.2.840.10045.3.1.7")), _bits(public))
    usages = _sequence(_oid("1.3.6.1.5.5.7.3.1"), _oid("1.3.6.1.5.5.7.3.2"))  # For servers and for clients.
    names = _sequence(*(_host_name(host) for host in dict.fromkeys(hosts)))
    extensions = _sequence(
        _extension("2.5.29.19", _sequence(_tagged(0x01, b"\xff")), critical=True),  # An authority.
        _extension("2.5.29.15", _tagged(0x03, b"\x02\x84"), critical=True),  # Signs handshakes and certificates.
        _extension("2.5.29.37", usages),
        _extension("2.5.29.17", names),
        _extension("2.5.29.14", _tagged(0x04, hashlib.sha256(public).digest()[:20])),
    )
    serial = _integer(int.from_bytes(hashlib.sha256(public).digest()[:16], "big") >> 1 | 1)
    version = _tagged(0xA0, _integer(2))
    body = _sequence(version, serial, algorithm, name, validity, name, key_info, _tagged(0xA3, extensions))
    signed = _sequence(body, algorithm, _bits(_signature(key, body, nonce(body))))
    private = _sequence(
        _integer(1), _tagged(0x04, key.to_bytes(32, "big")), _tagged(0xA0, _oid("1.2.840.10045.3.1.7")),
        _tagged(0xA1, _bits(public)),
    )  # fmt: skip
    return signed, private


def _keep(kind: str, content: bytes) -> str:
    """Keep a file for as long as this process lives, and return its path for this process and its children."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create(f"rdzv-quorum-{kind}")
        os.fchmod(number, 0o600)
        os.write(number, content)
        return f"/proc/{os.getpid()}/fd/{number}"
    folder = tempfile.mkdtemp(prefix="rdzv-quorum-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, kind)
    path.touch(mode=0o600)
    path.write_bytes(content)
    return str(path)


if hasattr(os, "register_at_fork"):  # A child makes its own: a path names the process.
    os.register_at_fork(after_in_child=identity.cache_clear)


# ---- the curve


def _plus(one: Point | None, other: Point | None) -> Point | None:
    if one is None or other is None:
        return one or other
    if one[0] == other[0] and (one[1] + other[1]) % _P == 0:
        return None
    if one == other:
        slope = 3 * (one[0] ** 2 - 1) * pow(2 * one[1], -1, _P)  # a = -3.
    else:
        slope = (other[1] - one[1]) * pow(other[0] - one[0], -1, _P)
    x = (slope * slope - one[0] - other[0]) % _P
    return x, (slope * (one[0] - x) - one[1]) % _P


def _times(factor: int, point: Point) -> Point:
    found: Point | None = None
    step: Point | None = point
    while factor:
        if factor & 1:
            found = _plus(found, step)
        step = _plus(step, step)
        factor >>= 1
    assert found is not None, "the factor is below the order"
    return found


def _signature(key: int, data: bytes, nonce: int) -> bytes:
    digest = int.from_bytes(hashlib.sha256(data).digest(), "big")
    r = _times(nonce, _G)[0] % _N
    return _sequence(_integer(r), _integer(pow(nonce, -1, _N) * (digest + r * key) % _N))


def _raw(point: Point) -> bytes:
    return b"\x04" + point[0].to_bytes(32, "big") + point[1].to_bytes(32, "big")


# ---- DER


def _tagged(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 128:
        return bytes([tag, size]) + content
    digits = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 128 | len(digits)]) + digits + content


def _sequence(*parts: bytes) -> bytes:
    return _tagged(0x30, b"".join(parts))


def _integer(value: int) -> bytes:
    return _tagged(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(content: bytes) -> bytes:
    return _tagged(0x03, b"\0" + content)


def _oid(text: str) -> bytes:
    first, second, *rest = map(int, text.split("."))
    digits = bytearray([40 * first + second])
    for part in rest:
        groups = [part & 127]
        while part := part >> 7:
            groups.append(part & 127 | 128)
        digits += bytes(reversed(groups))
    return _tagged(0x06, bytes(digits))


def _extension(oid: str, content: bytes, *, critical: bool = False) -> bytes:
    return _sequence(_oid(oid), _tagged(0x01, b"\xff") if critical else b"", _tagged(0x04, content))


def _host_name(host: str) -> bytes:
    try:
        return _tagged(0x87, ipaddress.ip_address(host).packed)
    except ValueError:
        return _tagged(0x82, host.encode())


def _pem(kind: str, der: bytes) -> bytes:
    text = base64.encodebytes(der).decode().replace("\n", "")
    lines = [text[at : at + 64] for at in range(0, len(text), 64)]
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""]).encode()
