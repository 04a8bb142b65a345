"""Certificates of an authority of our own, for clusters that want to see one from everybody."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class Certificates:
    """An authority of our own, a certificate for the servers, and as many for clients as are asked for."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._key, self._own = _make(name, None)
        self.ca = self._write("ca.pem", _pem(self._own))
        self.cert, self.key = self.issue("server", hosts=True)
        self.client_cert, self.client_key = self.issue("client")

    def issue(self, name: str, *, hosts: bool = False) -> tuple[str, str]:
        """Paths of a certificate and its key."""
        key, cert = _make(name, (self._key, self._own), hosts=hosts)
        return self._write(f"{name}.pem", _pem(cert)), self._write(f"{name}.key", _pem(key))

    def _write(self, name: str, content: bytes) -> str:
        path = self._folder / name
        path.write_bytes(content)
        return str(path)

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.ca)
        context.load_cert_chain(self.client_cert, self.client_key)
        return context

    def arguments(self) -> list[str]:
        """Of an etcd that wants to see a certificate from everybody."""
        both = (("", "client-cert-auth"), ("peer-", "peer-client-cert-auth"))
        return [
            word
            for kind, demand in both
            for word in (
                f"--{kind}cert-file={self.cert}",
                f"--{kind}key-file={self.key}",
                f"--{kind}trusted-ca-file={self.ca}",
                f"--{demand}",
            )
        ]


def _make(name: str, issuer: tuple[Any, Any] | None, *, hosts: bool = False) -> tuple[Any, Any]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.timezone.utc)
    signer, issued_by = (key, subject) if issuer is None else (issuer[0], issuer[1].subject)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issued_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
    )
    if hosts:
        names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return key, builder.sign(signer, hashes.SHA256())


def _pem(thing: Any) -> bytes:
    if hasattr(thing, "private_bytes"):
        return bytes(
            thing.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
    return bytes(thing.public_bytes(serialization.Encoding.PEM))
