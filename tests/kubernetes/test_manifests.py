"""The manifests of contrib/kubernetes agree with each other and with rdzv; their schemas are checked in test_schemas.py."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from rdzv.config import secret as secrets
from rdzv.config.auto_endpoint import choose
from rdzv.config.endpoint import PORT, Endpoint
from rdzv.config.settings import TABLE
from rdzv.errors import SettingsError
from rdzv.torchrun.conf import KEYS
from support.kubernetes import FOLDER, documents, made_by

ROOT = Path(__file__).parents[2]
MEMBERS = ("job.yaml", "jobset.yaml", "trainjob.yaml")
HTTP = 29480
SECRETS = {"rdzv": {"token": "x"}}
TORCH_READS = {"PET_RDZV_BACKEND", "PET_RDZV_ID", "PET_RDZV_CONF", "PET_MAX_RESTARTS"}
RDZV_READS = {"RDZV_TOKEN"}
OWN = {"RESTART_ATTEMPT"}
"""Variables that another one names."""


def all_pods():
    return [(name, pod) for name in (*MEMBERS, "server.yaml") for pod in made_by(documents(name))]


def selects(selector, labels):
    assert set(selector) == {"matchLabels"}, selector
    return selector["matchLabels"].items() <= labels.items()


def conf_of(pod):
    """The settings of a pod, however they are given: options of rdzv, or torchrun's variable."""
    environ = pod.environ(SECRETS)
    words = [word.removeprefix("--conf=") for word in pod.command(environ) if word.startswith("--conf=")]
    words += environ.get("PET_RDZV_CONF", "").split(",") if environ.get("PET_RDZV_CONF") else []
    words += [f"http={word.removeprefix('--http=')}" for word in pod.command(environ) if word.startswith("--http=")]
    return dict(word.split("=", 1) for word in words)


@pytest.mark.parametrize(("name", "pod"), all_pods(), ids=[f"{name}:{pod.name}" for name, pod in all_pods()])
def test_a_pod_names_only_what_exists(name, pod):
    (secret,) = documents("secret.yaml")
    known = {secret["metadata"]["name"]: set(secret["stringData"])}
    for path, mounted in pod.mounts().items():
        assert mounted in known
        assert f"{path}/token" in json.dumps([*pod.command({}), pod.environ(SECRETS)])
    for one in pod.container.get("env", ()):
        reference = one.get("valueFrom", {}).get("secretKeyRef")
        assert reference is None or reference["key"] in known[reference["name"]]
        assert one["name"] in TORCH_READS | RDZV_READS | OWN, one
    for key, value in conf_of(pod).items():
        assert key in KEYS
        if key in TABLE:
            TABLE[key].read(value)
    services = {one["metadata"]["name"]: one["spec"] for one in documents(name) if one["kind"] == "Service"}
    if services:  # The other kinds have a controller that makes it.
        service = services[pod.subdomain]
        assert service["selector"].items() <= pod.labels.items()
        assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)


@pytest.mark.parametrize("name", MEMBERS)
def test_all_pods_of_a_job_are_given_the_name_of_pod_0(name):
    pods = made_by(documents(name))
    ports = set()
    for pod in pods:
        environ = pod.environ(SECRETS)
        words = [word.removeprefix("--rdzv-endpoint=") for word in pod.command(environ)]
        given = [word for word in words if re.fullmatch(r"[\w.-]+:\d+", word)]
        endpoint = Endpoint.parse(given[0]) if given else choose(environ).endpoint
        ((host, port),) = endpoint.hosts
        assert host == f"{pods[0].name}.{pods[0].subdomain}"
        ports.add(port)
        first, last = map(int, conf_of(pod)["bootstrap_port"].split("-"))
        assert not first <= port <= last, "workers must not take the server's port"
    assert ports == {29500 if name == "trainjob.yaml" else PORT}


def test_ports_that_are_opened_scraped_and_probed_are_ports_of_the_pods():
    for name, pod in all_pods():
        ports = {one["name"]: one["containerPort"] for one in pod.container["ports"]}
        assert ports["http"] == HTTP
        assert conf_of(pod)["http"] == f"*:{HTTP}"
        assert ports.get("rdzv", PORT) == PORT
        policies = [one["spec"] for one in documents("networkpolicy.yaml") if selects(one["spec"]["podSelector"], pod.labels)]
        assert len(policies) == 1, pod.name
        opened = {port["port"] for rule in policies[0]["ingress"] for port in rule.get("ports", ())}
        assert opened == ({HTTP} if name in MEMBERS else {HTTP, PORT})
        monitors = [one["spec"] for one in documents("podmonitor.yaml") if selects(one["spec"]["selector"], pod.labels)]
        serves = name == "server.yaml" or pod.labels["batch.kubernetes.io/job-completion-index"] == "0"
        assert len(monitors) == int(serves), pod.name
        assert {one["port"] for spec in monitors for one in spec["podMetricsEndpoints"]} <= set(ports)
        for probe in ("readinessProbe", "livenessProbe"):
            assert pod.container.get(probe, {}).get("httpGet", {}).get("port", "http") in ports


def test_the_next_pod_of_an_index_starts_when_the_former_has_ended():
    """By default a Job replaces a pod that is still stopping, and then two servers of one name could run at the same time."""
    for name in MEMBERS:
        text = (FOLDER / name).read_text()
        assert "podReplacementPolicy: Failed" in text, name
        assert "restartPolicy: OnFailure" in text, name
    (server,) = [one for one in documents("server.yaml") if one["kind"] == "StatefulSet"]
    assert server["spec"]["replicas"] == 1


def test_the_secret_is_refused_until_it_has_a_value(tmp_path):
    (secret,) = documents("secret.yaml")
    file = tmp_path / "token"
    file.write_text(secret["stringData"]["token"])
    file.chmod(0o400)
    with pytest.raises(SettingsError, match="has nothing in it"):
        secrets.find(None, str(file))


def test_the_secret_that_kubectl_makes_has_the_key_that_the_pods_mount():
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("NOT TESTED with kubectl: it is not installed")
    (shown,) = re.findall(r"^(kubectl create secret .*)$", (ROOT / "docs" / "kubernetes.md").read_text(), re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", f"{shown} --dry-run=client -o json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    made, (ours,) = json.loads(done.stdout), documents("secret.yaml")
    assert (made["kind"], made["metadata"]["name"], set(made["data"])) == ("Secret", "rdzv", set(ours["stringData"]))


def test_the_image_serves_as_the_manifest_does():
    text = (ROOT / "contrib" / "docker" / "Dockerfile").read_text()
    instructions = dict(re.findall(r"^(ENTRYPOINT|CMD|EXPOSE|USER) (.+)$", text, re.MULTILINE))
    ((_, pod),) = [(name, pod) for name, pod in all_pods() if name == "server.yaml"]
    words = [*json.loads(instructions["ENTRYPOINT"]), *json.loads(instructions["CMD"])]
    assert words == [word for word in pod.command({}) if not word.startswith(("--token-file", "--conf=place"))]
    assert instructions["EXPOSE"].split() == [str(one["containerPort"]) for one in pod.container["ports"]]
    user = pod.spec["securityContext"]["runAsUser"]
    assert instructions["USER"] == f"{user}:{user}"
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    kept = (ROOT / "contrib" / "docker" / "Dockerfile.dockerignore").read_text().split()
    for source in copied:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in kept, source
