"""Commands that change a run: `rdzv close`, `drain`, `ban`, `unban` and `adopt`."""

from __future__ import annotations

import functools
import getpass
import inspect
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import typer

from ..config.settings import Settings
from ..core.duration import read_duration, show_duration
from ..core.keys import Keys
from ..engines.port import Get, Session
from ..errors import NotFound, SettingsError
from ..operate import commands
from . import options
from .options import ask, no_such_run, settings_for
from .output import json_text, say
from .words import Argument, Option

Reason = Annotated[str, Option("--reason", help="told to the members, and kept in the journal")]
ASKED = "asked for by an operator"
BAN_MAX_S = 30 * 86_400.0


def _ban_time(text: str) -> float:
    """Return the seconds of `--for`."""
    try:
        seconds = read_duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not 1 <= seconds <= BAN_MAX_S:
        raise typer.BadParameter(f"{text!r} must be from 1 s to {show_duration(BAN_MAX_S)}; without --for the ban has no end")
    return seconds


Expires = Annotated[
    float | None,
    Option("--for", parser=_ban_time, metavar="DURATION", help="let the host in again after, say, 90s, 15m, 2h or 1d"),
]

Answer = tuple[str, str, dict[str, Any]]
"""A word for the field `done`, a sentence for people, and further fields for programs."""


def _operator_command(act: Callable[..., Coroutine[Any, Any, Answer]]) -> Callable[..., None]:
    """Make a command from an action on a session: connect, act, and print the answer.

    The command has ENDPOINT, --run-id, --json and the options of `with_settings` in place of `session` and `settings`.
    An argument of its own stands before ENDPOINT.
    """

    def command(
        endpoint: options.Endpoint, given: options.Given, run_id: options.RunId = "", json: options.Json = False, **own: Any
    ) -> None:
        settings = settings_for(endpoint, run_id, given)
        done, text, fields = ask(settings, lambda session: act(session, settings, **own))
        say(json_text({"done": done, "run_id": settings.run_id, **fields}) if json else text)

    endpoint, given, run_id, json, _ = inspect.signature(command, eval_str=True).parameters.values()
    _, _, *own = inspect.signature(act, eval_str=True).parameters.values()
    first = [one for one in own if one.default is inspect.Parameter.empty]
    functools.update_wrapper(command, act, assigned=("__name__", "__doc__", "__module__"))
    parameters = [*first, endpoint, given, run_id, *own[len(first) :], json]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return options.with_settings(command)


@_operator_command
async def close(session: Session, settings: Settings, reason: Reason = ASKED) -> Answer:
    """End a run for all members. They are told by whom and why; the id is refused for `closed_for` seconds.

    Exit code 7: there is no such run, or it is closed already.
    """
    await _require_run(session, settings)
    if not await commands.close(session, settings.run_id, reason, _operator_name()):
        raise NotFound(settings.run_id, "it has no round to close: it is closed already, or has not begun")
    return "closed", f"run {settings.run_id!r} is closed: {reason}", {"reason": reason}


@_operator_command
async def drain(
    session: Session,
    settings: Settings,
    whom: Annotated[str, Argument(metavar="MEMBER|HOST", help="a member's name or id, or a host; '*' for all members")],
    reason: Reason = ASKED,
) -> Answer:
    """Ask members to leave. If enough members remain, they re-form the round without them.

    Exit code 7: there is no such run, or no member has that name, id or host.
    """
    await _require_run(session, settings)
    asked = await commands.drain(session, settings.run_id, whom, reason)
    if not asked:
        found = "no member is there" if whom == commands.EVERYBODY else f"nobody there has the name, id or host {whom!r}"
        problem = f"{found}; `rdzv status` shows who is there"
        raise NotFound(settings.run_id, problem)
    return "asked to drain", f"asked to drain: {', '.join(asked)}", {"members": asked, "reason": reason}


@_operator_command
async def ban(
    session: Session, settings: Settings, host: options.Host, reason: Reason = ASKED, expires: Expires = None
) -> Answer:
    """Keep a host out of a run, for as long as the run lives or for a time. Its members are evicted at once.

    Exit code 7: there is no such run.
    """
    await _require_run(session, settings)
    members, elsewhere = await commands.ban(session, settings.run_id, host, reason, expires)
    how_long = "" if expires is None else f" for {show_duration(expires)}"
    text = f"host {host!r} is banned from run {settings.run_id!r}{how_long}; `rdzv unban` lets it in again"
    if not members:
        text += "; no member is on it" + (f": {host!r} is the name of one on host {elsewhere!r}" if elsewhere else "")
    return "banned", text, {"host": host, "reason": reason, "for_s": expires, "members": members}


@_operator_command
async def unban(session: Session, settings: Settings, host: options.Host) -> Answer:
    """Let a banned or quarantined host in again. Exit code 7: there is no such run, or the host is neither."""
    await _require_run(session, settings)
    if not await commands.unban(session, settings.run_id, host):
        raise NotFound(settings.run_id, f"host {host!r} is neither banned from it nor quarantined")
    return "unbanned", f"host {host!r} may join run {settings.run_id!r} again", {"host": host}


@_operator_command
async def adopt(
    session: Session,
    settings: Settings,
    force: Annotated[bool, Option("--force", help="confirm that the engine that the members knew is gone")] = False,
) -> Answer:
    """Let the members of a run move to the engine that the endpoint names now, although they know one at another place.

    They refuse it by themselves, because the old engine may still serve others. If all members of a round move, it goes on.
    """
    if not force:
        problem = f"members of run {settings.run_id!r} would follow to the engine at {session.place}"
        remedy = "make sure that the one they knew is gone, then give --force: if it still serves others, the run is split"
        raise SettingsError(f"{problem}; {remedy}")
    await commands.adopt(session, settings.run_id, _operator_name())
    text = f"members of run {settings.run_id!r} may follow to {session.place} for {commands.ADOPT_S:g} s from now"
    return "adopted", text, {"place": session.place, "for_s": commands.ADOPT_S}


async def _require_run(session: Session, settings: Settings) -> None:
    """Raise NotFound if there is no such run. An operator's request to it would stay in the engine for ever."""
    found = await session.txn(then=[Get(Keys(settings.run_id).settings)])
    if found.item(0) is None:
        raise no_such_run(settings)


def _operator_name() -> str:
    """Return user@host, for the members and the journal."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # A container's user need not have a name.
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
