"""Secret and certificates through the public faces: settings, environment, real processes, the shell tools."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import rdzv
from rdzv.config import secret as secrets_of_ours
from rdzv.config.secret import Secret, find, password_put_aside, put_aside
from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.embedded.trust import Trust
from rdzv.errors import SettingsError, Untrusted
from support.certificates import TOKEN, ca_file, issue
from support.embedded_server import LONG_S, ServerThread
from support.ports import free_port
from support.timing import within

QUICK = {"last_call": 0.2, "settle": 0.1, "lease": 3, "grow_every": 0}
TLS = {"tls_ca": ca_file(), "tls_cert": issue().tls_cert, "tls_key": issue().tls_key}


@pytest.fixture(autouse=True)
def _nothing_was_said_before(monkeypatch):
    monkeypatch.setattr(secrets_of_ours, "_put_aside", {})
    monkeypatch.setattr(secrets_of_ours, "_passwords", {})
    monkeypatch.setattr(secrets_of_ours, "_warned", set())
    monkeypatch.delenv("RDZV_TOKEN", raising=False)


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def make(**options):
    required = {"endpoint": f"127.0.0.1:{free_port()}", "run_id": "job", "min_nodes": 1, "max_nodes": 1}
    return Settings.make(**{**required, **options})


# ---- where it comes from


def test_the_secret_is_found_in_each_of_the_three_places(token_file):
    assert find(Secret(TOKEN), "") == Secret(TOKEN)
    assert find(None, str(token_file)) == Secret(TOKEN)
    assert find(None, "") is None
    environ = {"RDZV_TOKEN": TOKEN + "\n", "HOME": "x"}
    put_aside(environ)
    assert environ == {"HOME": "x"}
    assert find(None, "") == Secret(TOKEN)
    put_aside(environ)
    assert find(None, "") == Secret(TOKEN), "it is remembered for the next member of this process"


def test_what_is_said_to_a_member_counts_more_than_its_environment(token_file):
    put_aside({"RDZV_TOKEN": "of the environment"})
    assert find(Secret("of the setting"), "") == Secret("of the setting")
    assert find(None, str(token_file)) == Secret(TOKEN)
    assert find(Secret(TOKEN), str(token_file)) == Secret(TOKEN)
    with pytest.raises(SettingsError) as refused:
        find(Secret("another secret of mine"), str(token_file))
    assert refused.value.sentence == f"token and token_file {str(token_file)!r} are two different secrets: give one of them"


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: no such file or directory"),
        (b"", "has nothing in it: it must hold a secret of 1 to 4096 bytes"),
        (b"\r\n\n", "has nothing in it: it must hold a secret of 1 to 4096 bytes"),
        (b"x" * 4097, "has more than 4096 bytes in it: it must hold a secret of 1 to 4096 bytes"),
    ],
)
def test_a_file_without_a_secret_is_refused(content, sentence, tmp_path):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        Trust.of(make(token_file=path))
    assert refused.value.sentence == f"token_file {str(path)!r} {sentence}"


def test_what_is_no_file_is_refused_without_waiting_for_it(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SettingsError, match="is no ordinary file"):
        find(None, str(pipe))
    with pytest.raises(SettingsError, match=r"is no ordinary file|is a directory"):
        find(None, str(tmp_path))


def test_a_secret_as_large_as_allowed_is_taken_with_its_newline(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(b"x" * 4096 + b"\r\n")
    assert find(None, str(path)) == Secret("x" * 4096)


@pytest.mark.parametrize("text", ["", "\n", "x" * 4097])
def test_an_environment_without_a_secret_is_refused_and_cleaned(text):
    environ = {"RDZV_TOKEN": text}
    size = len(text.rstrip("\n"))
    with pytest.raises(SettingsError) as refused:
        put_aside(environ)
    assert refused.value.sentence == f"RDZV_TOKEN cannot be a secret: it has {size} bytes, it must have 1 to 4096"
    assert environ == {}


def test_what_everybody_can_read_or_guess_is_warned_about_once(token_file, caplog):
    token_file.write_text("tiny")
    token_file.chmod(0o644)
    for _ in range(3):
        find(None, str(token_file))
    assert [record.message for record in caplog.records] == [
        f"token_file {str(token_file)!r} can be read by every user of this machine: take that right away (chmod o-r)",
        "the secret is short, or regular, or made of words, and can be guessed: make one with `openssl rand -hex 32`",
    ]
    assert "tiny" not in caplog.text


# ---- where it is not


def test_the_secret_is_in_nothing_that_is_shown_or_stored():
    import copy
    import pickle

    settings = make(token=TOKEN)
    for shown in (repr(settings), str(settings), settings.summary(), repr(settings.agreed()), repr(Trust.of(settings))):
        assert TOKEN not in shown
    assert "token=<secret>" in repr(settings)
    assert copy.copy(settings).token is settings.token
    with pytest.raises(TypeError, match="a secret is not to be pickled"):
        pickle.dumps(settings)
    driver = open_driver(settings)
    assert TOKEN not in repr(vars(driver)) + repr(vars(driver.trust))


@pytest.mark.parametrize("wrong", [TOKEN.encode(), [TOKEN], TOKEN * 1000, ""])
def test_a_wrong_secret_is_refused_without_being_shown(wrong):
    with pytest.raises(SettingsError) as refused:
        make(token=wrong)
    assert refused.value.sentence == (
        f"token is not a secret (a value of type {type(wrong).__name__}): it must be text of 1 to 4096 bytes"
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tls": False, "tls_ca": "x"}, "tls is false and tls_ca is set: leave one of them out"),
        ({"tls": "no", "tls_server_name": "x"}, "tls is false and tls_server_name is set: leave one of them out"),
        (
            {"tls_mutual": True, "tls_cert": "x", "tls_key": "x"},
            "tls_mutual is true and tls_ca is not set: it must say whose certificates members may show",
        ),
        (
            {"tls": True, "is_host": True},
            "is_host is true and tls is on without tls_cert and tls_key: a server needs a certificate",
        ),
    ],
)
def test_settings_that_do_not_fit_together_get_one_sentence(options, sentence):
    with pytest.raises(SettingsError) as refused:
        make(**options)
    assert refused.value.sentence == sentence


@pytest.mark.parametrize(
    ("options", "uses_tls"),
    [({}, False), ({"tls": True}, True), ({"tls_ca": "x"}, True), ({"tls": False}, False), ({"tls_server_name": "x"}, True)],
)
def test_naming_what_tls_needs_turns_it_on(options, uses_tls):
    assert make(**options).uses_tls is uses_tls


def test_without_tls_ca_the_system_says_whom_to_trust():
    trust = Trust.of(make(tls=True))
    assert (trust.certificates.mutual, trust.certificates.can_serve, trust.knows_members) == (False, False, False)


# ---- a member that is not trusted


def test_who_comes_with_a_wrong_secret_is_told_at_once_and_shows_no_secret(caplog):
    with ServerThread(trust=Trust(Secret(TOKEN))) as served, caplog.at_level(logging.DEBUG):
        began_at = time.monotonic()
        with rdzv.Rendezvous(
            f"127.0.0.1:{served.server.port}", run_id="job", min_nodes=1, max_nodes=1, token="another secret of mine"
        ) as member:
            with pytest.raises(Untrusted, match="the two sides have different secrets") as refused:
                member.join()
            with pytest.raises(Untrusted):
                member.status()
    within(time.monotonic() - began_at, 3 * 1.0, "and not after join_timeout")
    for text in (repr(refused.value), str(refused.value), caplog.text):
        assert "another secret" not in text
        assert TOKEN not in text


def test_who_has_been_in_goes_on_through_a_server_with_another_secret():
    """A world is not given up because somebody restarted the server with a wrong secret."""
    port = free_port()
    options = {"run_id": "job", "min_nodes": 1, "max_nodes": 1, "token": TOKEN, "is_host": False, **QUICK}

    async def scenario():
        from rdzv.engines.embedded.server import Server

        right = Server(("127.0.0.1", port), trust=Trust(Secret(TOKEN)))
        await right.start()
        async with rdzv.aio.Rendezvous(f"127.0.0.1:{port}", **options) as member:
            world = await member.join()
            await right.stop()
            wrong = Server(("127.0.0.1", port), trust=Trust(Secret("another")))
            complaints = asyncio.Event()
            await wrong.start()
            wrong.complain = lambda *_: complaints.set()
            await complaints.wait()
            assert member.changed is None
            await wrong.stop()
            driver = member.driver
            refusals, connect = iter(range(3)), driver.connect

            async def refused_at_first():
                """A session that was reset, and comes in anew, goes on, too."""
                if next(refusals, None) is not None:
                    raise Untrusted(driver.endpoint, "the two sides have different secrets")
                return await connect()

            driver.connect = refused_at_first
            again = Server(("127.0.0.1", port), trust=Trust(Secret(TOKEN)))
            await again.start()
            status = await until_status(member)
            assert status.round == world.round
            assert next(refusals, None) is None
            assert member.changed is None
            await member.leave()
            await again.stop()

    async def until_status(member):
        while True:
            try:
                status = await member.status()
                if status.phase == "sealed":
                    return status
            except rdzv.errors.RdzvError:
                pass
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(scenario(), LONG_S))


# ---- whole formations


@pytest.mark.parametrize("options", [{"token": TOKEN}, TLS, {"token": TOKEN, **TLS}], ids=["secret", "mutual TLS", "both"])
def test_two_members_form_a_round_and_one_of_them_serves(options):
    endpoint, found = f"127.0.0.1:{free_port()}", []
    together = threading.Barrier(2)

    def node(slot):
        with rdzv.Rendezvous(endpoint, run_id="job", min_nodes=2, max_nodes=2, slot=slot, **QUICK, **options) as member:
            world = member.join(timeout_s=LONG_S)
            found.append((world.round, world.size, world.rank, str(world.bootstrap)))
            world.store.set(slot, slot.encode())
            assert world.store.get("ab".replace(slot, ""), timeout_s=LONG_S)
            together.wait(LONG_S)

    threads = [threading.Thread(target=node, args=(slot,)) for slot in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert [rank for _, _, rank, _ in sorted(found)] == [0, 1]
    assert len({(number, size, boot) for number, size, _, boot in found}) == 1


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_the_certificates_that_the_documentation_makes_are_good_for_both_sides(tmp_path):
    document = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    (commands,) = [block for block in re.findall(r"```sh\n(.*?)```", document, re.DOTALL) if "openssl x509" in block]
    subprocess.run(["sh", "-e", "-c", commands], cwd=tmp_path, check=True, capture_output=True, timeout=LONG_S)
    files = {"tls_ca": tmp_path / "ca.pem", "tls_cert": tmp_path / "node.pem", "tls_key": tmp_path / "node.key"}
    endpoint = f"localhost:{free_port()}"
    with rdzv.Rendezvous(endpoint, run_id="job", min_nodes=1, max_nodes=1, **QUICK, **files) as member:
        assert member.join(timeout_s=LONG_S).size == 1


# ---- processes


PROGRAM = """
import json, os, sys
seen = dict(os.environ)
print(json.dumps({"seen": [name for name, value in seen.items() if "4711" in value], "round": seen["RDZV_ROUND"]}), flush=True)
"""


def rdzv_command(*words, **environ):
    return subprocess.Popen(
        [sys.executable, "-m", "rdzv", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environ},
    )  # fmt: skip


def quick():
    return [word for name, value in QUICK.items() for word in ("--conf", f"{name}={value}")]


def test_the_shell_tools_take_secret_and_certificates_and_children_do_not_see_it(token_file):
    """A server and two members, each told of the secret in another way. The password for etcd is no program's either."""
    files = [word for name, value in TLS.items() for word in (f"--{name.replace('_', '-')}", value)]
    server = rdzv_command("serve", "--bind", "127.0.0.1:0", "--token-file", token_file, *files)
    members = []
    try:
        place = server.stdout.readline().split()[-1]
        run = ["run", place, "--run-id", "t", "--nnodes", "2", *quick(), *files]
        program = ["--", sys.executable, "-c", PROGRAM]
        members = [
            rdzv_command(*run, "--conf", "slot=a", *program, RDZV_TOKEN=TOKEN, RDZV_ETCD_PASSWORD="4711 too"),
            rdzv_command(*run, "--conf", "slot=b", "--token-file", token_file, *program, RDZV_TOKEN="4711 of another"),
        ]
        for member in members:
            out, err = member.communicate(timeout=2 * LONG_S)
            assert member.returncode == 0, err
            assert json.loads(out) == {"seen": [], "round": "1"}
        stranger = rdzv_command("join", place, "--run-id", "t", "--nnodes", "1", *files, RDZV_TOKEN="wrong wrong wrong wrong")
        _, err = stranger.communicate(timeout=LONG_S)
        assert stranger.returncode == 6
        assert f"rdzv: engine rdzv://{place} and this side do not trust each other: {place}: " in err
        assert "the two sides have different secrets: give the member the server's token [RDZV-E03]\n" in err
        assert "wrong wrong" not in err
    finally:
        for process in (*members, server):
            process.terminate()
        _, err = server.communicate(timeout=LONG_S)
    assert "peer 127.0.0.1: the two sides have different secrets: give the member the server's token" in err
    assert TOKEN not in err


def test_the_environment_is_clean_once_a_member_was_made(monkeypatch):
    """For children of every kind, and although its settings were wrong."""
    monkeypatch.setenv("RDZV_TOKEN", TOKEN)
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "a password")
    with pytest.raises(SettingsError):
        rdzv.aio.Rendezvous("memory://", run_id="job", min_nodes=2, max_nodes=1)
    look = "import os; print('RDZV_TOKEN' in os.environ or 'RDZV_ETCD_PASSWORD' in os.environ)"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout == "False\n"
    assert subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.count(TOKEN) == 0
    assert find(None, "") == Secret(TOKEN)
    assert password_put_aside() == "a password"
