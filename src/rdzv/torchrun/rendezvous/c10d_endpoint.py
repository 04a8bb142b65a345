"""The endpoint `c10d://host:port`: a run in a TCPStore, as torch's own c10d backend keeps it.

`rdzv.drivers` names this module and imports it only for such an endpoint, because it needs torch.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from torch.distributed import TCPStore

from ...config.settings import Settings
from ...engines.port import Driver
from ...engines.register.backend import BlockingRegister, Version
from ...engines.register.driver import RegisterDriver
from ...system.addresses import can_be_told, outward_address, plain
from ...system.node import LocalNode
from .api import RendezvousConnectionError, RendezvousStateError
from .c10d_rendezvous_backend import C10dRendezvousBackend, connect, is_local

T = TypeVar("T")


def open_driver(settings: Settings) -> Driver:
    """Make the driver for a c10d endpoint. It connects later."""
    settings.endpoint.options()
    (host, port), *_ = settings.endpoint.hosts

    def dial() -> TCPStore:
        if settings.is_host is False or (settings.is_host is None and not is_local(host)):
            _check_reachable(host, port, settings.read_timeout)
        return connect(host, port, settings.read_timeout, settings.is_host)

    register = BlockingRegister(
        ReconnectingBackend(dial, settings.run_id),
        str(settings.endpoint),
        timeout_s=settings.read_timeout,
        local_host=_local_host(host, port),
        corrupt=(RendezvousStateError,),
    )
    return RegisterDriver(register, LocalNode(), timeout_s=settings.read_timeout)


def _check_reachable(host: str, port: int, timeout_s: float) -> None:
    """Fail fast where nothing listens: a TCPStore would retry until its timeout and print a page of stack frames."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError as error:
        problem = f"nobody serves a store at {host}:{port} ({(error.strerror or str(error)).lower()})"
        raise RendezvousConnectionError(f"{problem}; start the node that serves there, or correct the endpoint") from error


class ReconnectingBackend:
    """A c10d backend that reconnects after an error: a TCPStore never recovers from a broken connection.

    The public methods are those of `Backend`, `WaitingBackend` and `HeartbeatBackend`.
    """

    def __init__(self, dial: Callable[[], TCPStore], run_id: str) -> None:
        self._dial = dial
        self._run_id = run_id
        self._backend: C10dRendezvousBackend | None = None
        self._served: TCPStore | None = None
        """The first store, kept alive because it may be the one that serves."""

    def get_state(self) -> Version | None:
        return self._call(lambda backend: backend.get_state())

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        return self._call(lambda backend: backend.set_state(state, token))

    def wait_state(self, token: Any, timeout_s: float) -> None:
        backend = self._backend
        if backend is None or backend.wait_state is None:
            raise RendezvousConnectionError("not connected")
        backend.wait_state(token, timeout_s)

    def stop_waiting(self) -> None:
        if self._backend is not None:
            self._backend.stop_waiting()

    def beat(self, name: str) -> None:
        self._call(lambda backend: backend.beat(name))

    def read_beats(self, names: Sequence[str]) -> list[int]:
        return self._call(lambda backend: backend.read_beats(names))

    def drop_beat(self, name: str) -> None:
        self._call(lambda backend: backend.drop_beat(name))

    def _call(self, work: Callable[[C10dRendezvousBackend], T]) -> T:
        if self._backend is None:
            store = self._dial()
            self._served = self._served or store
            self._backend = C10dRendezvousBackend(store, self._run_id)
        try:
            return work(self._backend)
        except RendezvousConnectionError:
            self._backend = None
            raise


def _local_host(host: str, port: int) -> str:
    """Return the local address from which that host is reached. Sends nothing."""
    with suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = plain(probe.getsockname()[0])
                return own if can_be_told(own) or host in ("localhost", "127.0.0.1", "::1") else outward_address() or own
    return ""
