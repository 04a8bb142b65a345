"""The endpoint `auto`: what is chosen from which variables, what is logged, and what is refused."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rdzv
from rdzv.config.auto_endpoint import HOST_ENV, RUN_ID_ENV, choose, resolve
from rdzv.config.endpoint import Endpoint
from rdzv.drivers import open_driver
from rdzv.errors import SettingsError

KUBEFLOW = {"PET_NNODES": "4", "PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29400"}
SLURM = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "login,n[08-11]", "SLURM_STEP_NODELIST": "n[08-11]"}
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environ", "endpoint", "run_id"),
    [
        (KUBEFLOW, "job-node-0-0.job:29400", ""),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "23456"}, "n1:23456", ""),
        ({"MASTER_ADDR": "10.0.0.7"}, "10.0.0.7:29400", ""),
        ({"MASTER_ADDR": "fd00::7", "MASTER_PORT": "1234"}, "[fd00::7]:1234", ""),
        ({"MASTER_PORT": "1234"}, None, ""),
        # The port is the job's own, because two jobs may begin on one node.
        (SLURM, "n08:29967", "1234567"),
        ({**SLURM, "SLURM_STEP_NODELIST": ""}, "login:29967", "1234567"),
        ({"SLURM_JOB_NODELIST": "n1"}, "n1:29400", ""),
        ({"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "12_3"}, "n1:29400", "12_3"),
        ({"TORCHX_RANK0_HOST": "h0", "TORCHX_JOB_ID": "kubernetes://torchx/x-1"}, "h0:29400", "kubernetes-torchx-x-1"),
        ({"LWS_LEADER_ADDRESS": "lws-0.lws.default", "LWS_GROUP_SIZE": "4"}, "lws-0.lws.default:29400", ""),
        ({"SKYPILOT_NODE_IPS": "10.1.0.4\n10.1.0.5", "SKYPILOT_TASK_ID": "sky-1"}, "10.1.0.4:29400", "sky-1"),
        # The first counts.
        ({**SLURM, **KUBEFLOW}, "job-node-0-0.job:29400", "1234567"),
        ({**SLURM, "MASTER_ADDR": "n9"}, "n9:29400", "1234567"),
        # With loopback each node would serve itself, so it counts only if nothing else is there.
        ({**SLURM, **LOOPBACK}, "n08:29967", "1234567"),
        ({**LOOPBACK, "TORCHX_RANK0_HOST": "localhost"}, "127.0.0.1:29500", ""),
        ({"MASTER_ADDR": " ", "HOME": "/root"}, None, ""),
        ({}, None, ""),
    ],
)
def test_the_first_variable_that_names_a_host_counts(environ, endpoint, run_id):
    choice = choose(environ)
    if endpoint is None:
        assert choice is None
    else:
        assert (choice.endpoint, choice.run_id) == (Endpoint.parse(endpoint), run_id)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"SLURM_JOB_NODELIST": "n[0-"}, "SLURM_JOB_NODELIST is 'n[0-', which names no host that serves: the brackets of"),
        ({"MASTER_ADDR": "n 1"}, "MASTER_ADDR is 'n 1', which names no host that serves: endpoint 'rdzv://n 1:29400'"),
        ({"MASTER_ADDR": "n1", "MASTER_PORT": "http"}, "MASTER_ADDR is 'n1' and MASTER_PORT is 'http', which names no host"),
        ({"MASTER_ADDR": "a,b"}, "MASTER_ADDR is 'a,b', which names no host that serves"),
    ],
)
def test_a_value_that_names_no_host_is_refused_with_its_variable(environ, problem):
    """It is not passed over: other nodes might not see it the same way, and would wait somewhere else."""
    with pytest.raises(SettingsError) as caught:
        choose(environ)
    assert caught.value.sentence.startswith(problem)


@pytest.mark.parametrize(("given", "said"), [("auto", "endpoint is 'auto', and"), ("", "no endpoint is given, and")])
def test_without_any_variable_the_refusal_names_what_was_looked_for(given, said):
    with pytest.raises(SettingsError) as caught:
        resolve(given, "job", {}, several=True)
    assert caught.value.sentence.startswith(said)
    for name in HOST_ENV:
        assert name in caught.value.sentence
    assert "'host:29400'" in caught.value.sentence


@pytest.mark.parametrize("given_endpoint", ["", "auto", " auto "])
def test_an_empty_endpoint_for_several_nodes_means_auto(given_endpoint):
    assert resolve(given_endpoint, "job", SLURM, several=True) == (Endpoint.parse("n08:29967"), "job")


@pytest.mark.parametrize("run_id", ["", "none"])
def test_a_run_without_an_id_is_named_by_the_job(run_id):
    assert resolve("auto", run_id, SLURM, several=True)[1] == "1234567"
    assert resolve("auto", run_id, KUBEFLOW, several=True)[1] == "none"


@pytest.mark.parametrize("environ", [{}, SLURM, KUBEFLOW])
def test_one_node_with_an_empty_endpoint_stays_alone(environ):
    """As `torchrun --rdzv-backend=rdzv --nnodes=1` always did: on any free port, whatever the platform says."""
    assert resolve("", "none", environ, several=False) == ("", "none")


def test_one_node_with_auto_looks_but_needs_nothing():
    assert resolve("auto", "job", {}, several=False) == ("", "job")
    assert resolve("auto", "job", SLURM, several=False) == (Endpoint.parse("n08:29967"), "job")


@pytest.mark.parametrize("endpoint", ["n1:29400", "rdzv://", "etcd://auto", "rdzv://auto", Endpoint.parse("n1"), 7])
def test_an_endpoint_that_is_given_is_left_alone(endpoint):
    assert resolve(endpoint, "", SLURM, several=True) == (endpoint, "")


def test_the_choice_is_logged_with_its_reason(caplog):
    with caplog.at_level(logging.INFO, "rdzv.endpoint"):
        resolve("", "", SLURM, several=True)
        resolve("", "mine", KUBEFLOW, several=True)
    port = "PET_MASTER_PORT is '29400'; run id 'mine'"
    assert [record.getMessage() for record in caplog.records] == [
        "endpoint rdzv://n08:29967, because SLURM_STEP_NODELIST is 'n[08-11]'; run id '1234567' (from SLURM_JOB_ID)",
        f"endpoint rdzv://{KUBEFLOW['PET_MASTER_ADDR']}:29400, because PET_MASTER_ADDR is 'job-node-0-0.job' and {port}",
    ]


def test_a_member_is_made_from_the_variables(monkeypatch):
    for name in (*HOST_ENV, *RUN_ID_ENV):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SettingsError, match="no variable names the first node"):
        rdzv.Rendezvous("auto", run_id="", min_nodes=2, max_nodes=4)
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    for endpoint in ("", "auto"):
        made = []
        monkeypatch.setattr("rdzv.aio.open_driver", lambda settings, made=made: made.append(settings) or open_driver(settings))
        rdzv.Rendezvous(endpoint, run_id="", min_nodes=2, max_nodes=4)
        assert [(str(settings.endpoint), settings.run_id) for settings in made] == [("rdzv://n08:29967", "1234567")]


texts = st.text(st.characters(codec="utf-8"), max_size=20)


@given(st.dictionaries(st.sampled_from([*HOST_ENV, *RUN_ID_ENV, "MASTER_PORT", "PET_MASTER_PORT"]), texts, max_size=4))
def test_any_environment_gives_an_endpoint_or_is_refused(environ):
    try:
        choice = choose(environ)
    except SettingsError:
        return
    if choice is None:
        assert not any(environ.get(name, "").strip() for name in HOST_ENV)
    else:
        assert choice.endpoint.scheme == "rdzv"
        assert len(choice.endpoint.hosts) == 1
