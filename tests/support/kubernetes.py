"""Pods as the controllers of Kubernetes would make them of a manifest, and a cluster of network namespaces to run them in.

    pods = made_by(documents("job.yaml"))      # an Indexed Job, a StatefulSet, a JobSet or a TrainJob
    with Cluster(network, folder, secrets) as cluster:
        cluster.start(pods[0], PATH=...)

A pod has its own network namespace, address, host name, /etc/hosts, resolver, processes and mounted secrets. Names are
answered by a DNS server of the cluster, which knows a pod from its start to its end. Users, resources and images are not
modelled.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from support.network_hosts import ETC, Host, Network
from support.torchrun_jobs import children_of

FOLDER = Path(__file__).parents[2] / "contrib" / "kubernetes"
DOMAIN = "default.svc.cluster.local"
SEARCH = f"{DOMAIN} svc.cluster.local cluster.local"
LONG_S = 60.0
ENTER = """
echo "$1" > /proc/sys/kernel/hostname; shift
mount -t tmpfs tmpfs /run
while [ "$1" != -- ]; do mkdir -p "$2"; mount --bind "$1" "$2"; shift 2; done; shift
exec "$@"
"""
"""Arguments: the host name, pairs of a folder and where it is mounted, --, the command."""


def documents(*files: str) -> list[dict[str, Any]]:
    """Return the objects of these manifests; without a name, of all."""
    paths = [FOLDER / name for name in files] or sorted(FOLDER.glob("*.yaml"))
    return [one for path in paths for one in yaml.safe_load_all(path.read_text())]


# ---- controllers


@dataclass
class Pod:
    """The parts of a pod that its processes can see."""

    name: str
    subdomain: str
    spec: dict[str, Any]
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)  # Variables that a controller adds.

    @property
    def full_name(self) -> str:
        return f"{self.name}.{self.subdomain}.{DOMAIN}"

    @property
    def container(self) -> dict[str, Any]:
        (one,) = self.spec["containers"]
        return dict(one)

    def environ(self, secrets: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
        """The variables of its container, in the order in which they may name each other."""
        environ: dict[str, str] = {}
        for one in self.container.get("env", ()):
            environ[one["name"]] = self._value(one, environ, secrets)
        return {**environ, **self.given}

    def _value(self, one: dict[str, Any], environ: Mapping[str, str], secrets: Mapping[str, Mapping[str, str]]) -> str:
        if "value" in one:
            return expand(one["value"], environ)
        (kind, source), *_ = one["valueFrom"].items()
        if kind == "secretKeyRef":
            return secrets[source["name"]][source["key"]]
        found = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", source["fieldPath"])
        assert kind == "fieldRef", one
        assert found, one
        return str(getattr(self, found[1])[found[2]])

    def command(self, environ: Mapping[str, str]) -> list[str]:
        words = [*self.container["command"], *self.container.get("args", ())]
        return [expand(word, environ) for word in words]

    def mounts(self) -> dict[str, str]:
        """The secrets that are mounted, by path."""
        named = {one["name"]: one["secret"]["secretName"] for one in self.spec.get("volumes", ())}
        return {one["mountPath"]: named[one["name"]] for one in self.container.get("volumeMounts", ())}


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Replace $(NAME) as the kubelet does: a name that is not known stays as it is."""
    return re.sub(r"\$\((\w+)\)", lambda found: environ.get(found[1], found[0]), text)


def made_by(objects: Iterable[dict[str, Any]]) -> list[Pod]:
    """Return the pods that the controllers make of these objects."""
    objects = list(objects)
    pods = []
    for one in objects:
        name, spec = one["metadata"]["name"], one.get("spec", {})
        if one["kind"] == "Job":
            pods += _of_job(name, spec)
        elif one["kind"] == "StatefulSet":
            template = spec["template"]
            labels = dict(template["metadata"]["labels"])
            pods += [Pod(f"{name}-{i}", spec["serviceName"], template["spec"], labels) for i in range(spec["replicas"])]
        elif one["kind"] == "JobSet":
            pods += _of_job_set(name, spec)
        elif one["kind"] == "TrainJob":
            (runtime,) = [other for other in objects if other["metadata"]["name"] == spec["runtimeRef"]["name"]]
            pods += _of_train_job(name, spec, runtime["spec"])
    return pods


def _of_job(name: str, spec: dict[str, Any], subdomain: str = "", **marks: str) -> list[Pod]:
    """Return the pods of an Indexed Job. `marks` are labels and annotations that its owner adds."""
    template = spec["template"]
    pods = []
    for index in range(spec["completions"]):
        index_label = {"batch.kubernetes.io/job-completion-index": str(index)}
        labels = {**template.get("metadata", {}).get("labels", {}), "batch.kubernetes.io/job-name": name}
        subdomain = subdomain or template["spec"]["subdomain"]
        given = {"JOB_COMPLETION_INDEX": str(index)}
        both = {**marks, **index_label}
        pods.append(Pod(f"{name}-{index}", subdomain, template["spec"], {**labels, **both}, both, given))
    return pods


def _of_job_set(name: str, spec: dict[str, Any], restarts: int = 0) -> list[Pod]:
    marks = {"jobset.sigs.k8s.io/jobset-name": name, "jobset.sigs.k8s.io/restart-attempt": str(restarts)}
    return [
        pod
        for job in spec["replicatedJobs"]
        for number in range(job.get("replicas", 1))
        for pod in _of_job(f"{name}-{job['name']}-{number}", job["template"]["spec"], name, **marks)
    ]


def _of_train_job(name: str, spec: dict[str, Any], runtime: dict[str, Any]) -> list[Pod]:
    """Combine job and runtime as Kubeflow Trainer does: the job's trainer replaces command and variables of `node`."""
    trainer, (job,) = spec["trainer"], runtime["template"]["spec"]["replicatedJobs"]
    nodes = trainer["numNodes"]
    job["template"]["spec"].update(completions=nodes, parallelism=nodes)
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node", "the container that Trainer looks for"
    container.update({key: trainer[key] for key in ("command", "args") if key in trainer})
    pods = _of_job_set(name, {"replicatedJobs": [job]})
    for index, pod in enumerate(pods):
        pod.given.update(
            PET_NNODES=str(nodes), PET_NPROC_PER_NODE=str(trainer["numProcPerNode"]), PET_NODE_RANK=str(index),
            PET_MASTER_ADDR=f"{name}-node-0-0.{name}", PET_MASTER_PORT="29500",
        )  # fmt: skip
    return pods


# ---- the cluster


class NameServer:
    """A DNS server for A records, which answers by UDP."""

    def __init__(self, at: socket.socket) -> None:
        self.records: dict[str, str] = {}
        self._socket = at
        self._socket.settimeout(0.2)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="DNS")
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing.is_set():
            with suppress(OSError):  # No query came, or its sender is gone.
                query, peer = self._socket.recvfrom(512)
                self._socket.sendto(self._answer(query), peer)

    def _answer(self, query: bytes) -> bytes:
        labels, at = [], 12
        while query[at]:
            labels.append(query[at + 1 : at + 1 + query[at]].decode())
            at += 1 + query[at]
        (kind,) = struct.unpack("!H", query[at + 1 : at + 3])
        address = self.records.get(".".join(labels).lower())
        found = address is not None and kind == 1
        # A name that has no record of this kind is no error; a name that nobody has is one (3).
        flags = 0x8580 | (0 if address is not None else 3)
        head = query[:2] + struct.pack("!HHHHH", flags, 1, int(found), 0, 0) + query[12 : at + 5]
        if not found:
            return head
        return head + b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(str(address))

    def close(self) -> None:
        self._closing.set()
        self._thread.join(LONG_S)
        self._socket.close()


class RunningPod:
    """A pod with its sandbox: the network namespace, which outlives its container."""

    def __init__(self, cluster: Cluster, pod: Pod, host: Host) -> None:
        self.pod = pod
        self.host = host
        self.out = cluster.folder / f"{host.name}.out"
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None

    def start_container(self, **environ: str) -> None:
        """Start the container's command as process 1, with nothing but the variables of a pod."""
        declared = self.pod.environ(self._cluster.secrets)
        mounts = [word for path, secret in self.pod.mounts().items() for word in (str(self._cluster.folder / secret), path)]
        command = [
            "ip", "netns", "exec", self.host.space,
            "unshare", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child",
            "sh", "-ec", ENTER, "sh", self.pod.name, *mounts, "--", *self.pod.command(declared),
        ]  # fmt: skip
        own = {"HOSTNAME": self.pod.name, "KUBERNETES_SERVICE_HOST": "10.96.0.1", **declared, **environ}
        with self.out.open("ab") as out:
            self._process = subprocess.Popen(
                command, env=own, cwd=self._cluster.folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip

    @property
    def code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    @property
    def text(self) -> str:
        return self.out.read_text(errors="replace")

    def wait(self, timeout_s: float = LONG_S) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def terminate(self) -> None:
        """Send SIGTERM to process 1, as the kubelet does first."""
        self._signal(signal.SIGTERM)

    def kill_container(self) -> None:
        """Kill all processes of the container, which end with process 1. The sandbox stays."""
        assert self._process is not None
        self._signal(signal.SIGKILL)
        self._process.wait(LONG_S)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        if self._process.poll() is None:
            # `unshare` ends when process 1 has. Until it has started that, it is all there is.
            first = children_of(self._process.pid) or [self._process.pid]
            with suppress(ProcessLookupError):
                os.kill(first[0], number)


class Cluster:
    """A network with pods and their names."""

    def __init__(self, network: Network, folder: Path, secrets: Mapping[str, Mapping[str, str]]) -> None:
        self.folder = folder
        self.secrets = secrets
        self.pods: list[RunningPod] = []
        self._network = network
        self.node = network.host("node")  # Probes and scrapes come from outside of the pods.
        self.dns = NameServer(self.node.do(self._open))
        self._made = 0
        for name, keys in secrets.items():
            (folder / name).mkdir()
            for key, value in keys.items():
                (folder / name / key).write_text(value)
                (folder / name / key).chmod(0o440)

    def _open(self) -> socket.socket:
        opened = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        opened.bind((self.node.address, 53))
        return opened

    def __enter__(self) -> Cluster:  # noqa: PYI034  Self came with 3.11.
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.pods:
            one.kill_container()
        self.dns.close()

    def start(self, pod: Pod, **environ: str) -> RunningPod:
        """Start a pod in a sandbox of its own, at a new address, and publish its name."""
        self._made += 1
        host = self._network.host(f"{pod.name}.{self._made}")
        running = RunningPod(self, pod, host)
        self.pods.append(running)
        etc = ETC / host.space
        (etc / "nsswitch.conf").write_text("hosts: files dns\n")
        (etc / "resolv.conf").write_text(f"nameserver {self.node.address}\nsearch {SEARCH}\noptions ndots:5\n")
        for one in self.pods:  # A pod's own name is all that its /etc/hosts has.
            one.host.hosts({f"{one.pod.full_name} {one.pod.name}": one.host.address})
        self.dns.records[pod.full_name] = host.address
        running.start_container(**environ)
        return running

    def delete(self, running: RunningPod) -> None:
        """End a pod for good: its processes, its name and its address.

        Its namespace stays until the network is cleared. The kernel gives the number of a namespace that is gone to the next
        one, and a pod on another machine would not have it.
        """
        running.kill_container()
        self.dns.records.pop(running.pod.full_name, None)
        self.pods.remove(running)
        running.host.cut()
