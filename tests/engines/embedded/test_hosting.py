"""The choice of the process that serves, and its end."""

from __future__ import annotations

import asyncio
import logging
import socket
import time

import pytest

from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.embedded import hosting as hosting_module
from rdzv.engines.embedded.frames import Hello
from rdzv.engines.embedded.hosting import HostingDriver
from rdzv.engines.port import Get, Put
from rdzv.errors import SettingsError, Unreachable
from rdzv.system.addresses import is_here
from rdzv.system.dial import DialFailed
from support.embedded_server import LONG_S, Proxy, driver_to, run, serving, until
from support.ports import free_port
from support.timing import within


def hosting(endpoint, run_id="job", **options):
    return HostingDriver(Endpoint.parse(endpoint), run_id=run_id, **{"stay_s": 5.0, **options})


# ---- who serves


async def test_the_first_serves_and_the_others_connect():
    endpoint = f"127.0.0.1:{free_port()}"
    drivers = [hosting(endpoint) for _ in range(3)]
    sessions = [await driver.connect() for driver in drivers]
    assert [driver.server is not None for driver in drivers] == [True, False, False]
    assert len({session.instance for session in sessions}) == 1
    assert drivers[0].server.only_run == "job"
    for session in sessions:
        await session.close()
    for driver in drivers:
        await driver.close()


async def test_only_a_node_that_the_platform_named_so_serves_at_the_declared_place(monkeypatch):
    """All pods have the same settings, so the setting alone proves nothing."""
    endpoint = f"127.0.0.1:{free_port()}"
    monkeypatch.setenv("RDZV_POD_NAME", "pod-1")
    other = hosting(endpoint, place="pod-0")
    with pytest.raises(Unreachable, match=r"only .pod-0. serves .place., and the platform named this node 'pod-1'"):
        await other.connect()
    with pytest.raises(SettingsError, match="the platform named this node 'pod-1'"):
        hosting_module.check_name("pod-0")
    monkeypatch.setenv("RDZV_POD_NAME", "pod-0")
    hosting_module.check_name("pod-0")
    first = hosting(endpoint, place="pod-0")
    sessions = [await first.connect(), await other.connect()]
    assert [session.life.name for session in sessions] == ["pod-0", "pod-0"]
    with pytest.raises(Unreachable, match="place is 'pod-2' here and 'pod-0' of the server there"):
        await hosting(endpoint, place="pod-2").connect()
    for one in (*sessions, other, first):
        await one.close()
    monkeypatch.delenv("RDZV_POD_NAME")
    hosting_module.check_name(socket.gethostname())


async def test_a_server_that_retires_is_gone_and_its_process_does_not_serve_again(monkeypatch):
    monkeypatch.setenv("RDZV_POD_NAME", "pod-0")
    endpoint = f"127.0.0.1:{free_port()}"
    driver, later = hosting(endpoint, place="pod-0"), hosting(endpoint, place="pod-0")
    session = await driver.connect()
    life = session.life
    assert await life.answers(life.began_at)
    monkeypatch.setattr(later, "hello", lambda *_: Hello("job", "s", 1, follows="another", follows_age_s=0.0))
    with pytest.raises(Unreachable, match="a later server of place 'pod-0' is there, so this one stops"):
        await later.connect()
    await until(lambda: driver.server.is_retired and not driver.server._listeners)
    assert not await life.answers(life.began_at)
    with pytest.raises(Unreachable, match="this process served place 'pod-0' until a later server"):
        await driver.connect()
    for one in (session, driver, later):
        await one.close()


async def test_of_many_who_start_at_once_one_serves():
    endpoint = f"localhost:{free_port()}"
    drivers = [hosting(endpoint) for _ in range(10)]

    async def insist(driver):
        while True:
            try:
                return await driver.connect()
            except Unreachable:
                await asyncio.sleep(0.01)

    sessions = await asyncio.gather(*(insist(driver) for driver in drivers))
    assert sum(driver.server is not None for driver in drivers) == 1
    assert len({session.instance for session in sessions}) == 1
    await asyncio.gather(*(session.close() for session in sessions))
    await asyncio.gather(*(driver.close() for driver in drivers))


async def test_one_that_must_not_serve_does_not():
    driver = hosting(f"127.0.0.1:{free_port()}", is_host=False)
    with pytest.raises(Unreachable, match="connection refused"):
        await driver.connect()
    assert driver.server is None
    await driver.close()


def test_an_address_of_another_machine_is_not_served():
    async def scenario():
        driver = hosting(f"192.0.2.1:{free_port()}", connect_timeout_s=0.2)
        with pytest.raises(Unreachable, match=r"192\.0\.2\.1:\d+: "):
            await driver.connect()
        assert driver.server is None

    run(scenario)
    assert is_here(socket.AF_INET, "127.0.0.1")
    assert not is_here(socket.AF_INET, "192.0.2.1")


async def test_told_to_serve_an_address_that_nobody_can_bind_it_waits_until_it_is_led_to_itself(monkeypatch):
    """A service address in front of this machine, which does not work at first."""

    port = free_port()
    driver = hosting(f"service:{port}", is_host=True, connect_timeout_s=0.3)
    leads_to = []

    async def resolve(_host, port, _timeout_s):
        if not leads_to:
            raise DialFailed("host 'service' does not resolve", answered=False)
        return [(socket.AF_INET, (leads_to[0], port))]

    monkeypatch.setattr(driver._resolver, "resolve", resolve)
    for _ in range(2):
        with pytest.raises(Unreachable, match="does not resolve; a server was started here at port"):
            await driver.connect()
    assert not driver.server.is_open
    with pytest.raises(Unreachable, match="does not know yet whether the endpoint means it"):
        await driver_to(port).connect()
    leads_to.append("127.0.0.1")
    session = await driver.connect()
    assert driver.server.is_open
    await session.close()
    await driver.close()


async def test_led_to_another_server_after_all_it_gives_its_own_up(monkeypatch):
    driver = hosting(f"service:{free_port()}", is_host=True)
    leads_to = []

    async def resolve(*_):
        return [(socket.AF_INET, address) for address in leads_to]

    monkeypatch.setattr(driver._resolver, "resolve", resolve)
    with pytest.raises(Unreachable, match="its name has no address; a server was started here"):
        await driver.connect()
    assert driver.server is not None
    async with serving() as other:
        leads_to.append(("127.0.0.1", other.port))
        await (await driver.connect()).close()
        assert driver.server is None


async def test_one_that_is_cancelled_while_it_gives_its_own_server_up_hangs_up(monkeypatch):
    async with serving() as other, serving(is_open=False) as own:
        driver = hosting(f"127.0.0.1:{other.port}", is_host=True)
        driver.server = own
        stops, stop = asyncio.Event(), own.stop

        async def slow_stop():
            stops.set()
            await asyncio.sleep(LONG_S)

        monkeypatch.setattr(own, "stop", slow_stop)
        connecting = asyncio.ensure_future(driver.connect())
        await asyncio.wait_for(stops.wait(), LONG_S)
        assert other.peers
        connecting.cancel()
        await asyncio.wait([connecting])
        await until(lambda: not other.peers)
        monkeypatch.setattr(own, "stop", stop)


async def test_it_listens_on_all_interfaces_unless_the_endpoint_means_this_machine_only():
    name = socket.gethostname()
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(name, None)}
    except OSError:
        pytest.skip("this machine's own name does not resolve")
    driver = hosting(f"{name}:{free_port()}")
    session = await driver.connect()
    assert addresses
    assert driver.server.bind[0] == ""
    assert driver.server.place.endswith(f"/*:{driver.server.port}")
    other = await driver_to(driver.server.port).connect()
    await other.close()
    await session.close()
    await driver.close()
    local = hosting(f"localhost:{free_port()}")
    session = await local.connect()
    assert local.server.bind[0] == "localhost"
    await session.close()
    await local.close()


async def test_another_server_under_one_of_the_names_addresses_is_joined_and_none_is_made(monkeypatch):
    port = free_port()
    async with serving("127.0.0.2", port) as there:
        driver = hosting(f"head:{port}")
        monkeypatch.setattr(driver._resolver, "resolve", two_addresses)
        session = await driver.connect()
        assert session.place == there.place
        assert driver.server is None
        await session.close()


async def two_addresses(_host, port, _timeout_s):
    return [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET, ("127.0.0.2", port))]


async def test_one_that_finds_another_server_after_all_steps_back(monkeypatch):
    """Both found nobody, both bound an address of the name; whoever sees the other gives way."""

    port = free_port()
    driver = hosting(f"127.0.0.1:{port}")
    monkeypatch.setattr(driver._resolver, "resolve", two_addresses)
    probe = driver._is_meant

    async def late(server):
        async with serving("127.0.0.2", port, run_id="job", is_open=False):
            return await probe(server)

    monkeypatch.setattr(driver, "_is_meant", late)
    with pytest.raises(Unreachable, match="another server is there"):
        await driver.connect()
    assert driver.server is None
    monkeypatch.setattr(driver, "_is_meant", probe)
    session = await driver.connect()
    assert driver.server is not None
    await session.close()
    await driver.close()


async def test_a_port_that_somebody_else_has_is_named():
    async def handle(reader, writer):
        writer.write(b"SSH-2.0-x\r\n")
        writer.close()

    other = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    driver = hosting(f"127.0.0.1:{port}")
    with pytest.raises(Unreachable, match="an SSH server answers there"):
        await driver.connect()
    other.close()
    with socket.socket() as bound:  # Bound, but nobody listens.
        bound.bind(("127.0.0.1", 0))
        driver = hosting(f"127.0.0.1:{bound.getsockname()[1]}")
        with pytest.raises(Unreachable, match=r"port \d+ is taken by another process here, which does not answer"):
            await driver.connect()


async def test_two_jobs_on_one_port_are_told_apart():
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = hosting(endpoint, "first"), hosting(endpoint, "second")
    session = await first.connect()
    with pytest.raises(Unreachable, match="is hosted by an agent of run 'first' and serves that run only"):
        await second.connect()
    await session.close()
    await first.close()
    session = await second.connect()
    await session.close()
    await second.close()


async def test_one_machine_needs_no_address():
    for endpoint in ("", "rdzv://", "localhost:0"):
        driver = hosting(endpoint)
        session = await driver.connect()
        assert driver.server.bind == ("127.0.0.1", 0)
        assert session.local_host == "127.0.0.1"
        await session.txn()
        await session.close()
        await driver.close()
    with pytest.raises(Unreachable, match="it names no host, and no server was started for it here"):
        await hosting("", is_host=False).connect()


def test_an_endpoint_that_means_this_machine_only_is_warned_about_once(caplog):
    async def scenario(max_nodes):
        driver = hosting(f"127.0.0.1:{free_port()}", max_nodes=max_nodes)
        for _ in range(2):
            session = await driver.connect()
            await session.close()
        await driver.close()

    with caplog.at_level(logging.WARNING):
        run(lambda: scenario(1))
        assert caplog.records == []
        run(lambda: scenario(2))
        assert [record.message.split(": ")[0].split(" ", 2)[2] for record in caplog.records] == ["means this machine only"]


def test_settings_choose_the_driver():
    settings = Settings.make(
        "head:1234", run_id="job", min_nodes=1, max_nodes=2, linger=3, read_timeout=4, is_host=False
    )
    driver = open_driver(settings)
    assert isinstance(driver, HostingDriver)
    assert (driver.endpoint, driver.run_id, driver.linger_s, driver.read_timeout_s, driver._is_host) == (
        "rdzv://head:1234", "job", 3.0, 4.0, False
    )  # fmt: skip
    with pytest.raises(SettingsError, match="unknown option 'x'"):
        open_driver(Settings.make("head:1?x=1", run_id="job", min_nodes=1, max_nodes=2))


# ---- going


async def test_who_serves_stays_until_the_others_are_gone():
    port = free_port()
    driver = hosting(f"127.0.0.1:{port}", stay_s=LONG_S)
    await (await driver.connect()).close()
    other = await driver_to(port).connect()
    closing = asyncio.ensure_future(driver.close())
    for _ in range(10):
        await asyncio.sleep(0.05)
        await other.txn()
    assert not closing.done()
    await other.close()
    closed_at = time.monotonic()
    await closing
    within(time.monotonic() - closed_at, 3 * 1.0)
    with pytest.raises(Unreachable):
        await driver_to(port).connect()


def test_but_not_for_ever(caplog):
    async def scenario():
        port = free_port()
        driver = hosting(f"127.0.0.1:{port}", stay_s=0.3)
        await (await driver.connect()).close()
        other = await driver_to(port).connect()
        began_at = time.monotonic()
        await driver.close()
        took_s = time.monotonic() - began_at
        assert took_s >= 0.3
        within(took_s, 3 * 1.3)
        await other.close()

    run(scenario)
    assert "after 0.3 s, although 1 connections were left" in caplog.text


async def test_who_serves_looks_for_the_others_a_few_times_a_second_without_a_linger_too(monkeypatch):
    """Found by review: with `linger=0` it looked without a pause, for up to a minute."""
    port = free_port()
    driver = hosting(f"127.0.0.1:{port}", linger_s=0.0, stay_s=0.5)
    await (await driver.connect()).close()
    other = await driver_to(port).connect()
    looks, moves = [], driver.server._moves

    def counted(timeout_s):
        looks.append(timeout_s)
        return moves(timeout_s)

    monkeypatch.setattr(driver.server, "_moves", counted)
    await driver.close()
    assert len(looks) < 20
    await other.close()


async def test_one_whose_host_went_without_hanging_up_is_not_waited_for():
    """The connection stands, as far as the server can see, but the lease has ended."""

    port = free_port()
    driver = hosting(f"127.0.0.1:{port}", stay_s=LONG_S)
    session = await driver.connect()
    async with Proxy(port) as proxy:
        lost = await driver_to(proxy.port).connect()
        lease = await lost.grant(0.5, presence=True)
        await lost.txn(then=[Put("lost", b"", lease)])
        proxy.freeze()
        for _ in range(200):  # Asked for, not watched: time passes for leases only while somebody is heard.
            if (await session.txn(then=[Get("lost")])).item(0) is None:
                break
            await asyncio.sleep(0.05)
        began_at = time.monotonic()
        await session.close()
        await driver.close()
        within(time.monotonic() - began_at, 3 * 1.0)
        proxy.thaw()
        await lost.close()


async def test_one_whose_connection_just_broke_is_waited_for():
    port = free_port()
    driver = hosting(f"127.0.0.1:{port}")
    await (await driver.connect()).close()
    other = await driver_to(port).connect()
    await other.txn(then=[Put("here", b"", await other.grant(60, presence=True))])
    closing = asyncio.ensure_future(driver.close())
    await asyncio.sleep(0)
    other._link.transport.abort()
    await asyncio.sleep(0.3)
    assert not closing.done()
    await other.txn()
    other._link.transport.abort()
    await other.close()
    await closing


async def test_members_of_one_process_share_its_server_and_the_last_stops_it():
    port = free_port()
    drivers = [hosting(f"127.0.0.1:{port}", stay_s=LONG_S) for _ in range(3)]
    sessions = [await driver.connect() for driver in drivers]
    for driver, session in zip(drivers, sessions, strict=True):
        await sessions[-1].txn()
        await session.close()
        began_at = time.monotonic()
        await driver.close()
        within(time.monotonic() - began_at, 3 * 1.0)
    with pytest.raises(Unreachable):
        await driver_to(port).connect()


async def test_a_driver_that_connects_once_more_after_it_was_closed_does_not_keep_the_server():
    """As a member does whose status is asked for while it leaves."""
    port = free_port()
    host, other = (hosting(f"127.0.0.1:{port}", stay_s=LONG_S) for _ in range(2))
    sessions = [await host.connect()]
    await other.close()
    sessions.append(await other.connect())
    for session in sessions:
        await session.close()
    await host.close()
    with pytest.raises(Unreachable):
        await driver_to(port).connect()


async def test_a_server_that_stands_by_itself_is_not_replaced():
    async with serving() as server:
        driver = hosting(f"127.0.0.1:{server.port}")
        session = await driver.connect()
        await server.stop()
        with pytest.raises(Unreachable, match="connection refused"):
            await driver.connect()
        assert driver.server is None
        async with serving(port=server.port):  # It finds its address free.
            await (await driver.connect()).close()
        await session.close()


async def test_another_process_takes_over_and_sessions_find_it():
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = hosting(endpoint), hosting(endpoint)
    one, other = await first.connect(), await second.connect()
    assert second.server is None
    await first.server.stop()
    await until(lambda: second.server is not None, "taking over")
    await until(lambda: one._ended and other._ended, "the end of both sessions")
    fresh = await second.connect()
    assert fresh.instance != other.instance
    assert fresh.place == other.place
    for session in (one, other, fresh):
        await session.close()
    await first.close()
    await second.close()


async def test_drivers_of_several_servers_that_leave_together_stop_each_server_once():
    """Each stop waits, and the others change the table of servers meanwhile. A KeyError skipped the rest of leaving."""
    drivers, sessions = [], []
    for _ in range(3):
        endpoint = f"127.0.0.1:{free_port()}"
        for driver in (hosting(endpoint), hosting(endpoint)):
            drivers.append(driver)
            sessions.append(await driver.connect())
    ports = [driver.server.port for driver in drivers if driver.server is not None]
    for session in sessions:
        await session.close()
    await asyncio.gather(*(driver.close() for driver in drivers))
    assert len(ports) == 3
    for port in ports:
        with socket.socket() as one:
            assert one.connect_ex(("127.0.0.1", port)) != 0
    assert not hosting_module._users
