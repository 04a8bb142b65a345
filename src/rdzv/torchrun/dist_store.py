"""A `torch.distributed.Store` over any key-value space, so that torch can bootstrap through an engine of ours.

    world = rendezvous.join()
    store = DistStore(world.store)
    torch.distributed.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)

torch calls a store from C++ under names of its own, which differ from those that Python code uses (`deleteKey` and
`delete_key`), so both exist. Two limits are torch's: queues and `list_keys` never reach a store written in Python, and
`timeout` is kept on the C++ side, which is therefore asked anew by every call that waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import ClassVar, Protocol

from torch.distributed import DistNetworkError, DistStoreError, Store  # From C++.

from ..errors import RoundOver, StoreTimeout, Unreachable

NO_LIMIT_S = 86_400.0
"""What torch's "no timeout" (zero) comes to: no wait is without an end."""
BATCH = 100
"""Keys that are written at once: below what every engine allows. torch promises nothing about several."""


class KeyValueSpace(Protocol):
    """What a store needs: blocking operations on keys and bytes. `rdzv.World.store` is one.

    Those that wait raise `StoreTimeout`; all may raise `Unreachable`, and `RoundOver` if the space ends with a round.
    """

    def multi_set(self, values: Mapping[str, bytes | str]) -> None:
        """Write several keys at once."""

    def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """The values, waited for if need be."""

    def wait(self, keys: Sequence[str], timeout_s: float | None = None) -> None:
        """Until all of the keys are set."""

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys are set now."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and say what it is now."""

    def append(self, key: str, value: bytes | str) -> None:
        """Put more bytes behind a value, which starts empty."""

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected` (empty: if there is none); return the value there is afterwards."""

    def delete(self, key: str) -> bool:
        """Remove a key; whether it was there."""

    def num_keys(self) -> int:
        """How many keys there are."""


class DistStore(Store):
    """See the module's docstring. Raises torch's DistStoreError (timeout, round over) and DistNetworkError (outage)."""

    timeout: timedelta
    _kept: ClassVar[list[DistStore]] = []
    """All of them, for ever: what torch holds is the C++ half, which is an empty shell once the Python half is freed."""

    def __init__(self, space: KeyValueSpace, timeout: timedelta | None = None) -> None:
        super().__init__()
        self._space = space
        if timeout is not None:
            self.set_timeout(timeout)
        self._kept.append(self)

    # ---- writing

    def set(self, key: str, value: bytes | str) -> None:
        """Write a key."""
        with _torch_errors():
            self._space.multi_set({key: value})

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Write several keys; a batch is seen at once."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set: {len(keys)} keys, but {len(values)} values")
        with _torch_errors():
            for start in range(0, len(keys), BATCH):
                some = slice(start, start + BATCH)
                self._space.multi_set(dict(zip(keys[some], values[some], strict=True)))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and say what it is now."""
        with _torch_errors():
            return self._space.add(key, amount)

    def append(self, key: str, value: bytes | str) -> None:
        """Put more bytes behind a value, which starts empty."""
        with _torch_errors():
            self._space.append(key, value)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected` (empty: if there is none); return the value there is afterwards.

        Of a missing key that was expected to have a value torch's stores return what was expected, and so does this.
        """
        with _torch_errors():
            return self._space.compare_set(key, expected, desired) or _bytes(expected)

    def delete_key(self, key: str) -> bool:
        """Remove a key; whether it was there."""
        with _torch_errors():
            return self._space.delete(key)

    deleteKey = delete_key  # noqa: N815  C++ asks for it by this name.

    # ---- reading

    def get(self, key: str) -> bytes:
        """The value, waited for if need be."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, waited for if need be."""
        with _torch_errors():
            return self._space.multi_get(keys, _seconds(self.timeout))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Until all of the keys are set."""
        with _torch_errors():
            self._space.wait(keys, _seconds(self.timeout if timeout is None else timeout))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of the keys are set now."""
        with _torch_errors():
            return self._space.check(keys)

    def num_keys(self) -> int:
        """How many keys there are."""
        with _torch_errors():
            return self._space.num_keys()

    getNumKeys = num_keys  # noqa: N815  As above.

    # ---- the object

    def has_extended_api(self) -> bool:
        """Whether `append`, `multi_get` and `multi_set` are more than loops."""
        return True

    def clone(self) -> DistStore:
        """Another store over the same space: calls do not wait for one another anyway."""
        return DistStore(self._space, self.timeout)


@contextmanager
def _torch_errors() -> Iterator[None]:
    """What torch's own code catches are torch's errors; the sentence stays ours."""
    try:
        yield
    except (StoreTimeout, RoundOver) as error:
        raise DistStoreError(str(error)) from error
    except Unreachable as error:
        raise DistNetworkError(str(error)) from error


def _seconds(timeout: timedelta) -> float:
    return timeout.total_seconds() or NO_LIMIT_S


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else value
