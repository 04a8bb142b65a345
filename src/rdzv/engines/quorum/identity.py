"""A certificate that only holders of the shared secret can show: etcd knows no secrets, but it knows TLS.

The key is derived from the secret and the name of the quorum, so every node of the run makes the same one, and the certificate
is its own authority. Members and clients take nothing else: a program without the secret cannot have the key.

Anyone who connects is shown the certificate, and can try secrets on it: each guess costs the price of `config.secret`. So a
secret that can be guessed is refused here.

The files are in memory and end with the process. etcd, a child of the process, opens them through /proc.
"""

from __future__ import annotations

import atexit
import ipaddress
import os
import shutil
import tempfile
from datetime import datetime, timezone
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ...config.secret import Secret
from ...errors import SettingsError

if TYPE_CHECKING:
    from cryptography import x509

# Fixed times, so that all nodes make the same bytes. The secret decides who belongs to the run, not a date.
_SINCE = datetime(2020, 1, 1, tzinfo=timezone.utc)
_UNTIL = datetime(2099, 12, 31, tzinfo=timezone.utc)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""The number of points of the curve P-256: a private key is a number from 1 to this number - 1."""


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
    # Twice the bits of the order, so that the remainder favours no key.
    wide = b"".join(secret.prove(b"rdzv quorum", quorum.encode(), bytes([half]), b"key") for half in (0, 1))
    cert, key = certificate(int.from_bytes(wide, "big") % (_ORDER - 1) + 1, hosts)
    return IdentityFiles(_keep("cert", cert), _keep("key", key))


def certificate(number: int, hosts: tuple[str, ...]) -> tuple[bytes, bytes]:
    """Return a certificate for these hosts that is signed by the key of that number, and the key, as PEM."""
    try:
        from cryptography import x509  # noqa: PLC0415
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID  # noqa: PLC0415
    except ModuleNotFoundError:
        raise SettingsError(
            "a quorum with a secret needs the package cryptography, which is not installed: `pip install 'rdzv[quorum]'`"
        ) from None
    key = ec.derive_private_key(number, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "rdzv quorum")])
    public = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    signs = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, crl_sign=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.BasicConstraints(ca=True, path_length=None), True),
        (signs, True),
        (x509.ExtendedKeyUsage(usages), False),
        (x509.SubjectAlternativeName([_host_name(host) for host in dict.fromkeys(hosts)]), False),
        (public, False),
    ]
    builder = x509.CertificateBuilder(
        issuer_name=name, subject_name=name, public_key=key.public_key(), not_valid_before=_SINCE, not_valid_after=_UNTIL,
        serial_number=int.from_bytes(public.digest[:16], "big") >> 1 | 1,
    )  # fmt: skip
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    signed = builder.sign(key, hashes.SHA256(), ecdsa_deterministic=True)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return signed.public_bytes(serialization.Encoding.PEM), private


def _host_name(host: str) -> x509.GeneralName:
    from cryptography import x509  # noqa: PLC0415

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


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
