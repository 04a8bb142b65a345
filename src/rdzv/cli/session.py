"""For commands of somebody who is no member: a session on the engine that the endpoint names, which never serves itself."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ..config.secret import put_aside
from ..config.settings import Settings
from ..core.keys import Keys
from ..drivers import open_driver
from ..engines.port import EngineReset, Get, Session
from ..errors import NotFound, Unreachable
from . import options


def settings_for(endpoint: str, run_id: str, given: options.Given) -> Settings:
    """Of an onlooker: how many nodes there are is the run's business."""
    put_aside(os.environ)
    return Settings.make(endpoint, run_id=run_id, min_nodes=1, max_nodes=1, **{**given, "is_host": False})


@asynccontextmanager
async def session_for(settings: Settings) -> AsyncIterator[Session]:
    """Raises Unreachable at once: who asks from a shell wants to know, not to wait."""
    driver = open_driver(settings)
    try:
        session = await driver.connect()
        try:
            yield session
        except EngineReset:
            raise Unreachable(driver.endpoint, "it was restarted at this moment: ask again") from None
        finally:
            await session.close()
    finally:
        await driver.close()


def no_such_run(settings: Settings) -> NotFound:
    """The error for a run that nobody has heard of."""
    problem = f"engine {settings.endpoint} keeps no such run: nobody has joined it, or its records are gone"
    return NotFound(settings.run_id, f"{problem}; check --run-id and the endpoint")


async def require_run(session: Session, settings: Settings) -> None:
    """Raises NotFound. What an operator asks of a run that is not there would lie in the engine for ever."""
    found = await session.txn(then=[Get(Keys(settings.run_id).settings)])
    if found.item(0) is None:
        raise no_such_run(settings)


def who() -> str:
    """Who asks, as others are told."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user need not have a name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
