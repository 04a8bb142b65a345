"""A `torch.distributed.Store` over a store of rdzv, so that torch can bootstrap through an rdzv engine.

    world = rendezvous.join()
    store = DistStore(world.store)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)

torch calls a store from C++ under other names than Python code uses (`deleteKey` and `delete_key`), so both exist. torch sets
two limits. Called from C++, as by a PrefixStore, queues and `list_keys` never reach a store written in Python. And `timeout` is
kept on the C++ side, so every call that waits reads it there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar

from torch.distributed import DistNetworkError, DistStoreError, Store  # From C++.

from .. import blocking
from ..errors import RoundOver, StoreTimeout, Unreachable

try:
    from torch.distributed import QueueEmptyError
except ImportError:  # An older torch: its stores have no queues, so nobody knows this error by another name.

    class QueueEmptyError(DistStoreError):  # type: ignore[no-redef]
        """A queue has no value."""

NO_LIMIT_S = 86_400.0  # Used for torch's "no timeout" (zero): no wait is endless.
QUEUES = "rdzv queue/"  # The keys of queues, which `list_keys` does not show.
BATCH = 100  # Keys per write: fewer than every engine's limit. torch does not promise that `multi_set` is atomic.


class DistStore(Store):
    """The store, with torch's names. Raises torch's DistStoreError (timeout, round over) and DistNetworkError (outage)."""

    timeout: timedelta
    _kept: ClassVar[list[DistStore]] = []
    """All stores, for ever: torch holds only the C++ half, which is an empty shell once the Python half is freed."""

    def __init__(self, space: blocking.Store, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._space = space
        if timeout is not None:
            self.set_timeout(timeout)
        self._keep()

    def _keep(self) -> None:
        self._kept.append(self)

    @property
    def underlying_store(self) -> Store:
        """This store: it has no prefix. torch's `info.store` is a PrefixStore, which has this attribute."""
        return self

    def set(self, key: str, value: bytes | str) -> None:
        with _torch_errors():
            self._space.multi_set({key: value})

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Write several keys. Readers see a batch of `BATCH` keys at once."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys, but {len(values)} values")
        with _torch_errors():
            for start in range(0, len(keys), BATCH):
                some = slice(start, start + BATCH)
                self._space.multi_set(dict(zip(keys[some], values[some], strict=True)))

    def add(self, key: str, amount: int) -> int:
        with _torch_errors():
            return self._space.add(key, amount)

    def append(self, key: str, value: bytes | str) -> None:
        with _torch_errors():
            self._space.append(key, value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected` (empty: if there is none) and return the value that is then stored.

        If a value was expected and the key is missing, return what was expected, as torch's own stores do.
        """
        with _torch_errors():
            stored = self._space.compare_set(key, expected, desired)
        return stored or (expected.encode() if isinstance(expected, str) else expected)

    def delete_key(self, key: str) -> bool:
        with _torch_errors():
            return self._space.delete(key)

    deleteKey = delete_key  # noqa: N815  The name that C++ calls.

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        with _torch_errors():
            return self._space.multi_get(keys, _seconds(self.timeout))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        with _torch_errors():
            self._space.wait(keys, _seconds(self.timeout if timeout is None else timeout))

    def check(self, keys: Sequence[str]) -> bool:
        with _torch_errors():
            return self._space.check(keys)

    def num_keys(self) -> int:
        with _torch_errors():
            return self._space.num_keys()

    getNumKeys = num_keys  # noqa: N815  The name that C++ calls.

    def list_keys(self) -> list[str]:
        with _torch_errors():
            return [key for key in self._space.list_keys() if not key.startswith(QUEUES)]

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Append to a queue, which starts empty."""
        number = self.add(f"{QUEUES}{key}/pushed", 1)
        self.set(f"{QUEUES}{key}/{number}", value)

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the first value. If there is none, wait for one, or raise QueueEmptyError if `block` is false."""
        deadline = time.monotonic() + _seconds(self.timeout)
        while True:
            taken = self._value(f"{QUEUES}{key}/taken")
            number = _number(taken) + 1
            item = f"{QUEUES}{key}/{number}"
            if number > _number(self._value(f"{QUEUES}{key}/pushed")):
                if not block:
                    raise QueueEmptyError(f"queue {key!r} is empty")
                self.wait([item], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            # The random part tells whose write it was: two takers may write the same number.
            mine = f"{number} {secrets.token_hex(8)}".encode()
            if self.compare_set(f"{QUEUES}{key}/taken", taken, mine) == mine:
                value = self.get(item)  # The number comes before the value, so the value may still be on its way.
                self.delete_key(item)
                return value

    def queue_len(self, key: str) -> int:
        pushed, taken = (_number(self._value(f"{QUEUES}{key}/{name}")) for name in ("pushed", "taken"))
        return pushed - taken

    def _value(self, key: str) -> bytes:
        return self.get(key) if self.check([key]) else b""

    def has_extended_api(self) -> bool:
        """Return True: `append`, `multi_get` and `multi_set` are more than loops."""
        return True

    def clone(self) -> DistStore:
        """Return another store over the same space. Calls of one store do not block each other anyway."""
        return DistStore(self._space, self.timeout)


class OwnedStore(DistStore):
    """A store that its owner keeps alive for as long as torch may use it, and that is freed then."""

    def _keep(self) -> None:
        """Do nothing: stores that are kept for ever would keep their members, and there is one per round."""

    def clone(self) -> OwnedStore:
        """Return this store. Its calls do not block each other, and a copy that only C++ held would lose its Python half."""
        return self


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Raise torch's errors, which torch's code catches, with the message of ours."""
    try:
        yield
    except (StoreTimeout, RoundOver) as error:
        raise DistStoreError(str(error)) from error
    except Unreachable as error:
        raise DistNetworkError(str(error)) from error


def _number(value: bytes) -> int:
    return int(value.partition(b" ")[0] or b"0")


def _seconds(timeout: timedelta) -> float:
    return timeout.total_seconds() or NO_LIMIT_S
