"""Which driver an endpoint asks for."""

from __future__ import annotations

from ..errors import SettingsError
from ..settings import Settings
from .base import Driver


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
    problem = f"endpoint {str(endpoint)!r}: this version has no driver for {endpoint.scheme}://, only for memory:// and rdzv://"
    raise SettingsError(problem)
