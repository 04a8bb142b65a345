from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from rdzv.core.model import WorkerRanks
from rdzv.errors import SettingsError
from rdzv.launch.environment import NodeInRound, of_worker
from rdzv.system.bootstrap import Bootstrap

NODE = NodeInRound(
    run_id="job", round=3, fence=77, reason="n2 lost", host="10.0.0.1", port=4711, rank=1, nodes=3, workers=2,
    ranks=WorkerRanks(4, 8, 2, 6), role="trainer", restarts=1, max_restarts=5, channel="/run/w",
)  # fmt: skip


def test_a_worker_finds_the_names_that_torch_lightning_accelerate_and_jax_read():
    assert of_worker({"PATH": "/bin", "RANK": "of the launcher"}, NODE, 1, "/tmp/error.json") == {
        "PATH": "/bin",
        "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1", "GROUP_WORLD_SIZE": "3",
        "ROLE_NAME": "trainer", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_ERROR_FILE": "/tmp/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "JAX_COORDINATOR_ADDRESS": "10.0.0.1:4711", "JAX_NUM_PROCESSES": "8", "JAX_PROCESS_ID": "5",
        "JAX_LOCAL_DEVICE_IDS": "1", "JAX_ENABLE_PREEMPTION_SERVICE": "false",
        "RDZV_RUN_ID": "job", "RDZV_ROUND": "3", "RDZV_FENCE": "77", "RDZV_WORKER": "/run/w", "RDZV_REASON": "n2 lost",
        "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "TORCH_NCCL_ASYNC_ERROR_HANDLING", "JAX_LOCAL_DEVICE_IDS",
     "JAX_ENABLE_PREEMPTION_SERVICE"],
)  # fmt: skip
def test_a_default_gives_way_to_the_value_that_the_user_set(name):
    assert of_worker({name: "mine"}, NODE, 0)[name] == "mine"


def test_a_worker_that_is_alone_on_its_node_may_use_all_of_it():
    environ = of_worker({}, msgspec.structs.replace(NODE, workers=1), 0)
    assert not {"OMP_NUM_THREADS", "JAX_LOCAL_DEVICE_IDS"} & set(environ)


def test_an_address_of_ipv6_has_brackets_where_the_port_follows():
    environ = of_worker({}, msgspec.structs.replace(NODE, host="fe80::1"), 0)
    assert (environ["MASTER_ADDR"], environ["JAX_COORDINATOR_ADDRESS"]) == ("fe80::1", "[fe80::1]:4711")


def test_a_reason_that_others_wrote_cannot_break_the_environment():
    assert of_worker({}, msgspec.structs.replace(NODE, reason="a\0b\nc"), 0)["RDZV_REASON"] == "a b c"


def world(ranks):
    fields = {"run_id": "job", "round": 3, "fence": 77, "rank": 1, "size": 3, "worker_ranks": ranks}
    return SimpleNamespace(**fields, bootstrap=Bootstrap("10.0.0.1", 4711))


def test_the_ranks_of_workers_are_those_that_were_sealed():
    node = NodeInRound.of(world(WorkerRanks(4, 8, 2, 6)), 2, "trainer", "n2 lost", 1, 5)
    assert msgspec.structs.replace(node, channel=NODE.channel) == NODE


def test_beside_a_member_that_names_no_workers_each_node_counts_as_one_worker():
    node = NodeInRound.of(world(None), 1, "default", "", 0, 0)
    assert node.ranks == WorkerRanks(1, 3, 1, 3)
    with pytest.raises(SettingsError, match=r"round 3 has a member that does not say how many workers it starts, so 2 workers"):
        NodeInRound.of(world(None), 2, "default", "", 0, 0)
