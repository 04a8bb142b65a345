"""Sources of runs for an observer: a server in this process, or an endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..config.endpoint import Endpoint
from ..config.settings import Settings
from ..core.keys import Keys
from ..drivers import open_driver
from ..engines.embedded.inside import InsideSession
from ..engines.embedded.server_core import ServerCore
from ..engines.port import Driver, EngineReset, Get, Session
from ..errors import Unreachable
from ..operate.runs import list_runs


class ServerFigures(msgspec.Struct, frozen=True):
    """The load of a server in this process."""

    connections: int
    bytes: int


class Source(Protocol):
    """One engine, or one server, with its runs."""

    endpoint: str
    """The endpoint as shown to people."""
    poll_s: float
    """How often the list of runs is read."""

    async def runs(self) -> Sequence[str]:
        """Return the ids of all runs. Raises RdzvError."""

    async def connect(self, run_id: str) -> Session:
        """Return a session for that run. Raises RdzvError or EngineReset."""

    def figures(self) -> ServerFigures | None:
        """Return the load of the server, if it is in this process."""

    async def close(self) -> None:
        """Release all connections."""


class ServerSource:
    """The runs of a server in this process. All calls must come from the server's loop."""

    poll_s = 0.25  # Reads a dictionary.

    def __init__(self, server: ServerCore, endpoint: str) -> None:
        self.endpoint = endpoint
        self._server = server
        self._sessions: dict[InsideSession, None] = {}

    async def runs(self) -> list[str]:
        for session in tuple(self._sessions):
            if session.is_over:
                session.end(EngineReset("the server dropped the run"))
                del self._sessions[session]
        # A run without keys was only asked for.
        return [name for name, run in self._server.runs.items() if len(run.engine)]

    async def connect(self, run_id: str) -> Session:
        run = self._server.runs.get(run_id)
        if run is None:
            raise Unreachable(self.endpoint, f"it has no run {run_id!r}", applied=False)
        session = InsideSession(self._server, run)
        self._sessions[session] = None
        return session

    def figures(self) -> ServerFigures:
        return ServerFigures(len(self._server.peers), self._server.room.taken)

    async def close(self) -> None:
        """End the sessions. The server goes on."""
        for session in tuple(self._sessions):
            await session.close()
        self._sessions.clear()


class EndpointSource:
    """The runs at an endpoint, or one of them. An ordinary client that only reads."""

    poll_s = 3.0

    def __init__(self, settings: Settings, only_run: str = "") -> None:
        """`only_run`: show that run only; the list of runs is not asked for then."""
        self.endpoint = str(settings.endpoint)
        self._settings = settings
        self._only_run = only_run
        self._places: dict[str, Endpoint] = {}
        self._drivers: dict[str, Driver] = {}
        self._probe: Session | None = None

    async def runs(self) -> Sequence[str]:
        # A server counts every request to a run as a sign of the run's life, but not the request for its list. Asked about one
        # run again and again, a server that is cut off from all members would take its leases for overdue.
        if not self._only_run or self._settings.endpoint.scheme == "rdzv":
            listed = await list_runs(self._settings)
            self._places = {run.run_id: run.endpoint for run in listed.runs}
            if self._settings.endpoint.scheme == "rdzv":
                for run_id in self._drivers.keys() - self._places.keys():
                    await self._drivers.pop(run_id).close()
            return [run_id for run_id in self._places if run_id == (self._only_run or run_id)]
        if self._probe is None:
            self._probe = await self.connect(self._only_run)
        try:
            found = await self._probe.txn(then=[Get(Keys(self._only_run).settings)])
        except (EngineReset, Unreachable):
            probe, self._probe = self._probe, None
            await probe.close()
            raise
        return [self._only_run] if found.item(0) is not None else []

    async def connect(self, run_id: str) -> Session:
        place = self._places.get(run_id, self._settings.endpoint)
        # A server has one engine per run, so each needs a connection; others serve all runs by one driver.
        key = run_id if place.scheme in ("rdzv", "c10d") else str(place)
        driver = self._drivers.get(key)
        if driver is None:
            own = msgspec.structs.replace(self._settings, endpoint=place, run_id=run_id)
            driver = self._drivers[key] = open_driver(own)
        return await driver.connect()

    def figures(self) -> None:
        return None

    async def close(self) -> None:
        drivers, self._drivers = self._drivers, {}
        if self._probe is not None:
            await self._probe.close()
        for driver in drivers.values():
            await driver.close()
