"""A register in one of torch's key-value stores: one key holds the state, and the store's compare-and-set replaces it.

Besides torch's two methods, the backend saves a TCPStore most of the work: it has counters for the members' renewals, and a
wait that ends when a known state has been replaced. The writer that replaces a state sets a marker key named after the old one.
"""

from __future__ import annotations

import binascii
import hashlib
import os
import socket
import tempfile
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from torch.distributed import DistStoreError, FileStore, Store, TCPStore

from ...config.settings import Settings
from ...engines.port import Driver
from ...engines.register.backend import BlockingRegister, Version
from ...engines.register.driver import RegisterDriver
from ...system.addresses import can_be_told, is_here, outward_address, source_of
from ...system.fork import never_free_in_children
from ...system.node import LocalNode
from .api import RendezvousConnectionError, RendezvousError, RendezvousParameters, RendezvousStateError
from .dynamic_rendezvous import RendezvousBackend, Token
from .utils import parse_rendezvous_endpoint

__all__ = ["DEFAULT_PORT", "C10dRendezvousBackend", "create_backend"]

T = TypeVar("T")

DEFAULT_PORT = 29400
READ_TIMEOUT_S = 60
MARGIN_S = 1.0  # Time beyond `read_timeout` in which a TCPStore should report by itself why it cannot connect.
STATE_MAX = 4 << 20  # Bytes of base64 that are decoded at most.
_ABSENT = b"Y2FuaW1hZGFt"  # The value that torch's backend writes for "no state". A store with it is still empty.
_MARKS_MAX = 16  # Marker keys kept for waiters that start late.


class C10dRendezvousBackend(RendezvousBackend):
    """A register in any store of torch. The token is the value itself, because the store compares values.

    A call lasts as long as the store's: a TCPStore whose server is stopped does not return. The handler has a limit of its own.
    """

    def __init__(self, store: Store, run_id: str) -> None:
        """Raises ValueError if the run id is empty. Sends no request yet."""
        if not run_id:
            raise ValueError("the run id is empty: it names the state, so give one")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._marks: deque[str] = deque()
        self._waiter: Store | None = None
        self._awaited: bytes | None = None
        # Other stores would wait by polling, which the driver does better itself.
        self.wait_state = self._wait_state if isinstance(store, TCPStore) and hasattr(store, "clone") else None

    @property
    def name(self) -> str:
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Read the state with one compare-and-set, which also answers if there is no state."""
        value = self._ask(self._store.compare_set, self._key, _ABSENT, _ABSENT)
        if self._awaited is not None and value != self._awaited:
            self._mark(self._awaited)  # The writer of the new state has not set the marker yet, and may have died.
            self._awaited = None
        return None if value == _ABSENT else (self._decode(value), value)

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """Replace the state that the token stands for. A token of another type matches no state."""
        if token is not None and not isinstance(token, bytes):
            present = self.get_state()
            return None if present is None else (*present, False)
        desired = b64encode(state)
        value = self._ask(self._store.compare_set, self._key, token or _ABSENT, desired)
        if token is None and value == _ABSENT:  # A missing key is compared with an empty value.
            value = self._ask(self._store.compare_set, self._key, b"", desired)
        if value == _ABSENT or (token is not None and value == token and desired != token):
            return None  # A store that has lost the key returns the expected value.
        won = value == desired
        if won and token is not None and self.wait_state is not None:
            self._mark(token)
        return (state if won else self._decode(value)), value, won

    def _wait_state(self, token: bytes, timeout_s: float) -> None:
        """Wait on a second connection, because a TCPStore handles one request at a time on each."""
        if self._waiter is None:
            self._waiter = self._ask(self._store.clone)
        waiter, self._awaited = self._waiter, token
        try:
            waiter.wait([self._mark_key(token)], timedelta(seconds=timeout_s))
        except DistStoreError:
            return  # Timeout.
        except (ValueError, RuntimeError) as error:
            self._waiter = None
            raise _unreachable(error) from error

    def stop_waiting(self) -> None:
        """End a wait. Other waiters for the same state wake up once too often, which is harmless."""
        if self._awaited is not None:
            with suppress(RendezvousError):
                self._mark(self._awaited)
                self._ask(self._store.delete_key, self._marks.pop())

    def _mark(self, replaced: bytes) -> None:
        mark = self._mark_key(replaced)
        self._ask(self._store.set, mark, b"")
        self._marks.append(mark)
        if len(self._marks) > _MARKS_MAX:
            self._ask(self._store.delete_key, self._marks.popleft())

    def _mark_key(self, value: bytes) -> str:
        return f"{self._key}/replaced/{hashlib.sha256(value).hexdigest()[:32]}"

    def beat(self, name: str) -> None:
        self._ask(self._store.add, self._beat_key(name), 1)

    def read_beats(self, names: Sequence[str]) -> list[int]:
        """Read the counters, with two requests for all. A counter that was never used costs one request per name."""
        keys = [self._beat_key(name) for name in names]
        if self._ask(self._store.check, keys):
            return [int(value) for value in self._ask(self._store.multi_get, keys)]
        return [self._ask(self._store.add, key, 0) for key in keys]

    def drop_beat(self, name: str) -> None:
        self._ask(self._store.delete_key, self._beat_key(name))

    def _beat_key(self, name: str) -> str:
        return f"{self._key}/beats/{name}"

    def _ask(self, request: Callable[..., T], *args: object) -> T:
        try:
            return request(*args)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise _unreachable(error) from error

    def _decode(self, value: bytes) -> bytes:
        if len(value) > STATE_MAX:
            raise RendezvousStateError(f"the state has {len(value)} bytes, at most {STATE_MAX} are allowed")
        try:
            return b64decode(value, validate=True)
        except binascii.Error as error:
            raise RendezvousStateError(
                f"the state under {self._key!r} is corrupt: it begins with {value[:16]!r}, which is not base64"
            ) from error


def _unreachable(error: Exception) -> RendezvousConnectionError:
    return RendezvousConnectionError(f"the store does not answer: {' '.join(str(error).split())}")


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Store]:
    """Make a backend and its store from `store_type` (tcp, file), `read_timeout` (seconds) and `is_host`.

    Raises ValueError for a wrong parameter, and RendezvousConnectionError if the store cannot be made or reached.
    """
    kind = str(params.get("store_type", "tcp")).strip().lower()
    if kind not in ("tcp", "file"):
        raise ValueError(f"store_type is {kind!r}: it must be 'tcp' or 'file'")
    store = _tcp(params) if kind == "tcp" else _file(params)
    return C10dRendezvousBackend(store, params.run_id), store


def _tcp(params: RendezvousParameters) -> TCPStore:
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    timeout_s = params.get_as_int("read_timeout", READ_TIMEOUT_S)
    if timeout_s is None or timeout_s <= 0:
        raise ValueError(f"read_timeout is {timeout_s}: it must be a whole number of seconds above 0")
    return connect(host, port, timeout_s, params.get_as_bool("is_host"))


def connect(host: str, port: int, timeout_s: float, is_host: bool | None) -> TCPStore:
    """Connect to a TCPStore. If `is_host` is None, the first process on the machine with that address serves it."""
    serves = is_local(host) if is_host is None else is_host
    options: dict[str, Any] = {"multi_tenant": True, "wait_for_workers": False, "timeout": timedelta(seconds=timeout_s)}
    problem: Exception | None = None
    for serve in (True, False) if serves and is_host is None else (serves,):
        try:
            store = _in_time(partial(TCPStore, host, port, None, serve, **options), timeout_s + MARGIN_S)
        except (ValueError, RuntimeError, TimeoutError) as error:
            problem = problem or error
        else:
            never_free_in_children(store)
            return store
    raise RendezvousConnectionError(
        f"the store at {host}:{port} could not be {'served' if serves else 'reached'} within {timeout_s:g} s: "
        f"{' '.join(str(problem).split())}"
    ) from problem


def _in_time(make: Callable[[], T], limit_s: float) -> T:
    """Return what `make` does, or raise TimeoutError: a TCPStore waits without limit for a server that is stopped."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # noqa: BLE001  The caller judges it.
            made.set_exception(error)

    Thread(target=run, name="rdzv connects a TCPStore", daemon=True).start()
    try:
        return made.result(limit_s)
    except FutureTimeout:
        raise TimeoutError("it accepts connections and does not answer") from None


def is_local(host: str) -> bool:
    """Whether one of the name's addresses can be bound, so belongs to this machine."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(is_here(int(family), str(address[0])) for family, _, _, _, address in found)


def _file(params: RendezvousParameters) -> FileStore:
    path = (params.endpoint or "").strip()
    if not path:
        try:
            descriptor, path = tempfile.mkstemp(prefix="rdzv-")
            os.close(descriptor)
        except OSError as error:
            raise RendezvousError(f"no temporary file could be made for the store: {error}") from error
    try:
        # Tried first, because a FileStore retries for minutes and blocks all threads of the process meanwhile.
        Path(path).open("ab").close()
        return FileStore(path)
    except (OSError, ValueError, RuntimeError) as error:
        raise RendezvousConnectionError(f"the file {path!r} cannot be used as a store: {error}") from error


def open_driver(settings: Settings) -> Driver:
    """Make the driver for `c10d://host:port`, an endpoint for which `rdzv.drivers` imports this module. Connects later."""
    settings.endpoint.options()
    (host, port), *_ = settings.endpoint.hosts

    def dial() -> TCPStore:
        if settings.is_host is False or (settings.is_host is None and not is_local(host)):
            _check_reachable(host, port, settings.read_timeout)
        return connect(host, port, settings.read_timeout, settings.is_host)

    backend, timeout_s, own = ReconnectingBackend(dial, settings.run_id), settings.read_timeout, _local_host(host, port)
    endpoint, corrupt = str(settings.endpoint), (RendezvousStateError,)
    register = BlockingRegister(backend, endpoint, timeout_s=timeout_s, local_host=own, corrupt=corrupt)
    return RegisterDriver(register, LocalNode(), timeout_s=timeout_s)


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
        self._served: TCPStore | None = None  # The first store, kept alive because it may be the one that serves.

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
            if own := source_of(family, address):
                return own if can_be_told(own) or host in ("localhost", "127.0.0.1", "::1") else outward_address() or own
    return ""
