"""The choice of a driver by the endpoint's scheme."""

from __future__ import annotations

import os
from importlib import import_module

from .config.settings import UNNAMED, Settings
from .engines.port import Driver
from .errors import SettingsError
from .system.node import LocalNode

USER_ENV = "RDZV_ETCD_USER"
PASSWORD_ENV = "RDZV_ETCD_PASSWORD"  # noqa: S105  Its name, not its value.

_ELSEWHERE = {"c10d": ("rdzv.torchrun.rendezvous.c10d_rendezvous_backend", "torch")}
"""Schemes whose driver lives in a higher layer, the only one that may import the package it needs: module, package."""


def open_driver(settings: Settings) -> Driver:
    """Return the driver for the endpoint's engine. It connects later. Only the modules of that engine are imported."""
    endpoint = settings.endpoint
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
            trust=Trust.of(settings),
        )  # fmt: skip
    if endpoint.scheme in {"etcd", "etcds"}:
        return _open_etcd(settings)
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


def _open_etcd(settings: Settings) -> Driver:
    try:
        from .engines.etcd.client.credentials import Credentials  # noqa: PLC0415
        from .engines.etcd.driver import EtcdDriver  # noqa: PLC0415
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "grpc":
            raise
        raise SettingsError(
            f"endpoint {str(settings.endpoint)!r}: etcd needs grpcio, which is not installed; `pip install 'rdzv[etcd]'`"
        ) from None
    endpoint = settings.endpoint
    if settings.run_id == UNNAMED:
        raise SettingsError(
            f"run_id is {UNNAMED!r}, which is what torchrun says when none was given, and an etcd is shared: "
            "give each job an id of its own"
        )
    tls = endpoint.scheme == "etcds"
    if not tls and (settings.tls_ca or settings.tls_cert):
        raise SettingsError(f"endpoint {str(endpoint)!r} is without TLS and tls_ca or tls_cert is set: write etcds://")
    access = Credentials(
        tls=tls, ca=settings.tls_ca, cert=settings.tls_cert, key=settings.tls_key,
        user=endpoint.options("user").get("user", "") or os.environ.get(USER_ENV, ""),
        password_file=settings.token_file, password=os.environ.get(PASSWORD_ENV, ""),
    )  # fmt: skip
    if settings.token_file and not access.user:
        raise SettingsError(f"token_file is set and no user: name it in the endpoint (?user=name) or in {USER_ENV}")
    return EtcdDriver(endpoint, access, read_timeout_s=settings.read_timeout)
