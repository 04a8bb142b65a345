"""Fixtures of the tests with torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support import ports, torchrun_jobs


@pytest.fixture
def free_port() -> int:
    """A port that is free now."""
    return ports.free_port()


@pytest.fixture(scope="module")
def etcd_server() -> Iterator[Any]:
    from rdzv.torchrun.rendezvous import EtcdServer

    server = EtcdServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def etcd_client(etcd_server: Any) -> Iterator[Any]:
    client = etcd_server.get_client()
    yield client
    client.close()


@pytest.fixture(scope="session")
def forker() -> Iterator[torchrun_jobs.AgentForker]:
    """One import of torch for all agents of the session."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch is not installed: the extra `torch` brings it")
    made = torchrun_jobs.AgentForker()
    yield made
    made.close()


@pytest.fixture
def job(forker: torchrun_jobs.AgentForker, tmp_path: Path) -> Iterator[Callable[..., torchrun_jobs.Job]]:
    """Makes jobs, and ends their processes."""
    with ExitStack() as stack:

        def make(nnodes: str = "1:4", folder: str = "job", **options: Any) -> torchrun_jobs.Job:
            return stack.enter_context(torchrun_jobs.Job(tmp_path / folder, nnodes, forker=forker, **options))

        yield make
