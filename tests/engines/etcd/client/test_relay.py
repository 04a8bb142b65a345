"""Calls through the helper process that a forked process uses instead of gRPC."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest

from rdzv.config.endpoint import Endpoint
from rdzv.engines.etcd.client import cluster as cluster_module
from rdzv.engines.etcd.client import relay
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.client.errors import NO_HELPER, error_of
from rdzv.engines.etcd.driver import EtcdDriver
from rdzv.engines.port import Get, Put
from rdzv.errors import Unreachable
from rdzv.system.processes import reap
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


async def test_a_helper_that_dies_is_replaced_and_watches_go_on(monkeypatch):
    async def reap_late(process):
        await asyncio.sleep(1)
        await reap(process)

    # Calls that are made meanwhile need another helper.
    monkeypatch.setattr(relay, "reap", reap_late)
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


async def test_a_call_that_begins_while_a_dead_helper_is_reaped_is_answered(monkeypatch):
    really, reaping, may_end = relay.reap, asyncio.Event(), asyncio.Event()

    async def reap_late(process):
        reaping.set()
        await may_end.wait()
        await really(process)

    monkeypatch.setattr(relay, "reap", reap_late)
    with Cluster(1) as etcd:
        session = await EtcdDriver(Endpoint.parse(etcd.endpoint("relay")), Credentials()).connect()
        (first,) = helpers()
        os.kill(first, signal.SIGKILL)
        await reaping.wait()
        call = asyncio.ensure_future(session.txn(then=[Put("k", b"v")]))
        await asyncio.sleep(0.1)
        may_end.set()
        assert (await call).succeeded
        await session.close()


async def test_a_helper_that_cannot_be_started_at_first_is_started_by_the_next_call(monkeypatch):
    start, problems = relay._start_helper, [BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")]

    def fails_once(descriptor):
        if problems:
            raise problems.pop()
        return start(descriptor)

    monkeypatch.setattr(relay, "_start_helper", fails_once)
    with Cluster(1) as etcd:
        helper = relay.Relay(None)
        channel = relay.RelayChannel(helper, f"{etcd.nodes[0].host}:{etcd.nodes[0].port}")
        status = channel.unary_unary("/etcdserverpb.Maintenance/Status")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(status(b"", timeout=10.0, metadata=None), 20.0)
        assert caught.value.details() == f"{NO_HELPER}: Resource temporarily unavailable"
        assert error_of(caught.value.code(), caught.value.details()).applied is False
        assert await asyncio.wait_for(status(b"", timeout=10.0, metadata=None), 20.0)
        await channel.close()


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
        while True:  # A busy machine may need more than the second that this client has for a call.
            with suppress(Unreachable):
                await session.txn(then=[Get("k")])
                break
        await session.close()


async def test_certificates_reach_the_helper():
    with Cluster(1, tls=True) as etcd:
        cert, key = issue()
        credentials = Credentials(tls=True, ca=ca_file(), cert=cert, key=key)
        session = await EtcdDriver(Endpoint.parse(etcd.endpoint("relay")), credentials).connect()
        await session.txn(then=[Put("k", b"v")])
        await session.close()
