"""The manifests of contrib/kubernetes: each container's command runs in pods made of network namespaces."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.kubernetes import DOMAIN, Cluster, documents, made_by
from support.torchrun_jobs import wait_for

logger = logging.getLogger(__name__)
SECRETS = {"rdzv": {"token": "5f0c1e6a9b7d42e8a3c4d5f60718293a4b5c6d7e8f90a1b2c3d4e5f607182930"}}
PROGRAM = """
import os, time
get = os.environ.get
print("sees", sorted(name for name in os.environ if "TOKEN" in name), flush=True)
print("rank", get("RANK"), "of", get("WORLD_SIZE"), "round", get("RDZV_ROUND"), "at", get("MASTER_ADDR"), flush=True)
deadline = time.monotonic() + 120
while not os.path.exists("finish") and time.monotonic() < deadline:
    time.sleep(0.05)
"""
"""The line with the rank is the one that tests wait for, so it is the last."""
COLLECTIVES = """
import os, signal, time, torch, torch.distributed as dist
signal.alarm(300)  # If the test is killed, nobody else ends it.
dist.init_process_group("gloo")
get = os.environ.get
trained = torch.zeros(2)
while not trained[1]:
    time.sleep(0.05)
    trained = torch.tensor([1.0, float(dist.get_rank() == 0 and os.path.exists("finish"))])
    dist.all_reduce(trained)
    if get("RDZV_ROUND"):
        assert trained[0] == dist.get_world_size()
        round = os.environ.pop("RDZV_ROUND")
        print("trained at", time.monotonic(), flush=True)
        print("rank", get("RANK"), "of", get("WORLD_SIZE"), "round", round, "at", get("MASTER_ADDR"), flush=True)
dist.destroy_process_group()
"""
"""Trains by collectives, and says so after the first one."""
WITHIN_S = 10.0
ENVIRON = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def cluster(network, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    with Cluster(network, tmp_path, SECRETS) as made:
        yield made


def start(cluster, pods, **environ):
    return [cluster.start(pod, HOME=str(cluster.folder), **ENVIRON, **environ) for pod in pods]


def report(pods):
    return lambda: "\n".join(f"---- {one.pod.name} {one.code}\n{one.text[-4000:]}" for one in pods)


def trains(pods, size, after=0):
    """Wait until the newest program of each pod is in the same round of that size, later than `after`; return the round."""

    def look():
        seen = [re.findall(r"^rank (\d+) of (\d+) round (\d+) at (\S+)$", one.text, re.MULTILINE)[-1:] for one in pods]
        if not all(seen):
            return None
        ranks = sorted(int(rank) for ((rank, _, _, _),) in seen)
        worlds = {(int(of), int(round), at) for ((_, of, round, at),) in seen}
        (of, round, at), *others = sorted(worlds)
        same = not others and of == size and round > after and len(set(ranks)) == len(pods)
        return (round, at) if same else None

    round, at = wait_for(look, f"{len(pods)} pods in a world of {size}", report=report(pods))
    assert at in {one.host.address for one in pods} | {one.pod.full_name for one in pods}, "other pods reach rank 0 there"
    return round


def finish(cluster, pods):
    (cluster.folder / "finish").touch()
    codes = [one.wait() for one in pods]
    assert set(codes) == {0}, report(pods)()


def fetch(cluster, pod, path, port=29480):
    """Ask a pod as the kubelet and Prometheus do, from the node and by the pod's address. Return status and text."""

    def ask():
        try:
            with urllib.request.urlopen(f"http://{pod.host.address}:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    return cluster.node.do(ask)


def fixed(words):
    """Return the words without elasticity: two pods are then all there are, and nobody waits for more."""
    return ["--nnodes=2" if word == "--nnodes=2:4" else word.replace("per-node=auto", "per-node=1") for word in words]


def two_of(pods):
    for pod in pods:
        (container,) = pod.spec["containers"]
        container["args"] = fixed(container["args"])
    return pods[:2]


def test_the_pods_of_the_job_find_pod_0_by_its_name_and_train(cluster):
    """Pod 0 comes last: its name does not resolve until then."""
    first, *others = made_by(documents("job.yaml"))
    pods = start(cluster, others)
    wait_for(lambda: all("joins at engine" in one.text for one in pods), report=report(pods))
    pods += start(cluster, [first])
    trains(pods, 4)
    assert {one.pod.name for one in pods if "came in: job-0, job-1, job-2, job-3" in one.text} == {f"job-{i}" for i in range(4)}
    assert [one.text.count("sees []") for one in pods] == [1] * 4, "no worker has the secret"
    wait_for(lambda: re.search(r'rdzv_members\{run="job",state="in"\} 4', fetch(cluster, pods[-1], "/metrics")[1]), "metrics")
    assert fetch(cluster, pods[0], "/metrics")[0] == 0, "only pod 0 serves, as podmonitor.yaml says"
    *others, pod_0 = pods
    pod_0.terminate()
    trains(others, 3, after=1)
    assert pod_0.code is None, "it serves the others for up to `serve_on`"
    finish(cluster, others)
    assert pod_0.wait() == 128 + signal.SIGTERM, "a Job would take code 0 for a completed index and not replace the pod"


def test_a_container_of_pod_0_that_dies_is_restarted_in_its_pod_and_the_others_follow(cluster):
    """The pod keeps its network, so its next server is at the same place."""
    pods = start(cluster, two_of(made_by(documents("job.yaml"))))
    before = trains(pods, 2)
    pods[0].kill_container()
    pods[0].start_container(HOME=str(cluster.folder), **ENVIRON)
    trains(pods, 2, after=before)
    finish(cluster, pods)


def test_the_others_follow_pod_0_to_another_machine(cluster):
    first, second = two_of(made_by(documents("job.yaml")))
    pods = start(cluster, [first, second])
    before = trains(pods, 2)
    cluster.delete(pods[0])
    (again,) = start(cluster, [first])
    trains([again, pods[1]], 2, after=before)
    finish(cluster, [again, pods[1]])


@pytest.mark.soak
def test_torchrun_follows_pod_0_from_machine_to_machine(cluster):
    """The workers of the others fail in their collectives when pod 0 goes. Then their agents have nobody to ask."""
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    (cluster.folder / "train.py").write_text(COLLECTIVES)
    first, second = two_of(made_by(documents("jobset.yaml")))
    pods = start(cluster, [first, second])
    now, re_formed_s, trained_s = trains(pods, 2), [], []
    for _ in range(3):
        missed = pods[1].text.count("engine away")
        cluster.delete(pods[0])
        wait_for(lambda missed=missed: pods[1].text.count("engine away") > missed, "pod 0 is missed", report=report(pods))
        started_at = time.monotonic()
        pods[:1] = start(cluster, [first])
        now = trains(pods, 2, after=now)
        re_formed_s += map(float, re.findall(r"rank \d of 2, formed in (\S+) s", pods[0].text))
        trained = [float(re.findall(r"^trained at (\S+)$", one.text, re.MULTILINE)[-1]) for one in pods]
        trained_s.append(max(trained) - started_at)
    logger.info("re-formed %s s after the new agent's join; trained %s s after the new pod's start", re_formed_s, trained_s)
    # The rest is the time that Python takes to import torch in the agent and then in the workers, which depends on the load.
    assert len(re_formed_s) == 3
    assert max(re_formed_s) < WITHIN_S, re_formed_s
    finish(cluster, pods)


@pytest.mark.soak
def test_without_a_declared_place_the_others_refuse_a_new_pod_0_until_a_person_says_that_the_former_is_gone(cluster):
    first, second = two_of(made_by(documents("job.yaml")))
    assert "--conf=place=job-0" in first.container["args"]
    for pod in (first, second):
        (container,) = pod.spec["containers"]
        container["args"] = [word for word in container["args"] if word != "--conf=place=job-0"]
    pods = start(cluster, [first, second])
    trains(pods, 2)
    cluster.delete(pods[0])
    (again,) = start(cluster, [first])
    said = wait_for(lambda: re.search(r".*was kept by the engine at.*", pods[1].text), report=report([again, pods[1]]))
    assert "rdzv adopt" in said[0], said[0]
    adopt = [
        "ip", "netns", "exec", again.host.space, sys.executable, "-m", "rdzv", "adopt", f"job-0.job.{DOMAIN}:29400",
        "--run-id=job", "--force", f"--token-file={cluster.folder / 'rdzv' / 'token'}",
    ]  # fmt: skip
    done = subprocess.run(adopt, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **ENVIRON})
    assert done.returncode == 0, done.stderr
    trains([again, pods[1]], 2)
    finish(cluster, [again, pods[1]])


def test_the_server_is_ready_by_its_probes_and_keeps_the_runs_of_other_pods(cluster):
    (server,) = start(cluster, made_by(documents("server.yaml")))
    (container,) = server.pod.spec["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        path = container[probe]["httpGet"]["path"]
        wait_for(lambda path=path: fetch(cluster, server, path)[0] == 200, probe, report=report([server]))
    members = two_of(made_by(documents("job.yaml")))
    for pod in members:
        (member,) = pod.spec["containers"]
        args = [word.replace("place=job-0", "place=rdzv-0") for word in member["args"][1:]]
        member["args"] = ["rdzv://rdzv-0.rdzv:29400", *args]
    pods = start(cluster, members)
    before = trains(pods, 2)
    assert "serving at *:29400" in server.text
    server.kill_container()
    server.start_container(**ENVIRON)
    wait_for(lambda: re.search(r'rdzv_members\{run="job",state="in"\} 2', fetch(cluster, server, "/metrics")[1]))
    assert trains(pods, 2) == before, "a server that is restarted in its pod disturbs nobody"
    finish(cluster, pods)
    server.terminate()
    assert server.wait() == 0


def test_a_train_job_of_kubeflow_needs_no_endpoint(cluster):
    """Trainer's own variables and the runtime's PET_RDZV_BACKEND are all that torchrun is given."""
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    runtime, job = documents("trainjob.yaml")
    job["spec"]["trainer"].update(numNodes=2, command=["torchrun", "train.py"])
    pods = start(cluster, made_by([runtime, job]))
    trains(pods, 2)
    for one in pods:
        assert "endpoint rdzv://tune-node-0-0.tune:29500, because PET_MASTER_ADDR is" in one.text, one.text
        assert "[tune] round 1: rank" in one.text, "the run is named after the TrainJob"
        assert "sees []" in one.text, "no worker has the secret"
    finish(cluster, pods)


@pytest.mark.soak
def test_the_pods_of_the_job_set_train_and_its_restart_is_a_higher_incarnation(cluster):
    pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
    pods = two_of(made_by(documents("jobset.yaml")))
    for pod in pods:
        pod.annotations["jobset.sigs.k8s.io/restart-attempt"] = "7"
        assert ",incarnation=7," in pod.environ(SECRETS)["PET_RDZV_CONF"]
    pods = start(cluster, pods)
    trains(pods, 2)
    wait_for(lambda: 'run="train"' in fetch(cluster, pods[0], "/metrics")[1])
    finish(cluster, pods)
