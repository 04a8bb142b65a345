"""`info.store` as torch's own code uses it: process groups of several processes over it, and what a loss does to them."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed: the extra `torch` brings it")

from support.torchrun_jobs import ServeProcess

PROGRAM = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from rdzv.torchrun import handler, info_store, plugin  # Imported before the fork: each import takes a second.

def node(slot):
    conf = {"last_call": "0.2", "lease": "3", "slot": str(slot)}
    given = dist.elastic.rendezvous.RendezvousParameters("rdzv", sys.argv[1], "train", 4, 4, "127.0.0.1", **conf)
    rendezvous = plugin.create_rdzv(given)
    info = rendezvous.next_rendezvous()
    for store in (info.store, dist.PrefixStore("train", info.store)):
        train(info, store)
    if info.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    began_at = time.monotonic()
    for wait in (info.store.get, dist.PrefixStore("late", info.store).get):
        try:
            wait("never")
        except dist.DistStoreError as error:
            assert "lost" in str(error), error
        else:
            raise AssertionError("nobody sets this key")
    assert time.monotonic() - began_at < 15, "a loss did not end the waits"
    os._exit(0)

def train(info, store):
    dist.init_process_group("gloo", store=store, rank=info.rank, world_size=info.world_size)
    torch.manual_seed(info.rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 2)
    losses = []
    for _ in range(40):
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 10, losses
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = [torch.zeros_like(weights) for _ in range(4)]
    dist.all_gather(everyone, weights)
    assert all(torch.allclose(one, weights) for one in everyone)
    group = dist.new_group([0, 1, 2, 3])
    dist.barrier(group)
    dist.destroy_process_group()

children = []
for slot in range(4):
    pid = os.fork()
    if pid == 0:
        node(slot)
    children.append(pid)
print(sorted(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))
"""


def test_four_processes_train_over_the_store_of_the_round_and_a_loss_ends_their_waits():
    with ServeProcess() as server:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.endpoint], capture_output=True, text=True, timeout=120, check=False
        )
    assert (done.stdout, done.returncode) == ("[-9, 0, 0, 0]\n", 0), done.stdout + done.stderr
