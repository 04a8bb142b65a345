"""Other programs on the port, at either end, are recognised and named."""

from __future__ import annotations

import asyncio
import http.client
import http.server
import logging
import threading
import time

import pytest

from rdzv.engines.embedded.frames import PREAMBLE, Hello, encode
from rdzv.errors import Unreachable
from support.embedded_server import Raw, driver_to, run, serving
from support.ports import free_port
from support.timing import within


async def refusal(port, **options):
    """Why the driver does not get in, and how long it took to find out."""
    began_at = time.monotonic()
    with pytest.raises(Unreachable) as refused:
        await driver_to(port, **options).connect()
    assert refused.value.applied is False
    assert refused.value.endpoint == f"rdzv://127.0.0.1:{port}"
    return refused.value.problem, time.monotonic() - began_at


async def refused_by(answer, **options):
    """The error of a driver that gets this answer."""

    async def handle(reader, writer):
        await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        return await refusal(server.sockets[0].getsockname()[1], **options)
    finally:
        server.close()


# ---- at the other end of a driver


def test_a_web_server_is_named():
    web = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    web.RequestHandlerClass.log_message = lambda *_: None
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        problem, took_s = run(lambda: refusal(web.server_port, connect_timeout_s=60.0))
    finally:
        web.shutdown()
        web.server_close()
    assert problem == f"127.0.0.1:{web.server_port}: a web server answers there, not an rdzv server"
    within(took_s, 1.0, "it answers at once, because the greeting looks like the end of a request")


def test_a_silent_listener_is_named():
    async def silent(reader, writer):
        await reader.read()

    problem, took_s = run(lambda: refused_by(silent, connect_timeout_s=0.3))
    assert problem.endswith("somebody accepts connections there but did not greet us within 0.3 s")
    assert took_s >= 0.3
    within(took_s, 3 * 0.3)


def test_one_that_hangs_up_is_named():
    async def rude(reader, writer):
        pass

    problem, _ = run(lambda: refused_by(rude))
    assert problem.endswith("somebody accepts connections there but closed ours without a greeting")


def test_another_version_is_named():
    async def later(reader, writer):
        writer.write(b"RDZV 0003\r\n\r\n")
        await reader.read(10)

    problem, _ = run(lambda: refused_by(later))
    assert problem.endswith("it speaks protocol version 3 of rdzv, this is version 2: all need one version of rdzv")


def test_a_server_that_greets_and_goes_mad_is_named():
    async def mad(reader, writer):
        writer.write(PREAMBLE + b"\xff" * 100)
        await reader.read(10)

    problem, _ = run(lambda: refused_by(mad))
    assert "it sent a frame of 4294967295 bytes, at most 16777216 are allowed" in problem


def test_a_closed_port_is_named():
    port = free_port()
    problem, _ = run(lambda: refusal(port))
    assert problem == f"127.0.0.1:{port}: connection refused"


async def test_a_name_that_does_not_resolve_is_named():
    with pytest.raises(Unreachable, match=r"host 'no-such-host\.invalid' (does not resolve|was not resolved)"):
        await driver_to(29400, host="no-such-host.invalid").connect()


def test_who_answers_instead_is_logged_once(caplog):
    async def scenario():
        async def rude(reader, writer):
            writer.close()

        server = await asyncio.start_server(rude, "127.0.0.1", 0)
        driver = driver_to(server.sockets[0].getsockname()[1])
        for _ in range(5):
            with pytest.raises(Unreachable):
                await driver.connect()
        server.close()

    with caplog.at_level(logging.INFO):
        run(scenario)
    assert [record.levelname for record in caplog.records if record.name == "rdzv.remote"] == ["WARNING"]


# ---- at the other end of a server


def test_a_web_browser_is_told_where_it_is(caplog):
    async def scenario():
        async with serving() as server:

            def browse():
                connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
                connection.request("GET", "/")
                answer = connection.getresponse()
                found = answer.status, answer.read()
                connection.close()
                return found

            status, body = await asyncio.get_running_loop().run_in_executor(None, browse)
            assert status == 400
            assert b"This is an rdzv server" in body

    run(scenario)
    assert "peer 127.0.0.1: it speaks HTTP, not rdzv" in caplog.text


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"RDZV 0007\r\n\r\n", "it speaks protocol version 7 of rdzv, this is version 2"),
        (b"\x16\x03\x01\x00\xa5\x01", "it speaks TLS, and this side does not"),
        (b"\x00\x00\x00\x01x", "it does not speak rdzv"),
        (PREAMBLE + b"\x00\x00\x00\x01x", "it sent what cannot be read"),
    ],
)
def test_strangers_get_the_version_and_the_log_a_reason(data, named, caplog):
    async def scenario():
        async with serving() as server:
            raw = await Raw.connect(server.port)
            raw.write(data)
            answer = await raw.rest()
            assert answer.startswith(PREAMBLE)
            await raw.close()

    run(scenario)
    assert named in caplog.text


def test_a_peer_is_complained_about_at_most_once_per_second(caplog):
    async def scenario():
        async with serving() as server:
            for _ in range(50):
                raw = await Raw.connect(server.port)
                raw.write(b"rubbish")
                await raw.rest()
                await raw.close()
            at_first = len(caplog.records)
            await asyncio.sleep(1.05)
            raw = await Raw.connect(server.port)
            raw.write(b"rubbish")
            await raw.rest()
            await raw.close()
            return at_first

    began_at = time.monotonic()
    at_first = run(scenario)
    assert at_first <= 1 + (time.monotonic() - began_at)
    assert "more were not logged" in caplog.records[-1].message


# ---- another run


def test_an_agents_server_serves_its_own_run_only(caplog):
    async def scenario():
        async with serving(run_id="mine") as server:
            session = await driver_to(server.port, "mine").connect()
            problem, _ = await refusal(server.port, run_id="yours")
            await session.close()
            return problem

    problem = run(scenario)
    assert problem.partition(": ")[2] == (
        "this server is hosted by an agent of run 'mine' and serves that run only, not 'yours': "
        "give one of the runs another port, or start a server for both with `rdzv serve`"
    )
    assert "and serves that run only, not 'yours'" in caplog.text


def test_a_server_that_is_not_certain_yet_answers_probes_only_and_troubles_nobody(caplog):
    async def scenario():
        async with serving(is_open=False) as server:
            problem, _ = await refusal(server.port)
            assert "does not know yet whether the endpoint means it" in problem
            raw = await Raw.connect(server.port)
            raw.write(PREAMBLE + encode(Hello("job", "s", 1, probe=True)))
            await raw.read(len(PREAMBLE))
            welcome = await raw.frame()
            assert (welcome.server, welcome.open, welcome.instance) == (server.id, False, "")
            await raw.close()
            server.admit()
            await (await driver_to(server.port).connect()).close()

    run(scenario)
    assert caplog.records == []
