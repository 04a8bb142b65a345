"""What an operator may ask of a run: `rdzv close`, `drain`, `ban`, `unban` and `adopt`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
import typer

from ..config.settings import Settings
from ..engines.port import Session
from ..errors import NotFound, SettingsError
from ..operate import commands
from . import options
from .session import require_run, session_for, settings_for, who

Reason = Annotated[str, typer.Option("--reason", help="told to the members, and kept in the journal")]


class Answer(msgspec.Struct):
    """What was done: fields for programs, a sentence for people."""

    done: str
    text: str
    fields: dict[str, Any] = {}

    def show(self, as_json: bool) -> None:
        """On one line."""
        said = msgspec.json.encode({"done": self.done, **self.fields}).decode()
        typer.echo(said if as_json else self.text)


Act = Callable[[Session, Settings], Awaitable[Answer]]


def _ask(settings: Settings, act: Act, as_json: bool) -> None:
    async def asking() -> Answer:
        async with session_for(settings) as session:
            return await act(session, settings)

    asyncio.run(asking()).show(as_json)


@options.with_settings
def close(
    endpoint: options.Endpoint,
    run_id: options.RunId,
    given: options.Given,
    reason: Reason = "asked for by an operator",
    json: options.Json = False,
) -> None:
    """End a run for everybody. Its members are told by whom and why; its id is refused for `closed_for` seconds.

    Exit code 7: there is no such run, or it is closed already.
    """

    async def act(session: Session, settings: Settings) -> Answer:
        await require_run(session, settings)
        if not await commands.close(session, run_id, reason, who()):
            raise NotFound(run_id, "it has no round to close: it is closed already, or has not begun")
        return Answer("closed", f"run {run_id!r} is closed: {reason}", {"run_id": run_id, "reason": reason})

    _ask(settings_for(endpoint, run_id, given), act, json)


@options.with_settings
def drain(
    whom: Annotated[str, typer.Argument(metavar="MEMBER|HOST", help="a member's name or id, or a host")],
    endpoint: options.EndpointLast,
    run_id: options.RunId,
    given: options.Given,
    reason: Reason = "asked for by an operator",
    json: options.Json = False,
) -> None:
    """Ask members to go: the round is re-formed without them, if enough remain, and they leave.

    Exit code 7: nobody of that name is there.
    """

    async def act(session: Session, settings: Settings) -> Answer:
        await require_run(session, settings)
        asked = await commands.drain(session, run_id, whom, reason)
        if not asked:
            raise NotFound(run_id, f"nobody there has the name, id or host {whom!r}; `rdzv status` shows who is there")
        fields = {"run_id": run_id, "members": asked, "reason": reason}
        return Answer("asked to drain", f"asked to drain: {', '.join(asked)}", fields)

    _ask(settings_for(endpoint, run_id, given), act, json)


@options.with_settings
def ban(
    host: options.Host,
    endpoint: options.EndpointLast,
    run_id: options.RunId,
    given: options.Given,
    reason: Reason = "asked for by an operator",
    json: options.Json = False,
) -> None:
    """Keep a host out of a run, for as long as the run lives; its members are evicted at once."""

    async def act(session: Session, settings: Settings) -> Answer:
        await require_run(session, settings)
        await commands.ban(session, run_id, host, reason)
        text = f"host {host!r} is banned from run {run_id!r}; `rdzv unban` lets it in again"
        return Answer("banned", text, {"run_id": run_id, "host": host, "reason": reason})

    _ask(settings_for(endpoint, run_id, given), act, json)


@options.with_settings
def unban(
    host: options.Host,
    endpoint: options.EndpointLast,
    run_id: options.RunId,
    given: options.Given,
    json: options.Json = False,
) -> None:
    """Let a host in again. Exit code 7: it was not banned."""

    async def act(session: Session, settings: Settings) -> Answer:
        await require_run(session, settings)
        if not await commands.unban(session, run_id, host):
            raise NotFound(run_id, f"host {host!r} is not banned from it")
        return Answer("unbanned", f"host {host!r} may join run {run_id!r} again", {"run_id": run_id, "host": host})

    _ask(settings_for(endpoint, run_id, given), act, json)


@options.with_settings
def adopt(
    endpoint: options.Endpoint,
    run_id: options.RunId,
    given: options.Given,
    force: Annotated[bool, typer.Option("--force", help="the engine that the members knew is surely gone")] = False,
    json: options.Json = False,
) -> None:
    """Let the members of a run follow to the engine that the endpoint means now, although they knew one at another place.

    They refuse it by themselves, because the old engine may still serve others. If all of a round follow, it goes on.
    """

    async def act(session: Session, settings: Settings) -> Answer:
        if not force:
            problem = f"members of run {settings.run_id!r} would follow to the engine at {session.place}"
            remedy = "make sure that the one they knew is gone, then give --force: if it still serves others, the run is split"
            raise SettingsError(f"{problem}; {remedy}")
        await commands.adopt(session, run_id, who())
        text = f"members of run {run_id!r} may follow to {session.place} for {commands.ADOPT_S:g} s from now"
        return Answer("adopted", text, {"run_id": run_id, "place": session.place, "for_s": commands.ADOPT_S})

    _ask(settings_for(endpoint, run_id, given), act, json)
