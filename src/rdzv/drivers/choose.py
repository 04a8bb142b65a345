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
    problem = f"endpoint {str(endpoint)!r}: this version has no driver for {endpoint.scheme}://, only for memory://"
    raise SettingsError(problem)
