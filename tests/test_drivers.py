"""The choice of an engine: what it cannot honour is refused, and the packages it needs have no known faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rdzv.config import secret as secrets_of_ours
from rdzv.config.settings import Settings
from rdzv.drivers import open_driver
from rdzv.errors import SettingsError

TRUST = {
    "token": "a secret", "token_file": "/no/file", "tls": True, "tls_ca": "ca.pem", "tls_server_name": "node1",
}  # fmt: skip
INSTEAD = {
    "file:///tmp/no/run": "the rights of the file and its directory say who may use it",
    "c10d://node1:29400": "torch's TCPStore knows no secrets and no TLS, so anyone who reaches its port may use it",
    "memory://engine-of-the-drivers": "only this process can reach it",
}


@pytest.fixture(autouse=True)
def _no_secret_was_given_before(monkeypatch):
    monkeypatch.setattr(secrets_of_ours, "_put_aside", {})


def make(endpoint, **more):
    return Settings.make(endpoint, run_id="job", min_nodes=1, max_nodes=1, **more)


@pytest.mark.parametrize("endpoint", [*INSTEAD, "etcd://node1:2379"])
def test_a_declared_place_is_for_the_embedded_server_only(endpoint):
    with pytest.raises(SettingsError, match=r"place is .pod-0., but endpoint .* is no embedded server"):
        open_driver(make(endpoint, place="pod-0"))


@pytest.mark.parametrize("endpoint", INSTEAD)
@pytest.mark.parametrize("name", TRUST)
def test_secrets_and_tls_are_refused_where_the_engine_knows_none(endpoint, name):
    with pytest.raises(SettingsError) as refused:
        open_driver(make(endpoint, **{name: TRUST[name]}))
    assert refused.value.sentence == (
        f"endpoint {endpoint!r} cannot honour {name}: {INSTEAD[endpoint]}; leave it out, "
        "or use the embedded server (host:port) or etcds://"
    )


@pytest.mark.parametrize("endpoint", list(INSTEAD)[:2])
def test_a_secret_in_the_environment_is_refused_like_one_in_the_settings(endpoint):
    secrets_of_ours.put_aside({"RDZV_TOKEN": "a secret"})
    with pytest.raises(SettingsError, match=r"cannot honour tls and RDZV_TOKEN: .* leave them out"):
        open_driver(make(endpoint, tls=True))


async def test_without_them_the_engine_is_opened(tmp_path):
    for endpoint in (f"file://{tmp_path}/run", "memory://engine-of-the-drivers"):
        await open_driver(make(endpoint, tls=False)).close()


def test_the_oldest_packages_that_are_allowed_have_no_known_faults():
    """grpcio: CVE-2024-11407 and older. typer: fails with click 8.2. rich: CVE-2022-40899, by way of commonmark."""
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    oldest = {"grpcio": (1, 66, 2), "typer": (0, 16), "rich": (13, 2)}
    for name, version in oldest.items():
        named = re.findall(rf'"{name}(?:>=([0-9.]+))?[^"]*"', project)
        assert named, name
        assert all(tuple(map(int, found.split("."))) >= version for found in named), (name, named)
