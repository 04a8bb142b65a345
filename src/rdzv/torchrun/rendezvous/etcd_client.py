"""A blocking hold on an etcd cluster, for the parts of torch's API that are given one: backends and stores.

torch's code has one client per process and hands it to a backend and a store; so this one is made from an endpoint, connects
when it is first used, and is shared. The work is done in the process's one background thread, like everything blocking here.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ...config.endpoint import Endpoint
from ...config.settings import Settings
from ...drivers import open_driver
from ...engines.port import Session
from ...errors import SettingsError
from ...system.portal import Portal

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

T = TypeVar("T")

READ_TIMEOUT_S = 60.0
"""torch's default for `read_timeout`."""
CLOSE_S = 5.0


class EtcdClient:
    """See the module's docstring. For one process: a fork makes its own."""

    def __init__(self, endpoint: str, *, read_timeout_s: float = READ_TIMEOUT_S, **options: Any) -> None:
        text = endpoint if "://" in endpoint else f"etcd://{endpoint}"
        # A client is no member, but it is told where and by which right in the same words.
        settings = Settings.make(
            text, run_id="client", min_nodes=1, max_nodes=1, read_timeout=read_timeout_s, **options
        )
        if settings.endpoint.scheme not in ("etcd", "etcds"):
            raise SettingsError(f"endpoint {str(settings.endpoint)!r} is not an etcd's: it must be as in 'etcd://host:2379'")
        self.endpoint = str(settings.endpoint)
        self.options = options
        """By which right: settings that name files, for whoever makes a member with this client."""
        self.read_timeout_s = settings.read_timeout
        self._driver = open_driver(settings)
        self._lock = threading.Lock()
        self._portal: Portal | None = None
        self._session: Session | None = None
        self._release: Any = None

    def __repr__(self) -> str:
        return f"<EtcdClient {self.endpoint}>"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the background thread and wait for it."""
        return self._open().run(coroutine)

    async def session(self) -> Session:
        """The connection, made when it is first needed. In the background thread. Raises Unreachable, SettingsError."""
        if self._session is None:
            # Of two that come at once the second closes what it made: sessions are cheap, they share what is costly.
            session = await self._driver.connect()
            if self._session is None:
                self._session = session
            else:
                await session.close()
        return self._session

    def renounce(self) -> None:
        """The connection is no good, or its etcd is another: the next who needs one makes a new one."""
        with self._lock:
            portal, session, self._session = self._portal, self._session, None
        if portal is not None and session is not None:
            portal.start(session.close())

    def close(self) -> None:
        """Give everything back. Leases stay: what hangs on them goes when their time is up."""
        with self._lock:
            portal, self._portal = self._portal, None
            session, self._session = self._session, None
            if self._release is not None:
                self._release.detach()
        if portal is not None:
            if session is not None:
                with contextlib.suppress(Exception):
                    portal.start(session.close()).result(CLOSE_S)
            portal.close()

    def _open(self) -> Portal:
        with self._lock:
            if self._portal is not None and self._portal.forked:
                self._release.detach()  # What was the parent's is the parent's to close.
                self._portal = self._session = None
            if self._portal is None:
                with Portal.lock:
                    self._portal = Portal.open()
                self._release = weakref.finalize(self, self._portal.close)
                self._release.atexit = False
            return self._portal


def client_of(parameters: RendezvousParameters) -> EtcdClient:
    """The client that torch's keys of an etcd backend describe. Raises SettingsError."""
    config = parameters.config
    protocol = str(config.get("protocol", "http")).strip().lower()
    if protocol not in ("http", "https"):
        raise SettingsError(f"protocol is {protocol!r}: it must be 'http' or 'https'")
    text = parameters.endpoint.strip()
    if "://" not in text:
        text = f"{'etcds' if protocol == 'https' else 'etcd'}://{text}"
    names = {"ssl_cert": "tls_cert", "ssl_cert_key": "tls_key", "ca_cert": "tls_ca"}
    names |= {"cert": "tls_cert", "key": "tls_key", "cacert": "tls_ca", "token_file": "token_file"}
    options = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs)}
    return EtcdClient(
        str(Endpoint.parse(text)), read_timeout_s=float(config.get("read_timeout", READ_TIMEOUT_S)), **options
    )
