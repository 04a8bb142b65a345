"""Commands of operators and viewers, who are no members: their arguments, settings and session on the engine."""

from __future__ import annotations

import asyncio
import functools
import getpass
import inspect
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar, get_type_hints

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


def run_command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command about one run from a function of `settings`, `as_json` and options of its own.

    The command has ENDPOINT, --run-id, the options of `with_settings` and --json in place of `settings` and `as_json`. An
    argument of its own stands before ENDPOINT.
    """
    hints = get_type_hints(function, include_extras=True)
    own = [one for name, one in inspect.signature(function).parameters.items() if name not in ("settings", "as_json")]
    own = [one.replace(annotation=hints[one.name], kind=inspect.Parameter.KEYWORD_ONLY) for one in own]
    arguments = [one for one in own if one.default is inspect.Parameter.empty]

    def added(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)

    def command(given: options.Given, endpoint: str, run_id: str, json: bool, **values: Any) -> None:
        function(settings=settings_for(endpoint, run_id, given), as_json=json, **values)

    functools.update_wrapper(command, function, assigned=("__name__", "__doc__", "__module__"))
    parameters = [
        *arguments,
        added("endpoint", options.EndpointLast if arguments else options.Endpoint),
        added("run_id", options.RunId),
        *(one for one in own if one not in arguments),
        added("json", options.Json, default=False),
    ]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return options.with_settings(command)


@asynccontextmanager
async def session_for(settings: Settings) -> AsyncIterator[Session]:
    """Open a session. Raises Unreachable at once: a user at a shell wants an answer, not a retry."""
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


def ask(settings: Settings, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
    """Run the work on a session, in an event loop of its own, and return its result."""

    async def asking() -> T:
        async with session_for(settings) as session:
            return await work(session)

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
