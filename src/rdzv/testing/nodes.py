"""The nodes of a simulated run, each with its own clock and random numbers.

A node is the process of one member. Its clock runs a little fast or slow and starts billions of seconds away from every
other clock. A comparison of two clocks is grossly wrong then, and an instant in a record is recognised (G10).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..system.bootstrap import Bootstrap, candidates
from ..system.timers import Timer, sleep
from .virtual_loop import Process, VirtualLoop

T = TypeVar("T")

OFFSETS_S = (1e9, 9e9)
RATES = (0.99, 1.01)
WALL_S = 2e8
"""The wall clock, in seconds since 2020, at the begin of a run."""
LATE_S = 4e-6
"""Timers are this late: a float clock with such an offset has no finer steps, and a timer must not be early by it."""


class SimNode(Process):
    """A `system.node.Node` that can be paused, resumed and crashed."""

    def __init__(
        self, loop: VirtualLoop, name: str, seed: int | str = 0, *,
        host: str = "", rate: float | None = None, offset_s: float | None = None,
    ) -> None:  # fmt: skip
        """`name` is unique in the run. A node that comes back after a crash is a new one with the same `host`."""
        super().__init__(loop, name, random.Random(f"{seed}/{name}"))  # noqa: S311
        self.host = host or name
        self.pid = self.rng.randrange(2, 1 << 22)
        self.rate = self.rng.uniform(*RATES) if rate is None else rate
        self.offset_s = self.rng.uniform(*OFFSETS_S) if offset_s is None else offset_s
        self.wall_off_s = self.offset_s % 0.4
        self.steps = False
        """Whether its wall clock steps."""
        self.dead = False
        self.sick = ""
        """Why its check fails; empty: it passes."""
        self.on_crash: list[Callable[[bool], None]] = []
        """Called after a crash with `silent`, for what outlives a process, such as its sockets."""
        self._exits: dict[asyncio.Future[Any], None] = {}

    # ---- the member's side

    def now(self) -> float:
        """Read this node's clock, which goes on while the node is paused."""
        return self.offset_s + self.rate * self.loop.now

    def call_later(self, delay_s: float, callback: Callable[[], object]) -> Timer:
        wait_s = delay_s / self.rate if delay_s > 0.0 else 0.0
        return self.loop.call_at(self.loop.now + wait_s + LATE_S, callback, context=self.context)

    async def check(self, command: str, timeout_s: float) -> str:  # noqa: ARG002
        """Take a moment, and say what is wrong with this node."""
        await sleep(self, 0.2)
        return self.sick

    def token(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"

    def jitter(self) -> float:
        return self.rng.random()

    def stamp(self) -> str:
        return ""  # All that is written must follow from the seed.

    def wall_s(self) -> int:
        """Read the wall clock, which is a little off, and steps by up to a day in every fifth scenario."""
        step_s = random.Random(f"{self.name}/{self.loop.now // 7}").uniform(-86_400, 86_400) if self.steps else 0.0  # noqa: S311
        return int(WALL_S + self.loop.now + self.wall_off_s + step_s)

    def bind(self, host: str, ports: tuple[int, int], former: int = 0) -> Bootstrap:
        """Return an address without a socket. Without a range it is always new, so that a former address shows."""
        if not ports[0]:
            return Bootstrap(host, 20_000 + next(self.loop.serial) % 40_000)
        return Bootstrap(host, candidates(ports, former)[0])

    # ---- the scenario's side

    def spawn(self, coro: Coroutine[Any, Any, T], name: str = "") -> asyncio.Future[T]:
        """Run the coroutine on this node. The returned future is cancelled if the node crashes."""
        if self.dead:
            coro.close()
            raise RuntimeError(f"{self.name} is dead")
        task: asyncio.Task[T] = self.context.copy().run(self.loop.create_task, coro, name=name or None)
        exited: asyncio.Future[T] = self.loop.create_future()
        self._exits[exited] = None
        self.loop.watch_over(exited, f"exit of {task.get_name()}")

        def end(task: asyncio.Task[T]) -> None:
            self._exits.pop(exited, None)
            if exited.done():
                return
            if task.cancelled():
                exited.cancel()
            elif (error := task.exception()) is not None:
                exited.set_exception(error)
            else:
                exited.set_result(task.result())

        task.add_done_callback(end, context=self.loop.outside)
        return exited

    def crash(self, *, silent: bool = False) -> None:
        """Stop the node as SIGKILL does: no clean-up runs, and its connections drop.

        `silent`: as a power cut does, so the network tells nobody. Tasks are unwound after the run's end, when they can
        reach nothing and are not observed.
        """
        if self.dead:
            return
        self.dead = True
        self.pause()
        for tell in self.on_crash:
            tell(silent)
        for exited in list(self._exits):
            exited.cancel()

    def resume(self) -> None:
        """Go on after a pause. A dead node only resumes to be unwound."""
        if not self.dead or self.loop.unwinding:
            super().resume()
