"""Registers with blocking calls: what a backend must offer, what it may offer, and how the driver uses it.

The two methods are those of torch's `RendezvousBackend`, so that a backend written for torch is one for us. What else a
backend can do is found by looking: `wait_state` spares polling, and `beat` with `read_beats` spares a swap of the whole
state for every renewal.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

from ...errors import Incompatible, Unreachable
from .call_thread import CallThread

T = TypeVar("T")

Version = tuple[bytes, Any]
"""A state, and the token that stands for it."""

WAIT_S = 6 * 3600.0
"""The longest wait of a backend's own. One that hears of no change costs nothing: members also look by themselves."""


STOP_S = 0.02
STOPS_MAX = 50
"""How often, and how many times at most, a wait is told to end."""


class Backend(Protocol):
    """A compare-and-set register. Any exception means that it could not be reached."""

    def get_state(self) -> Version | None:
        """The state and its token; None: there is none."""

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        """Replace the state that the token stands for (None: if there is none); the state now, and whether it is ours."""


class WaitingBackend(Protocol):
    """It can wait for a change. Called from another thread than the other methods. None instead: this one cannot."""

    def wait_state(self, token: Any, timeout_s: float) -> None:
        """Until the state is perhaps no longer the one that the token stands for, or the time is over."""

    def stop_waiting(self) -> None:
        """Let a wait end, if there is one."""


@runtime_checkable
class HeartbeatBackend(Protocol):
    """It has counters beside the state."""

    def beat(self, name: str) -> None:
        """Add one to a counter, which starts at 0."""

    def read_beats(self, names: Sequence[str]) -> Sequence[int]:
        """The counters."""

    def drop_beat(self, name: str) -> None:
        """It will not be read any more."""


class Register(Protocol):
    """A register as the driver uses it: calls that can be awaited, and raise Unreachable."""

    endpoint: str
    place: str
    durable: bool
    local_host: str
    waits: bool
    """`wait` may be called."""
    beats: bool
    """`beat`, `read_beats` and `drop_beat` may be called."""

    async def read(self) -> Version | None:
        """The state and its token; None: there is none."""

    async def swap(self, state: bytes, token: Any) -> tuple[bytes, Any, bool] | None:
        """As `Backend.set_state`."""

    async def wait(self, token: Any) -> None:
        """Until the state has perhaps changed, or some time has passed."""

    async def beat(self, name: str) -> None:
        """As `Beats.beat`."""

    async def read_beats(self, names: Sequence[str]) -> Sequence[int]:
        """As `Beats.read_beats`."""

    async def drop_beat(self, name: str) -> None:
        """As `Beats.drop_beat`."""

    async def close(self) -> None:
        """It is not needed any more."""


class BlockingRegister:
    """A backend's calls in a thread of their own; those that wait, in another. The backend stays its maker's."""

    def __init__(
        self,
        backend: Backend,
        endpoint: str,
        *,
        timeout_s: float,
        local_host: str = "",
        corrupt: tuple[type[Exception], ...] = (),
    ) -> None:
        """`timeout_s`: longest wait for one answer. `corrupt`: errors of the backend's that speak of the state itself."""
        self.endpoint = endpoint
        self.place = f"register {endpoint}"
        self.durable = bool(getattr(backend, "durable", False))
        self.local_host = local_host
        self.waits = callable(getattr(backend, "wait_state", None))
        self.beats = isinstance(backend, HeartbeatBackend)
        self._backend: Any = backend
        self._corrupt = corrupt
        self._timeout_s = timeout_s
        self._lane = CallThread(f"rdzv register {endpoint}")
        self._waiting = CallThread(f"rdzv waits for {endpoint}")

    async def read(self) -> Version | None:
        """A read that failed had no effect."""
        try:
            version: Version | None = await self._call(self._backend.get_state)
        except Unreachable as error:
            raise Unreachable(error.endpoint, error.problem, error.waited_s, applied=False) from error.__cause__
        return version

    async def swap(self, state: bytes, token: Any) -> tuple[bytes, Any, bool] | None:
        """See `Register`."""
        answer: tuple[bytes, Any, bool] | None = await self._call(self._backend.set_state, state, token)
        return answer

    async def wait(self, token: Any) -> None:
        """See `Register`."""
        await self._call(self._backend.wait_state, token, WAIT_S, lane=self._waiting, timeout_s=2 * WAIT_S)

    async def beat(self, name: str) -> None:
        """See `Register`."""
        await self._call(self._backend.beat, name)

    async def read_beats(self, names: Sequence[str]) -> Sequence[int]:
        """See `Register`."""
        counts: Sequence[int] = await self._call(self._backend.read_beats, names)
        return counts

    async def drop_beat(self, name: str) -> None:
        """See `Register`."""
        await self._call(self._backend.drop_beat, name)

    async def close(self) -> None:
        """Its threads end after the calls they are at; one that waits is woken, again if it was just about to wait."""
        self._waiting.close()
        for _ in range(STOPS_MAX):
            if not self._waiting.busy:
                break
            with suppress(Unreachable):
                await self._call(self._backend.stop_waiting)
            await asyncio.sleep(STOP_S)
        self._lane.close()

    async def _call(
        self, work: Callable[..., T], *args: object, lane: CallThread | None = None, timeout_s: float | None = None
    ) -> T:
        began_at = time.monotonic()
        try:
            return await (lane or self._lane).call(work, *args, timeout_s=timeout_s or self._timeout_s)
        except TimeoutError:
            raise Unreachable(self.endpoint, "no answer", time.monotonic() - began_at) from None
        except self._corrupt as error:
            raise Incompatible("the state in the register", str(error)) from error
        except Exception as error:
            raise Unreachable(self.endpoint, _say(error), time.monotonic() - began_at) from error


def _say(error: Exception) -> str:
    """In one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
