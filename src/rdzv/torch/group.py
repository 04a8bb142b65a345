"""torch's process group of one round: made over the round's store, aborted from any thread, and ended.

The group does not meet at a TCPStore, although rank 0 holds a socket for one. The clients of a TCPStore look up their own
address (5 s where no name server answers), and their calls hang beyond every timeout if rank 0's process is paused. Calls
of the round's store end with the round.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..blocking import World
from ..torchrun.dist_store import OwnedStore
from .agent import AgentWorld
from .gloo_sockets import GlooSockets

_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0"}
"""Settings without which NCCL's own watchdog ends the process when a peer is lost."""


class ProcessGroup:
    """The default process group of this process, one per round."""

    def __init__(self, backend: str, form_s: float, timeout_s: float) -> None:
        self._backend = backend
        self._form = timedelta(seconds=form_s)
        self._timeout = timedelta(seconds=timeout_s)
        self._sockets: GlooSockets | None = None
        self._left: GlooSockets | None = None
        """Those of the round that was left. Its other members may still use them."""
        self._store: OwnedStore | None = None
        self._former: list[Any] = []
        """The groups of the last round, all that `end` has destroyed."""
        if "nccl" in backend:
            for name, value in _NCCL.items():
                os.environ.setdefault(name, value)

    def warm_up(self) -> None:
        """Load all that a first group needs: a newcomer that did so in its first round would keep the others waiting."""
        if dist.is_initialized():
            raise RuntimeError("this process has a process group already: rounds() makes it, so do not call init_process_group")
        dist.init_process_group(self._backend, store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.zeros(1, device=device()))
        dist.destroy_process_group()

    def form(self, world: World | AgentWorld) -> None:
        """Make the group. If a peer is lost meanwhile, raise what torch raises, within about five times `form_s`."""
        # Freed by a thread, without the interpreter's lock: that takes 10 ms.
        threading.Thread(target=self._former.clear, name="rdzv frees groups", daemon=True).start()
        self._former = []
        self.close()
        self._sockets = GlooSockets()
        self._store = OwnedStore(world.store, self._form)
        # gloo waits for five times this for the connection of a peer that has died since it gave its address.
        uses_gloo = "gloo" in self._backend
        first = self._form if uses_gloo else self._timeout
        # The name of a group contains this counter, which is not set back when forming fails on some members only.
        distributed_c10d._world.group_count = 0  # noqa: SLF001
        dist.init_process_group(self._backend, store=self._store, rank=world.rank, world_size=world.size, timeout=first)
        self._store.set_timeout(self._timeout)
        if uses_gloo:
            distributed_c10d._set_pg_timeout(self._timeout)  # noqa: SLF001  There is no public way.

    def abort(self) -> None:
        """Let all collectives fail, those under way and those to come. Any thread may call it, and repeatedly."""
        if self._sockets is not None:
            self._sockets.stop_reads()
        groups = list(distributed_c10d._world.pg_map)  # noqa: SLF001
        nccl = next((found for group in groups if (found := _nccl_of(group)) is not None), None)
        if nccl is not None:
            nccl._group_start()  # noqa: SLF001  Aborts of several communicators wait for each other otherwise.
        for group in groups:
            # A group whose device has failed, or that another thread has aborted, must not keep the others alive.
            with suppress(RuntimeError):
                group.abort()
        if nccl is not None:
            with suppress(RuntimeError):
                nccl._group_end()  # noqa: SLF001

    def end(self) -> None:
        """Abort and destroy the group. The thread that uses the group calls it."""
        # NCCL's destroy waits for peers unless it was aborted, and gloo's for collectives that run in its threads.
        self.abort()
        if dist.is_initialized():
            # Kept until the next round. If a DDP had the last reference, its destructor would join gloo's threads while it
            # holds the interpreter's lock. A thread that is just ending a failed collective needs that lock, so both would
            # wait for ever. A little later all these threads are idle.
            self._former = list(distributed_c10d._world.pg_map)  # noqa: SLF001
            dist.destroy_process_group()
        if self._sockets is not None:
            self._left = self._sockets
        self._sockets = self._store = None

    def close(self) -> None:
        """Close what the last round has left open, when all its members have left it: they have joined again, or finished."""
        if self._left is not None:
            self._left.close()
            self._left = None


def device() -> torch.device:
    """Where the tensors of a collective of the default group must be: on the CPU if one of its backends works there."""
    kinds = dist.group.WORLD._device_types  # noqa: SLF001
    if torch.device("cpu") in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0].type, torch.get_device_module(kinds[0]).current_device())


def _nccl_of(group: Any) -> Any:
    try:
        found = group._get_backend(torch.device("cuda"))  # noqa: SLF001
    except RuntimeError:
        return None
    return found if hasattr(found, "_group_start") else None
