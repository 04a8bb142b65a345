"""Protection of a quorum's traffic by the same settings as the embedded server's: clients, exchange and etcd's peers.

Certificates are used as they are. A secret becomes a certificate (`identity`) that every node of the run makes for itself.
"""

from __future__ import annotations

import ssl

from ...config.settings import Settings
from ...errors import SettingsError
from ..embedded.trust import Certificates, Trust
from ..etcd.client.credentials import Credentials
from .agreement import quorum_name
from .driver import Security
from .etcd_program import PeerTls, shown
from .identity import identity
from .voter import Contexts


def security_of(settings: Settings) -> Security:
    """Read the files that the settings name. Raises SettingsError for what cannot be honoured."""
    if settings.tls_server_name:
        raise SettingsError("tls_server_name cannot be honoured by a quorum, whose hosts have a certificate each: leave it out")
    trust = Trust.of(settings)
    ca, cert, key, mutual = settings.tls_ca, settings.tls_cert, settings.tls_key, settings.tls_mutual
    if trust.secret is not None:
        if settings.uses_tls:
            raise SettingsError(
                "a secret and tls settings are given, and etcd can check only one of the two: leave one of them out"
            )
        hosts = settings.endpoint.hosts
        own = identity(trust.secret, quorum_name("", tuple(shown(*one) for one in hosts)), tuple(host for host, _ in hosts))
        ca, cert, key, mutual = own.cert, own.cert, own.key, True
    elif not settings.uses_tls:
        return Security(Credentials(), Contexts(lambda: None, lambda: None), None, knows_members=False)
    certificates = Certificates(ca, cert, key, mutual=mutual)
    tls = None
    if certificates.can_serve:
        tls = PeerTls(cert, key, ca or ssl.get_default_verify_paths().cafile or "", certificates.mutual)
    contexts = Contexts(certificates.client, lambda: certificates.server()[0])
    return Security(Credentials(tls=True, ca=ca, cert=cert, key=key), contexts, tls, knows_members=certificates.mutual)
