"""The HTTP port of an agent that serves (`http=`). It never allows actions, and no failure of it stops the agent."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from ..config.endpoint import parse_bind
from ..config.settings import Settings
from ..engines.embedded.hosting import Closer
from ..engines.embedded.server import Server
from .serving import WebServer
from .sources import ServerSource

logger = logging.getLogger("rdzv.web")


def page_of(settings: Settings) -> Callable[[Server], Awaitable[Closer]]:
    """Return a function that opens the port for a server, and returns how to close it."""

    async def open_page(server: Server) -> Closer:
        source = ServerSource(server, str(settings.endpoint))
        page = WebServer(source, parse_bind(settings.http), tls_cert=settings.tls_cert, tls_key=settings.tls_key)
        try:
            await page.start()
        except OSError as error:
            logger.warning(
                "no metrics and no page at %s (http): %s; the run goes on without them", settings.http, error.strerror or error
            )
        else:
            logger.info("metrics and a page about run %r are at %s", settings.run_id, page.url)
        return page.stop

    return open_page
