"""The store that torch's agent gets: for giving ranks to workers, and for the barrier at the end.

It is no TCPStore, because an agent that waits in one hears neither a signal nor that the round has broken. And it raises
nothing, because no exception means "try again" to the agent: each ends it. So when the round is over before the ranks are
given out, calls return a stand-in that is well-formed and wrong. It is harmless: `num_nodes_waiting` is above 0 by then, so
the agent stops the workers it has just started and asks for the next round, and that is not counted as a restart.

The barrier at the end needs no keys at all. Saying that we have come to it is what makes a member *done*; it is over when the
rules close the run, which is when all members of the round are done, or when the round breaks.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol, TypeVar

from torch.distributed import DistStoreError

from ..blocking import World
from ..errors import RdzvError

T = TypeVar("T")

logger = logging.getLogger("rdzv.torchrun")

ROLE_INFO = "torchelastic/role_info/"
ASSIGNED_RANKS = "torchelastic/assigned_ranks/"
TERMINAL = "torchelastic/agent/terminal_state"
BATCH = 64
"""Keys in one transaction: below what every engine allows, and a key that comes late makes us look at this many again."""
LOOK_S = 0.1
"""How often the barrier looks whether it is over; a local read."""


class AgentRound(Protocol):
    """What the store knows of the round it belongs to: the handler."""

    def is_over(self) -> bool:
        """The agent will be told to start anew."""

    def give_up(self, reason: str) -> None:
        """See to it that the agent is told to start anew."""

    def finish(self, timeout_s: float) -> None:
        """Our workers have succeeded. Never raises."""

    def is_closed(self) -> bool:
        """The run is over; a local read."""


class AgentStore:
    """See the module's docstring. The names and arguments are those of torch's Store."""

    def __init__(self, world: World, round_: AgentRound) -> None:
        store = self._store = world.store
        self._round = round_
        self._number = world.round
        self._rank = world.rank
        self._size = world.size
        self._timeout = timedelta(seconds=store.timeout_s)
        self._own: dict[str, bytes] = {}
        """Ranks are written once per round, so what we wrote need not be asked for: alone, nothing is."""

    # ---- what the agent uses

    @property
    def timeout(self) -> timedelta:
        """How long calls wait if they do not say."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """For later calls."""
        self._timeout = timeout
        self._store.set_timeout(timeout.total_seconds())

    def set(self, key: str, value: bytes | str) -> None:
        """Write a key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Write several keys; a batch is seen at once."""
        items = {key: _bytes(value) for key, value in zip(keys, values, strict=True)}
        ranks = {key: value for key, value in items.items() if _is_about_ranks(key)}
        self._own.update(ranks)
        if self._size == 1:
            items = {key: value for key, value in items.items() if key not in ranks}
        for batch in _batches(list(items)):
            values_of = {key: items[key] for key in batch}
            self._try(partial(self._store.multi_set, values_of), batch, None)

    def get(self, key: str) -> bytes:
        """The value, waited for."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, waited for."""
        found = {key: self._own[key] for key in keys if key in self._own}
        missing = [key for key in keys if key not in found]
        for batch in _batches(missing):
            stand_ins = [self._stand_in(key) for key in batch]
            values = self._try(partial(self._store.multi_get, batch), batch, stand_ins)
            found.update(zip(batch, values, strict=True))
        return [found[key] for key in keys]

    def add(self, key: str, amount: int) -> int:
        """Add to a number. At the barrier it says that our workers have succeeded; nobody is counted there."""
        if key.startswith(TERMINAL):
            self._round.finish(self._timeout.total_seconds())
            return 0
        return self._try(lambda: self._store.add(key, amount), [key], 0)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of the keys are set; at the barrier, until all are done or the round is over."""
        limit_s = (timeout or self._timeout).total_seconds()
        if all(key.startswith(TERMINAL) for key in keys):
            self._barrier(limit_s)
        else:
            self._try(lambda: self._store.wait(keys, limit_s), keys, None)

    # ---- the rest of torch's Store, for whoever else gets hold of it

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys are set now."""
        return self._try(lambda: self._store.check(keys), keys, False)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected`."""
        return self._try(lambda: self._store.compare_set(key, expected, desired), [key], self._stand_in(key))

    def append(self, key: str, value: bytes | str) -> None:
        """Put more bytes behind a value."""
        self._try(lambda: self._store.append(key, value), [key], None)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        return self._try(lambda: self._store.delete(key), [key], False)

    def num_keys(self) -> int:
        """How many keys this round has."""
        return self._try(self._store.num_keys, (), 0)

    # ---- how

    def _try(self, call: Callable[[], T], keys: Iterable[str], stand_in: T) -> T:
        """Its result; if there can be none, the stand-in where that is safe, and torch's error elsewhere."""
        try:
            return call()
        except RdzvError as error:
            if not any(_is_about_ranks(key) for key in keys):
                raise DistStoreError(str(error)) from error
            self._round.give_up(f"the ranks of round {self._number} could not be given out: {error.sentence}")
            return stand_in

    def _stand_in(self, key: str) -> bytes:
        """What the agent can read in place of a value that will not come."""
        role = self._own.get(f"{ROLE_INFO}{self._rank}", b"{}")
        if key.startswith(ROLE_INFO):
            return role
        workers = json.loads(role).get("local_world_size", 1)
        return json.dumps([0, workers, 0, workers]).encode()

    def _barrier(self, limit_s: float) -> None:
        """Never raises by itself: an agent whose workers have succeeded has nothing to hear of what goes wrong now."""
        deadline = time.monotonic() + limit_s
        while not self._round.is_over() and not self._round.is_closed():
            if time.monotonic() >= deadline:
                logger.warning("the others are not done after %.0f s; this agent does not wait for them any longer", limit_s)
                return
            # A sleep, so that a signal is heard at once: its handler runs in this thread.
            time.sleep(LOOK_S)


def _is_about_ranks(key: str) -> bool:
    return key.startswith((ROLE_INFO, ASSIGNED_RANKS))


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _batches(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(keys), BATCH):
        yield keys[start : start + BATCH]
