"""`rdzv dashboard`, and the HTTP port of `rdzv serve`: metrics and a page about runs."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

from ..config import secret
from ..config.endpoint import parse_bind
from ..config.secret import Secret
from ..config.settings import Settings
from ..engines.embedded.server import Server
from ..engines.embedded.trust import Trust
from ..errors import SettingsError, Unreachable
from . import options
from .exit_codes import ExitCode
from .launcher import StopSignal
from .options import settings_for
from .output import say
from .words import Option

if TYPE_CHECKING:
    from ..web.serving import WebServer

HERE = "127.0.0.1:29480"
Http = Annotated[
    str, Option("--http", metavar="HOST:PORT", help="where to serve metrics and a page about runs, to all who reach it")
]
HttpName = Annotated[
    list[str] | None,
    Option("--http-name", metavar="NAME", help="a name by which browsers reach the page; may be repeated"),
]
AllowActions = Annotated[
    bool, Option("--allow-actions", help="let people who give the secret drain, ban, unban and close on the page")
]
ActionsTokenFile = Annotated[
    str | None, Option("--actions-token-file", help="file with the secret for actions; default: the server's own")
]


@options.with_settings
def dashboard(
    endpoint: options.Endpoint,
    given: options.Given,
    http: Http = HERE,
    run_id: options.ShownRunId = "",
    http_name: HttpName = None,
    allow_actions: AllowActions = False,
    actions_token_file: ActionsTokenFile = None,
) -> None:
    """Serve metrics and a live page about the runs at an endpoint, until SIGTERM. An observer: it changes nothing.

    It shows all runs, or only the one of --run-id, and costs each run one watch, however many browsers look.
    """
    settings = settings_for(endpoint, run_id or "dashboard", given)
    if settings.endpoint.scheme == "c10d" and not run_id:
        raise SettingsError("torch's TCPStore cannot list its runs: name one with --run-id")
    where = parse_http(http)
    actions = actions_secret(settings, allow_actions, actions_token_file)
    sys.exit(asyncio.run(_show(settings, run_id, where, actions, http_name or [])))


async def _show(settings: Settings, run_id: str, where: tuple[str, int], actions: Secret | None, names: list[str]) -> int:
    from ..web.serving import WebServer  # noqa: PLC0415
    from ..web.sources import EndpointSource  # noqa: PLC0415

    stop = StopSignal()
    page = WebServer(EndpointSource(settings, run_id), where, secret=actions, hosts=names)
    await open_page(page)
    await stop.run_until(asyncio.Event().wait())
    await page.stop()
    return ExitCode.OK


def page_of(server: Server, settings: Settings, where: tuple[str, int], actions: Secret | None, names: list[str]) -> WebServer:
    """Return the HTTP port of a server in this process."""
    from ..web.serving import WebServer  # noqa: PLC0415
    from ..web.sources import ServerSource  # noqa: PLC0415

    shown = f"{server.bind[0] or '*'}:{server.port}"
    tls = {"tls_cert": settings.tls_cert, "tls_key": settings.tls_key}
    return WebServer(ServerSource(server, shown), where, secret=actions, hosts=names, **tls)


async def open_page(page: WebServer) -> None:
    """Listen, and say where."""
    try:
        await page.start()
    except OSError as error:
        raise Unreachable(f"{page.bind[0] or '*'}:{page.bind[1]}", f"cannot listen there: {error.strerror or error}") from None
    say(f"metrics and page at {page.url}")


def parse_http(text: str) -> tuple[str, int]:
    """Return host and port of --http. Raise SettingsError also if the extra is missing."""
    _require_web()
    try:
        return parse_bind(text)
    except ValueError as error:
        raise SettingsError(f"--http is wrong: {error}; it must be HOST:PORT, such as {HERE}") from None


def actions_secret(settings: Settings, allowed: bool, token_file: str | None) -> Secret | None:
    """Return the secret with which actions are allowed; None if they are not."""
    if not allowed:
        if token_file is not None:
            raise SettingsError("--actions-token-file is given without --allow-actions: give both")
        return None
    if token_file is not None:
        return secret.find(None, token_file)
    found = Trust.of(settings).secret if settings.endpoint.scheme == "rdzv" else None
    if found is None:
        raise SettingsError(
            "--allow-actions needs a secret, which people must give on the page: name a file with one (--actions-token-file)"
        )
    return found


def _require_web() -> None:
    """Raise SettingsError if the extra is missing."""
    try:
        from ..web import serving  # noqa: F401, PLC0415  The modules of an extra are imported where they are used.
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rdzv"):
            raise
        raise SettingsError(f"the page needs {error.name}, which is not installed: pip install 'rdzv[web]'") from None
