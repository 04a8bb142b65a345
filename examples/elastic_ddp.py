r"""Data-parallel training that continues when nodes are lost or join: stock PyTorch, without any import of rdzv.

On each node (on one machine: in several shells, with `--rdzv-conf=slot=a`, `slot=b` and so on):

    torchrun --rdzv-backend=rdzv --rdzv-endpoint=node1:29400 --rdzv-id=job --nnodes=1:4 --max-restarts=10 \
        elastic_ddp.py --checkpoint shared/model.pt

Kill a node with all its processes: the others continue from the last checkpoint. Start it again: it joins again. Three
things make this work. The program reads the world at every start, it loads the state before the first step, and rank 0
saves a checkpoint completely or not at all. When a node is lost, the collective in progress fails and so does the worker.
Each such failure uses one of `--max-restarts`, so allow enough of them.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def batch(step: int, rank: int, size: int, rows: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this rank's share of the step's rows. The rows of a step depend only on the step, not on the world."""
    source = torch.Generator().manual_seed(step)
    inputs = torch.randn(rows, 8, generator=source)
    targets = inputs.sum(dim=1, keepdim=True)
    return inputs[rank::size], targets[rank::size]


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the checkpoint, if there is one, and return the step to continue from."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Save a checkpoint atomically, because the node may be killed while it writes."""
    part = path.with_suffix(f".{os.getpid()}.part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(path)


def train(args: argparse.Namespace) -> None:
    """Train the steps that the checkpoint does not contain yet."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = load(args.checkpoint, model, optimizer)
    parallel = DistributedDataParallel(model)
    if rank == 0:
        print(f"world of {size}, from step {step}", flush=True)
    dist.barrier()  # All ranks load before rank 0 saves.
    loss = torch.zeros(())
    while step < args.steps:
        inputs, targets = batch(step, rank, size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        step += 1
        time.sleep(args.step_s)
        if rank == 0 and (step % args.save_every == 0 or step == args.steps):
            save(args.checkpoint, model, optimizer, step)
    if rank == 0:
        print(f"done at step {step} in a world of {size}, loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Read the arguments, join the process group given by torchrun's variables, and train."""
    parser = argparse.ArgumentParser(description="elastic data-parallel training, on CPUs")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file that all nodes can reach")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--step-s", type=float, default=0.05, help="the least time a step takes, to have time to watch")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
