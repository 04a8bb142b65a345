"""The driver for any compare-and-set register: the whole engine in one value, see `document`.

Everything a session wants goes into one line. One task takes all that waits there, applies it to the state it knows and offers
the result in one swap; whoever loses it tries again, after a pause that grows with each loss. So a burst of joins costs
each node a few swaps, and what a node wants at the same time costs it one.

What a register cannot promise, and etcd or the embedded server can:

- It tells nobody of a change: unless the backend can wait, members look at it, more often while much happens.
- It ends no lease: members do, each by its own clock (see `vigil`), so none ends while no member looks, and a connection that
  breaks says nothing.
- It cannot say where it was restarted: a value that is gone is taken for an engine that came back empty.
- It holds some 200 members: each write carries everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from ...errors import Unreachable
from ...system.node import Node
from ..port import Case, Compare, Operation, Outcome, leases_of
from .backend import Register
from .document import ELSEWHERE, StoredLease, encode, first_document
from .swap_loop import Act, SwapLoop
from .watch import RegisterWatch

TXN_MAX = 100_000
"""The state's size limits a transaction, not this."""


class RegisterDriver:
    """Reaches the engine in one register."""

    def __init__(self, register: Register, node: Node, *, timeout_s: float) -> None:
        """`timeout_s`: how long a transaction may lose swaps until it is given up."""
        self.endpoint = register.endpoint
        self._register = register
        self._node = node
        self._timeout_s = timeout_s

    async def connect(self) -> RegisterSession:
        """The first to find the register empty makes the engine."""
        register, node = self._register, self._node
        try:
            version = await register.read()
            while version is None:
                state = encode(first_document(node.token(), node.token()))
                await register.swap(state, None)
                version = await register.read()
        except Unreachable as error:
            raise Unreachable(self.endpoint, error.problem, error.waited_s, applied=False) from error.__cause__
        return RegisterSession(SwapLoop.enter(register, node, version, self._timeout_s), register, node)

    async def close(self) -> None:
        """See the port."""
        await self._register.close()


class RegisterSession:
    """See the port. What it wants is done by the hub that it shares with the other sessions of its process."""

    compares_max = TXN_MAX
    writes_max = TXN_MAX
    stars = False

    def __init__(self, hub: SwapLoop, register: Register, node: Node) -> None:
        self.instance = hub.instance
        self.place = register.place
        self.durable = register.durable
        self.local_host = register.local_host
        self._hub = hub
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
        """See the port."""
        unborn = self._hub.unborn
        args = tuple(compares), tuple(then), tuple(otherwise)
        births = leases_of([args[1], args[2], *(case.then for case in instead)]) & unborn.keys()
        outcome: Outcome = await self._ask(lambda draft: draft.txn(*args, unborn, instead), births)
        return outcome

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:  # noqa: ARG002
        """Costs nothing: the lease begins with the first put under it. There is no connection to lose."""
        self._check_open()
        id = int(self._node.token(), 16) >> 11 or 1  # Positive, and exact in every encoding.
        self._hub.unborn[id] = StoredLease(float(ttl_s), ELSEWHERE if self._register.beats else 0)
        self._granted.add(id)
        return id

    async def renew(self, lease: int) -> None:
        """Where the register has counters, a renewal changes no state; but it looks whether the lease is still there."""
        self._check_open()
        if lease in self._hub.unborn:
            return
        if self._register.beats:
            await self._register.beat(str(lease))
        await self._ask(lambda draft: draft.renew(lease))

    async def revoke(self, lease: int) -> None:
        """See the port."""
        self._check_open()
        if self._hub.unborn.pop(lease, None) is None:
            await self._ask(lambda draft: draft.end(lease))

    def watch(self, targets: Sequence[str], since: int) -> RegisterWatch:
        """Whatever is wrong is said by the watch."""
        watch = RegisterWatch(targets, since, self._hub.watches, self._watches)
        if self._closed or self._hub.ended is not None:
            watch.end(self._problem())
        else:
            watch.show(self._hub.document)
        return watch

    async def compact(self) -> None:
        """Forget all changes up to now."""
        await self._ask(lambda draft: draft.compact())

    async def close(self) -> None:
        """See the port."""
        if self._closed:
            return
        self._closed = True
        for answer in tuple(self._asked):
            if not answer.done():
                answer.set_exception(self._problem())
        for watch in tuple(self._watches):
            watch.end(self._problem())
        for id in self._granted:
            self._hub.unborn.pop(id, None)
        await self._hub.leave(self._register)

    async def _ask(self, act: Act, births: Iterable[int] = ()) -> Any:
        self._check_open()
        answer = self._hub.want(act, births).answer
        self._asked[answer] = None
        try:
            return await answer
        finally:
            del self._asked[answer]

    def _check_open(self) -> None:
        if self._closed or self._hub.ended is not None:
            raise self._problem()

    def _problem(self) -> Exception:
        if self._hub.ended is not None and not self._closed:
            return self._hub.ended
        return Unreachable(self._register.endpoint, "the session is closed", applied=False)
