"""Names, addresses, and at which of them others reach us."""

from __future__ import annotations

import asyncio
import socket
import time
from itertools import count

import pytest

from rdzv.config.endpoint import Endpoint
from rdzv.engines.embedded import client, dialer
from rdzv.engines.embedded.client import RemoteDriver
from rdzv.engines.embedded.frames import Welcome
from rdzv.errors import Unreachable
from rdzv.system import addresses, dial
from rdzv.system.addresses import can_be_told, is_here, plain
from support.embedded_server import driver_to, serving
from support.ports import free_port
from support.timing import within


async def test_names_are_resolved_anew_and_all_addresses_are_tried(monkeypatch):
    async with serving() as server:
        found = []
        asked = []

        def getaddrinfo(host, port, **_):
            asked.append(host)
            if not found:
                raise socket.gaierror(-2, "Name or service not known")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]

        monkeypatch.setattr(dial.socket, "getaddrinfo", getaddrinfo)
        driver = RemoteDriver(Endpoint.parse(f"server:{server.port}"), run_id="job")
        with pytest.raises(Unreachable, match="host 'server' does not resolve: name or service not known"):
            await driver.connect()
        found[:] = ["127.0.0.2", "127.0.0.3"]
        with pytest.raises(Unreachable, match=r"127\.0\.0\.2:\d+: connection refused; 127\.0\.0\.3:\d+: conn"):
            await driver.connect()
        found.append("127.0.0.1")
        session = await driver.connect()
        await session.txn()
        await session.close()
        assert asked == ["server"] * 3


async def test_an_address_that_does_not_answer_does_not_keep_the_next_one_waiting():
    with socket.socket() as full, socket.socket() as first:
        # A listener whose queue is full drops what comes, as a firewall does.
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        first.setblocking(False)
        first.connect_ex(full.getsockname())
        async with serving() as server:
            addresses = [(socket.AF_INET, full.getsockname()), (socket.AF_INET, ("127.0.0.1", server.port))]
            driver = driver_to(server.port)
            began_at = time.monotonic()
            greeting = dialer.Greeting("s", count(1))
            found, _ = await dialer.dial(addresses, lambda: driver.hello(greeting), driver.new_link, 5.0)
            within(time.monotonic() - began_at, 3 * dialer.STAGGER_S)
            found.close()


async def test_a_resolver_that_hangs_is_asked_once(monkeypatch):
    hanging = []
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def getaddrinfo(host, port, **_):
        hanging.append(host)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(20)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    async with serving() as server:
        monkeypatch.setattr(dial.socket, "getaddrinfo", getaddrinfo)
        driver = RemoteDriver(Endpoint.parse(f"server:{server.port}"), run_id="job", connect_timeout_s=0.1)
        for _ in range(3):
            with pytest.raises(Unreachable, match=r"host 'server' was not resolved within 0\.1 s"):
                await driver.connect()
        release.set()
        driver.connect_timeout_s = 5.0
        await (await driver.connect()).close()
        assert hanging == ["server"]


async def test_ipv6_is_first_class():
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")

    for bound in ("::1", ""):
        async with serving(bound) as server:
            session = await driver_to(server.port, host="::1").connect()
            assert session.local_host == "::1"
            await session.close()
            if not bound:
                session = await driver_to(server.port).connect()
                assert session.local_host == "127.0.0.1"
                await session.close()


class FakeLink:
    def __init__(self, address):
        self.transport = self
        self._address = address

    def get_extra_info(self, _name):
        return (self._address, 1)


@pytest.mark.parametrize(
    ("endpoint", "own", "reached_at", "expected"),
    [
        ("head:1", "10.0.0.5", "", "10.0.0.5"),
        ("head:1", "::ffff:10.0.0.5", "", "10.0.0.5"),
        ("head:1", "2001:db8::5", "", "2001:db8::5"),
        ("head:1", "127.0.1.1", "10.0.0.1", "10.0.0.1"),
        ("head:1", "fe80::1%eth0", "10.0.0.1", ""),
        ("head:1", "169.254.3.4", "", ""),
        ("localhost:1", "127.0.0.1", "10.0.0.1", "127.0.0.1"),
        ("[::1]:1", "::1", "", "::1"),
        ("", "127.0.0.1", "", "127.0.0.1"),
    ],
)
def test_the_address_others_reach_us_at(endpoint, own, reached_at, expected):
    welcome = Welcome("s", "i", "p", 1, 1, reached_at=reached_at)
    assert RemoteDriver(Endpoint.parse(endpoint), run_id="job").local_host(FakeLink(own), welcome) == expected


def test_before_others_have_come_it_is_the_address_we_would_reach_them_from(monkeypatch):
    monkeypatch.setattr(client, "outward_address", lambda: "10.9.8.7")
    welcome = Welcome("s", "i", "p", 1, 1)
    assert RemoteDriver(Endpoint.parse("head:1"), run_id="job").local_host(FakeLink("127.0.1.1"), welcome) == "10.9.8.7"
    monkeypatch.setattr(client, "outward_address", lambda: "")
    assert RemoteDriver(Endpoint.parse("head:1"), run_id="job").local_host(FakeLink("127.0.1.1"), welcome) == "127.0.1.1"


def test_the_outward_address_can_be_told_to_others():
    address = addresses.outward_address()
    assert address == "" or can_be_told(address)
    for found, _ in addresses.interfaces():
        assert is_here(socket.AF_INET6 if ":" in found else socket.AF_INET, found) or found.startswith("fe80")
    assert plain("::ffff:1.2.3.4") == "1.2.3.4"
    assert not can_be_told("not an address")


async def test_a_connection_that_met_itself_is_nobody():
    port = free_port()
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(("127.0.0.1", port))
        own.connect(("127.0.0.1", port))
        with pytest.raises(ConnectionRefusedError):
            dial._refuse_ourselves(own)
