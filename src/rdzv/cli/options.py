"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..errors import SettingsError

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


def conf(pairs: list[str] | None) -> dict[str, Any]:
    """Settings given one by one."""
    settings: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise SettingsError(f"--conf is {pair!r}: it must be KEY=VALUE, such as last_call=10")
        name = key.strip().replace("-", "_")
        if name == "token":
            raise SettingsError("a secret is not given as an argument, which all users of a machine can see: use --token-file")
        settings[name] = value.strip()
    return settings


def trust(token_file: str | None, tls_ca: str | None, tls_cert: str | None, tls_key: str | None) -> dict[str, Any]:
    """The settings of whom to trust, as far as given."""
    given = {"token_file": token_file, "tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
    return {name: value for name, value in given.items() if value is not None}
