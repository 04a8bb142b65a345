"""The choice of a driver by the endpoint's scheme."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from .config import secret
from .config.endpoint import Endpoint
from .config.setting_types import switch
from .config.settings import UNNAMED, Settings
from .core import wire
from .core.keys import Keys
from .core.model import Head, Phase
from .engines.port import Driver, Get, List, Session
from .errors import SettingsError
from .system.node import LocalNode

if TYPE_CHECKING:
    from .engines.embedded.hosting import Closer
    from .engines.embedded.server import Server
    from .engines.quorum.driver import Remaining

USER_ENV = "RDZV_ETCD_USER"
_TLS = ("tls", "tls_cert", "tls_key", "tls_ca", "tls_mutual", "tls_server_name")
_WITHOUT_TRUST = {
    "memory": "only this process can reach it",
    "file": "the rights of the file and its directory say who may use it",
    "c10d": "torch's TCPStore knows no secrets and no TLS, so anyone who reaches its port may use it",
}
"""Schemes of engines that know neither secrets nor TLS, and what protects them instead."""

_ELSEWHERE = {"c10d": ("rdzv.torchrun.rendezvous.c10d_rendezvous_backend", "torch")}
"""Schemes whose driver lives in a higher layer, the only one that may import the package it needs: module, package."""


def open_driver(settings: Settings) -> Driver:
    """Return the driver for the endpoint's engine. It connects later. Only the modules of that engine are imported."""
    endpoint = settings.endpoint
    if endpoint.scheme in _WITHOUT_TRUST:
        _refuse_trust(settings)
    if settings.place and endpoint.scheme != "rdzv":
        raise SettingsError(f"place is {settings.place!r}, but endpoint {str(endpoint)!r} is no embedded server: leave it out")
    if endpoint.scheme == "memory":
        from .engines.memory import MemoryDriver  # noqa: PLC0415

        endpoint.options()
        return MemoryDriver(endpoint.path)
    if endpoint.scheme == "rdzv":
        from .engines.embedded.hosting import HostingDriver  # noqa: PLC0415
        from .engines.embedded.trust import Trust  # noqa: PLC0415

        endpoint.options()
        return HostingDriver(
            endpoint, run_id=settings.run_id, is_host=settings.is_host, max_nodes=settings.max_nodes,
            linger_s=settings.linger, stay_s=settings.serve_on, read_timeout_s=settings.read_timeout,
            trust=Trust.of(settings), place=settings.place, on_serve=_page_of(settings) if settings.http else None,
        )  # fmt: skip
    if endpoint.scheme in {"etcd", "etcds"}:
        return _open_etcd(settings)
    if endpoint.scheme == "quorum":
        return _open_quorum(settings)
    if endpoint.scheme == "file":
        from .engines.register.backend import BlockingRegister  # noqa: PLC0415
        from .engines.register.driver import RegisterDriver  # noqa: PLC0415
        from .engines.register.file import FileBackend  # noqa: PLC0415

        endpoint.options()
        register = BlockingRegister(FileBackend(endpoint.path), str(endpoint), timeout_s=settings.read_timeout)
        return RegisterDriver(register, LocalNode(), timeout_s=settings.read_timeout)
    module, needs = _ELSEWHERE[endpoint.scheme]
    try:
        driver: Driver = import_module(module).open_driver(settings)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != needs:
            raise
        raise SettingsError(
            f"endpoint {str(endpoint)!r} needs {needs}, which is not installed: pip install 'rdzv[{needs}]'"
        ) from error
    return driver


def _page_of(settings: Settings) -> Callable[[Server], Awaitable[Closer]]:
    """Return the function that opens the HTTP port of an agent that serves. It lives in a higher layer."""
    try:
        page: Callable[[Server], Awaitable[Closer]] = import_module("rdzv.web.hosted").page_of(settings)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("rdzv"):
            raise
        raise SettingsError(f"http is {settings.http!r}, which needs {error.name}: pip install 'rdzv[web]'") from None
    return page


def _refuse_trust(settings: Settings) -> None:
    """Refuse a secret and TLS where the engine could not honour them: the user would believe to be protected."""
    scheme = settings.endpoint.scheme
    given = [name for name in ("token", "token_file", *_TLS) if getattr(settings, name)]
    if secret.is_put_aside() and scheme != "memory":
        given.append(secret.TOKEN_ENV)
    if given:
        raise SettingsError(
            f"endpoint {str(settings.endpoint)!r} cannot honour {' and '.join(given)}: {_WITHOUT_TRUST[scheme]}; "
            f"leave {'it' if len(given) == 1 else 'them'} out, or use the embedded server (host:port) or etcds://"
        )


def etcd_user(endpoint: Endpoint) -> str:
    """Return the name of the user, from the endpoint or the environment; empty: none."""
    return endpoint.options("user", "plaintext").get("user", "") or os.environ.get(USER_ENV, "")


def _check_etcd_trust(settings: Settings, user: str) -> None:
    """Refuse settings of trust that would not be honoured, and a password that anyone on the way could read."""
    endpoint = settings.endpoint
    tls = endpoint.scheme == "etcds"
    given = [name for name in _TLS if getattr(settings, name)]
    if not tls and given:
        raise SettingsError(f"endpoint {str(endpoint)!r} is without TLS and {given[0]} is set: write etcds://")
    if tls and settings.tls is False:
        raise SettingsError(f"endpoint {str(endpoint)!r} is with TLS and tls is false: write etcd://, or leave it out")
    for name in ("tls_mutual", "tls_server_name"):
        if getattr(settings, name):
            raise SettingsError(f"{name} is for the embedded server, and etcd cannot honour it: leave it out")
    if settings.token is not None:
        raise SettingsError("token is set, and etcd has users and passwords instead: name a token_file with the password")
    if settings.token_file and not user:
        raise SettingsError(f"token_file is set and no user: name it in the endpoint (?user=name) or in {USER_ENV}")
    if secret.is_put_aside():
        secret.warn_once(f"{secret.TOKEN_ENV} is set, and etcd does not know it: it has users and passwords (docs/etcd.md)")
    try:
        plaintext = switch("").read(endpoint.options("user", "plaintext").get("plaintext", "false"))
    except ValueError:
        raise SettingsError(f"endpoint {str(endpoint)!r}: plaintext must be true or false") from None
    if user and not tls and not plaintext:
        raise SettingsError(
            f"endpoint {str(endpoint)!r} is without TLS, so the password of {user!r} could be read on its way: write "
            "etcds://, or, if you trust the network, add plaintext=true (?user=name&plaintext=true)"
        )


def _needs_grpc(endpoint: Endpoint) -> None:
    """Raise SettingsError if grpcio is not installed."""
    try:
        import_module(".engines.etcd.client", __package__)  # It imports gRPC, without its fork handlers.
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "grpc":
            raise
        extra = "quorum" if endpoint.scheme == "quorum" else "etcd"
        raise SettingsError(
            f"endpoint {str(endpoint)!r}: etcd needs grpcio, which is not installed; `pip install 'rdzv[{extra}]'`"
        ) from None


def _open_etcd(settings: Settings) -> Driver:
    endpoint = settings.endpoint
    _needs_grpc(endpoint)
    from .engines.etcd.client.credentials import Credentials  # noqa: PLC0415
    from .engines.etcd.driver import EtcdDriver  # noqa: PLC0415

    if settings.run_id == UNNAMED:
        raise SettingsError(
            f"run_id is {UNNAMED!r}, which is what torchrun says when none was given, and an etcd is shared: "
            "give each job an id of its own"
        )
    secret.put_aside(os.environ)
    user = etcd_user(endpoint)
    _check_etcd_trust(settings, user)
    access = Credentials(
        tls=endpoint.scheme == "etcds", ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key, user=user,
        password_file=settings.token_file, password=secret.password_put_aside(),
    )  # fmt: skip
    return EtcdDriver(endpoint, access, read_timeout_s=settings.read_timeout, sentinel=settings.sentinel)


def _open_quorum(settings: Settings) -> Driver:
    endpoint = settings.endpoint
    _needs_grpc(endpoint)
    from .engines.quorum.driver import QuorumDriver  # noqa: PLC0415
    from .engines.quorum.security import security_of  # noqa: PLC0415

    if settings.run_id == UNNAMED:
        raise SettingsError(f"run_id is {UNNAMED!r}: a quorum keeps the data of one run under its id, so give each job its own")
    endpoint.options()
    secret.put_aside(os.environ)
    return QuorumDriver(
        endpoint, security_of(settings), run_id=settings.run_id, is_host=settings.is_host, state_dir=settings.state_dir,
        stay_s=settings.serve_on, remaining=partial(_remaining, run_id=settings.run_id), read_timeout_s=settings.read_timeout,
        sentinel=settings.sentinel,
    )  # fmt: skip


async def _remaining(session: Session, run_id: str) -> Remaining:
    """Read what is left of a run. A run without a head was never formed, and is as over as a closed one when all have left."""
    from .engines.quorum.driver import Remaining  # noqa: PLC0415

    keys = Keys(run_id)
    found = await session.txn(then=[List(keys.members), Get(keys.head)])
    head = found.item(1)
    return Remaining(len(found.reads[0]), head is None or wire.decode(Head, head.value).phase is Phase.CLOSED)
