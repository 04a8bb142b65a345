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
        self._sessions: dict[Portal, Session] = {}
        """The session, used in the portal's thread only; in a forked child also the parent's, which is left alone."""
        self._use = object()
        """Keeps the portal open from the first call on."""
        self._release = weakref.finalize(self, Portal.close_soon, self._use)
        self._release.atexit = False
        self._closed = False

    def __repr__(self) -> str:
        return f"<EtcdClient {self.endpoint}>"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the background thread and wait for its result. Raises Unreachable at once after `close`."""
        if self._closed:
            coroutine.close()
            raise self._closed_error()
        portal = Portal.open(coroutine)
        try:
            Portal.open(self._use)
            if self._closed:  # Meanwhile, by a signal handler or another thread: it may not have found the use.
                Portal.close_soon(self._use)
            return portal.run(coroutine)
        finally:
            portal.close(coroutine)

    def connect(self) -> None:
        """Connect now, and not with the first call. Raises Unreachable, SettingsError."""
        self.run(self.session())

    async def session(self) -> Session:
        """Return the session, connecting if needed. Runs in the background thread. Raises Unreachable, SettingsError."""
        portal = Portal.kept_by(self._use)
        if portal is None or self._closed:
            raise self._closed_error()
        if portal not in self._sessions:
            # Two callers may connect at once. The second closes its session, which is cheap: sessions share the connections.
            session = await self._driver.connect()
            if portal not in self._sessions and not self._closed:
                self._sessions[portal] = session
            else:
                await session.close()
        if portal not in self._sessions:  # The client was closed while this call was under way.
            raise self._closed_error()
        return self._sessions[portal]

    def _closed_error(self) -> Unreachable:
        return Unreachable(self.endpoint, "this client was closed", applied=False, remedy="make a new EtcdClient")

    def drop_session(self) -> None:
        """Drop a session that is broken, or whose etcd was replaced. The next call connects again."""
        portal = Portal.kept_by(self._use)
        if portal is not None:
            with contextlib.suppress(RuntimeError):  # The client was closed meanwhile, and the loop has ended.
                portal.start(self._end_session(portal))

    async def _end_session(self, portal: Portal) -> None:
        session = self._sessions.pop(portal, None)
        if session is not None:
            await session.close()

    def close(self) -> None:
        """Close the connection. Leases stay, and expire with their keys when their time is over."""
        self._closed = True
        self._release.detach()
        portal = Portal.kept_by(self._use)
        if portal is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended, with the process.
                portal.start(self._end_session(portal)).wait(CLOSE_S)
            portal.close(self._use)


def client_of(parameters: RendezvousParameters) -> EtcdClient:
    """Make the client that torch's parameters of an etcd backend describe. Raises SettingsError."""
    config = parameters.config
    protocol = str(config.get("protocol", "http")).strip().lower()
    endpoint = etcd_endpoint(parameters.endpoint.strip(), protocol, "protocol")
    names = {"ssl_cert": "tls_cert", "ssl_cert_key": "tls_key", "ca_cert": "tls_ca"}
    names |= {"cert": "tls_cert", "key": "tls_key", "cacert": "tls_ca", "token_file": "token_file"}
    options = {name: config[key] for key, name in names.items() if config.get(key)}
    return EtcdClient(str(endpoint), read_timeout_s=float(config.get("read_timeout", READ_TIMEOUT_S)), **options)
