"""What is said when an etcd cannot be used: each reason has its own sentence, within the time for connecting."""

from __future__ import annotations

import asyncio
import builtins
import re
import socketserver
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rdzv.config.endpoint import Endpoint
from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.engines.etcd.client.cluster import Cluster as EtcdCluster
from rdzv.engines.etcd.client.credentials import Credentials
from rdzv.engines.etcd.client.diagnose import too_old, version_of
from rdzv.engines.etcd.client.errors import LeaderChanged
from rdzv.engines.etcd.driver import CONNECT_TIMEOUT_S, DIAGNOSE_S, EtcdDriver
from rdzv.engines.etcd.server import free_ports
from rdzv.engines.port import Put
from rdzv.errors import SettingsError, Unreachable
from support.etcd_certificates import Certificates
from support.etcd_cluster import Cluster


def refusal(endpoint: str, access: Credentials | None = None, connect_timeout_s: float = CONNECT_TIMEOUT_S) -> str:
    """What connecting says."""

    async def connect() -> None:
        driver = EtcdDriver(Endpoint.parse(endpoint), access or Credentials(), connect_timeout_s=connect_timeout_s)
        session = await driver.connect()
        await session.close()

    began_at = time.monotonic()
    with pytest.raises((SettingsError, Unreachable)) as caught:
        asyncio.run(connect())
    assert time.monotonic() - began_at < 3 * (connect_timeout_s + DIAGNOSE_S)
    return caught.value.sentence


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Iterator[tuple[Cluster, Certificates, Certificates]]:
    """A member that wants certificates, the right authority, and another."""
    folder = tmp_path_factory.mktemp("certificates")
    right, other = Certificates(folder / "right"), Certificates(folder / "other", "stranger")
    with Cluster(1, tls=right) as cluster:
        yield cluster, right, other


def test_a_certificate_that_both_sides_trust_is_all_it_takes(tls):
    cluster, right, _ = tls
    access = Credentials(tls=True, ca=right.ca, cert=right.client_cert, key=right.client_key)

    async def connect() -> str:
        session = await EtcdDriver(Endpoint.parse(cluster.endpoint()), access).connect()
        await session.txn()
        await session.close()
        return session.instance

    assert re.fullmatch("[0-9a-f]{16}", asyncio.run(connect()))


def test_a_server_whose_certificate_is_not_trusted_is_named_with_the_reason(tls):
    cluster, right, other = tls
    access = Credentials(tls=True, ca=other.ca, cert=right.client_cert, key=right.client_key)
    said = refusal(cluster.endpoint(), access, 1.0)
    assert re.fullmatch(
        rf"engine {cluster.endpoint()} is unreachable after 1 s: 127.0.0.1:\d+: its certificate is not trusted "
        r"\(.*\); check tls_ca and the host's name",
        said,
    )


@pytest.mark.parametrize("shown", [False, True])
def test_a_certificate_that_the_server_refuses_or_misses_is_named(tls, shown):
    cluster, right, other = tls
    files = {"cert": other.client_cert, "key": other.client_key} if shown else {}
    said = refusal(cluster.endpoint(), Credentials(tls=True, ca=right.ca, **files), 1.0)
    assert re.search(r"it refuses our certificate \(.*\); give a tls_cert and tls_key that it trusts$", said)


def test_an_endpoint_without_tls_is_told_to_write_etcds(tls):
    cluster, _, _ = tls
    said = refusal(cluster.endpoint().replace("etcds", "etcd"), connect_timeout_s=1.0)
    assert said.endswith("it speaks TLS; write etcds:// instead of etcd://")


def test_a_change_of_etcds_leader_while_we_connect_is_outlasted(tls, monkeypatch):
    cluster, right, _ = tls
    access = Credentials(tls=True, ca=right.ca, cert=right.client_cert, key=right.client_key)
    attempt, asked = EtcdCluster._attempt, []

    async def changed(self, member, method, *rest):
        answer = await attempt(self, member, method, *rest)
        asked.append(method.rpartition("/")[2])
        if asked.count("Txn") == 1:
            raise LeaderChanged("etcd's leader has changed")
        return answer

    monkeypatch.setattr(EtcdCluster, "_attempt", changed)

    async def connect() -> None:
        session = await EtcdDriver(Endpoint.parse(cluster.endpoint()), access).connect()
        await session.close()

    asyncio.run(connect())
    assert asked == ["Status", "Txn", "Txn"]


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    """A member that asks everybody for a name and a password."""
    with Cluster(1) as cluster:
        cluster.add_user("trainer", "s3cr3t", "jobs/rdzv/")
        cluster.enable_auth("r00t")
        yield cluster


def test_an_endpoint_with_tls_is_told_to_write_etcd(guarded):
    said = refusal(guarded.endpoint().replace("etcd", "etcds"), Credentials(tls=True), 1.0)
    assert said.endswith("it speaks no TLS; write etcd:// instead of etcds://")


def test_a_wrong_password_is_said_without_the_password(guarded):
    endpoint = guarded.endpoint("jobs", "user=trainer")
    said = refusal(endpoint, Credentials(user="trainer", password="wrong"))
    assert said == f"endpoint '{endpoint}': etcd refuses the name 'trainer' with that password"


def test_a_prefix_that_may_not_be_written_is_named(guarded):
    endpoint = guarded.endpoint("others")
    assert refusal(endpoint, Credentials(user="trainer", password="s3cr3t")) == (
        f"endpoint '{endpoint}': user 'trainer' may not read and write below 'others/rdzv/' in etcd; "
        "grant that, or name a path that may be written"
    )


def test_who_gives_no_name_is_told_that_one_is_wanted(guarded):
    endpoint = guarded.endpoint("jobs")
    assert refusal(endpoint) == f"endpoint '{endpoint}': etcd wants a name and a password; see user and token_file"


def test_a_token_that_is_refused_is_renewed_for_calls_and_streams(guarded, tmp_path):
    password = tmp_path / "password"
    password.write_text("s3cr3t\n")
    access = Credentials(user="trainer", password_file=str(password))

    async def use() -> None:
        session = await EtcdDriver(Endpoint.parse(guarded.endpoint("jobs")), access).connect()
        cluster = session.client.cluster
        lease = await session.grant(60)
        cluster.token = "expired.7"
        before = (await session.txn()).revision
        assert cluster.token != "expired.7"
        guarded.add_user(f"another{time.monotonic_ns()}", "x")  # Every token is older than the rights now.
        await session.txn(then=[Put("rdzv/k", b"1", lease)])
        cluster.token = "expired.8"
        watch = aiter(session.watch(["rdzv/k"], before))
        assert (await asyncio.wait_for(anext(watch), 30)).events[0].key == "rdzv/k"
        await session.renew(lease)
        await session.revoke(lease)
        await session.close()

    asyncio.run(use())


def test_a_name_is_no_hindrance_where_nobody_is_asked_for_one():
    with Cluster(1) as cluster:

        async def connect() -> None:
            access = Credentials(user="trainer", password="s3cr3t")
            await (await EtcdDriver(Endpoint.parse(cluster.endpoint()), access).connect()).close()

        asyncio.run(connect())


def test_where_nobody_listens_the_refused_connection_is_named():
    port = free_ports(1)[0]
    said = refusal(f"etcd://127.0.0.1:{port}", connect_timeout_s=1.0)
    assert re.fullmatch(
        rf"engine etcd://127.0.0.1:{port} is unreachable after 1 s: 127.0.0.1:{port}: "
        "it cannot be connected to: connection refused",
        said,
    )


def test_a_cluster_without_quorum_says_how_many_answer():
    with Cluster(3) as cluster:
        for node in cluster.nodes[:2]:
            node.kill()
        said = refusal(cluster.endpoint(), connect_timeout_s=3.0)
    assert re.search(r" after 3 s: 1 of 3 members answer, but they have no leader, .* quorum \(.*\); bring a majority ", said)


class Web(socketserver.StreamRequestHandler):
    """Something else that answers."""

    answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(self.answer)


class OldEtcd(Web):
    """As an etcd answers that has no v3 worth speaking to."""

    answer = b'HTTP/1.1 200 OK\r\n\r\n{"etcdserver":"2.3.8","etcdcluster":"2.3.0"}'


class Mute(Web):
    """Hangs up."""

    answer = b""


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (Web, "something answers there that is not etcd: 'HTTP/1.1 404 Not Found'"),
        (OldEtcd, "it is etcd 2.3.8, which does not have what rdzv needs; use 3.4 or later"),
        (Mute, "it hangs up without an answer, as etcd never does"),
    ],
)
def test_what_is_no_etcd_or_an_old_one_is_said_to_be(handler, problem):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        said = refusal(f"etcd://127.0.0.1:{port}", connect_timeout_s=1.0)
        server.shutdown()
    assert said == f"engine etcd://127.0.0.1:{port} is unreachable after 1 s: 127.0.0.1:{port}: {problem}"


@pytest.mark.parametrize(
    ("version", "enough"), [("3.4.0", True), ("3.6.1-rc.0", True), ("4.0.0", True), ("3.3.27", False), ("", False)]
)
def test_versions_from_3_4_on_are_enough(version, enough):
    assert (too_old(version) == "") is enough


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"no"])
def test_what_is_not_etcds_answer_has_no_version(body):
    assert version_of(body) == ""


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
            "endpoint 'etcd://a:2379' is without TLS and tls_ca or tls_cert is set: write etcds://",
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


def test_name_and_password_come_from_the_environment_and_are_not_shown(monkeypatch):
    monkeypatch.setenv("RDZV_ETCD_USER", "trainer")
    monkeypatch.setenv("RDZV_ETCD_PASSWORD", "s3cr3t")
    driver = open_driver(settings("etcd://a/x"))
    assert isinstance(driver, EtcdDriver)
    assert driver.credentials.login() == ("trainer", "s3cr3t")
    assert "s3cr3t" not in f"{driver.credentials!r} {driver.credentials} {driver.endpoint}"


def test_files_that_cannot_be_read_are_named(tmp_path):
    missing = str(tmp_path / "missing")
    with pytest.raises(SettingsError, match=r"^tls_ca is '.*missing', which cannot be read: No such file or directory "):
        Credentials(tls=True, ca=missing).for_channel()
    long = tmp_path / "long"
    long.write_bytes(b"x" * 5000)
    with pytest.raises(SettingsError, match=r"^token_file has 5000 bytes, a password at most 4096 "):
        Credentials(user="me", password_file=str(long)).login()


def test_without_grpcio_the_sentence_has_the_command_that_installs_it(monkeypatch):
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
