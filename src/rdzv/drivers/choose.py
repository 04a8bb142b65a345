"""Which driver an endpoint asks for."""

from __future__ import annotations

import os

from ..errors import SettingsError
from ..settings import Settings
from .base import Driver

USER_ENV = "RDZV_ETCD_USER"
PASSWORD_ENV = "RDZV_ETCD_PASSWORD"  # noqa: S105  Its name, not its value.
NO_RUN_ID = "none"


def open_driver(settings: Settings) -> Driver:
    """The driver for the engine that the endpoint names. It connects later, and imports only what that engine needs."""
    endpoint = settings.endpoint
    if endpoint.scheme == "memory":
        from .memory import MemoryDriver  # noqa: PLC0415

        endpoint.options()
        return MemoryDriver(endpoint.path)
    if endpoint.scheme == "rdzv":
        from ..server.host import HostingDriver  # noqa: PLC0415
        from ..server.trust import Trust  # noqa: PLC0415

        endpoint.options()
        return HostingDriver(
            endpoint,
            run_id=settings.run_id,
            is_host=settings.is_host,
            max_nodes=settings.max_nodes,
            linger_s=settings.linger,
            stay_s=settings.serve_on,
            read_timeout_s=settings.read_timeout,
            trust=Trust.of(settings),
        )
    if endpoint.scheme in {"etcd", "etcds"}:
        return _open_etcd(settings)
    known = "memory://, rdzv://, etcd:// and etcds://"
    raise SettingsError(f"endpoint {str(endpoint)!r}: this version has no driver for {endpoint.scheme}://, only for {known}")


def _open_etcd(settings: Settings) -> Driver:
    try:
        from ..etcd.access import Access  # noqa: PLC0415
        from .etcd import EtcdDriver  # noqa: PLC0415
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "grpc":
            raise
        raise SettingsError(
            f"endpoint {str(settings.endpoint)!r}: etcd needs grpcio, which is not installed; `pip install 'rdzv[etcd]'`"
        ) from None
    endpoint = settings.endpoint
    if settings.run_id == NO_RUN_ID:
        raise SettingsError(
            f"run_id is {NO_RUN_ID!r}, which is what torchrun says when none was given, and an etcd is shared: "
            "give each job an id of its own"
        )
    tls = endpoint.scheme == "etcds"
    if not tls and (settings.tls_ca or settings.tls_cert):
        raise SettingsError(f"endpoint {str(endpoint)!r} is without TLS and tls_ca or tls_cert is set: write etcds://")
    access = Access(
        tls=tls,
        ca=settings.tls_ca,
        cert=settings.tls_cert,
        key=settings.tls_key,
        user=endpoint.options("user").get("user", "") or os.environ.get(USER_ENV, ""),
        password_file=settings.token_file,
        password=os.environ.get(PASSWORD_ENV, ""),
    )
    if settings.token_file and not access.user:
        raise SettingsError(f"token_file is set and no user: name it in the endpoint (?user=name) or in {USER_ENV}")
    return EtcdDriver(endpoint, access, read_timeout_s=settings.read_timeout)
