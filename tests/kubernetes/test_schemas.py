"""The manifests of contrib/kubernetes and the image: checked with what Kubernetes, JobSet and Kubeflow Trainer publish.

The schemas come as Python packages. Each test installs them in an environment of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from support.kubernetes import documents
from support.own_environment import OwnEnvironment

pytestmark = pytest.mark.soak
ROOT = Path(__file__).parents[2]
KUBERNETES = "1.29"
"""The oldest version with all fields here: `podReplacementPolicy` is known since 1.28 and on by default since 1.29."""

BUILT_IN = """
import json, sys, kubernetes_validate
for one in json.load(sys.stdin):
    for version in (sys.argv[1], kubernetes_validate.latest_version()):
        kubernetes_validate.validate(one, version, strict=True)
"""
OTHERS = """
import json, sys, kubeflow_trainer_api.models as models
KINDS = {"JobSet": models.JobsetV1alpha2JobSet, "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
         "TrainJob": models.TrainerV1alpha1TrainJob}

def lost(given, kept, path=""):
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            yield from lost(value, kept[key], f"{path}.{key}") if key in kept else [f"{path}.{key}"]
    elif isinstance(given, list) and isinstance(kept, list):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from lost(one, other, f"{path}[{number}]")
    elif given != kept:
        yield path

found = [f"{one['kind']}{path}" for one in json.load(sys.stdin)
         for path in lost(one, KINDS[one["kind"]].from_dict(one).to_dict())]
sys.exit("\\n".join(found) or 0)
"""


def check(environment, program, objects, *words):
    command = [str(environment.python), "-c", program, *words]
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def split():
    ours = [one for one in documents() if one["apiVersion"].split("/")[0] in {"jobset.x-k8s.io", "trainer.kubeflow.org"}]
    monitors = [one for one in documents() if one["kind"] == "PodMonitor"]
    return [one for one in documents() if one not in ours and one not in monitors], ours


def test_kubernetes_knows_every_field(tmp_path):
    environment = OwnEnvironment(tmp_path, "kubernetes-validate")
    built_in, _ = split()
    assert {one["kind"] for one in built_in} == {"Secret", "Service", "Job", "StatefulSet", "NetworkPolicy"}
    assert check(environment, BUILT_IN, built_in, KUBERNETES) == (0, "")
    built_in[-1]["spec"]["replica"] = 1
    assert check(environment, BUILT_IN, built_in, KUBERNETES)[0] != 0, "a misspelt field is found"


def test_job_set_and_trainer_know_every_field(tmp_path):
    environment = OwnEnvironment(tmp_path, "kubeflow-trainer-api")
    _, others = split()
    assert {one["kind"] for one in others} == {"JobSet", "TrainingRuntime", "TrainJob"}
    assert check(environment, OTHERS, others) == (0, "")
    others[0]["spec"]["failurePolicy"]["maxRestart"] = 1
    assert "JobSet.spec.failurePolicy.maxRestart" in check(environment, OTHERS, others)[1], "a misspelt field is found"


def test_the_steps_of_the_image_install_a_server(tmp_path):
    """No image can be pulled here, so the steps of the Dockerfile run in an environment of their own."""
    text = (ROOT / "contrib" / "docker" / "Dockerfile").read_text()
    environment = OwnEnvironment(tmp_path)
    source, wheels = tmp_path / "src", tmp_path / "wheels"
    source.mkdir()
    for words in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE):
        *names, to = words.replace("/src/", f"{source}/").split()
        subprocess.run(["cp", "-r", *names, to], cwd=ROOT, check=True, timeout=60)
    for step in re.findall(r"^RUN (.+)$", text, re.MULTILINE):
        here = step.replace('"/src', f'"{source}').replace("/wheels", str(wheels))
        here = re.sub(r"^pip", f"{environment.python} -m pip --disable-pip-version-check -q", here)
        done = subprocess.run(["sh", "-ec", here], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    served = subprocess.run(
        [str(environment.python.parent / "rdzv"), "serve", "--help"], capture_output=True, text=True, timeout=60, check=False
    )
    assert served.returncode == 0, served.stderr
    assert "--http" in served.stdout
