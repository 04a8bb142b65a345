"""Options that several commands share, and the settings and session that a command without a member makes of them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeAlias, TypeVar

from ..config import auto_endpoint
from ..config.secret import put_aside
from ..config.settings import Settings, check_name
from ..drivers import open_driver
from ..engines.port import EngineReset, Session
from ..errors import NotFound, SettingsError, Unreachable
from .exit_codes import exit_on_error
from .words import Argument, Option

T = TypeVar("T")

WHERE = (
    "where the run is kept: host:port, rdzv://, etcd://, etcds://, quorum://, c10d://, file://, memory://, "
    "or auto (the first node of the job, as Slurm and others name it)"
)
Endpoint = Annotated[str, Argument(metavar="ENDPOINT", envvar="RDZV_ENDPOINT", help=WHERE)]
MemberEndpoint = Annotated[
    str, Argument(metavar="ENDPOINT", envvar="RDZV_ENDPOINT", help=f"{WHERE}; without it: auto")
]
Host = Annotated[str, Argument(metavar="HOST", help="a host name as `rdzv status` shows it")]


def _run_id(help: str) -> Any:
    return Option("--run-id", metavar="ID", envvar="RDZV_RUN_ID", help=help, autocompletion="complete_run_id")


RunId = Annotated[str, _run_id("names the run: members with the same id meet; with auto it may be left out: the id of the job")]
AnyRunId = Annotated[str, _run_id("the run that you will join, if you know it")]
ShownRunId = Annotated[str, _run_id("shows that run only; without it, all runs that are there")]
OnlyRunId = Annotated[str, _run_id("names the run; without it, the only run that is there")]
Nodes = Annotated[str, Option("--nnodes", metavar="N|MIN:MAX", help="how many nodes")]
Conf = Annotated[
    list[str] | None,
    Option(
        "--conf", "-c", metavar="KEY=VALUE", autocompletion="complete_conf",
        help="a setting, such as last_call=10; may be repeated",
    ),
]
TokenFile = Annotated[
    str | None, Option("--token-file", metavar="FILE", help="file with the shared secret; or set RDZV_TOKEN")
]
TlsCa = Annotated[str | None, Option("--tls-ca", metavar="FILE", help="PEM file: whose certificates to trust")]
TlsCert = Annotated[str | None, Option("--tls-cert", metavar="FILE", help="PEM file: the certificate to show")]
TlsKey = Annotated[str | None, Option("--tls-key", metavar="FILE", help="PEM file: the key of that certificate")]
Json = Annotated[bool, Option("--json", help="machine-readable output: one JSON object per line")]

_ELSEWHERE = {
    "endpoint": "as the argument ENDPOINT",
    "run_id": "with --run-id",
    "min_nodes": "with --nnodes",
    "max_nodes": "with --nnodes",
    "info": "by programs only: its value is no text",
}
"""Settings that --conf does not take."""

Given: TypeAlias = dict[str, Any]  # Settings from the command line.
ANY_RUN = "any"  # In place of a run id that is not known yet, and that nothing uses.


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
        if name in _ELSEWHERE:
            raise SettingsError(f"--conf has {name!r}, which is given {_ELSEWHERE[name]}")
        # Here, because a command passes the settings on as keywords beside keywords of its own, such as `observer`.
        check_name(name)
        settings[name] = value.strip()
    return {**settings, **trust_of({"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key})}


def trust_of(values: dict[str, Any]) -> Given:
    """Return the secret and the certificates that were given, of all options."""
    return {name: values[name] for name in ("token_file", "tls_ca", "tls_cert", "tls_key") if values.get(name) is not None}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Make a command that has the options of `_given` in place of `given`, and prints errors as sentences."""
    # Not by get_type_hints: before Python 3.11 it hides an annotation whose default is None, and the option loses its names.
    shared = inspect.signature(_given, eval_str=True).parameters
    own = {name: one for name, one in inspect.signature(command, eval_str=True).parameters.items() if name != "given"}

    @functools.wraps(command)
    def wrapped(**values: Any) -> None:
        with exit_on_error():
            command(given=_given(**{name: values.pop(name) for name in shared}), **values)

    options = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in {**own, **shared}.values()]
    wrapped.__annotations__ = {one.name: one.annotation for one in options}
    wrapped.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return wrapped


def settings_for(endpoint: str, run_id: str, given: Given) -> Settings:
    """Make settings for a process that never serves. The numbers of nodes are placeholders: the run has its own."""
    put_aside(os.environ)
    where, run_id = auto_endpoint.resolve(endpoint, run_id, os.environ, several=endpoint.strip() == auto_endpoint.AUTO)
    if not run_id:
        raise SettingsError("--run-id is not given: name the run; `rdzv runs` lists those that are there")
    return Settings.make(where, run_id=run_id, min_nodes=1, max_nodes=1, **{**given, "is_host": False})


def viewer_settings(endpoint: str, given: Given) -> Settings:
    """Make the same for a process that does not know yet which run it will look at."""
    return settings_for(endpoint, ANY_RUN, given)


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
