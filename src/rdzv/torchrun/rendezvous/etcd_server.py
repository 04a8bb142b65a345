"""`EtcdServer` with torch's signature: a real etcd v3, for tests and single machines."""

from __future__ import annotations

import os
import shutil
import socket
from subprocess import Popen
from typing import IO, Any

from ...engines.etcd.server import EtcdServer as Server
from .etcd_client import EtcdClient

BINARY_ENV = "TORCHELASTIC_ETCD_BINARY_PATH"  # torch's variable for the path of etcd. RDZV_ETCD_BIN works as well.


def find_free_port() -> socket.socket:
    """Return a socket that listens on a free port of localhost. The caller closes it to use the port."""
    return socket.create_server(("localhost", 0), backlog=0)


def stop_etcd(subprocess: Popen[Any] | None, data_dir: str | None = None) -> None:
    """End an etcd that the caller started, and delete its data if `data_dir` is given."""
    if subprocess is not None and subprocess.poll() is None:
        subprocess.terminate()
        subprocess.wait()
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)


class EtcdServer(Server):
    """An etcd that ends with this process, even if the process is killed."""

    def __init__(self, data_dir: str | None = None) -> None:
        super().__init__(data_dir or "", binary=os.environ.get(BINARY_ENV, ""))

    def start(self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[str] | None = None) -> None:
        """Start etcd and wait until it serves. Raises NotStarted, which is a RuntimeError."""
        super().start(timeout, num_retries, stderr)

    def get_client(self) -> EtcdClient:  # type: ignore[override]
        """Return a client for backends and stores."""
        return EtcdClient(self.url)
