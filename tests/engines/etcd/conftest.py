"""Clusters that the tests of the etcd engine share, and a runner for their coroutines."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from support.etcd_cluster import LONG_S, Cluster


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def test_...` on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), LONG_S))
    return True


@pytest.fixture(scope="module")
def one() -> Iterator[Cluster]:
    with Cluster(1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(3) as cluster:
        yield cluster
