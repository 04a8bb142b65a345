"""Data-parallel training whose processes stay when others are lost or come. No checkpoint, no restart.

Start as many as you like, on one machine or several; each process is a member. On one machine, give each a name (`--name a`):

    python stay_ddp.py node1:29400 --nnodes 2:4

Under Slurm, `srun python stay_ddp.py auto --nnodes 2:4` starts them all. Kill one: the others go on without it, at the step at
which they were. Start another one: it loads and builds its model first, and then gets the state of the others.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rdzv.torch


def data() -> TensorDataset:
    """Return the samples, the same on every node."""
    source = torch.Generator().manual_seed(0)
    inputs = torch.randn(1000, 8, generator=source)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def main() -> None:
    """Train until all steps are done, whoever is there."""
    parser = argparse.ArgumentParser(description="data-parallel training by processes that stay, on CPUs")
    parser.add_argument("endpoint", help="such as node1:29400, or auto under a batch system")
    parser.add_argument("--run-id", default="stay")
    parser.add_argument("--nnodes", default="2:4", help="fewest and most processes, such as 2:4")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-s", type=float, default=0.05, help="the least time a step takes, to have time to watch")
    parser.add_argument("--name", default="", help="tells the processes of one node apart, if srun does not")
    args = parser.parse_args()
    low, _, high = args.nnodes.partition(":")
    settings = {"slot": args.name} if args.name else {}

    # Whatever takes long comes before the loop: the others are not interrupted while this process gets ready.
    samples = data()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    state = rdzv.torch.ReplicaState(model=model, optimizer=optimizer)
    sampler = rdzv.torch.StepSampler(len(samples), batch=64)

    loss = torch.zeros(())
    for world in rdzv.torch.rounds(args.endpoint, run_id=args.run_id, min_nodes=low, max_nodes=high or low, **settings):
        with world:
            state.sync(world)
            print(f"round {world.round}: rank {world.rank} of {world.size}, from step {state.step}", flush=True)
            parallel = DistributedDataParallel(model, init_sync=False)
            for inputs, targets in DataLoader(samples, batch_sampler=sampler.start(world, state.step)):
                if state.step == args.steps:
                    break
                world.check()
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(parallel(inputs), targets) * sampler.weight
                loss.backward()
                optimizer.step()
                state.step += 1
                if world.rank == 0 and state.step % 20 == 0:
                    print(f"step {state.step}: loss {loss.item():.4f}", flush=True)
                time.sleep(args.step_s)
    print(f"done at step {state.step}, loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
