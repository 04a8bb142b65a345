"""`EtcdServer` with the signature that torch has for it: a real etcd v3 for tests and single machines."""

from __future__ import annotations

import os
from typing import IO

from ...engines.etcd.server import EtcdServer as Server
from .etcd_client import EtcdClient

BINARY_ENV = "TORCHELASTIC_ETCD_BINARY_PATH"
"""torch's variable; ours, RDZV_ETCD, counts as well."""


class EtcdServer(Server):
    """As `rdzv.engines.etcd.server.EtcdServer`; it ends with this process, also if that is killed."""

    def __init__(self, data_dir: str | None = None) -> None:
        super().__init__(data_dir or "", binary=os.environ.get(BINARY_ENV, ""))

    def start(
        self, timeout: float = 60, num_retries: int = 3, stderr: int | IO[str] | None = None
    ) -> None:
        """Until it serves. Raises NotStarted, which is a RuntimeError."""
        super().start(timeout, num_retries, stderr)

    def get_client(self) -> EtcdClient:  # type: ignore[override]
        """What backends and stores are made with."""
        return EtcdClient(self.url)
