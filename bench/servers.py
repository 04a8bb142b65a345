"""The server of a peer in a process of its own: prints its address and serves until its input ends.

python bench/servers.py lighthouse MEMBERS | tcpstore
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path


def torchft():
    """Return the extension module of torchft alone: the package around it imports torch."""
    package = importlib.util.find_spec("torchft")
    if package is None:
        raise SystemExit("torchft is missing: pip install --no-deps torchft")
    (path,) = Path(package.submodule_search_locations[0]).glob("_torchft*.so")
    loader = importlib.machinery.ExtensionFileLoader("torchft._torchft", str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location(loader.name, path, loader=loader))
    loader.exec_module(module)
    return module


def lighthouse(members: str):
    """Start a lighthouse with the fastest settings: a check every 10 ms, and no waiting for more than these members."""
    server = torchft().LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=int(members),
        join_timeout_ms=60_000,
        quorum_tick_ms=10,
        heartbeat_timeout_ms=60_000,
    )
    return server, "http://127.0.0.1:" + server.address().rpartition(":")[2]


def tcpstore():
    """Start the store that torch's c10d rendezvous keeps its state in."""
    from torch.distributed import TCPStore  # noqa: PLC0415  Seconds.

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, f"127.0.0.1:{store.port}"


def main() -> None:
    kind, *words = sys.argv[1:]
    server, address = {"lighthouse": lighthouse, "tcpstore": tcpstore}[kind](*words)
    print(address, flush=True)
    sys.stdin.read()  # Also ends with the benchmark, if that is killed.
    del server


if __name__ == "__main__":
    main()
