"""Settings and a session on the engine for the commands of operators and viewers, who are no members."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..config.secret import put_aside
from ..config.settings import Settings
from ..core.keys import Keys
from ..drivers import open_driver
from ..engines.port import EngineReset, Get, Session
from ..errors import NotFound, Unreachable
from . import options

T = TypeVar("T")


def settings_for(endpoint: str, run_id: str, given: options.Given) -> Settings:
    """Make settings for a process that never serves. The numbers of nodes are placeholders: the run has its own."""
    put_aside(os.environ)
    return Settings.make(endpoint, run_id=run_id, min_nodes=1, max_nodes=1, **{**given, "is_host": False})


def ask(settings: Settings, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
    """Run the work on a session, in an event loop of its own. Raises Unreachable at once: a user wants an answer, no retry."""

    async def asking() -> T:
        driver = open_driver(settings)
        try:
            session = await driver.connect()
            try:
                return await work(session)
            except EngineReset:
                raise Unreachable(driver.endpoint, "it was restarted at this moment: ask again") from None
            finally:
                await session.close()
        finally:
            await driver.close()

    return asyncio.run(asking())


def no_such_run(settings: Settings) -> NotFound:
    problem = f"engine {settings.endpoint} keeps no such run: nobody has joined it, or its records are gone"
    return NotFound(settings.run_id, f"{problem}; check --run-id and the endpoint")


async def require_run(session: Session, settings: Settings) -> None:
    """Raise NotFound if there is no such run. An operator's request to it would stay in the engine for ever."""
    found = await session.txn(then=[Get(Keys(settings.run_id).settings)])
    if found.item(0) is None:
        raise no_such_run(settings)


def operator_name() -> str:
    """Return user@host, for the members and the journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user need not have a name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
