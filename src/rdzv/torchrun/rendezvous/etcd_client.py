"""A blocking etcd client, for the parts of torch's API that take one: backends and stores.

torch's code makes one client per process and passes it to a backend and a store. This client is made from an endpoint, connects
when it is first used, and can be shared. The process's one background thread does the work, as for every blocking call of rdzv.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ...config.settings import Settings
from ...drivers import open_driver
from ...engines.port import Session
from ...errors import SettingsError, Unreachable
from ...system.portal import Portal
from ..conf import etcd_endpoint

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

T = TypeVar("T")

READ_TIMEOUT_S = 60.0  # torch's default for `read_timeout`.
CLOSE_S = 5.0


class EtcdClient:
    """A client of one process. After a fork, the child opens its own connection."""

    def __init__(self, endpoint: str, *, read_timeout_s: float = READ_TIMEOUT_S, **options: Any) -> None:
        text = endpoint if "://" in endpoint else f"etcd://{endpoint}"
        # A client is no member, but its endpoint and credentials are settings of a member.
        settings = Settings.make(text, run_id="client", min_nodes=1, max_nodes=1, read_timeout=read_timeout_s, **options)
        if settings.endpoint.scheme not in ("etcd", "etcds"):
            raise SettingsError(f"endpoint {str(settings.endpoint)!r} is not an etcd's: it must be as in 'etcd://host:2379'")
        self.endpoint = str(settings.endpoint)
        self.options = options  # Credentials: settings that name files, for a member that is made with this client.
        self.read_timeout_s = settings.read_timeout
        self._driver = open_driver(settings)
        # Guarded, with the session, by the portal's lock, which a forked child finds free.
        self._portal: Portal | None = None
        self._session: Session | None = None
        self._release: Any = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<EtcdClient {self.endpoint}>"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background thread and wait for its result. Raises Unreachable at once after `close`."""
        with Portal.lock:
            if self._closed:
                coroutine.close()
                raise self._closed_error()
            if self._portal is not None and self._portal.forked:
                self._release.detach()  # The parent closes its own connection.
                self._portal = self._session = None
            if self._portal is None:
                portal = Portal.open()
                self._release = weakref.finalize(self, portal.close_soon)
                self._release.atexit = False
                self._portal = portal  # Last: a child that another thread forks in between finds nothing to release.
            portal = self._portal
        return portal.run(coroutine)

    def connect(self) -> None:
        """Connect now, and not with the first call. Raises Unreachable, SettingsError."""
        self.run(self.session())

    async def session(self) -> Session:
        """Return the session, connecting if needed. Runs in the background thread. Raises Unreachable, SettingsError."""
        if self._session is None and not self._closed:
            # Two callers may connect at once. The second closes its session, which is cheap: sessions share the connections.
            session = await self._driver.connect()
            if self._session is None and not self._closed:
                self._session = session
            else:
                await session.close()
        if self._session is None:  # The client was closed while this call was under way.
            raise self._closed_error()
        return self._session

    def _closed_error(self) -> Unreachable:
        return Unreachable(self.endpoint, "this client was closed", applied=False, remedy="make a new EtcdClient")

    def drop_session(self) -> None:
        """Drop a session that is broken, or whose etcd was replaced. The next call connects again."""
        with Portal.lock:
            portal, session, self._session = self._portal, self._session, None
        if portal is not None and session is not None:
            portal.start(session.close())

    def close(self) -> None:
        """Close the connection. Leases stay, and expire with their keys when their time is over."""
        with Portal.lock:
            self._closed = True
            portal, self._portal = self._portal, None
            session, self._session = self._session, None
            if self._release is not None:
                self._release.detach()
        if portal is not None:
            if session is not None:
                with contextlib.suppress(Exception):
                    portal.start(session.close()).result(CLOSE_S)
            portal.close()


def client_of(parameters: RendezvousParameters) -> EtcdClient:
    """Make the client that torch's parameters of an etcd backend describe. Raises SettingsError."""
    config = parameters.config
    protocol = str(config.get("protocol", "http")).strip().lower()
    endpoint = etcd_endpoint(parameters.endpoint.strip(), protocol, "protocol")
    names = {"ssl_cert": "tls_cert", "ssl_cert_key": "tls_key", "ca_cert": "tls_ca"}
    names |= {"cert": "tls_cert", "key": "tls_key", "cacert": "tls_ca", "token_file": "token_file"}
    options = {name: config[key] for key, name in names.items() if config.get(key)}
    return EtcdClient(str(endpoint), read_timeout_s=float(config.get("read_timeout", READ_TIMEOUT_S)), **options)
