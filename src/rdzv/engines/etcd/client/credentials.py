"""Credentials for a cluster: certificates, a user name and a password. No representation shows a secret."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from ....errors import SettingsError
from .channels import Files

PASSWORD_MAX = 4096  # Bytes. A larger file is hardly a password: more likely the wrong file was named.


class Credentials(msgspec.Struct, frozen=True):
    """Names of files, read at every use, so that renewed certificates and passwords are found."""

    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    password: str = ""  # The password from the environment; used if there is no file.
    held: Files | None = None  # The contents of the three files, if they end with the process that made them.

    def __repr__(self) -> str:
        return f"Credentials(tls={self.tls}, user={self.user!r})"

    __str__ = __repr__

    def files(self) -> Files | None:
        """Return what a gRPC channel needs; None without TLS. Raises SettingsError."""
        if not self.tls or self.held is not None:
            return self.held
        # The default roots of gRPC are a list of its own, without the authorities that an operator added to the node's.
        ca = _read(self.ca or ssl.get_default_verify_paths().cafile or "", "tls_ca")
        return Files(ca, _read(self.key, "tls_key"), _read(self.cert, "tls_cert"))

    def outliving(self) -> Credentials:
        """Return credentials for a process that outlives this one. Files in the memory of this one (`/proc`) go by content."""
        return msgspec.structs.replace(self, held=self.files()) if self.key.startswith("/proc/") else self

    def ssl_context(self) -> ssl.SSLContext:
        """Return the same for the standard library, whose errors say better what is wrong."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key)
        return context

    def login(self) -> tuple[str, str] | None:
        """Return user name and password, or None without a user. Raises SettingsError."""
        if not self.user:
            return None
        if not self.password_file:
            return self.user, self.password
        content = _read(self.password_file, "token_file") or b""
        if len(content) > PASSWORD_MAX:
            raise SettingsError(f"token_file has {len(content)} bytes, a password at most {PASSWORD_MAX}")
        return self.user, content.decode(errors="replace").rstrip("\r\n")


def _read(name: str, setting: str) -> bytes | None:
    if not name:
        return None
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise SettingsError(f"{setting} is {name!r}, which cannot be read: {error.strerror}") from None
