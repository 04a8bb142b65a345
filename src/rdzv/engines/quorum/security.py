"""Protection of a quorum's traffic by the same settings as the embedded server's: clients, exchange and etcd's peers."""

from __future__ import annotations

import ssl

from ...config.settings import Settings
from ...errors import SettingsError
from ..embedded.trust import Trust
from ..etcd.client.credentials import Credentials
from .driver import Security
from .etcd_program import PeerTls
from .voter import Contexts


def security_of(settings: Settings) -> Security:
    """Read the files that the settings name. Raises SettingsError for what cannot be honoured."""
    if settings.tls_server_name:
        raise SettingsError("tls_server_name cannot be honoured by a quorum, whose hosts have a certificate each: leave it out")
    trust = Trust.of(settings)
    if trust.secret is not None:
        raise SettingsError(
            "a secret cannot protect a quorum, because etcd knows none: give all nodes tls_cert, tls_key and tls_ca instead, "
            "and leave the secret out (docs/quorum.md)"
        )
    certificates = trust.certificates
    if certificates is None:
        return Security(Credentials(), Contexts(lambda: None, lambda: None), None, knows_members=False)
    credentials = Credentials(tls=True, ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key)
    tls = None
    if certificates.can_serve:
        ca = settings.tls_ca or ssl.get_default_verify_paths().cafile or ""
        tls = PeerTls(settings.tls_cert, settings.tls_key, ca, certificates.mutual)
    contexts = Contexts(certificates.client, lambda: certificates.server()[0])
    return Security(credentials, contexts, tls, knows_members=certificates.mutual)
