"""The driver for any compare-and-set register: the whole engine in one value (`document`).

Sessions queue their requests. One task per process applies all queued requests to the state it knows and offers the
result in one swap (`swap_loop`). A process that loses a swap tries again, after a pause that grows with each loss. So a
burst of joins costs each node a few swaps, and simultaneous requests of one node cost one. Members renew their leases in
turns, the one that was not renewed for longest first.

Limits of a register, compared with etcd or the embedded server:

- It announces no change. Unless the backend can wait, members poll it, more often while much happens.
- It ends no lease. Members do, each by its own clock (`expiry`), so no lease ends while no member looks, and a broken
  connection means nothing.
- It takes one swap per round trip, so a lease lasts at least as long as `expiry.TURNS` swaps per lease.
- It cannot tell a restart. A missing value is taken for an engine that came back empty.
- It holds some 200 members: each write carries everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import Incompatible, Unreachable
from ...system.node import Node
from ...system.timers import backoff_s, sleep
from ..port import Case, Compare, Operation, Outcome, ServerLife, leases_of
from ..watch_queue import WatchesAfterwards
from .backend import Register
from .document import ELSEWHERE, StoredLease, encode, first_document
from .swap_loop import Act, RegisterWatch, SwapLoop

TXN_MAX = 100_000
"""A number for callers that split their transactions; the size of the state is the real limit."""
FIRST_WRITES_MAX = 5
"""How often the first state is written before the register counts as one that keeps nothing."""
FIRST_WRITE_PAUSE_S = (0.05, 0.5)
"""First and longest pause between two of these writes."""


class RegisterDriver:
    """Reaches the engine in one register."""

    def __init__(self, register: Register, node: Node, *, timeout_s: float) -> None:
        """`timeout_s`: how long a transaction may lose swaps before it fails."""
        self.endpoint = register.endpoint
        self._register = register
        self._node = node
        self._timeout_s = timeout_s

    async def connect(self) -> RegisterSession:
        """Connect, and make the engine if the register is empty. Raises Incompatible if it stays empty."""
        register, node = self._register, self._node
        try:
            version = await register.read()
            for write in range(FIRST_WRITES_MAX):
                if version is not None:
                    break
                if write:  # Another process may have emptied it, or a slow copy of it was read.
                    await sleep(node, backoff_s(write - 1, FIRST_WRITE_PAUSE_S, node.jitter()))
                await register.swap(encode(first_document(node.token(), node.token())), None)
                version = await register.read()
        except Unreachable as error:
            raise Unreachable(self.endpoint, error.problem, error.waited_s, applied=False) from error.__cause__
        if version is None:
            raise Incompatible(
                "the state in the register",
                f"{self.endpoint} is still empty after {FIRST_WRITES_MAX} writes: its set_state does not store the state, "
                "or its get_state reads another place",
            )
        return RegisterSession(SwapLoop.enter(register, node, version, self._timeout_s), register, node)

    async def close(self) -> None:
        await self._register.close()


class RegisterSession(WatchesAfterwards):
    """A session. The swap loop that it shares with the other sessions of its process does the work."""

    life: ServerLife | None = None
    fence_floor: int | None = 0
    compares_max = TXN_MAX
    writes_max = TXN_MAX
    stars = False
    sees_ends = False

    def __init__(self, loop: SwapLoop, register: Register, node: Node) -> None:
        self.instance = loop.instance
        self.place = register.place
        self.durable = register.durable
        self.local_host = register.local_host
        self._loop = loop
        self._register = register
        self._node = node
        self._asked: dict[asyncio.Future[Any], None] = {}
        self._granted: set[int] = set()
        self._watches: dict[RegisterWatch, None] = {}
        self._closed = False

    async def txn(
        self,
        compares: Iterable[Compare] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
        instead: Sequence[Case] = (),
    ) -> Outcome:
        unstored = self._loop.unstored
        args = tuple(compares), tuple(then), tuple(otherwise)
        begins = leases_of([args[1], args[2], *(case.then for case in instead)]) & unstored.keys()
        outcome: Outcome = await self._ask(lambda draft: draft.txn(*args, unstored, instead), begins)
        return outcome

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:
        self._check_open()
        # Not stored yet: the lease begins with the first put under it. That saves one swap per join, and joins are when
        # swaps are lost.
        id = int(self._node.token(), 16) >> 11 or 1  # Positive, and exact in every encoding.
        self._loop.unstored[id] = StoredLease(float(ttl_s), ELSEWHERE if self._register.beats else 0)
        self._granted.add(id)
        if presence:
            self._loop.presences.add(id)
        return id

    async def renew(self, lease: int) -> None:
        self._check_open()
        if lease in self._loop.unstored:
            return
        if self._register.beats:
            await self._register.beat(str(lease))  # The request below then changes nothing: it checks for LeaseGone.
        await self._ask(lambda draft: draft.renew(lease), renews=True)

    async def revoke(self, lease: int) -> None:
        self._check_open()
        if self._loop.unstored.pop(lease, None) is None:
            await self._ask(lambda draft: draft.end(lease))

    def watch(self, targets: Sequence[str], since: int, ends: Sequence[str] = ()) -> RegisterWatch:
        """Start a watch. Its reader gets the error if it cannot start."""
        watch = RegisterWatch(targets, since, ends, self._loop.watches, self._watches)
        if self._closed or self._loop.ended is not None:
            watch.end(self._problem())
        else:
            watch.show(self._loop.document)
        return watch

    async def compact(self) -> None:
        """Forget the log of changes."""
        await self._ask(lambda draft: draft.compact())

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for answer in tuple(self._asked):
            if not answer.done():
                answer.set_exception(self._problem())
        for watch in tuple(self._watches):
            watch.end(self._problem())
        for id in self._granted:
            self._loop.unstored.pop(id, None)
        self._loop.presences -= self._granted
        await self._loop.leave(self._register)

    async def _ask(self, act: Act, begins: Iterable[int] = (), *, renews: bool = False) -> Any:
        self._check_open()
        answer = self._loop.request(act, begins, renews=renews).answer
        self._asked[answer] = None
        try:
            return await answer
        finally:
            del self._asked[answer]

    def _check_open(self) -> None:
        if self._closed or self._loop.ended is not None:
            raise self._problem()

    def _problem(self) -> Exception:
        if self._loop.ended is not None and not self._closed:
            return self._loop.ended
        return Unreachable(self._register.endpoint, "the session is closed", applied=False)
