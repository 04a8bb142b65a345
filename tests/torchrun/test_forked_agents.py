"""Agents that are forked from a process that has used etcd itself, as torch's own tests and `elastic_launch` fork them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")

PROGRAM = """
import os
from torch.distributed.elastic.rendezvous import RendezvousParameters
from rdzv.torchrun.plugin import create_etcd_v3
from rdzv.torchrun.rendezvous import EtcdServer

def handler(run_id, nodes):
    conf = {"last_call": "0.2", "lease": "5", "slot": str(os.getpid())}
    return create_etcd_v3(RendezvousParameters("etcd-v3", server.get_endpoint(), run_id, nodes, nodes, "127.0.0.1", **conf))

server = EtcdServer()
server.start()
own = handler("parent", 1)
assert own.next_rendezvous().world_size == 1
children = []
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        agent = handler("children", 2)
        info = agent.next_rendezvous()
        info.store.set(str(info.rank), "here")
        assert info.store.multi_get(["0", "1"]) == [b"here", b"here"]
        assert agent.shutdown()
        os._exit(10 + info.rank)
    children.append(pid)
codes = sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)
assert own.num_nodes_waiting() == 0
assert own.shutdown()
server.stop()
print(codes)
"""


@pytest.mark.xfail(
    strict=False,
    reason="known and open: where a thread of the parent is inside gRPC when it forks, gRPC skips its fork handlers, and some "
    "children then die by a signal inside gRPC's own code (3 of 12 in one trial)",
)
def test_agents_forked_from_a_user_of_etcd_form_a_round():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=40, check=False)
    assert (done.stdout, done.returncode) == ("[10, 11]\n", 0), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
