"""`rdzv serve`: the embedded server as a process of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from ..config.endpoint import PORT, parse_bind
from ..config.secret import put_aside
from ..config.settings import Settings
from ..engines.embedded.hosting import check_name
from ..engines.embedded.limits import give_back_freed_memory
from ..engines.embedded.server import Server
from ..engines.embedded.trust import Trust
from ..errors import SettingsError, Unreachable
from . import dashboard, launcher, options
from .exit_codes import ExitCode
from .output import say
from .words import Option

if TYPE_CHECKING:
    from ..web.serving import WebServer


@options.with_settings
def serve(
    given: options.Given,
    bind: Annotated[str, Option("--bind", help="HOST:PORT to listen at; '*' for all interfaces")] = f"127.0.0.1:{PORT}",
    http: dashboard.Http = "",
    http_name: dashboard.HttpName = None,
    allow_actions: dashboard.AllowActions = False,
    actions_token_file: dashboard.ActionsTokenFile = None,
) -> None:
    """Keep runs in the memory of this process, until SIGTERM. Members stay in their round if it is restarted in place."""
    put_aside(os.environ)
    settings = Settings.make("rdzv://", run_id="serve", min_nodes=1, max_nodes=1, **{"is_host": True, **given})
    if not settings.is_host:
        raise SettingsError("is_host is false, and `rdzv serve` always serves: leave it out")
    actions = dashboard.actions_secret(settings, allow_actions, actions_token_file)
    where = dashboard.parse_http(http) if http else None
    page = partial(dashboard.page_of, settings=settings, where=where, actions=actions, names=http_name or []) if where else None
    if settings.place:
        check_name(settings.place)
    sys.exit(asyncio.run(_serve(_parse_bind(bind), Trust.of(settings), settings.place, page)))


def _parse_bind(bind: str) -> tuple[str, int]:
    try:
        return parse_bind(bind)
    except ValueError as error:
        raise SettingsError(f"--bind is wrong: {error}; it must be HOST:PORT, such as 127.0.0.1:{PORT} or *:{PORT}") from None


async def _serve(bind: tuple[str, int], trust: Trust, place: str, make_page: Callable[[Server], WebServer] | None) -> int:
    stop, (host, port) = launcher.StopSignal(), bind
    server = Server(bind, trust=trust, promised=place)
    try:
        await server.start()
    except OSError as error:
        raise Unreachable(f"{host or '*'}:{port}", f"cannot listen there: {error.strerror or error}") from None
    # This process only serves. Its modules stay for ever, and without this each of thousands of connections would make the
    # garbage collector scan them again.
    give_back_freed_memory()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
    say(f"serving at {host or '*'}:{server.port}")
    page = make_page(server) if make_page is not None else None
    if page is not None:
        await dashboard.open_page(page)
    await stop.run_until(server.retired.wait())
    if page is not None:
        await page.stop()
    await server.stop()
    return ExitCode.UNREACHABLE if server.is_retired else ExitCode.OK  # The server has logged why.
