"""The variables that a worker finds in its environment. Pure.

The names are those that training programs already read: torch's `env://` and its `torchrun`, which Lightning,
Accelerate and others look for, and JAX's. `docs/launcher.md` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ..core.model import WorkerRanks
from ..errors import SettingsError
from ..member.world import AsyncWorld
from ..printable import clean


class NodeInRound(msgspec.Struct, frozen=True):
    """One node in one round, as its workers are told."""

    run_id: str
    round: int
    fence: int
    reason: str
    """Why the workers are started in this round."""
    host: str
    port: int
    rank: int
    """The node's own rank, among `nodes`."""
    nodes: int
    workers: int
    ranks: WorkerRanks
    role: str
    restarts: int
    """How many failures of this node's workers were followed by a restart."""
    max_restarts: int
    channel: str = ""
    """The socket on which workers tell how far they are; empty: there is none."""

    @classmethod
    def of(cls, world: AsyncWorld, workers: int, role: str, reason: str, restarts: int, max_restarts: int) -> NodeInRound:
        """Describe this node in a world. Raises SettingsError if the ranks of its workers are not known."""
        ranks = world.worker_ranks
        if ranks is None:
            # Some member, such as a program of the user's own, did not say how many workers it has. A node counts as one.
            if workers != 1:
                raise SettingsError(
                    f"round {world.round} has a member that does not say how many workers it starts, so {workers} workers of "
                    "this node cannot be given ranks: start every node of the run with `rdzv run`"
                )
            ranks = WorkerRanks(world.rank, world.size, world.rank, world.size)
        return cls(
            world.run_id, world.round, world.fence, reason, world.bootstrap.host, world.bootstrap.port, world.rank, world.size,
            workers, ranks, role, restarts, max_restarts,
        )  # fmt: skip

    @property
    def address(self) -> str:
        """The bootstrap address as one text."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def of_worker(base: Mapping[str, str], node: NodeInRound, local_rank: int, error_file: str = "") -> dict[str, str]:
    """Return the whole environment of one worker, made of that of the launcher."""
    rank = str(node.ranks.first + local_rank)
    world_size = str(node.ranks.total)
    return {
        **_defaults(node.workers, local_rank),
        **base,
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(node.workers),
        "GROUP_RANK": str(node.rank),
        "GROUP_WORLD_SIZE": str(node.nodes),
        "ROLE_NAME": node.role,
        "ROLE_RANK": str(node.ranks.role_first + local_rank),
        "ROLE_WORLD_SIZE": str(node.ranks.role_total),
        "MASTER_ADDR": node.host,
        "MASTER_PORT": str(node.port),
        # torch, Lightning and Accelerate know a worker of an elastic launcher by these.
        "TORCHELASTIC_RUN_ID": node.run_id,
        "TORCHELASTIC_RESTART_COUNT": str(node.restarts),
        "TORCHELASTIC_MAX_RESTARTS": str(node.max_restarts),
        # The worker with rank 0 serves at MASTER_ADDR. No agent does.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_ERROR_FILE": error_file,
        "JAX_COORDINATOR_ADDRESS": node.address,
        "JAX_NUM_PROCESSES": world_size,
        "JAX_PROCESS_ID": rank,
        "RDZV_RUN_ID": node.run_id,
        "RDZV_ROUND": str(node.round),
        "RDZV_FENCE": str(node.fence),
        "RDZV_WORKER": node.channel,
        "RDZV_REASON": clean(node.reason),  # Others wrote it, and a NUL cannot be in a variable.
    }


def of_staying(base: Mapping[str, str], local_rank: int, workers: int, error_file: str) -> dict[str, str]:
    """Return the environment of a worker that stays. It learns its rank in each round, by the socket."""
    return {
        **_defaults(workers, local_rank),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # A failed collective must not end a worker that stays.
        **base,
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(workers),
        "TORCHELASTIC_ERROR_FILE": error_file,
    }


def _defaults(workers: int, local_rank: int) -> dict[str, str]:
    """Return the variables that a user may have set otherwise."""
    several = workers > 1
    return {
        # A worker that must be killed shows its stacks first (stacks.py), and so does one that crashes.
        "PYTHONFAULTHANDLER": "1",
        # Lines reach the log when they are written, not when a buffer is full; a worker that is killed loses none.
        "PYTHONUNBUFFERED": "1",
        # As torchrun: a failed NCCL collective ends the worker instead of hanging.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        # JAX would take SIGTERM for the notice of a preemption and go on, until it is killed.
        "JAX_ENABLE_PREEMPTION_SERVICE": "false",
        # Each of several workers with a thread per core would be slower than all with one; torchrun does the same.
        **({"OMP_NUM_THREADS": "1", "JAX_LOCAL_DEVICE_IDS": str(local_rank)} if several else {}),
    }
