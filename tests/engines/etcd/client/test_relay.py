"""Calls through the helper process that a forked process uses instead of gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc.aio
import pytest

from rdzv.config.endpoint import Endpoint
from rdzv.engines.etcd.client import cluster as cluster_module
from rdzv.engines.etcd.client import relay as relay_module
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.driver import EtcdDriver
from rdzv.engines.port import Get, Put
from rdzv.errors import Unreachable
from support.certificates import ca_file, issue
from support.etcd_cluster import Cluster


@pytest.fixture(autouse=True)
def forked(monkeypatch):
    """As in a process that was forked from one that had used gRPC."""
    monkeypatch.setattr(cluster_module._fork_guard, "forked", True)


def helpers():
    """Return the ids of this process's helpers."""
    children = [pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]
    return [int(pid) for pid in children if b"relay import main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def test_a_helper_that_dies_is_replaced_and_watches_go_on():
    with Cluster(1) as etcd:
        session = await EtcdDriver(Endpoint.parse(etcd.endpoint("relay")), Credentials()).connect()
        watch = aiter(session.watch(["k"], (await session.txn()).revision))
        (first,) = helpers()
        os.kill(first, signal.SIGKILL)
        await session.txn(then=[Get("k")])
        assert helpers() != [first]
        await session.txn(then=[Put("k", b"v")])
        assert (await anext(watch)).events[0].item.value == b"v"
        await session.close()
        assert helpers() == []


async def test_a_call_that_is_made_while_the_helper_ends_is_told_of_its_end(monkeypatch):
    """It waited for ever: it was given to a helper that was dead, and whose end had been told already."""
    real, made = relay_module.reap, []

    async def reap(child) -> None:
        made.append(channel.unary_unary("/none")(b"", timeout=60.0, metadata=None))
        await real(child)

    monkeypatch.setattr(relay_module, "reap", reap)
    channel = relay_module.RelayChannel(relay_module.Relay(None), "127.0.0.1:1")
    call = channel.stream_stream("/none")(metadata=None)
    while not helpers():  # noqa: ASYNC110  A process has no event.
        await asyncio.sleep(0.01)
    os.kill(helpers()[0], signal.SIGKILL)
    for waiting in (call.read(), made_soon(made)):
        with pytest.raises(grpc.aio.AioRpcError, match="has ended"):
            await asyncio.wait_for(waiting, 30.0)
    await channel.close()


async def made_soon(made):
    while not made:  # noqa: ASYNC110  The test has no event.
        await asyncio.sleep(0.01)
    return await made[0]


async def test_an_etcd_that_is_gone_is_an_outage_and_a_cancelled_call_leaves_the_rest_alone():
    with Cluster(1) as etcd:
        endpoint = Endpoint.parse(etcd.endpoint("relay"))
        session = await EtcdDriver(endpoint, Credentials(), read_timeout_s=1.0, connect_timeout_s=1.0).connect()
        etcd.nodes[0].stop()
        call = asyncio.ensure_future(session.txn(then=[Get("k")]))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(Unreachable):
            await session.txn(then=[Get("k")])
        etcd.nodes[0].cont()
        await session.txn(then=[Get("k")])
        await session.close()


async def test_certificates_reach_the_helper():
    with Cluster(1, tls=True) as etcd:
        cert, key = issue()
        credentials = Credentials(tls=True, ca=ca_file(), cert=cert, key=key)
        session = await EtcdDriver(Endpoint.parse(etcd.endpoint("relay")), credentials).connect()
        await session.txn(then=[Put("k", b"v")])
        await session.close()
