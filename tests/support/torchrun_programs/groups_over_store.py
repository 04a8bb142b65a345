"""One of two processes that make their process groups over the round's own store, or over an EtcdStore.

python groups_over_store.py ENDPOINT [ETCD_URL]
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import rdzv
from rdzv.torchrun.dist_store import DistStore
from rdzv.torchrun.rendezvous.etcd_client import EtcdClient
from rdzv.torchrun.rendezvous.etcd_store import EtcdStore

os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

with rdzv.Rendezvous(sys.argv[1], run_id="job", min_nodes=2, max_nodes=2) as rendezvous:
    world = rendezvous.join()
    store = EtcdStore(EtcdClient(sys.argv[2]), "gloo") if len(sys.argv) > 2 else DistStore(world.store)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=40))
    number = torch.tensor([world.rank + 1.0])
    dist.all_reduce(number)
    ranks: list[int | None] = [None] * world.size
    dist.all_gather_object(ranks, world.rank)
    alone = dist.new_group([0])
    pairs = dist.new_group([0, 1])
    dist.barrier(group=pairs)
    dist.monitored_barrier(timeout=timedelta(seconds=40))
    sizes = dist.get_world_size(alone) if world.rank == 0 else 1
    sys.stdout.write(f"rank {world.rank}: {number.item()} {ranks} {sizes}\n")
    dist.destroy_process_group()
    rendezvous.done()
