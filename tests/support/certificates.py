"""Certificates for tests, made once per process: those of a trusted authority ("ours") and of others."""

from __future__ import annotations

import atexit
import datetime as dt
import functools
import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import trustme

from rdzv.config.secret import Secret
from rdzv.engines.embedded.trust import Certificates, Trust

HOSTS = ("127.0.0.1", "localhost", "::1")
TOKEN = "the-secret-that-nobody-may-see-4711"


class Pem(NamedTuple):
    """Paths of a certificate and its key, named as the settings are."""

    tls_cert: str
    tls_key: str


@functools.cache
def folder() -> Path:
    path = Path(tempfile.mkdtemp(prefix="rdzv-certs-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


@functools.cache
def authority(name: str = "ours") -> trustme.CA:
    made = trustme.CA(organization_name=name)
    made.cert_pem.write_to_path(str(folder() / f"{name}.pem"))
    return made


def ca_file(name: str = "ours") -> str:
    authority(name)
    return str(folder() / f"{name}.pem")


@functools.cache
def issue(*hosts: str, by: str = "ours", days: int = 2) -> Pem:
    """Issue a certificate that is valid from ten days ago to so many days from now."""
    now = dt.datetime.now(dt.timezone.utc)
    made = authority(by).issue_cert(
        *(hosts or HOSTS), not_before=now - dt.timedelta(10), not_after=now + dt.timedelta(days)
    )
    stem = f"{by}-{days}-{'-'.join(hosts).replace(':', '_')}"
    cert, key = folder() / f"{stem}.cert", folder() / f"{stem}.key"
    cert.write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    made.private_key_pem.write_to_path(str(key))
    key.chmod(0o600)
    return Pem(str(cert), str(key))


def trust(token: str = "", pem: Pem | None = None, *, ca: str = "", mutual: bool | None = None, name: str = "") -> Trust:
    """Return the trust that the settings would make: with TLS if a certificate or an authority is given."""
    secret = Secret(token) if token else None
    if pem is None and not ca:
        return Trust(secret)
    cert, key = pem or ("", "")
    return Trust(secret, Certificates(ca and ca_file(ca), cert, key, mutual=mutual, name=name))


def full() -> Trust:
    """Return trust with a secret and with certificates on both sides."""
    return trust(TOKEN, issue(), ca="ours")
