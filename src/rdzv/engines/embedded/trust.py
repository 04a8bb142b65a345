"""Trust between client and server: a shared secret, certificates, both or nothing.

Both sides prove *the secret* before anything else is said. Each sends a number that was never used before. The proof is a keyed
hash of both numbers, of the protocol's version and of the role, so that a proof that was recorded, or is sent back to where it
came from, proves nothing. The client proves itself first: a stranger that calls gets a random number and no hash to try secrets
on. Under TLS the hash also covers the server's certificate (tls-server-end-point in RFC 5929), so that a program with another
certificate cannot pass proofs on. Python offers no other binding for TLS 1.3: `tls-unique` is not defined there.

*Certificates* are ordinary PEM files. They are read anew when they have changed: they are renewed while runs go on.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import ssl
from pathlib import Path

from ...config import secret as secrets_of_ours
from ...config.secret import Secret
from ...config.settings import Settings
from ...errors import SettingsError
from .frames import NONCE, VERSION

DRIVER, SERVER = b"driver", b"server"

DIFFERENT_SECRETS = "the two sides have different secrets: give the member the server's token"
ONLY_SERVER_HAS_ONE = (
    "the server has a secret and the member has none: give the member the same, "
    "by RDZV_TOKEN, token_file or the setting token"
)
ONLY_MEMBER_HAS_ONE = (
    "the member has a secret and the server has none: give the server the same, "
    "by RDZV_TOKEN, token_file or the setting token"
)
SERVER_DID_NOT_PROVE = (
    "it did not prove that it knows our secret: it is not the server that is meant, or somebody is in between"
)
ONLY_SERVER_HAS_TLS = "the server speaks TLS and the member does not: give the member tls=true, and tls_ca if need be"
ONLY_MEMBER_HAS_TLS = "the member speaks TLS and the server does not: give the server tls_cert and tls_key"

_PEM_MAX = 1024 * 1024
_LEAF = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE)


class Handshake:
    """One connection's proofs of the secret, for both roles. `binding` stands for the TLS channel."""

    __slots__ = ("_secret", "_words")

    def __init__(self, secret: Secret, of_driver: bytes, of_server: bytes, binding: bytes) -> None:
        self._secret = secret
        self._words = (of_driver, of_server, binding)

    def proof(self, role: bytes) -> bytes:
        """Return the proof that a side in that role sends."""
        return self._secret.prove(b"rdzv %d" % VERSION, role, *self._words)

    def holds(self, role: bytes, proof: bytes) -> bool:
        """Whether the proof shows that the other side knows the secret."""
        return hmac.compare_digest(self.proof(role), proof)


class Certificates:
    """Makes the contexts of both roles from files, and again when the files have changed."""

    def __init__(self, ca: str = "", cert: str = "", key: str = "", *, mutual: bool | None = None, name: str = "") -> None:
        """Take the settings of these names. Raise SettingsError."""
        self._ca, self._cert, self._key = ca, cert, key
        self.mutual = bool(ca) if mutual is None else mutual
        self.name = name
        self._stamps = self._look()
        self._load()

    @property
    def can_serve(self) -> bool:
        """Whether there is a certificate to show, as a server must."""
        return bool(self._cert)

    def client(self) -> ssl.SSLContext:
        """Return the context for a connection that we make."""
        self._refresh()
        return self._client

    def server(self) -> tuple[ssl.SSLContext, bytes]:
        """Return the context for a connection that we accept, and the digest of the certificate that it will show."""
        self._refresh()
        assert self._server is not None, "only who can serve asks"
        return self._server, self._digest

    def _refresh(self) -> None:
        """Read changed files again. They are replaced one by one: while they do not fit together, keep the former."""
        try:
            stamps = self._look()
            if stamps != self._stamps:
                self._load()
                self._stamps = stamps
        except SettingsError as error:
            secrets_of_ours.warn_once(f"the certificates read before are still used: {error.sentence}")

    def _look(self) -> list[tuple[int, int, int]]:
        stamps = []
        for setting, path in (("tls_ca", self._ca), ("tls_cert", self._cert), ("tls_key", self._key)):
            if not path:
                continue
            try:
                found = Path(path).stat()
            except OSError as error:
                raise SettingsError(f"{setting} {path!r} cannot be read: {_words(error)}") from None
            if found.st_size > _PEM_MAX:
                raise SettingsError(f"{setting} {path!r} has {found.st_size} bytes, at most {_PEM_MAX} are allowed")
            stamps.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return stamps

    def _load(self) -> None:
        client = self._context(ssl.PROTOCOL_TLS_CLIENT)
        server: ssl.SSLContext | None = None
        digest = b""
        if self._cert:
            secrets_of_ours.warn_if_shown("tls_key", self._key)
            digest = self._leaf()
            server = self._context(ssl.PROTOCOL_TLS_SERVER)
            server.verify_mode = ssl.CERT_REQUIRED if self.mutual else ssl.CERT_NONE
            server.num_tickets = 0  # No client resumes: connections last.
        self._client, self._server, self._digest = client, server, digest

    def _context(self, role: int) -> ssl.SSLContext:
        context = ssl.SSLContext(role)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION
        try:
            if self._ca:
                context.load_verify_locations(self._ca)
            else:
                context.load_default_certs()
        except (OSError, ValueError) as error:
            raise SettingsError(f"tls_ca {self._ca!r} cannot be used: {_words(error)}; it must be a PEM file") from None
        if self._cert:
            try:
                # Without an answer to give, a key with a password would ask for it on the terminal.
                context.load_cert_chain(self._cert, self._key, password=_no_password)
            except (OSError, ValueError) as error:
                raise SettingsError(
                    f"tls_cert {self._cert!r} and tls_key {self._key!r} cannot be used: {_words(error)}; "
                    "they must be PEM files that belong together, the key without a password"
                ) from None
        return context

    def _leaf(self) -> bytes:
        try:
            found = _LEAF.search(Path(self._cert).read_text("latin-1"))
            data = ssl.PEM_cert_to_DER_cert(found[0]) if found else b""
        except (OSError, ValueError) as error:
            raise SettingsError(f"tls_cert {self._cert!r} cannot be read: {_words(error)}") from None
        return hashlib.sha256(data).digest()


class Trust:
    """The secret and the certificates of one driver or server."""

    def __init__(self, secret: Secret | None = None, certificates: Certificates | None = None) -> None:
        self.secret = secret
        self.certificates = certificates

    @classmethod
    def of(cls, settings: Settings) -> Trust:
        """Read the files that the settings name. Raise SettingsError."""
        secret = secrets_of_ours.find(settings.token, settings.token_file)
        if not settings.uses_tls:
            return cls(secret)
        certificates = Certificates(
            settings.tls_ca,
            settings.tls_cert,
            settings.tls_key,
            mutual=settings.tls_mutual,
            name=settings.tls_server_name,
        )
        return cls(secret, certificates)

    @property
    def knows_members(self) -> bool:
        """Whether a server can tell members from strangers."""
        return self.secret is not None or (self.certificates is not None and self.certificates.mutual)


def _no_password() -> str:
    raise ValueError("the key has a password")


def _words(error: OSError | ValueError) -> str:
    """Return the system's or the library's reason, as part of a sentence."""
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a PEM file").lower().replace("_", " ")
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error)


# ---- what went wrong with TLS

_UNTRUSTED = {7, 18, 19, 20, 21}
"""OpenSSL's numbers for a chain that does not lead to a trusted issuer."""
_OTHER_HOST = {62, 64}
_ALERTS = {
    "CERTIFICATE_EXPIRED": "it says that this side's certificate has expired: our tls_cert must be renewed",
    "UNKNOWN_CA": "it does not trust who signed this side's certificate: its tls_ca must name who signed our tls_cert",
    "BAD_CERTIFICATE": "it refuses this side's certificate: our tls_cert must be for the name that members call us by",
    "CERTIFICATE_REQUIRED": "it wants a certificate and was shown none: give this side tls_cert and tls_key",
    "PROTOCOL_VERSION": "there is no version of TLS that both sides speak: 1.2 is the oldest allowed",
}
_REASONS = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate and this server wants one: give it tls_cert and tls_key",
    "UNSUPPORTED_PROTOCOL": _ALERTS["PROTOCOL_VERSION"],
    "WRONG_SSL_VERSION": _ALERTS["PROTOCOL_VERSION"],
}


def explain(error: ssl.SSLError, name: str) -> tuple[str, bool]:
    """Return a sentence, and whether it is about trust: then trying again does not help. `name`: the other side's name."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(error, name), True
    reason = re.sub(r"[^A-Z0-9]+", "_", (error.reason or str(error)).upper())
    known = _REASONS.get(reason) or _ALERTS.get(reason.partition("ALERT_")[2])
    if known:
        return known, True
    return f"TLS failed: {reason.lower().replace('_', ' ')}", False


def _explain_certificate(error: ssl.SSLCertVerificationError, name: str) -> str:
    code = error.verify_code
    if code == 10:
        return "its certificate has expired: it must be renewed"
    if code == 9:
        return "its certificate is not valid yet: look at the clocks of both machines"
    if code in _UNTRUSTED:
        return "its certificate is not signed by whom we trust: our tls_ca must name who signed it"
    if code in _OTHER_HOST:
        return f"its certificate is not for {name!r}: call the server by a name that is in it, or set tls_server_name"
    return f"its certificate is refused: {error.verify_message}"
