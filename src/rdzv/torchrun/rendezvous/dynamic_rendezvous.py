"""torch's dynamic rendezvous: the handler of `rdzv.torchrun.handler` over a backend that keeps one state.

A backend written for torch works unchanged: it is a compare-and-set register, which `engines.register` turns into an engine.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta

from torch.distributed import Store

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (  # isort: skip
    RendezvousBackend, RendezvousSettings, RendezvousTimeout, Token,
)  # fmt: skip

from ...config.endpoint import Endpoint
from ...config.settings import DEFAULTS
from ...engines.register.backend import BlockingRegister
from ...engines.register.driver import RegisterDriver
from ...errors import NotJoined, Unreachable
from ...operate import commands
from ...system.node import LocalNode
from ...system.portal import Portal
from ..conf import KEYS, OWN, TORCH, Conf, read_own, translate
from ..handler import Handler, torch_errors
from .api import RendezvousClosedError, RendezvousInfo, RendezvousParameters, RendezvousStateError

__all__ = [
    "DynamicRendezvousHandler", "RendezvousBackend", "RendezvousSettings", "RendezvousTimeout", "Token", "create_handler",
]  # fmt: skip

logger = logging.getLogger("rdzv.torchrun")

_BACKENDS = frozenset({"store_type", "read_timeout", "is_host", "protocol", "ssl_cert", "ssl_cert_key", "ca_cert"})
"""Parameters of torch's own backends, which come in the same mapping as the handler's."""


class DynamicRendezvousHandler(Handler):
    """A handler over a `RendezvousBackend`. `from_backend` and `create_handler` make it."""

    def __init__(
        self, settings: RendezvousSettings, backend: RendezvousBackend, store: Store, local_addr: str | None = None,
        *, spare_exit: str = "error", **options: object,
    ) -> None:  # fmt: skip
        """`options` are settings of rdzv. The store is kept only because it may be the one that serves."""
        self._torch_settings = settings
        self._store = store
        self._was_closed = False
        last_call_s = settings.timeout.last_call.total_seconds()
        given: dict[str, object] = {
            "join_timeout": settings.timeout.join.total_seconds(),
            "last_call": last_call_s,
            "replace_wait": last_call_s,
            "lease": settings.keep_alive_interval.total_seconds() * settings.keep_alive_max_attempt,
            # The first ranks follow the addresses, as in torch.
            **({"local_addr": local_addr, "order": local_addr} if local_addr else {}),
            **options,
        }
        endpoint = Endpoint("register", path=backend.name)
        timeout_s = float(str(given.get("read_timeout", DEFAULTS["read_timeout"])))
        register = BlockingRegister(backend, str(endpoint), timeout_s=timeout_s, corrupt=(RendezvousStateError,))
        self._driver = RegisterDriver(register, LocalNode(), timeout_s=timeout_s)
        close_s = settings.timeout.close.total_seconds()
        conf = Conf(endpoint, settings.run_id, settings.min_nodes, settings.max_nodes, given, spare_exit, close_s)
        super().__init__(backend.name, conf, self._driver)

    @classmethod
    def from_backend(
        cls, run_id: str, store: Store, backend: RendezvousBackend, min_nodes: int, max_nodes: int,
        local_addr: str | None = None, timeout: RendezvousTimeout | None = None,
        keep_alive_interval: int = 5, keep_alive_max_attempt: int = 3,
    ) -> DynamicRendezvousHandler:  # fmt: skip
        """Make a handler with torch's parameters. It does not write to `store`: a round has a store of its own."""
        timeout, interval = timeout or RendezvousTimeout(), timedelta(seconds=keep_alive_interval)
        settings = RendezvousSettings(run_id, min_nodes, max_nodes, timeout, interval, keep_alive_max_attempt)
        return cls(settings, backend, store, local_addr)

    @property
    def settings(self) -> RendezvousSettings:
        return self._torch_settings

    def next_rendezvous(self) -> RendezvousInfo:
        if self._was_closed:
            raise RendezvousClosedError(f"run {self.get_run_id()!r} is closed: this handler closed it")
        return super().next_rendezvous()

    def is_closed(self) -> bool:
        """Whether the run is over. Asks the backend, as torch's handler does, unless that is known already."""
        if self._was_closed or self.is_known_closed():
            return True
        with torch_errors():
            return self._rendezvous.status().phase == "closed"

    def set_closed(self) -> None:
        """End the run for all members. The caller need not be a member.

        Raises RendezvousConnectionError if the backend is away for `RendezvousTimeout.close`.
        """
        with torch_errors():
            try:
                self._rendezvous.close_run("closed by its program", self._conf.close_timeout_s)
            except NotJoined:
                self._close_from_outside()
        self._was_closed = True

    def _close_from_outside(self) -> None:
        async def close() -> None:
            session = await self._driver.connect()
            try:
                await commands.close(session, self.get_run_id(), "closed by a program", "a non-member")
            finally:
                await session.close()

        async def close_in_time() -> None:
            limit_s = self._conf.close_timeout_s
            try:
                await asyncio.wait_for(close(), limit_s)
            except asyncio.TimeoutError:
                raise Unreachable(self._driver.endpoint, "no answer", limit_s) from None

        user = object()
        portal = Portal.open(user)
        try:
            portal.run(close_in_time())
        finally:
            portal.close(user)


def create_handler(store: Store, backend: RendezvousBackend, params: RendezvousParameters) -> DynamicRendezvousHandler:
    """Make a handler from torch's parameters, in whole seconds, and any settings of rdzv.

    Defaults: join_timeout 600, last_call_timeout 30, close_timeout 30, keep_alive_interval 5, keep_alive_max_attempt 3.
    heartbeat_timeout is checked but not used. Raises ValueError for a wrong parameter.
    """
    given = [params.get_as_int(f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat")]
    timeout = RendezvousTimeout(*(None if seconds is None else timedelta(seconds=seconds) for seconds in given))
    interval = timedelta(seconds=params.get_as_int("keep_alive_interval", 5) or 5)
    attempts = params.get_as_int("keep_alive_max_attempt", 3) or 3
    settings = RendezvousSettings(params.run_id, params.min_nodes, params.max_nodes, timeout, interval, attempts)
    own = {key: value for key, value in params.config.items() if key in KEYS and key not in {*TORCH, *_BACKENDS}}
    own.pop("join_timeout", None)
    if "read_timeout" in params.config:  # The backend's time for one answer is the handler's, too.
        own["read_timeout"] = params.config["read_timeout"]
    for key in params.config.keys() - set(KEYS) - _BACKENDS:
        logger.warning("parameter %r is not known here; its backend may know it", key)
    options = translate({key: value for key, value in own.items() if key not in OWN})
    return DynamicRendezvousHandler(settings, backend, store, params.local_addr, **read_own(own), **options)
