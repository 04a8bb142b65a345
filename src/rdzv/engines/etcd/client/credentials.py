"""By which right we talk to a cluster: certificates, a name and a password. Nothing of it is ever shown."""

from __future__ import annotations

import ssl
from pathlib import Path

import grpc
import msgspec

from ....errors import SettingsError

PASSWORD_MAX = 4096


class Credentials(msgspec.Struct, frozen=True):
    """Files are named here and read when they are used, so that a renewed certificate is found."""

    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = ""
    password_file: str = ""
    password: str = ""
    """If there is no file: from the environment."""

    def __repr__(self) -> str:
        return f"Credentials(tls={self.tls}, user={self.user!r})"

    __str__ = __repr__

    def credentials(self) -> grpc.ChannelCredentials | None:
        """For a channel; None: no TLS. Raises SettingsError."""
        if not self.tls:
            return None
        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.ca or _system_roots(), "tls_ca"),
            private_key=_read(self.key, "tls_key"),
            certificate_chain=_read(self.cert, "tls_cert"),
        )

    def context(self) -> ssl.SSLContext:
        """The same for the standard library, which tells better what is wrong."""
        context = ssl.create_default_context(cafile=self.ca or None)
        if self.cert:
            context.load_cert_chain(self.cert, self.key)
        return context

    def login(self) -> tuple[str, str] | None:
        """Name and password; None: we have none. Raises SettingsError."""
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


def _system_roots() -> str:
    """GRPC brings a list of its own, which knows nothing of what an operator added to the machine's."""
    return ssl.get_default_verify_paths().cafile or ""
