"""The asyncio face: one member of one run, for code that has an event loop.

    async with rdzv.aio.Rendezvous("memory://", run_id="job", min_nodes=2, max_nodes=4) as r:
        world = await r.join()

`rdzv.Rendezvous` is the same for code without one. The member itself is in `member`; here is only how it is made, and
what the end of an `async with` block means.
"""

from __future__ import annotations

import asyncio
import os
from types import TracebackType

from .config.endpoint import Endpoint
from .config.secret import put_aside
from .config.settings import Settings
from .core.member import Change
from .core.status import Status
from .drivers import open_driver
from .engines.port import Driver
from .errors import Closed, Drained, RdzvError
from .member.member import Member
from .member.notices import Observer
from .member.store import AsyncStore
from .member.world import AsyncWorld, Peer
from .system.node import LocalNode

__all__ = ["Peer", "Rendezvous", "Store", "World"]


class AsyncRendezvous:
    """One member of one run. For one event loop; nothing happens before the first call.

    The settings are checked here (SettingsError). `observer` is called with every notice, in the loop: it should be
    quick. `driver` is for an engine that no endpoint names; the endpoint is then only shown.
    """

    def __init__(
        self,
        endpoint: str | Endpoint,
        *,
        run_id: str,
        min_nodes: int | str,
        max_nodes: int | str,
        observer: Observer | None = None,
        driver: Driver | None = None,
        **options: object,
    ) -> None:
        put_aside(os.environ)
        settings = Settings.make(
            endpoint, run_id=run_id, min_nodes=min_nodes, max_nodes=max_nodes, environ=os.environ, **options
        )
        self.run_id = settings.run_id
        self._member = Member(driver or open_driver(settings), settings, LocalNode(), observer)

    async def __aenter__(self) -> AsyncRendezvous:  # noqa: PYI034  Self came with 3.11.
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed, reason = departure_of(error)
        await self.leave(failed=failed, reason=reason)

    async def prepare(self) -> None:
        """Connect already, and serve if that is ours to do, without taking part: `join` is quicker then.

        It does not wait for that, and does not say what came of it: whoever joins is told.
        """
        self._member.prepare()

    async def join(self, timeout_s: float | None = None) -> AsyncWorld:
        """Wait until a round is sealed with us in it. Calling it says that no worker of an earlier round runs any more.

        The time (default: `join_timeout`) counts only while the run has no sealed round: a spare waits as long as it
        must. Raises JoinTimeout, Closed, Evicted (join again), Drained, Banned, SettingsError, Untrusted, EngineMoved.
        """
        return await self._member.join(timeout_s)

    @property
    def changed(self) -> Change | None:
        """Why the world we hold no longer stands, or None while it does. A local read; who reads an eviction was told."""
        return self._member.changed

    async def wait_changed(self, timeout_s: float | None = None) -> Change | None:
        """The change, as soon as there is one; None when the time ran out first, or we leave."""
        return await self._member.wait_changed(timeout_s)

    async def status(self) -> Status:
        """The whole run, with the reason for what it waits for. Asks the engine; raises Unreachable."""
        return await self._member.status()

    async def done(self) -> None:
        """Our work succeeded. We stay until we leave; when all of the round are done, the run closes with success."""
        await self._member.done()

    async def drain(self, reason: str = "asked to go") -> None:
        """Say that we are about to go, so that the others re-form without waiting for us to be gone."""
        await self._member.drain(reason)

    async def leave(self, *, failed: bool = False, reason: str = "") -> None:
        """Go, for good. The run goes on for the others. Never raises, and takes a few seconds at most.

        `failed` says that our work cannot be done here: if quorum is then out of reach, the run is closed with our
        reason (unless on_failure=wait).
        """
        await self._member.leave(failed=failed, reason=reason)

    async def close_run(self, reason: str = "finished") -> None:
        """End the run for everybody. Raises RoundOver if the others have gone on without us."""
        await self._member.close_run(reason)


def departure_of(error: BaseException | None) -> tuple[bool, str]:
    """What the end of a `with` block says to the others: whether we failed, and the reason.

    Who is told to go, or stops a program by hand, has not failed; neither has one whose run is over because all
    succeeded.
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
