"""`EtcdServer` with torch's signature: a real etcd v3, for tests and single machines."""

from __future__ import annotations

import os
from typing import IO

from ...engines.etcd.server import EtcdServer as Server
from .etcd_client import EtcdClient

BINARY_ENV = "TORCHELASTIC_ETCD_BINARY_PATH"  # torch's variable for the path of etcd. RDZV_ETCD works as well.


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
