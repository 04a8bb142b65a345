"""The store that torch's agent gets. The agent uses it to assign ranks to workers, and for the barrier at its end.

Every exception from a store ends the agent: none means "try again". So this store never raises about ranks. If the round is
over before the ranks are assigned, calls return a placeholder: well-formed, and wrong. That is harmless. By then
`num_nodes_waiting` is above 0, so the agent stops the workers that it has just started and asks for the next round, and torch
does not count that as a restart.

The barrier uses no keys, for the same reason. Reaching it makes the member *done*. It is over when the rules close the run
(all members of the round are done) or when the round breaks. A TCPStore can do neither: neither a signal nor a broken round
interrupts a wait in it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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
        self._written: dict[str, bytes] = {}
        """Rank keys that this agent wrote. They are written once per round, so a read needs no request."""

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
        ranks = {key: value for key, value in items.items() if _is_about_ranks(key)}
        self._written.update(ranks)
        if self._world.size == 1:  # No other agent reads them.
            items = {key: value for key, value in items.items() if key not in ranks}
        for batch in _batches(list(items)):
            values_of = {key: items[key] for key in batch}
            self._try(partial(self._store.multi_set, values_of), batch, None)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for the values of all keys."""
        found = {key: self._written[key] for key in keys if key in self._written}
        for batch in _batches([key for key in keys if key not in found]):
            placeholders = [self._placeholder(key) for key in batch]
            values = self._try(partial(self._store.multi_get, batch), batch, placeholders)
            found.update(zip(batch, values, strict=True))
        return [found[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a number. At the barrier, report that this node's workers have succeeded; the barrier counts nobody."""
        if key.startswith(TERMINAL):
            self._handler.finish(self.timeout.total_seconds())
            return 0
        return self._try(lambda: self._store.add(key, amount), [key], 0)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set; at the barrier, until all members are done or the round is over."""
        limit_s = (timeout or self.timeout).total_seconds()
        if all(key.startswith(TERMINAL) for key in keys):
            self._barrier(limit_s)
        else:
            self._try(lambda: self._store.wait(keys, limit_s), keys, None)

    def check(self, keys: Sequence[str]) -> bool:
        return self._try(lambda: self._store.check(keys), keys, False)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._try(lambda: self._store.compare_set(key, expected, desired), [key], self._placeholder(key))

    def append(self, key: str, value: bytes | str) -> None:
        self._try(lambda: self._store.append(key, value), [key], None)

    def delete_key(self, key: str) -> bool:
        return self._try(lambda: self._store.delete(key), [key], False)

    def num_keys(self) -> int:
        return self._try(self._store.num_keys, (), 0)

    def _try(self, call: Callable[[], T], keys: Iterable[str], placeholder: T) -> T:
        """Return the call's result. If it fails, return the placeholder for rank keys and raise torch's error for others."""
        try:
            return call()
        except RdzvError as error:
            if not any(_is_about_ranks(key) for key in keys):
                raise DistStoreError(str(error)) from error
            self._handler.restart(f"the ranks of round {self._world.round} could not be given out: {error.sentence}")
            return placeholder

    def _placeholder(self, key: str) -> bytes:
        """Return a value that the agent can parse, for a rank key that will never be set."""
        role = self._written.get(f"{ROLE_INFO}{self._world.rank}", b"{}")
        if key.startswith(ROLE_INFO):
            return role
        workers = json.loads(role).get("local_world_size", 1)
        return json.dumps([0, workers, 0, workers]).encode()

    def _barrier(self, limit_s: float) -> None:
        """Wait for the other members. Never raises: the workers of this agent have succeeded whatever happens now."""
        deadline = time.monotonic() + limit_s
        while not self._handler.is_over() and not self._handler.is_closed():
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
