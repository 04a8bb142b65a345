"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias, get_type_hints

import typer

from ..errors import SettingsError
from .exit_codes import sentences

Endpoint = Annotated[
    str,
    typer.Argument(envvar="RDZV_ENDPOINT", help="where the run is kept: host:port, rdzv://host:port, memory://"),
]
EndpointLast = Annotated[
    str,
    typer.Argument(metavar="[ENDPOINT]", envvar="RDZV_ENDPOINT", help="where the run is kept: host:port, rdzv://host:port"),
]
Host = Annotated[str, typer.Argument(help="as members call it; `rdzv status` shows the hosts")]
RunId = Annotated[str, typer.Option("--run-id", envvar="RDZV_RUN_ID", help="names the run: members with one id meet")]
AnyRunId = Annotated[str, typer.Option("--run-id", envvar="RDZV_RUN_ID", help="the run that will be joined, if it is known")]
Nodes = Annotated[str, typer.Option("--nnodes", help="how many nodes: n, or min:max")]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", "-c", metavar="KEY=VALUE", help="a setting, such as last_call=10; may be repeated"),
]
TokenFile = Annotated[
    str | None, typer.Option("--token-file", help="file with the shared secret; RDZV_TOKEN in the environment is the other way")
]
TlsCa = Annotated[str | None, typer.Option("--tls-ca", help="PEM file: whose certificates to trust")]
TlsCert = Annotated[str | None, typer.Option("--tls-cert", help="PEM file: the certificate to show")]
TlsKey = Annotated[str | None, typer.Option("--tls-key", help="PEM file: the key of that certificate")]
Json = Annotated[bool, typer.Option("--json", help="for programs: one JSON object per line")]


def nodes(text: str) -> tuple[str, str]:
    """Fewest and most nodes, as texts: the settings check them."""
    low, colon, high = text.partition(":")
    if not low or (colon and not high):
        raise SettingsError(f"--nnodes is {text!r}: it must be a number or min:max, such as 2:4")
    return low, high or low


Given: TypeAlias = dict[str, Any]
"""Settings, as far as the command line gives them."""


def _given(
    conf: Conf = None,
    token_file: TokenFile = None,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
) -> Given:
    """What every command takes: settings one by one, and whom to trust."""
    trust = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    return {**read_conf(conf), **{name: value for name, value in trust.items() if value is not None}}


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """The command as the shell sees it: with these options in place of its `given`, and sentences in place of tracebacks."""
    shared = inspect.signature(_given).parameters
    own = {name: one for name, one in inspect.signature(command).parameters.items() if name != "given"}

    @functools.wraps(command)
    def shown(**values: Any) -> None:
        with sentences():
            command(given=_given(**{name: values.pop(name) for name in shared}), **values)

    hints = {**get_type_hints(command, include_extras=True), **get_type_hints(_given, include_extras=True)}
    options = [one.replace(annotation=hints[name]) for name, one in {**own, **shared}.items()]
    shown.__annotations__ = {one.name: one.annotation for one in options}
    shown.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return shown


def read_conf(pairs: list[str] | None) -> Given:
    """Settings given one by one."""
    settings: Given = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise SettingsError(f"--conf is {pair!r}: it must be KEY=VALUE, such as last_call=10")
        name = key.strip().replace("-", "_")
        if name == "token":
            raise SettingsError("a secret is not given as an argument, which all users of a machine can see: use --token-file")
        settings[name] = value.strip()
    return settings
