"""Options that several commands share, and the settings and session that a command without a member makes of them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

import typer

from ..config.secret import put_aside
from ..config.settings import Settings
from ..drivers import open_driver
from ..engines.port import EngineReset, Session
from ..errors import NotFound, SettingsError, Unreachable
from .exit_codes import exit_on_error

T = TypeVar("T")

WHERE = "where the run is kept: host:port, etcd://, c10d://, file:// or memory://"
Endpoint = Annotated[str, typer.Argument(envvar="RDZV_ENDPOINT", help=WHERE)]
EndpointLast = Annotated[str, typer.Argument(metavar="[ENDPOINT]", envvar="RDZV_ENDPOINT", help=WHERE)]
Host = Annotated[str, typer.Argument(help="a host name as `rdzv status` shows it")]
RunId = Annotated[str, typer.Option("--run-id", envvar="RDZV_RUN_ID", help="names the run: members with the same id meet")]
AnyRunId = Annotated[str, typer.Option("--run-id", envvar="RDZV_RUN_ID", help="the run that you will join, if you know it")]
Nodes = Annotated[str, typer.Option("--nnodes", help="how many nodes: n, or min:max")]
Conf = Annotated[
    list[str] | None, typer.Option("--conf", "-c", metavar="KEY=VALUE", help="a setting, such as last_call=10; may be repeated")
]
TokenFile = Annotated[str | None, typer.Option("--token-file", help="file with the shared secret; or set RDZV_TOKEN")]
TlsCa = Annotated[str | None, typer.Option("--tls-ca", help="PEM file: whose certificates to trust")]
TlsCert = Annotated[str | None, typer.Option("--tls-cert", help="PEM file: the certificate to show")]
TlsKey = Annotated[str | None, typer.Option("--tls-key", help="PEM file: the key of that certificate")]
Json = Annotated[bool, typer.Option("--json", help="machine-readable output: one JSON object per line")]

Given: TypeAlias = dict[str, Any]  # Settings from the command line.


def _given(
    conf: Conf = None, token_file: TokenFile = None, tls_ca: TlsCa = None, tls_cert: TlsCert = None, tls_key: TlsKey = None
) -> Given:
    """Collect the settings, the secret and the certificates that every command takes."""
    settings: Given = {}
    for pair in conf or []:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise SettingsError(f"--conf is {pair!r}: it must be KEY=VALUE, such as last_call=10")
        name = key.strip().replace("-", "_")
        if name == "token":
            raise SettingsError("a secret is not given as an argument, which all users of a machine can see: use --token-file")
        settings[name] = value.strip()
    trust = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    return {**settings, **{name: value for name, value in trust.items() if value is not None}}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command that has the options of `_given` in place of `given`, and prints errors as sentences."""
    shared = inspect.signature(_given).parameters
    own = {name: one for name, one in inspect.signature(command).parameters.items() if name != "given"}

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        with exit_on_error():
            command(given=_given(**{name: values.pop(name) for name in shared}), **values)

    hints = {**get_type_hints(command, include_extras=True), **get_type_hints(_given, include_extras=True)}
    kind = inspect.Parameter.KEYWORD_ONLY
    options = [one.replace(annotation=hints[name], kind=kind) for name, one in {**own, **shared}.items()]
    wrapped.__annotations__ = {one.name: one.annotation for one in options}
    wrapped.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return wrapped


def settings_for(endpoint: str, run_id: str, given: Given) -> Settings:
    """Make settings for a process that never serves. The numbers of nodes are placeholders: the run has its own."""
    put_aside(os.environ)
    return Settings.make(endpoint, run_id=run_id, min_nodes=1, max_nodes=1, **{**given, "is_host": False})


def ask(settings: Settings, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
    """Run the work on a session, in an event loop of its own. Raises Unreachable at once, without a retry, or NotFound."""

    async def asking() -> T:
        driver = open_driver(settings)
        try:
            try:
                session = await driver.connect()
            except Unreachable as error:
                if not error.other_run:
                    raise
                raise NotFound(settings.run_id, f"engine {settings.endpoint} keeps another run: {error.problem}") from None
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
