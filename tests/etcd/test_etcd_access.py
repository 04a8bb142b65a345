"""Certificates, users and the wrong places: real servers, and one sentence for each thing that only a person can mend."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import Certificates
from cluster import Cluster
from troupe import Troupe

from rdzv.drivers.base import Get, Put
from rdzv.drivers.choose import open_driver
from rdzv.drivers.etcd import CONNECT_TIMEOUT_S
from rdzv.errors import RdzvError, SettingsError, Unreachable
from rdzv.settings import Settings

SLACK = 3
"""Times are three times what is asked for: two busy cores."""


async def connect(endpoint: str, **options: object) -> bytes:
    """Write and read a key by these rights."""
    settings = Settings.make(endpoint, run_id="job", min_nodes=1, max_nodes=1, **options)
    session = await open_driver(settings).connect()
    try:
        await session.txn(then=[Put("rdzv/x", b"here")])
        item = (await session.txn(then=[Get("rdzv/x")])).item(0)
        return item.value if item is not None else b""
    finally:
        await session.close()


async def _problem(endpoint: str, kind: type[RdzvError], options: dict[str, str]) -> str:
    began_at = time.monotonic()
    with pytest.raises(kind) as caught:
        await connect(endpoint, **options)
    assert type(caught.value) is kind
    assert time.monotonic() - began_at < SLACK * CONNECT_TIMEOUT_S
    return str(caught.value)


def problems_of(kind: type[RdzvError], *places: tuple[str, dict[str, str]]) -> list[str]:
    """What connections that cannot be made say, each in time; asked for together, because each takes its time."""

    async def main() -> list[str]:
        return await asyncio.gather(*(_problem(endpoint, kind, options) for endpoint, options in places))

    return asyncio.run(main())


def unreachable(endpoint: str, problem: str) -> str:
    """The whole sentence about a place that has one member."""
    return f"engine {endpoint} is unreachable after 5 s: {endpoint.partition('//')[2]}: {problem}"


# ---- certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def secured(certificates: Certificates) -> Iterator[Cluster]:
    with Cluster(tls=certificates) as cluster:
        yield cluster


def rights(certificates: Certificates) -> dict[str, str]:
    return {"tls_ca": certificates.ca, "tls_cert": certificates.client_cert, "tls_key": certificates.client_key}


def test_a_run_on_a_cluster_that_wants_certificates_survives_the_loss_of_its_leader(secured, certificates):
    with Troupe(secured, 2, 2, **rights(certificates)) as troupe:
        agents = [troupe.start("a"), troupe.start("b")]
        assert troupe.wait_world(*agents) == 1
        leader = secured.leader()
        leader.kill()
        agents[0].tell("fail")
        assert troupe.wait_world(*agents, above=1) == 2
        leader.start()
        assert troupe.wrong() == []


def test_each_mistake_with_certificates_has_its_own_sentence(secured, certificates, tmp_path):
    ours, others = rights(certificates), Certificates(tmp_path / "others", "stranger")
    host = f"127.0.0.1:{secured.leader().port}"
    endpoint = f"etcds://{host}"
    with listening(b"HTTP/1.0 400 Bad Request\r\n\r\n") as port:
        found = problems_of(
            Unreachable,
            (endpoint, {**ours, "tls_ca": others.ca}),
            (f"etcd://{host}", {}),
            (f"etcds://127.0.0.1:{port}", ours),
            (endpoint, {**rights(others), "tls_ca": certificates.ca}),
            (endpoint, {"tls_ca": certificates.ca}),
        )
    untrusted = "its certificate is not trusted (unable to get local issuer certificate); check tls_ca and the host's name"
    assert found[0] == unreachable(endpoint, untrusted)
    assert found[1] == unreachable(
        f"etcd://{host}", "it hangs up without an answer; is it etcd, and does it want TLS (etcds://)?"
    )
    assert found[2] == unreachable(f"etcds://127.0.0.1:{port}", "it speaks no TLS; write etcd:// instead of etcds://")
    # What a server calls the trouble in its alert depends on the library it was built with.
    assert found[3].startswith(unreachable(endpoint, "it refuses our certificate ("))
    assert found[3].endswith("); give a tls_cert and tls_key that it trusts")
    assert found[4].startswith(unreachable(endpoint, "it "))
    assert found[4].endswith(("give a tls_cert and tls_key that it trusts", "give tls_cert and tls_key"))


# ---- users


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    """Ann may write below team/, Bob nowhere; tokens last for a second and a half."""
    with Cluster(1, extra=["--auth-token-ttl=1"]) as cluster:
        cluster.add_user("ann", "secret one", "team/")
        cluster.add_user("bob", "secret two")
        cluster.enable_auth("secret of root")
        yield cluster


def password(folder: Path, text: str) -> dict[str, str]:
    file = folder / f"password of {text}"
    file.write_text(text + "\n")
    return {"token_file": str(file)}


def test_a_user_with_a_password_joins_below_its_prefix_and_outlives_its_token(guarded, tmp_path):
    options = password(tmp_path, "secret one")
    endpoint = guarded.endpoint("team", "user=ann")
    assert asyncio.run(connect(endpoint, **options)) == b"here"
    # The recorder's token would run out too: what is judged here is what the agents are told.
    with Troupe(guarded, 2, 2, record=False, **options) as troupe:
        agents = [troupe.start("a", endpoint=endpoint), troupe.start("b", endpoint=endpoint)]
        assert troupe.wait_world(*agents) == 1
        time.sleep(4.0)
        agents[0].tell("fail")
        assert troupe.wait_world(*agents, above=1) == 2
        assert troupe.evicted() == []


def test_each_mistake_with_users_has_its_own_sentence_which_shows_no_password(guarded, tmp_path):
    ann, bob = guarded.endpoint("team", "user=ann"), guarded.endpoint("team", "user=bob")
    elsewhere, nobody = guarded.endpoint("elsewhere", "user=ann"), guarded.endpoint("team")
    found = problems_of(
        SettingsError,
        (ann, password(tmp_path, "not this")),
        (bob, password(tmp_path, "secret two")),
        (elsewhere, password(tmp_path, "secret one")),
        (nobody, {}),
    )
    advice = "in etcd; grant that, or name a path that may be written"
    assert found == [
        f"endpoint {ann!r}: etcd refuses the name 'ann' with that password",
        f"endpoint {bob!r}: user 'bob' may not read and write below 'team/rdzv/' {advice}",
        f"endpoint {elsewhere!r}: user 'ann' may not read and write below 'elsewhere/rdzv/' {advice}",
        f"endpoint {nobody!r}: etcd refuses the name '' with that password",
    ]


# ---- the wrong place


class listening:  # noqa: N801  Used as a function.
    """Something that accepts, reads a little, and answers this; empty: nothing at all."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._held: list[socket.socket] = []

    def __enter__(self) -> int:
        self._thread.start()
        return int(self._socket.getsockname()[1])

    def __exit__(self, *_: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        for one in self._held:
            one.close()

    def _serve(self) -> None:
        while True:
            try:
                one, _ = self._socket.accept()
            except OSError:
                return
            if not self._answer:
                self._held.append(one)
                continue
            one.settimeout(5.0)
            try:
                one.recv(4096)
                one.sendall(self._answer)
            except OSError:
                pass
            finally:
                one.close()


def answer_of(body: dict[str, str]) -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(text) + text


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_a_place_that_is_no_etcd_of_use_is_described():
    old = answer_of({"etcdserver": "2.3.8", "etcdcluster": "2.3.0"})
    with listening(old) as v2, listening(b"HTTP/1.0 404 Not Found\r\n\r\nno") as other, listening(b"") as silent:
        places = [f"etcd://127.0.0.1:{port}" for port in (v2, other, silent, free_port())]
        found = problems_of(Unreachable, *((place, {}) for place in places))
    assert found[0] == unreachable(places[0], "it is etcd 2.3.8, which does not have what rdzv needs; use 3.4 or later")
    assert found[1] == unreachable(places[1], "something answers there that is not etcd: 'HTTP/1.0 404 Not Found'")
    assert found[2] == unreachable(places[2], "no answer within 2 s")
    assert found[3].startswith(unreachable(places[3], "it cannot be connected to: "))
