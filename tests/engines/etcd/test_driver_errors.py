"""The errors of an etcd that cannot be used: each reason has its own sentence, within the timeout for connecting."""

from __future__ import annotations

import asyncio
import builtins
import os
import re
import socketserver
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rdzv.config import secret as secrets_of_ours
from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.etcd.client.cluster import Cluster as EtcdCluster
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.client.errors import LeaderChanged
from rdzv.engines.etcd.driver import CONNECT_TIMEOUT_S, DIAGNOSE_S, EtcdDriver
from rdzv.engines.port import Put
from rdzv.errors import SettingsError, Unreachable
from support.certificates import ca_file, issue
from support.etcd_cluster import Cluster
from support.ports import free_port
from support.timing import within


async def connect(endpoint: str, credentials: Credentials, timeout_s: float = CONNECT_TIMEOUT_S) -> str:
    """Connect and disconnect; return the name of the engine instance."""
    session = await EtcdDriver(Endpoint.parse(endpoint), credentials, connect_timeout_s=timeout_s).connect()
    await session.close()
    return session.instance


def refusal(endpoint: str, credentials: Credentials | None = None, timeout_s: float = CONNECT_TIMEOUT_S) -> str:
    """Return the sentence of the error that connecting raises."""
    began_at = time.monotonic()
    with pytest.raises((SettingsError, Unreachable)) as caught:
        asyncio.run(connect(endpoint, credentials or Credentials(), timeout_s))
    within(time.monotonic() - began_at, 3 * (timeout_s + DIAGNOSE_S))
    return caught.value.sentence


def certificates(ca: str = "ours", by: str = "ours") -> Credentials:
    """Return credentials that trust one authority and show a certificate of another; "" shows none."""
    cert, key = issue(by=by) if by else ("", "")
    return Credentials(tls=True, ca=ca_file(ca), cert=cert, key=key)


@pytest.fixture(scope="module")
def tls() -> Iterator[Cluster]:
    """A cluster that demands certificates."""
    with Cluster(1, tls=True) as cluster:
        yield cluster


async def test_certificates_that_both_sides_trust_are_enough(tls):
    assert re.fullmatch("[0-9a-f]{16}", await connect(tls.endpoint(), certificates()))


def test_the_error_says_why_the_servers_certificate_is_not_trusted(tls):
    assert re.fullmatch(
        rf"engine {tls.endpoint()} is unreachable after 1 s: 127.0.0.1:\d+: its certificate is not trusted "
        r"\(.*\); check tls_ca and the host's name",
        refusal(tls.endpoint(), certificates(ca="stranger"), 1.0),
    )


@pytest.mark.parametrize("by", ["", "stranger"])
def test_the_error_names_a_client_certificate_that_the_server_misses_or_refuses(tls, by):
    said = refusal(tls.endpoint(), certificates(by=by), 1.0)
    assert re.search(r"it refuses our certificate \(.*\); give a tls_cert and tls_key that it trusts$", said)


def test_an_endpoint_without_tls_is_told_to_write_etcds(tls):
    said = refusal(tls.endpoint().replace("etcds", "etcd"), timeout_s=1.0)
    assert said.endswith("it speaks TLS; write etcds:// instead of etcd://")


async def test_connecting_outlasts_a_change_of_etcds_leader(tls, monkeypatch):
    attempt, calls = EtcdCluster._attempt, []

    async def changed(self, member, method, *rest):
        reply = await attempt(self, member, method, *rest)
        calls.append(method.rpartition("/")[2])
        if calls.count("Txn") == 1:
            raise LeaderChanged("etcd's leader has changed")
        return reply

    monkeypatch.setattr(EtcdCluster, "_attempt", changed)
    await connect(tls.endpoint(), certificates())
    assert calls == ["Status", "Txn", "Txn"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    """A cluster that demands a name and a password."""
    with Cluster(1) as cluster:
        cluster.add_user("trainer", "s3cr3t", "jobs/rdzv/")
        cluster.enable_auth("r00t")
        yield cluster


def test_an_endpoint_with_tls_is_told_to_write_etcd(guarded):
    said = refusal(guarded.endpoint().replace("etcd", "etcds"), Credentials(tls=True), 1.0)
    assert said.endswith("it speaks no TLS; write etcd:// instead of etcds://")


def test_the_error_of_a_wrong_password_does_not_show_it(guarded):
    endpoint = guarded.endpoint("jobs", "user=trainer")
    said = refusal(endpoint, Credentials(user="trainer", password="wrong"))
    assert said == f"endpoint '{endpoint}': etcd refuses the name 'trainer' with that password"


def test_the_error_names_a_prefix_that_the_user_may_not_write(guarded):
    endpoint = guarded.endpoint("others")
    assert refusal(endpoint, Credentials(user="trainer", password="s3cr3t")) == (
        f"endpoint '{endpoint}': user 'trainer' may not read and write below 'others/rdzv/' in etcd; "
        "grant that, or name a path that may be written"
    )


def test_the_error_without_a_name_says_that_etcd_demands_one(guarded):
    endpoint = guarded.endpoint("jobs")
    assert refusal(endpoint) == f"endpoint '{endpoint}': etcd wants a name and a password; see user and token_file"


async def test_a_token_that_is_refused_is_renewed_for_calls_and_streams(guarded, tmp_path):
    password = tmp_path / "password"
    password.write_text("s3cr3t\n")
    access = Credentials(user="trainer", password_file=str(password))

    session = await EtcdDriver(Endpoint.parse(guarded.endpoint("jobs")), access).connect()
    cluster = session.client.cluster
    lease = await session.grant(60)
    cluster.token = "expired.7"
    before = (await session.txn()).revision
    assert cluster.token != "expired.7"
    guarded.add_user(f"another{time.monotonic_ns()}", "x")  # Makes every token older than the permissions.
    await session.txn(then=[Put("rdzv/k", b"1", lease)])
    cluster.token = "expired.8"
    watch = aiter(session.watch(["rdzv/k"], before))
    assert (await asyncio.wait_for(anext(watch), 30)).events[0].key == "rdzv/k"
    await session.renew(lease)
    await session.revoke(lease)
    await session.close()


async def test_a_user_name_is_harmless_where_etcd_demands_no_login(one):
    await connect(one.endpoint(), Credentials(user="trainer", password="s3cr3t"))


def test_the_error_names_a_refused_connection():
    port = free_port()
    said = refusal(f"etcd://127.0.0.1:{port}", timeout_s=1.0)
    assert re.fullmatch(
        rf"engine etcd://127.0.0.1:{port} is unreachable after 1 s: 127.0.0.1:{port}: "
        "it cannot be connected to: connection refused",
        said,
    )


def test_the_error_without_a_quorum_says_how_many_members_answer():
    with Cluster(3) as cluster:
        for node in cluster.nodes[:2]:
            node.kill()
        said = refusal(cluster.endpoint(), timeout_s=3.0)
    assert re.search(r" after 3 s: 1 of 3 members answer, but they have no leader, .* quorum \(.*\); bring a majority ", said)


class WebServer(socketserver.StreamRequestHandler):
    answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(self.answer)


class OldEtcd(WebServer):
    answer = b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"2.3.8","etcdcluster":"2.3.0"}'


class SilentServer(WebServer):
    answer = b""


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (WebServer, "something answers there that is not etcd: 'HTTP/1.1 404 Not Found'"),
        (OldEtcd, "it is etcd 2.3.8, which does not have what rdzv needs; use 3.4 or later"),
        (SilentServer, "it hangs up without an answer, as etcd never does"),
    ],
)
def test_the_error_says_that_the_server_is_no_etcd_or_too_old(handler, problem):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        said = refusal(f"etcd://127.0.0.1:{port}", timeout_s=1.0)
        server.shutdown()
    assert said == f"engine etcd://127.0.0.1:{port} is unreachable after 1 s: 127.0.0.1:{port}: {problem}"


# ---- settings


def settings(endpoint: str, run_id: str = "job", **more: str) -> Settings:
    return Settings.make(endpoint, run_id=run_id, min_nodes=1, max_nodes=1, **more)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"endpoint": "etcd://a", "run_id": "none"},
            (
                "run_id is 'none', which is what torchrun says when none was given, and an etcd is shared: "
                "give each job an id of its own"
            ),
        ),
        (
            {"endpoint": "etcd://a", "tls_ca": "ca.pem"},
            "endpoint 'etcd://a:2379' is without TLS and tls_ca is set: write etcds://",
        ),
        ({"endpoint": "etcd://a", "tls": True}, "endpoint 'etcd://a:2379' is without TLS and tls is set: write etcds://"),
        (
            {"endpoint": "etcds://a", "tls": False},
            "endpoint 'etcds://a:2379' is with TLS and tls is false: write etcd://, or leave it out",
        ),
        (
            {"endpoint": "etcds://a", "tls_server_name": "b"},
            "tls_server_name is for the embedded server, and etcd cannot honour it: leave it out",
        ),
        (
            {"endpoint": "etcds://a", "tls_mutual": True, "tls_ca": "ca.pem"},
            "tls_mutual is for the embedded server, and etcd cannot honour it: leave it out",
        ),
        (
            {"endpoint": "etcds://a?user=me", "token": "a secret"},
            "token is set, and etcd has users and passwords instead: name a token_file with the password",
        ),
        (
            {"endpoint": "etcd://a?user=me", "token_file": "f"},
            (
                "endpoint 'etcd://a:2379?user=me' is without TLS, so the password of 'me' could be read on its way: "
                "write etcds://, or, if you trust the network, add plaintext=true (?user=name&plaintext=true)"
            ),
        ),
        (
            {"endpoint": "etcd://a?user=me&plaintext=perhaps"},
            "endpoint 'etcd://a:2379?user=me&plaintext=perhaps': plaintext must be true or false",
        ),
        (
            {"endpoint": "etcds://a", "token_file": "f"},
            "token_file is set and no user: name it in the endpoint (?user=name) or in RDZV_ETCD_USER",
        ),
        ({"endpoint": "etcd://a?usr=me"}, "endpoint 'etcd://a:2379?usr=me' has an unknown option 'usr': did you mean 'user'?"),
    ],
)
def test_settings_that_cannot_work_on_etcd_are_refused(given, sentence, monkeypatch):
    monkeypatch.delenv("RDZV_ETCD_USER", raising=False)
    with pytest.raises(SettingsError) as caught:
        open_driver(settings(**given))
    assert caught.value.sentence == sentence


def test_user_and_password_come_from_the_environment_and_are_not_shown(monkeypatch):
    monkeypatch.setenv("RDZV_ETCD_USER", "trainer")
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "s3cr3t")
    monkeypatch.setattr(secrets_of_ours, "_passwords", {})
    with pytest.raises(SettingsError, match="is without TLS, so the password of 'trainer' could be read on its way"):
        open_driver(settings("etcd://a/x"))
    assert "RDZV_ETCD_PASSWORD" not in os.environ, "a worker would inherit it"
    for endpoint in ("etcds://a/x", "etcd://a/x?plaintext=true"):
        driver = open_driver(settings(endpoint))
        assert isinstance(driver, EtcdDriver)
        assert driver.credentials.login() == ("trainer", "s3cr3t")
    assert "s3cr3t" not in f"{driver.credentials!r} {driver.credentials} {driver.endpoint}"


def test_a_secret_in_the_environment_that_etcd_does_not_know_is_warned_about(monkeypatch, caplog):
    monkeypatch.setattr(secrets_of_ours, "_put_aside", {})
    monkeypatch.setattr(secrets_of_ours, "_warned", set())
    monkeypatch.setenv("RDZV_TOKEN", "a secret")
    open_driver(settings("etcd://a"))
    assert [record.message for record in caplog.records] == [
        "RDZV_TOKEN is set, and etcd does not know it: it has users and passwords (docs/etcd.md)"
    ]


def test_the_error_without_grpcio_has_the_command_that_installs_it(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **more):
        if name.partition(".")[0] == "grpc":
            raise ModuleNotFoundError("No module named 'grpc'", name="grpc")
        return real(name, *args, **more)

    for name in [one for one in sys.modules if one.startswith("rdzv.engines.etcd")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingsError) as caught:
        open_driver(settings("etcd://a"))
    assert caught.value.sentence == (
        "endpoint 'etcd://a:2379': etcd needs grpcio, which is not installed; `pip install 'rdzv[etcd]'`"
    )
