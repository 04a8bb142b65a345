"""Quorums with a secret or with certificates: members and peers are let in, strangers are not."""

from __future__ import annotations

import http.client
import ssl
import time
from pathlib import Path

import pytest

from rdzv.config.secret import Secret
from rdzv.config.settings import Settings
from rdzv.errors import SettingsError
from support.certificates import ca_file, issue
from support.guarded_process import pid_of_sentinel
from support.quorum_hosts import PORT, QuorumHosts
from support.timing import within

pytest.importorskip("grpc", reason="grpcio is not installed: the extra `quorum` brings it")

from rdzv.engines.quorum.identity import identity
from rdzv.engines.quorum.security import security_of

TOKEN = "5f3c9a1be07d42689b6e1f0c7a8d3e52"
HOSTS = ("n1", "10.0.0.2", "fd99::3")


@pytest.fixture
def hosts(network, tmp_path):
    with QuorumHosts(network, "abc", tmp_path / "state") as made:
        yield made


def settings(**given: object) -> Settings:
    return Settings.make("quorum://n1,n2,n3", run_id="job", min_nodes=1, max_nodes=4, **given)


def in_the_clear(hosts: QuorumHosts, port: int) -> str:
    """Send a request without TLS to a host, and return the reply, or what went wrong."""

    def ask() -> str:
        connection = http.client.HTTPConnection(hosts.hosts["a"].address, port, timeout=5.0)
        try:
            connection.request("GET", "/members")
            return connection.getresponse().read().decode()
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()

    return hosts.hosts["b"].do(ask)


@pytest.mark.soak
def test_a_secret_lets_members_in_and_keeps_strangers_out(hosts, tmp_path):
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    for file, text in ((token, TOKEN), (wrong, TOKEN[::-1])):
        file.touch(mode=0o600)
        file.write_text(text)
    hosts.start(*"abc", settings=[f"token_file={token}"])
    hosts.world("abc")
    asked = ("status", hosts.endpoint, "--run-id", hosts.run_id)
    told = hosts.rdzv("a", *asked, "--token-file", str(token)).stdout
    assert "round 1 sealed" in told, told
    without = hosts.rdzv("a", *asked)
    assert without.returncode
    assert "TLS" in without.stderr, without.stderr
    other = hosts.rdzv("a", *asked, "--token-file", str(wrong))
    assert other.returncode
    assert "certificate" in other.stderr, other.stderr
    for port in (PORT, PORT + 1):
        assert '"name"' not in in_the_clear(hosts, port)
    assert "anybody who reaches" not in hosts.members["a"].errors()
    hosts.close_run("a", "--token-file", str(token))


@pytest.mark.soak
def test_certificates_protect_clients_and_peers(hosts):
    cert, key = issue(*(host.address for host in hosts.hosts.values()))
    hosts.start(*"abc", settings=[f"tls_cert={cert}", f"tls_key={key}", f"tls_ca={ca_file()}"])
    hosts.world("abc")
    without = hosts.rdzv("a", "status", hosts.endpoint, "--run-id", hosts.run_id, "--tls-ca", ca_file())
    assert without.returncode, "a client without a certificate is refused"
    for port in (PORT, PORT + 1):
        assert '"name"' not in in_the_clear(hosts, port)
    hosts.close_run("a", "--tls-cert", cert, "--tls-key", key, "--tls-ca", ca_file())


@pytest.mark.soak
@pytest.mark.parametrize("secret", [False, True])
def test_a_killed_process_is_noticed_long_before_its_lease_ends(hosts, tmp_path, secret, record_property):
    """Its etcd ends with it, so its sentinel asks the other two, with a certificate that was in the memory of the dead."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(TOKEN)
    hosts.start(*"abc", settings=["lease=60", *([f"token_file={token}"] if secret else [])])
    number = hosts.world("abc")
    pid_of_sentinel(hosts.members["c"].pid)
    began_at = time.monotonic()
    hosts.members["c"].kill()
    hosts.world("ab", after=number)
    took_s = time.monotonic() - began_at
    record_property("took_s", took_s)
    within(took_s, 20)


def test_nodes_with_one_secret_make_the_same_certificate_and_no_other_secret_does():
    ours = [identity.__wrapped__(Secret(TOKEN), "quorum", HOSTS) for _ in range(2)]
    other = identity(Secret(TOKEN[::-1]), "quorum", HOSTS)
    read = [(Path(files.cert).read_bytes(), Path(files.key).read_bytes()) for files in (*ours, other)]
    assert read[0] == read[1]
    assert read[0][0] != read[2][0]
    assert read[0][1] != read[2][1]


def test_the_certificate_is_sound_and_for_the_listed_hosts():
    files = identity(Secret(TOKEN), "quorum", HOSTS)
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives.asymmetric import ec

    cert = x509.load_pem_x509_certificate(Path(files.cert).read_bytes())
    cert.public_key().verify(cert.signature, cert.tbs_certificate_bytes, ec.ECDSA(cert.signature_hash_algorithm))
    names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {str(name.value) for name in names} == set(HOSTS)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert, files.key)  # They belong together.


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"token": "too-short"}, "can be guessed"),
        ({"token": TOKEN, "tls": True}, "leave one of them out"),
        ({"tls_server_name": "x", "tls": True}, "tls_server_name"),
    ],
)
def test_protection_that_cannot_be_honoured_is_refused(given, problem):
    with pytest.raises(SettingsError, match=problem):
        security_of(settings(**given))
