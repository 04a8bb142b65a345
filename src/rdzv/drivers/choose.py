"""Which driver an endpoint asks for."""

from __future__ import annotations

from importlib import import_module

from ..errors import SettingsError
from ..machine import RealMachine
from ..settings import Settings
from .base import Driver

_ELSEWHERE = {"c10d": ("rdzv.torchrun.endpoints", "torch")}
"""Schemes whose driver lives above this layer, because it needs a package that is imported only there: module, package."""


def open_driver(settings: Settings) -> Driver:
    """The driver for the engine that the endpoint names. It connects later, and imports only what that engine needs."""
    endpoint = settings.endpoint
    if endpoint.scheme == "memory":
        from .memory import MemoryDriver  # noqa: PLC0415

        endpoint.options()
        return MemoryDriver(endpoint.path)
    if endpoint.scheme == "rdzv":
        from ..server.host import HostingDriver  # noqa: PLC0415

        endpoint.options()
        return HostingDriver(
            endpoint,
            run_id=settings.run_id,
            is_host=settings.is_host,
            max_nodes=settings.max_nodes,
            linger_s=settings.linger,
            read_timeout_s=settings.read_timeout,
        )
    if endpoint.scheme == "file":
        from .backend import BlockingRegister  # noqa: PLC0415
        from .file import FileBackend  # noqa: PLC0415
        from .register import RegisterDriver  # noqa: PLC0415

        endpoint.options()
        register = BlockingRegister(FileBackend(endpoint.path), str(endpoint), timeout_s=settings.read_timeout)
        return RegisterDriver(register, RealMachine(), timeout_s=settings.read_timeout)
    if endpoint.scheme in _ELSEWHERE:
        module, needs = _ELSEWHERE[endpoint.scheme]
        try:
            driver: Driver = import_module(module).open_driver(settings)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != needs:
                raise
            problem = f"endpoint {str(endpoint)!r} needs {needs}, which is not installed: pip install 'rdzv[{needs}]'"
            raise SettingsError(problem) from error
        return driver
    there = "memory://, rdzv://, file:// and c10d://"
    raise SettingsError(f"endpoint {str(endpoint)!r}: this version has no driver for {endpoint.scheme}://, only for {there}")
