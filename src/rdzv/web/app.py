"""The HTTP application: metrics, probes, the page and its stream."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from importlib.resources import files
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..config.secret import Secret
from . import metrics
from .actions import Actions, Refusal
from .feed import CLIENTS_MAX, Feeds
from .observer import RunsObserver

HEADERS_MAX = 16 * 1024
"""Bytes of the address and the headers of a request."""
RUN_ID_MAX = 600
METRICS_S = 0.5
"""How long the text of the metrics is kept, so that many scrapes cost little more than one."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATIC = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}
HEADERS = {
    b"content-security-policy": b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-store",
    b"cross-origin-resource-policy": b"same-origin",
    b"cross-origin-opener-policy": b"same-origin",
}


class Web:
    """The application for the runs of one observer."""

    def __init__(self, observer: RunsObserver, secret: Secret | None = None, hosts: Iterable[str] = ()) -> None:
        """Take the secret with which actions are allowed (None: they are not), and host names that browsers may use."""
        self._observer = observer
        self._actions = Actions(observer, secret)
        self.feeds = Feeds(observer, are_actions_allowed=self._actions.are_allowed)
        self._metrics = b""
        self._metrics_at = -METRICS_S
        self._scraping = asyncio.Lock()
        folder = files("rdzv.web") / "static"
        self._static = {name: (folder / name).read_bytes() for name in STATIC}
        routes = [
            Route("/", self._page), Route("/static/{name}", self._file), Route("/favicon.ico", self._icon),
            Route("/metrics", self._scrape), Route("/healthz", self._health), Route("/readyz", self._ready),
            Route("/api/runs", self._runs), Route("/api/run", self._run), Route("/api/act", self._act, methods=["POST"]),
            Route("/events", self._events),
        ]  # fmt: skip
        own = {"localhost", socket.gethostname().lower(), *(host.lower() for host in hosts)}
        self.app: ASGIApp = _Guard(Starlette(routes=routes), own)
        # A resolver that does not answer would hold the event loop of the agent, so the full name may become known later. In
        # a daemon thread: the end of the program would wait for one of asyncio's own.
        with suppress(RuntimeError):  # The system has no room for a thread. The plain name is known.
            threading.Thread(target=lambda: own.add(socket.getfqdn().lower()), name="rdzv host name", daemon=True).start()

    async def stop(self) -> None:
        await self.feeds.stop()

    # ---- metrics and probes

    async def _scrape(self, _: Request) -> Response:
        async with self._scraping:
            now = self._observer.now()
            if now - self._metrics_at >= METRICS_S:
                figures = metrics.take(self._observer)
                self._metrics, self._metrics_at = await asyncio.to_thread(metrics.text, figures), now
        return Response(self._metrics, headers={"content-type": METRICS_TYPE})

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _ready(self, _: Request) -> Response:
        if self._observer.is_up:
            return PlainTextResponse("ready\n")
        return PlainTextResponse(f"the engine does not answer: {self._observer.trouble}\n", 503)

    # ---- the page

    async def _page(self, _: Request) -> Response:
        return self._send_file("page.html")

    async def _icon(self, _: Request) -> Response:
        return self._send_file("icon.svg")

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        return self._send_file(name) if name in STATIC else PlainTextResponse("no such file\n", 404)

    def _send_file(self, name: str) -> Response:
        return Response(self._static[name], media_type=STATIC[name])

    async def _runs(self, _: Request) -> Response:
        return _json(self.feeds.overview())

    async def _run(self, request: Request) -> Response:
        feed = self.feeds.feed(request.query_params.get("id", "")[:RUN_ID_MAX])
        return _json({"error": "no such run"}, 404) if feed is None else _json(feed.full())

    async def _events(self, request: Request) -> Response:
        """Stream a run (`?run=`), or the overview."""
        feeds, run_id = self.feeds, request.query_params.get("run")
        if feeds.clients >= CLIENTS_MAX:
            return PlainTextResponse(f"{CLIENTS_MAX} browsers listen already, which is all that can\n", 503)
        events = feeds.stream()
        if run_id is not None:
            feed = feeds.feed(run_id[:RUN_ID_MAX])
            if feed is None:
                return PlainTextResponse("no such run\n", 404)
            events = feed.stream(feeds.closing)
        return StreamingResponse(self._counted(events), media_type="text/event-stream")

    async def _counted(self, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.feeds.clients += 1
        try:
            async for event in events:
                yield event
        finally:
            self.feeds.clients -= 1
            await events.aclose()  # type: ignore[attr-defined]  # A generator.

    # ---- actions

    async def _act(self, request: Request) -> Response:
        if problem := _why_cross_site(request):
            return _json({"error": problem}, 403)
        peer = request.client.host if request.client is not None else "unknown"
        try:
            return _json({"done": await self._actions.act(request.stream(), peer)})
        except Refusal as refusal:
            return _json({"error": refusal.sentence}, refusal.status)
        except ClientDisconnect:  # Strangers must not fill the log. Nobody reads the answer.
            return Response(status_code=400)


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _why_cross_site(request: Request) -> str:
    """Return why the request may come from a page of another site; empty: it does not.

    A form of another site cannot send JSON, and a script of another site must ask first, which is never answered.
    """
    headers = request.headers
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        return "a request is sent as application/json"
    if headers.get("sec-fetch-site", "same-origin") != "same-origin":
        return "the request comes from a page of another site"
    origin = headers.get("origin")
    try:
        is_ours = origin is None or urlsplit(origin).netloc == headers.get("host", "")
    except ValueError:  # It is no address, such as "http://[".
        is_ours = False
    return "" if is_ours else "the request comes from a page of another site"


class _Guard:
    """Adds the headers of safety to every answer, and refuses requests under a foreign name.

    A page of an attacker's domain whose name suddenly means this machine could otherwise read everything (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, hosts: set[str]) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message["headers"]}
                more = [(name, value) for name, value in HEADERS.items() if name not in names]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if size + len(scope["raw_path"]) + len(scope["query_string"]) > HEADERS_MAX:
            await PlainTextResponse(f"headers have at most {HEADERS_MAX} bytes\n", 431)(scope, receive, guarded)
        elif self._is_ours(host):
            await self._app(scope, receive, guarded)
        else:
            text = "this name is not known here: use the address, or give --http-name with it\n"
            await PlainTextResponse(text, 421)(scope, receive, guarded)

    def _is_ours(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._hosts
        return True
