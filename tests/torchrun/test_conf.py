"""torchrun's options become settings or are refused in one sentence, and docs/torchrun.md lists them. `--rewrite` writes it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv.config.auto_endpoint import HOST_ENV, RUN_ID_ENV
from rdzv.config.settings import DEFAULTS, TABLE, Settings, _plain
from rdzv.errors import SettingsError
from rdzv.torchrun import plugin
from rdzv.torchrun.conf import KEYS, OWN, SYNONYMS, TORCH, read, read_etcd, translate


def given(endpoint="node1:29400", run_id="job", low=2, high=4, backend="rdzv", local_addr=None, **conf):
    """As torchrun does it: every value of --rdzv-conf is text, and `timeout` is there."""
    return RendezvousParameters(backend, endpoint, run_id, low, high, local_addr, **{"timeout": 900, **conf})


def settings(**conf):
    made = read(given(**conf))
    return Settings.make(made.endpoint, run_id=made.run_id, min_nodes=2, max_nodes=4, **made.settings)


def refused(reader=read, **conf):
    with pytest.raises(SettingsError) as caught:
        reader(given(**conf))
    return caught.value.sentence


# ---- torch's keys


def test_the_time_that_torchrun_always_gives_is_the_time_to_join_unless_join_timeout_is_given():
    assert settings().join_timeout == 900
    assert settings(timeout="33.5").join_timeout == 33.5
    assert settings(timeout="50", join_timeout="70").join_timeout == 70


def test_torchs_last_call_also_waits_for_a_replacement():
    made = settings(last_call_timeout="2.5")
    assert (made.last_call, made.replace_wait) == (2.5, 2.5)
    assert settings(last_call_timeout="2.5", replace_wait="0").replace_wait == 0
    assert settings(last_call="4").replace_wait == 0


@pytest.mark.parametrize(
    ("conf", "lease"),
    [
        ({"keep_alive_interval": "2", "keep_alive_max_attempt": "4"}, 8),
        ({"keep_alive_interval": "0.5"}, 1.5),
        ({"keep_alive_max_attempt": "5"}, 25),
        ({}, 10),
    ],
)
def test_torchs_keep_alive_is_the_lease(conf, lease):
    assert settings(**conf).lease == lease


def test_torchs_other_words_are_understood():
    made = settings(rank="3", is_host="T", read_timeout="60", ssl_cert="/c", ssl_cert_key="/k", ca_cert="/a")
    assert (made.order, made.is_host, made.read_timeout) == ("3", True, 60)
    assert (made.tls_cert, made.tls_key, made.tls_ca) == ("/c", "/k", "/a")


def test_torchs_keys_without_a_meaning_here_are_checked():
    assert settings(heartbeat_timeout="5", close_timeout="30.5").closed_for == 60
    wanted = "it must be a number of seconds, more than 0 and at most 1000000000"
    assert refused(close_timeout="soon") == f"close_timeout is 'soon': {wanted}"
    assert refused(keep_alive_interval="-1") == f"keep_alive_interval is '-1': {wanted}"


def test_the_local_address_is_torchruns():
    assert read(given(local_addr="10.0.0.7")).settings["local_addr"] == "10.0.0.7"


# ---- the endpoint that the platform tells


@pytest.fixture
def environ(monkeypatch):
    """A way to set variables; none of those that `auto` looks for is set before."""
    for name in (*HOST_ENV, *RUN_ID_ENV):
        monkeypatch.delenv(name, raising=False)
    return lambda **variables: [monkeypatch.setenv(name, value) for name, value in variables.items()]


@pytest.mark.parametrize("endpoint", ["", "auto"])
def test_the_same_line_works_on_every_node_of_a_slurm_job(environ, endpoint):
    environ(SLURM_JOB_ID="77", SLURM_STEP_NODELIST="n[3-6]")
    made = read(given(endpoint=endpoint, run_id="none"))
    assert (str(made.endpoint), made.run_id) == ("rdzv://n3:29477", "77")


def test_kubeflow_needs_no_endpoint(environ):
    """It sets PET_MASTER_ADDR and PET_MASTER_PORT, and torchrun's default id is `none`: the server is the job's own."""
    environ(PET_MASTER_ADDR="job-node-0-0.job", PET_MASTER_PORT="29400")
    made = read(given(endpoint="", run_id="none"))
    assert (str(made.endpoint), made.run_id) == ("rdzv://job-node-0-0.job:29400", "none")


def test_one_node_without_an_endpoint_stays_alone(environ):
    environ(SLURM_JOB_ID="77", SLURM_STEP_NODELIST="n3")
    made = read(given(endpoint="", run_id="none", low=1, high=1))
    assert made.endpoint.is_one_machine
    assert made.run_id.startswith("alone-")


def test_several_nodes_without_an_endpoint_are_refused_with_what_was_looked_for(environ):
    environ()
    assert "looked for PET_MASTER_ADDR, MASTER_ADDR, SLURM_STEP_NODELIST" in refused(endpoint="")


# ---- refusals


@pytest.mark.parametrize(
    ("conf", "sentence"),
    [
        ({"last_cal": "3"}, "--rdzv-conf has an unknown key 'last_cal': did you mean 'last_call'?"),
        ({"spare_exits": "3"}, "--rdzv-conf has an unknown key 'spare_exits': did you mean 'spare_exit'?"),
        (
            {"lease": "3", "keep_alive_interval": "1"},
            "--rdzv-conf has lease and torch's keep_alive_interval, which mean the same: give one of them",
        ),
        ({"order": "3", "rank": "1"}, "--rdzv-conf has order and torch's rank, which mean the same: give one of them"),
        (
            {"store_type": "file"},
            "--rdzv-conf has 'store_type': the endpoint says it: 'host:port', or 'file:///path' for a file that all nodes see",
        ),
        ({"spare_exit": "never"}, "spare_exit is 'never': it must be 'auto' or 'exit' or 'error'"),
    ],
)
def test_a_mistake_gives_one_sentence(conf, sentence):
    assert refused(**conf) == sentence


def test_a_key_with_a_torchrun_option_is_refused_with_its_name():
    parameters = given()
    parameters.config["min_nodes"] = "3"
    with pytest.raises(SettingsError, match=r"--rdzv-conf has 'min_nodes', which is given with --nnodes"):
        read(parameters)


def test_a_key_that_resembles_nothing_is_answered_with_all_keys():
    assert refused(zzzz="1") == f"--rdzv-conf has an unknown key 'zzzz'; the keys are {', '.join(KEYS)}"


@pytest.mark.parametrize("key", ["token", "password", "auth_key"])
def test_a_secret_is_refused_and_not_repeated(key):
    sentence = refused(**{key: "hunter2"})
    assert "torch writes --rdzv-conf to its log" in sentence
    assert "hunter2" not in sentence


def test_every_setting_can_be_given_but_those_with_an_option_of_their_own_and_the_secret():
    assert set(TABLE) - set(KEYS) == {"endpoint", "run_id", "min_nodes", "max_nodes", "local_addr", "info", "token"}
    assert len(set(KEYS)) == len(KEYS)


def test_only_torchs_keys_are_translated():
    assert translate({"lease": "7", "grow": "now"}) == {"lease": "7", "grow": "now"}


# ---- endpoint and run id


def test_one_machine_needs_neither_endpoint_nor_id_and_two_such_jobs_do_not_meet():
    one, other = (read(given(endpoint="", run_id="none", low=1, high=1)) for _ in range(2))
    assert one.endpoint.is_one_machine
    assert one.run_id != other.run_id
    assert one.run_id.startswith("alone-")


def test_several_nodes_need_an_endpoint_that_others_can_find():
    with pytest.raises(SettingsError, match="which no other machine can find, and max_nodes is 4"):
        plugin.create_rdzv(given(endpoint="rdzv://", run_id="none"))


def test_a_server_of_our_own_may_do_without_an_id():
    assert read(given(run_id="none")).run_id == "none"


def test_a_shared_engine_needs_an_id():
    assert refused(endpoint="etcd://e:2379", run_id="none") == (
        "--rdzv-id is not given, and etcd://e:2379 may be shared: all jobs without an id would meet in one run; "
        "give one, such as --rdzv-id=$SLURM_JOB_ID"
    )


# ---- etcd-v3


@pytest.mark.parametrize(
    ("endpoint", "conf", "read_as"),
    [
        ("e1:2379", {}, "etcd://e1:2379"),
        ("e1", {"protocol": "https"}, "etcds://e1:2379"),
        ("etcds://a,b:23/p", {}, "etcds://a:2379,b:23/p"),
    ],
)
def test_users_of_etcd_v2_need_not_change_the_endpoint(endpoint, conf, read_as):
    assert str(read_etcd(given(endpoint=endpoint, backend="etcd-v3", **conf)).endpoint) == read_as


def test_etcd_v3_is_for_etcd():
    assert refused(read_etcd, endpoint="rdzv://h:1") == (
        "endpoint 'rdzv://h:1' is not an etcd's: --rdzv-backend=etcd-v3 needs one such as 'etcd://host:2379', "
        "or use --rdzv-backend=rdzv"
    )
    assert refused(read_etcd, protocol="ftp") == "--rdzv-conf protocol is 'ftp': it must be 'http' or 'https'"


# ---- the plug-in


def test_torch_gets_the_same_function_each_time():
    assert plugin.rdzv() is plugin.rdzv() is plugin.create_rdzv
    assert plugin.etcd_v3() is plugin.create_etcd_v3


def test_the_plug_in_is_imported_by_everybody_so_it_imports_nothing():
    program = (
        "import sys, rdzv.torchrun.plugin; "
        "print(*sorted({'torch', 'asyncio', 'msgspec', 'rdzv.torchrun.handler'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""


# ---- the tables of docs/torchrun.md

DOCUMENT = Path(__file__).parents[2] / "docs" / "torchrun.md"
OWN_TABLE = "| key | default | meaning |\n|---|---|---|\n"
TORCH_TABLE = "| torch's key | here |\n|---|---|\n"


def default(key):
    value = "auto" if key in OWN else _plain(DEFAULTS[key])
    return "" if value in ("", "None") else f"`{value}`"


def rows(head):
    if head == OWN_TABLE:
        names = [name for name in KEYS if name in TABLE or name in OWN]
        return [f"| `{name}` | {default(name)} | {(TABLE.get(name) or OWN[name]).meaning} |" for name in names]
    same = [f"| `{key}` | `{name}` |" for key, name in SYNONYMS.items()]
    return same + [f"| `{name}` | {setting.meaning} |" for name, setting in TORCH.items()]


def test_every_key_of_rdzv_conf_is_documented_with_its_default_and_meaning(request):
    text = DOCUMENT.read_text()
    for head in (OWN_TABLE, TORCH_TABLE):
        wanted = "".join(f"{row}\n" for row in rows(head))
        found = re.search(re.escape(head) + r"((?:\|.*\n)*)", text)
        assert found, f"there is no table that begins {head!r}"
        if request.config.getoption("--rewrite"):
            text = text.replace(found[0], head + wanted)
            DOCUMENT.write_text(text)
        else:
            assert found[1] == wanted


def test_every_key_is_in_one_of_the_tables():
    documented = {row.split("`")[1] for head in (OWN_TABLE, TORCH_TABLE) for row in rows(head)}
    assert documented == set(KEYS)
