"""The store that torch's agent gets. The agent uses it to assign ranks to workers, and for the barrier at its end.

Every exception from a store ends the agent: none means "try again". And an agent that is given ranks starts workers
with them, whatever has become of the round. So the ranks of all workers are part of the seal (`World.worker_ranks`),
and this store answers from there: it never waits for another agent, never asks the engine, and never makes an answer
up. If the round is over by then, the workers belong to a world that was sealed, and `num_nodes_waiting` is above 0: the
agent stops them and asks for the next round, and torch does not count that as a restart.

An agent whose number of workers is not known before its first round exchanges ranks as torch's own agents do. Then no
rank key is special, and a round that ends meanwhile ends the agent: anything else would be a guess.

The barrier uses no keys. Reaching it makes the member *done*. It is over when the rules close the run (all members of
the round are done) or when the round breaks. A TCPStore can do neither: neither a signal nor a broken round interrupts
a wait in it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch.distributed import DistStoreError

from ..blocking import World
from ..errors import RdzvError

if TYPE_CHECKING:
    from .handler import Handler

T = TypeVar("T")

logger = logging.getLogger("rdzv.torchrun")

ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
TERMINAL = "torchelastic/agent/terminal_state"
BATCH = 64
"""Keys per transaction: fewer than every engine's limit. A key that is set late makes a wait read this many again."""
BARRIER_POLL_S = 0.1  # Pause between two looks of the barrier, which are local reads.


class AgentStore:
    """The part of torch's Store that an agent uses, with torch's names and arguments, and the rest for other callers."""

    def __init__(self, world: World, handler: Handler) -> None:
        self._world = world
        self._store = world.store
        self._handler = handler
        self.timeout = timedelta(seconds=world.store.timeout_s)
        self._role_info = b""
        """The agent's own role and number of workers, as it wrote them."""

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout
        self._store.set_timeout(timeout.total_seconds())

    def set(self, key: str, value: bytes | str) -> None:
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Write several keys. Readers see a batch of `BATCH` keys at once."""
        items = {
            key: value.encode() if isinstance(value, str) else bytes(value) for key, value in zip(keys, values, strict=True)
        }
        own = items.get(f"{ROLE_INFO}{self._world.rank}")
        if own is not None:
            self._role_info = own
            self._learn_workers(own)
        if self._world.worker_ranks is not None:  # Then no agent reads them.
            items = {key: value for key, value in items.items() if not _is_about_ranks(key)}
        for batch in _batches(list(items)):
            values_of = {key: items[key] for key in batch}
            self._try(partial(self._store.multi_set, values_of))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values of all keys."""
        found = {key: self._sealed(key) for key in keys if self._world.worker_ranks is not None and _is_about_ranks(key)}
        for batch in _batches([key for key in keys if key not in found]):
            found.update(zip(batch, self._try(partial(self._store.multi_get, batch)), strict=True))
        return [found[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a number. At the barrier, report that this node's workers have succeeded; the barrier counts nobody."""
        if key.startswith(TERMINAL):
            self._handler.finish(self.timeout.total_seconds())
            return 0
        return self._try(lambda: self._store.add(key, amount))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; at the barrier, until all members are done or the round is over."""
        limit_s = (timeout or self.timeout).total_seconds()
        if all(key.startswith(TERMINAL) for key in keys):
            self._barrier(limit_s)
        else:
            self._try(lambda: self._store.wait(keys, limit_s))

    def check(self, keys: Sequence[str]) -> bool:
        return self._try(lambda: self._store.check(keys))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._try(lambda: self._store.compare_set(key, expected, desired))

    def append(self, key: str, value: bytes | str) -> None:
        self._try(lambda: self._store.append(key, value))

    def delete_key(self, key: str) -> bool:
        return self._try(lambda: self._store.delete(key))

    def num_keys(self) -> int:
        return self._try(self._store.num_keys)

    def _try(self, call: Callable[[], T]) -> T:
        """Return the call's result, or raise torch's error for ours."""
        try:
            return call()
        except RdzvError as error:
            raise DistStoreError(str(error)) from error

    def _learn_workers(self, role_info: bytes) -> None:
        """Note what the agent says of its workers, for the next round, and check it against what was sealed."""
        try:
            said = json.loads(role_info)
            role, workers = str(said["role"]), int(said["local_world_size"])
        except (ValueError, TypeError, KeyError):  # Not written by torch's agent.
            return
        known = self._handler.learn_workers(role, workers)
        if not known and self._world.worker_ranks is not None:
            problem = f"round {self._world.round} was sealed for another number of workers than {role_info.decode()}"
            raise DistStoreError(problem)

    def _sealed(self, key: str) -> bytes:
        """Return what torch reads under a rank key, from the seal.

        Rank 0's agent also reads the roles of all agents, computes their ranks and writes them. Nobody reads those, so it may
        be given its own role for each.
        """
        ranks = self._world.worker_ranks
        assert ranks is not None, "asked only if the seal has them"
        if key.startswith(ROLE_INFO):
            return self._role_info
        return json.dumps([ranks.first, ranks.total, ranks.role_first, ranks.role_total]).encode()

    def _barrier(self, limit_s: float) -> None:
        """Wait for the other members. Never raises: the workers of this agent have succeeded whatever happens now."""
        deadline = time.monotonic() + limit_s
        while not self._handler.is_over() and not self._handler.is_known_closed():
            if time.monotonic() >= deadline:
                logger.warning("the others are not done after %.0f s; this agent does not wait for them any longer", limit_s)
                return
            # time.sleep, because torch's signal handler runs in this thread and must be able to interrupt it.
            time.sleep(BARRIER_POLL_S)


def _is_about_ranks(key: str) -> bool:
    return key.startswith((ROLE_INFO, ASSIGNED_RANKS))


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), BATCH):
        yield keys[start : start + BATCH]
