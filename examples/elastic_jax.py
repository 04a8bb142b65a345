"""Elastic data-parallel training with JAX, under `rdzv run`.

On each node (on one machine: in several shells, with `--conf slot=a`, `slot=b` and so on):

    rdzv run node1:29400 --run-id jax --nnodes 1:4 --max-restarts 10 -- python elastic_jax.py --checkpoint shared/model.npz

All processes together fit a line of eight dimensions; each works on its own part of every batch. When a node is lost or joins,
`rdzv run` stops every process and starts it again in the new world. Training then continues from the last checkpoint.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rdzv.jax

DIMENSIONS = 8
TRUTH = np.arange(1, DIMENSIONS + 1, dtype=np.float32)
PART = 32
"""Rows of a batch that each process works on."""


@jax.jit
def train(weights: jax.Array, x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the weights after one step, and the loss before it."""
    loss, gradient = jax.value_and_grad(lambda at: jnp.mean((x @ at - y) ** 2))(weights)
    return weights - 0.05 * gradient, loss


def save(path: Path, step: int, weights: jax.Array) -> None:
    """Replace the checkpoint in one step, so that no reader ever sees half of one."""
    part = path.with_name(f"{path.name}.{os.environ['RDZV_FENCE']}.part")
    with part.open("wb") as file:
        np.savez(file, step=step, weights=np.asarray(weights))
    part.replace(path)


def main() -> None:
    """Train, and let process 0 save every few steps."""
    parser = argparse.ArgumentParser(description="elastic training with JAX")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file that all nodes can reach")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--step-s", type=float, default=0.0, help="a pause after each step, to have time to watch")
    args = parser.parse_args()

    rdzv.jax.initialize()
    process, processes = jax.process_index(), jax.process_count()
    step, weights = 0, jnp.zeros(DIMENSIONS)
    if args.checkpoint.exists():
        saved = np.load(args.checkpoint)
        step, weights = int(saved["step"]), jnp.asarray(saved["weights"])
    if process == 0:
        print(f"world of {processes} in round {os.environ['RDZV_ROUND']}, from step {step}", flush=True)

    by_process = NamedSharding(Mesh(np.array(jax.devices()), ("process",)), PartitionSpec("process"))
    loss = jnp.inf
    while step < args.steps:
        random = np.random.default_rng([step, process])
        x = random.normal(size=(PART, DIMENSIONS)).astype(np.float32)
        rows, targets = (jax.make_array_from_process_local_data(by_process, part) for part in (x, x @ TRUTH))
        weights, loss = train(weights, rows, targets)
        step += 1
        if process == 0 and step % args.save_every == 0:
            save(args.checkpoint, step, weights)
        time.sleep(args.step_s)
    if process == 0:
        print(f"done at step {step} in a world of {processes}, loss {float(loss):.6f}", flush=True)


if __name__ == "__main__":
    main()
