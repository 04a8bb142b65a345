"""Agents that are forked from a process that has used etcd itself, as torch's own tests and `elastic_launch` fork them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")
pytest.importorskip("grpc", reason="grpcio is not installed: the extra `etcd` brings it")

PROGRAM = """
import os, sys
from torch.distributed.elastic.rendezvous import RendezvousParameters
from rdzv.torchrun.plugin import create_etcd_v3
from rdzv.torchrun.rendezvous import EtcdServer

rounds, nodes = map(int, sys.argv[1:])

def handler(run_id, nodes):
    conf = {"last_call": "0.2", "lease": "10", "slot": str(os.getpid())}
    return create_etcd_v3(RendezvousParameters("etcd-v3", server.get_endpoint(), run_id, nodes, nodes, "127.0.0.1", **conf))

def agent(run_id, ready, go):
    agent = handler(run_id, nodes)
    info = agent.next_rendezvous()
    info.store.set(str(info.rank), "here")
    assert info.store.multi_get([str(rank) for rank in range(nodes)]) == [b"here"] * nodes
    os.write(ready, b".")
    os.read(go, 1)  # The first one that leaves ends the round for all.
    assert agent.shutdown()
    if info.rank % 2:
        os._exit(10 + info.rank)
    sys.exit(10 + info.rank)

def fork(run_id):
    ready, is_ready = os.pipe()
    go, may_go = os.pipe()
    children = []
    for _ in range(nodes):
        children.append(os.fork())
        if children[-1] == 0:
            os.close(may_go)
            agent(run_id, is_ready, go)
    os.close(is_ready)  # If a child dies, the others fail, and this is the end of the pipe: no wait for ever.
    for _ in children:
        os.read(ready, 1)
    os.close(may_go)
    return sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children)

server = EtcdServer()
server.start()
own = handler("parent", 1)
assert own.next_rendezvous().world_size == 1
for number in range(rounds):
    codes = fork(f"children{number}")
    assert codes == list(range(10, 10 + nodes)), codes
assert own.num_nodes_waiting() == 0
assert own.shutdown()
server.stop()
print("done")
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("rounds", "nodes"), [(1, 6), pytest.param(10, 6, marks=pytest.mark.soak)])
def test_agents_forked_from_a_user_of_etcd_form_rounds_and_end_as_they_choose(rounds, nodes):
    """gRPC has threads in the parent at each fork. Half of the children end by `os._exit`, and half by `sys.exit`."""
    command = [sys.executable, "-c", PROGRAM, str(rounds), str(nodes)]
    # A child that dies by a signal inside gRPC has no other way to say where.
    environ = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False, env=environ)
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "fork" not in done.stderr, "gRPC's fork handlers have run"
