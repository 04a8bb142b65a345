"""The doctor, with servers, other programs, silence and wrong secrets on loopback."""

from __future__ import annotations

import asyncio
import errno
import importlib.metadata
import json
import os
import re
import socket

import pytest
from typer.testing import CliRunner

from rdzv.aio import AsyncRendezvous
from rdzv.cli.main import make_app
from rdzv.config.secret import Secret
from rdzv.config.settings import Settings
from rdzv.engines.embedded.server import Server
from rdzv.engines.embedded.trust import Trust
from rdzv.errors import SettingsError, Unreachable, Untrusted
from rdzv.operate import doctor
from rdzv.operate.doctor import Doctor, Finding, clock_finding, torch_findings
from rdzv.system.dial import DialFailed

SECRET = "5f0c9b1e7a3d48268b1d3c5e7f9a0b2c"


def settings_for(endpoint, **options):
    return Settings.make(endpoint, **{"run_id": "t", "min_nodes": 1, "max_nodes": 1, "is_host": False, **options})


async def examine(endpoint, timeout_s=3.0, **options):
    """Return the last finding of each topic."""
    return {one.topic: one async for one in Doctor(settings_for(endpoint, **options), timeout_s).examine()}


def examined(endpoint):
    return asyncio.run(examine(endpoint, 0.5))


def beside_a_server(trust=None, **options):
    async def scenario():
        server = Server(("127.0.0.1", 0), trust=trust)
        await server.start()
        try:
            return await examine(f"127.0.0.1:{server.port}", **options)
        finally:
            await server.stop()

    return asyncio.run(scenario())


def test_a_server_that_works_is_found_to_work():
    found = beside_a_server()
    assert {topic for topic, finding in found.items() if finding.level != "ok"} <= {"endpoint", "own name", "torch"}
    assert found["engine"].text.startswith("it may be read and written, and answers in ")
    assert found["run"].text == "run 't' is not kept there yet: nobody has joined it"
    assert found["trust"].text == "this node connects without TLS and without a secret"


def test_the_clock_of_the_server_is_shown_whomever_it_trusts_and_the_visit_is_no_cause_for_complaint(caplog):
    for trust, token in ((None, None), (Trust(Secret(SECRET)), SECRET)):
        found = beside_a_server(trust=trust, token=token)["clock"]
        assert re.fullmatch(r"the clock of 127\.0\.0\.1:\d+ and this machine's agree to about 2 s", found.text)
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("remote", "said"),
    [
        ("Wed, 01 Jul 2026 12:00:02 GMT", "the clock of s and this machine's agree to about 2 s"),
        ("Wed, 01 Jul 2026 12:02:05 GMT", "is 125 s ahead of this machine's; rdzv depends on neither clock, but logs"),
        ("Wed, 01 Jul 2026 11:59:50 GMT", "is 10 s behind this machine's"),
        ("soon", "s sends no readable time"),
    ],
)
def test_a_clock_that_differs_is_information_and_nothing_else(remote, said):
    finding = clock_finding("s", remote, "Wed, 01 Jul 2026 12:00:00 GMT")
    assert (finding.level, said in finding.text) == ("ok", True)


def test_a_secret_that_is_missing_is_a_problem_with_its_remedy():
    found = beside_a_server(trust=Trust(Secret(SECRET)))
    assert (found["trust"].level, found["trust"].code) == ("problem", "RDZV-P07")
    assert "secret" in found["trust"].text
    assert "token_file" in found["trust"].remedy
    assert "engine" not in found
    assert beside_a_server(trust=Trust(Secret(SECRET)), token=SECRET)["engine"].level == "ok"


def test_where_nobody_serves_this_machine_would():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
    found = examined(place)
    assert found["serving"] == Finding(
        "ok", "serving", f"nothing serves at {place} yet; this machine can bind it, so a member here would serve"
    )


def test_a_port_that_another_program_has_is_a_problem():
    """The program has bound the port and does not listen."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        found = examined(f"127.0.0.1:{holder.getsockname()[1]}")
    assert found["serving"].code == "RDZV-P05"
    assert "address already in use" in found["serving"].text


def test_another_program_that_answers_is_a_problem():
    async def scenario():
        async def greet(reader, writer):
            writer.write(b"SSH-2.0-OpenSSH_9.0\r\n")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        async with server:
            return await examine(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    found = asyncio.run(scenario())
    assert found["port"].level == "ok"
    assert found["engine"].code == "RDZV-P06"


def test_a_name_that_does_not_resolve_is_a_problem():
    found = examined("no-such-host.invalid:29400")
    assert (found["name"].level, found["name"].code) == ("problem", "RDZV-P01")


@pytest.mark.parametrize(
    ("failed", "code"),
    [("1.2.3.4:5: connection refused", "RDZV-P03"), ("1.2.3.4:5: no answer within 3 s", "RDZV-P04"),
     ("1.2.3.4:5: network is unreachable", "RDZV-P02")],
)  # fmt: skip
def test_how_a_connection_fails_tells_what_to_do(monkeypatch, failed, code):
    async def fail(*_):
        raise DialFailed(failed, answered=False)

    monkeypatch.setattr(doctor, "connect", fail)
    monkeypatch.setattr(doctor, "is_here", lambda *_: False)
    found = examined("127.0.0.1:29400")
    assert [finding.code for finding in found.values() if finding.level == "problem"] == [code]


def test_an_address_without_a_way_to_it_is_a_problem_unless_another_works(monkeypatch):
    monkeypatch.setattr(doctor, "source_of", lambda _family, _where: "")
    assert examined("127.0.0.1:29400")["route"].code == "RDZV-P02"

    async def resolve(self, host, port, timeout_s):
        return [(socket.AF_INET, ("127.0.0.1", port)), (socket.AF_INET, ("127.0.0.2", port))]

    monkeypatch.setattr(doctor.Resolver, "resolve", resolve)
    monkeypatch.setattr(doctor, "source_of", lambda _, where: "" if where[0] == "127.0.0.2" else "127.0.0.1")
    route = examined("127.0.0.1:29400")["route"]
    assert (route.level, route.code) == ("warning", "")


class FakeSession:
    """A session that refuses, or is slow."""

    instance = place = local_host = "odd"
    durable = True

    def __init__(self, *, refuses=False, wait_s=0.0):
        self.refuses, self.wait_s = refuses, wait_s

    async def txn(self, *_):
        await asyncio.sleep(self.wait_s)
        if self.refuses:
            raise Unreachable("etcd", "permission denied")
        from rdzv.engines.port import Outcome

        return Outcome(False, 1, ((),))


@pytest.mark.parametrize(("odd", "level", "said"), [(FakeSession(refuses=True), "problem", "permission denied"),
                                                   (FakeSession(wait_s=0.01), "warning", "to answer")])  # fmt: skip
def test_an_engine_that_refuses_or_is_slow_is_said_to_be(monkeypatch, odd, level, said):
    async def use():
        return [finding async for finding in Doctor(settings_for("node1:29400"))._use(odd)]

    monkeypatch.setattr(doctor, "SLOW_S", 0.001)
    found = asyncio.run(use())
    assert (found[0].level, said in found[0].text) == (level, True)
    if level == "warning":
        assert found[-1].topic == "address"
        assert "works only here" in found[-1].text


@pytest.mark.parametrize(
    ("version", "backends", "level", "said"),
    [
        (None, [], "ok", "torch is not installed here"),
        ("2.13.0+cpu", ["rdzv"], "ok", "torch 2.13.0+cpu finds the backends rdzv"),
        ("2.13.0", [], "problem", "is not installed as its plug-in"),
        ("2.5.1", ["rdzv"], "problem", "too old to find rendezvous plug-ins"),
        ("2.6.0", ["rdzv"], "ok", "torch 2.6.0 finds the backends rdzv"),
    ],
)
def test_whether_torchrun_would_find_us_is_told_without_torch(monkeypatch, version, backends, level, said):
    def find(_):
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    entries = [importlib.metadata.EntryPoint(name, "x", "torchrun.handlers") for name in backends]
    monkeypatch.setattr(importlib.metadata, "version", find)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    (finding,) = torch_findings()
    assert (finding.level, said in finding.text) == (level, True)


@pytest.mark.parametrize(
    ("means", "level", "said"),
    [(["127.0.1.1"], "warning", "which resolves to 127.0.1.1 here: others cannot use that"),
     (["10.0.0.1", "127.0.0.1"], "ok", "which resolves to 10.0.0.1, 127.0.0.1"), ([], "warning", "which it cannot resolve")],
)  # fmt: skip
def test_the_machines_own_name_is_checked(monkeypatch, means, level, said):
    async def resolve(*_):
        if not means:
            raise DialFailed("no", answered=False)
        return [(socket.AF_INET, (address, 0)) for address in means]

    examiner = Doctor(settings_for("memory://"))
    monkeypatch.setattr(examiner._resolver, "resolve", resolve)
    finding = asyncio.run(examiner._own_name())
    assert (finding.level, said in finding.text) == (level, True)


def test_a_name_that_means_this_machine_here_is_warned_about(monkeypatch):
    async def resolve(*_):
        return [(socket.AF_INET, ("127.0.1.1", 29400))]

    async def scenario():
        examiner = Doctor(settings_for("node1:29400"))
        monkeypatch.setattr(examiner._resolver, "resolve", resolve)
        return [finding async for finding in examiner._host("node1", 29400)]

    found = asyncio.run(scenario())
    assert "node1 resolves to this machine here" in found[1].text


def test_the_command_shows_it_to_people_and_programs_and_ends_with_1_if_there_is_a_problem():
    words = ["doctor", "no-such-host.invalid:29400"]
    shown, said = (CliRunner().invoke(make_app(), [*words, *more]) for more in ([], ["--json"]))
    assert (shown.exit_code, said.exit_code) == (1, 1)
    assert "problem  name        host 'no-such-host.invalid' does not resolve" in shown.stdout
    assert "[RDZV-P01]\n                     -> check the spelling" in shown.stdout
    findings = [json.loads(line) for line in said.stdout.splitlines()]
    assert next(one["topic"] for one in findings if one["level"] == "problem") == "name"
    assert CliRunner().invoke(make_app(), ["doctor", "memory://"]).exit_code in (0, 1)


async def test_an_agent_that_serves_its_own_run_is_no_problem_unless_another_run_is_meant():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    async with AsyncRendezvous(where, run_id="job", min_nodes=1, max_nodes=1, last_call=0) as member:
        await member.join()
        findings = [one async for one in Doctor(settings_for(where, run_id=doctor.NO_RUN)).examine()]
        assert [one.text for one in findings if one.topic == "run"] == [
            "an agent of run 'job' serves there, and keeps that run only", "run 'job' is kept there"
        ]  # fmt: skip
        assert not [one for one in findings if one.level == "problem" and one.topic != "torch"]
        found = (await examine(where))["run"]
        assert (found.level, found.code) == ("problem", "RDZV-P08")
        assert "serves that run only, not 't'" in found.text
        assert "check --run-id" in found.remedy


@pytest.mark.parametrize(
    ("error", "endpoint", "remedy"),
    [
        (Untrusted("e", "its certificate has expired"), "127.0.0.1:1", "replace the certificate"),
        (Untrusted("e", "the two sides have different secrets"), "127.0.0.1:1", "same token_file"),
        (SettingsError("the run has no id ('none')"), "127.0.0.1:1", "--run-id"),
        (SettingsError("user 'x' may not read"), "etcd://127.0.0.1:1", "rights"),
        (Unreachable("e", "no quorum", remedy="bring a majority back"), "etcd://127.0.0.1:1", "bring a majority back"),
        (Unreachable("e", "this server has just started: try again"), "127.0.0.1:1", "ask again"),
        (Unreachable("e", "a web server answers there", remedy="correct the endpoint"), "127.0.0.1:1", "correct the endpoint"),
    ],
)
def test_the_remedy_is_one_for_the_problem_that_was_found(error, endpoint, remedy):
    found = Doctor(settings_for(endpoint))._not_welcome(error)
    assert (found.text, remedy in found.remedy) == (error.problem, True)


@pytest.mark.parametrize(("number", "remedy"), [(errno.EADDRINUSE, "end the program"), (errno.EACCES, "choose another port")])
def test_a_port_that_cannot_be_bound_has_the_remedy_for_its_reason(monkeypatch, number, remedy):
    def listen(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(doctor, "listen", listen)
    found = Doctor(settings_for("127.0.0.1:80"))._could_serve(80, "127.0.0.1:80")
    assert (found.code, found.remedy.startswith(remedy)) == ("RDZV-P05", True)
