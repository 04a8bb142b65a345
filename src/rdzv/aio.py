"""The asyncio API: one member of one run, for code that has an event loop.

    async with rdzv.aio.Rendezvous("memory://", run_id="job", min_nodes=2, max_nodes=4) as r:
        world = await r.join()

`rdzv.Rendezvous` is the same for code without one. The calls are those of `Member`. This module says how a member is
made from an endpoint and settings, and what the end of an `async with` block means.
"""

from __future__ import annotations

import asyncio
import os
from types import TracebackType

from .config import arguments, auto_endpoint, topology
from .config.endpoint import Endpoint
from .config.options import Options, Unpack
from .config.secret import put_aside
from .config.settings import Settings
from .drivers import open_driver
from .engines.port import Driver
from .errors import Closed, Drained, RdzvError
from .member.journal_file import journal_for
from .member.member import Member
from .member.notices import Observer
from .member.store import AsyncStore
from .member.world import AsyncWorld, Peer
from .system.node import LocalNode

__all__ = ["Peer", "Rendezvous", "Store", "World"]


class AsyncRendezvous(Member):
    """One member of one run. For one event loop; nothing happens before the first call.

    The settings are checked here (SettingsError). `observer` is called with every notice, in the loop: it should be
    quick. `driver` is for an engine that no endpoint names; the endpoint is then only shown.
    """

    def __init__(
        self, endpoint: str | Endpoint, *, run_id: str, min_nodes: int | str, max_nodes: int | str,
        observer: Observer | None = None, driver: Driver | None = None, **options: Unpack[Options],
    ) -> None:  # fmt: skip
        arguments.function("Rendezvous", "observer", observer)
        if driver is not None and not callable(getattr(driver, "connect", None)):
            raise arguments.refused("Rendezvous", "driver", driver, "a driver, which has `connect` and `close`")
        put_aside(os.environ)
        endpoint, run_id = auto_endpoint.resolve(endpoint, run_id, os.environ, several=str(max_nodes).strip() != "1")
        settings = Settings.make(
            endpoint, run_id=run_id, min_nodes=min_nodes, max_nodes=max_nodes, environ=os.environ, **options
        )
        node = LocalNode()
        settings = topology.locate(settings, node.host)
        super().__init__(driver or open_driver(settings), settings, node, observer, journal_for(settings, node))

    async def __aenter__(self) -> AsyncRendezvous:  # noqa: PYI034  Self came with 3.11.
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed, reason = departure_of(error)
        await self.leave(failed=failed, reason=reason)


def departure_of(error: BaseException | None) -> tuple[bool, str]:
    """Whether a member failed, and the reason, as the end of its `with` block tells the others.

    A member that was told to go, or whose program was stopped by hand, has not failed. Neither has a member whose run
    is over because all succeeded.
    """
    if error is None:
        return False, "its work here is over"
    said = error.sentence if isinstance(error, RdzvError) else str(error)
    text = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SystemExit):
        return error.code not in (None, 0), text
    if isinstance(error, Closed):
        return not error.success, text
    return not isinstance(error, (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, Drained)), text


# The public names: the same as in the blocking API, told apart by the module.
Rendezvous = AsyncRendezvous
Store = AsyncStore
World = AsyncWorld
