"""The driver for any compare-and-set register: the whole engine in one value, see `document`.

Everything a session wants goes into one line. One task takes all that waits there, applies it to the state it knows and offers
the result in one swap; whoever loses it tries again, after a pause for as many as were quicker. So a burst of joins costs
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from ..errors import LimitExceeded, RdzvError, Unreachable
from ..machine import Bell, Machine, sleep
from .backend import Register, Version
from .base import Compare, EngineReset, LeaseGone, Operation, Outcome, Put
from .document import ELSEWHERE, Document, Draft, Lease, decode, encode, first_document
from .register_watch import RegisterWatch
from .vigil import GAP, Vigil

TXN_MAX = 100_000
"""The state's size limits a transaction, not this."""
QUICK_S = (0.02, 0.002)
"""Between two looks while much happens: at least, and per lease, since every look of every member fetches everything."""
SLOW_S = (0.5, 0.01, 1.0)
"""Between two looks while nothing does: at least, per lease, at most."""
SLOWER = 1.5
"""Each look that showed nothing new makes the time until the next one so much longer."""
BACKOFF_MAX_S = 0.5
PATIENCE = 6
"""After so many lost swaps no more pauses: others that were as unlucky are few."""


class RegisterDriver:
    """Reaches the engine in one register."""

    def __init__(self, register: Register, machine: Machine, *, timeout_s: float) -> None:
        """`timeout_s`: how long a transaction may lose swaps until it is given up."""
        self.endpoint = register.endpoint
        self._register = register
        self._machine = machine
        self._timeout_s = timeout_s

    async def connect(self) -> RegisterSession:
        """The first to find the register empty makes the engine."""
        register, machine = self._register, self._machine
        try:
            version = await register.read()
            while version is None:
                state = encode(first_document(machine.token(), machine.token()))
                await register.swap(state, None)
                version = await register.read()
        except Unreachable as error:
            raise Unreachable(self.endpoint, error.problem, error.waited_s, applied=False) from error.__cause__
        return RegisterSession(register, machine, version, self._timeout_s)

    async def close(self) -> None:
        """See the port."""
        await self._register.close()


class _Request:
    """Something to be done to the state, and who waits for it."""

    __slots__ = ("act", "answer", "asked_at", "births", "looks")

    def __init__(
        self, act: Callable[[Draft], object], answer: asyncio.Future[Any], looks: int, asked_at: float, births: Iterable[int]
    ) -> None:
        self.act = act
        self.answer = answer
        self.looks = looks
        """How many looks had begun when it was asked: only a later one may answer it without a swap."""
        self.asked_at = asked_at
        self.births = births
        """Leases that begin with it."""

    def judge(self, draft: Draft) -> object:
        """Its answer, if the draft becomes the state."""
        try:
            return self.act(draft)
        except (LeaseGone, ValueError) as problem:
            return problem


class RegisterSession:
    """See the port. All calls to the register, but those that wait and those that renew, are made by one task."""

    compares_max = TXN_MAX
    writes_max = TXN_MAX

    def __init__(self, register: Register, machine: Machine, version: Version, timeout_s: float) -> None:
        self.place = register.place
        self.durable = register.durable
        self.local_host = register.local_host
        self._register = register
        self._machine = machine
        self._timeout_s = timeout_s
        self._state, self._token = version
        self._document = decode(self._state)
        self._draft: Draft | None = None
        self.instance = self._document.instance
        self._looks = 0
        self._swap_s = 0.0
        """How long the last swap took."""
        self._interval_s = 0.0
        self._looked_at = self._beats_at = machine.now()
        self._look_at = machine.now()
        self._vigil = Vigil()
        self._set_pace(self._document.leases)
        self._pending: list[_Request] = []
        self._unborn: dict[int, Lease] = {}
        self._watches: dict[RegisterWatch, None] = {}
        self._bell = Bell(machine)
        self._ended: Exception | None = None
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._serve(), name=f"rdzv register {register.endpoint}")]
        if register.waits:
            self._tasks.append(loop.create_task(self._await_changes(), name=f"rdzv waits for {register.endpoint}"))

    # ---- the port

    async def txn(
        self,
        compares: Iterable[Compare] = (),
        then: Iterable[Operation] = (),
        otherwise: Iterable[Operation] = (),
    ) -> Outcome:
        """See the port."""
        args = tuple(compares), tuple(then), tuple(otherwise)
        births = {one.lease for one in (*args[1], *args[2]) if isinstance(one, Put) and one.lease in self._unborn}
        outcome: Outcome = await self._ask(lambda draft: draft.txn(*args, self._unborn), births)
        return outcome

    async def grant(self, ttl_s: float, *, presence: bool = False) -> int:  # noqa: ARG002
        """Costs nothing: the lease begins with the first put under it. There is no connection to lose."""
        self._check_open()
        if self._document.instance != self.instance:
            raise self._reset()
        id = int(self._machine.token(), 16) >> 11 or 1  # Positive, and exact in every encoding.
        self._unborn[id] = Lease(float(ttl_s), ELSEWHERE if self._register.beats else 0)
        return id

    async def renew(self, lease: int) -> None:
        """Where the register has counters, a renewal changes no state; but it looks whether the lease is still there."""
        self._check_open()
        if lease in self._unborn:
            return
        if self._register.beats:
            await self._register.beat(str(lease))
        await self._ask(lambda draft: draft.renew(lease))

    async def revoke(self, lease: int) -> None:
        """See the port."""
        self._check_open()
        if self._unborn.pop(lease, None) is None:
            await self._ask(lambda draft: draft.end(lease))
            await self._drop_beat(lease)

    def watch(self, targets: Sequence[str], since: int) -> RegisterWatch:
        """Whatever is wrong is said by the watch."""
        watch = RegisterWatch(targets, since, self._watches)
        if self._ended is not None:
            watch.end(self._ended)
        else:
            watch.show(self._document)
        return watch

    async def compact(self) -> None:
        """Forget all changes up to now."""
        await self._ask(lambda draft: draft.compact())

    async def close(self) -> None:
        """See the port."""
        self._end(Unreachable(self._register.endpoint, "the session is closed", applied=False))
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one task for all that is wanted

    async def _ask(self, act: Callable[[Draft], object], births: Iterable[int] = ()) -> Any:
        self._check_open()
        request = self._want(act, births)
        return await request.answer

    def _want(self, act: Callable[[Draft], object], births: Iterable[int] = ()) -> _Request:
        answer = asyncio.get_running_loop().create_future()
        request = _Request(act, answer, self._looks, self._machine.now(), births)
        self._pending.append(request)
        self._bell.ring()
        return request

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended

    async def _serve(self) -> None:
        try:
            while self._ended is None:
                try:
                    if self._pending:
                        await self._settle()
                    await self._idle()
                except Unreachable as problem:
                    self._refuse(problem)
        except Exception as problem:  # noqa: BLE001  Whatever it is, whoever waits must hear of it.
            self._end(problem)

    async def _settle(self) -> None:
        """Carry out all that is wanted, in one swap if there is anything to write."""
        lost, together, settled = 0, True, False
        while self._pending and not settled:
            self._pending = [request for request in self._pending if not request.answer.done()]
            requests = self._pending[:] if together else self._pending[:1]
            if not requests:
                return
            draft = self._draft = self._draft or Draft(self._document)
            answers, serial = [request.judge(draft) for request in requests], self._document.serial
            if draft.changed:
                try:
                    settled = await self._swap(draft, partial(self._answer, requests, answers, draft.leases))
                except LimitExceeded as problem:
                    self._draft, together = None, False
                    if len(requests) == 1:
                        self._answer(requests, [problem], {})
                    continue
            elif settled := await self._is_fresh(requests):
                self._answer(requests, answers, draft.leases)
            if not settled:
                lost += 1
                await self._back_off(lost, serial, requests)

    async def _is_fresh(self, requests: Sequence[_Request]) -> bool:
        """What is known was true at some moment since they all were asked."""
        if all(request.looks < self._looks for request in requests):
            return True
        document = self._document
        await self._look()
        return document is self._document

    def _answer(self, requests: Sequence[_Request], answers: Sequence[object], leases: dict[int, Lease]) -> None:
        """They have happened. Removed before anybody is told, since who is told may ask again at once."""
        self._pending = [request for request in self._pending if request not in requests]
        for request, answer in zip(requests, answers, strict=True):
            self._beget(request, leases)
            if request.answer.done():
                continue
            if isinstance(answer, Exception):
                request.answer.set_exception(answer)
            else:
                request.answer.set_result(answer)

    def _beget(self, request: _Request, leases: dict[int, Lease] | None) -> None:
        """A lease is born once: if that may have happened unheard, it is there or it is gone (None: nobody knows)."""
        for id in request.births:
            if leases is None or id in leases:
                self._unborn.pop(id, None)

    def _refuse(self, problem: Unreachable) -> None:
        """The register does not answer: nobody's wish is repeated unasked."""
        pending, self._pending = self._pending, []
        for request in pending:
            if problem.applied is not False:
                self._beget(request, None)
            if not request.answer.done():
                request.answer.set_exception(problem)

    async def _back_off(self, lost: int, serial: int, requests: Sequence[_Request]) -> None:
        now = self._machine.now()
        waited_s = now - min(request.asked_at for request in requests)
        if lost > 1 and waited_s > self._timeout_s:
            problem = f"{lost} swaps were lost to others"
            raise Unreachable(self._register.endpoint, problem, waited_s, applied=False)
        # As many turns as others were quicker while we tried; and since they go on meanwhile, look before the next try.
        pause_s = min(self._swap_s * (self._document.serial - serial), BACKOFF_MAX_S) * self._machine.jitter()
        if lost < PATIENCE and pause_s > self._swap_s / 2:
            await sleep(self._machine, pause_s)
            await self._look()

    # ---- looking and swapping

    async def _idle(self) -> None:
        """Wait for a wish, or for the time to look again."""
        wait_s = self._look_at - self._machine.now()
        if wait_s > 0 and (self._pending or await self._bell.wait(wait_s)):
            return
        before = self._document.revision
        # Set first: a look that fails must not be repeated at once.
        self._plan(before)
        await self._look()
        self._plan(before)
        await self._keep_vigil()

    def _plan(self, before: int) -> None:
        """When to look next."""
        if self._register.waits:
            self._interval_s = self._slow_s
        elif self._document.revision != before:
            self._interval_s = self._quick_s
        else:
            self._interval_s = min(max(self._interval_s, self._quick_s) * SLOWER, self._slow_s)
        self._looked_at = self._machine.now()
        self._look_at = self._looked_at + self._interval_s * (0.75 + 0.25 * self._machine.jitter())

    def _set_pace(self, leases: Mapping[int, Lease]) -> None:
        """How often to look. Often enough to tell the silence of the shortest lease from a pause of ours."""
        self._vigil_s = min((lease.ttl_s for lease in leases.values()), default=3600.0) * GAP / 2
        self._quick_s = max(QUICK_S[0], QUICK_S[1] * len(leases))
        self._slow_s = min(max(SLOW_S[0], SLOW_S[1] * len(leases)), SLOW_S[2], self._vigil_s)

    async def _look(self) -> None:
        self._looks += 1
        self._take(await self._register.read())

    async def _swap(self, draft: Draft, answer_all: Callable[[], None]) -> bool:
        """Offer the draft; if another was quicker, know its state instead.

        Who asked is answered before the watches show what else happened by the same swap: an answer must not be older
        than what its reader has seen.
        """
        leases = self._document.leases
        document = draft.finish(self._machine.token())
        state = encode(document)
        self._looks += 1
        self._draft = None
        asked_at = self._machine.now()
        answer = await self._register.swap(state, self._token)
        self._swap_s = self._machine.now() - asked_at
        if answer is None:
            version = await self._register.read()
            if version is None:
                raise self._reset()
            answer = (*version, False)
        now, token, won = answer
        if won or now == state:
            self._state, self._token, self._draft = state, token, draft
            answer_all()
            self._show(document)
            for id in leases.keys() - document.leases.keys():
                await self._drop_beat(id)
            return True
        self._take((now, token))
        return False

    def _take(self, version: Version | None) -> None:
        """This is the state now."""
        if version is None:
            raise self._reset()
        state, token = version
        if state == self._state:
            return  # And its token stays the same object, by which `_await_changes` knows it.
        document = decode(state)
        if document.instance != self.instance or document.serial < self._document.serial:
            raise self._reset()
        self._state, self._token, self._draft = state, token, None
        self._show(document)

    def _show(self, document: Document) -> None:
        if len(document.leases) != len(self._document.leases):
            self._set_pace(document.leases)
        self._document = document
        for watch in tuple(self._watches):
            watch.show(document)

    async def _await_changes(self) -> None:
        """Where the backend can wait, look soon after a change; but not at every one of a burst."""
        with suppress(asyncio.CancelledError):
            while self._ended is None:
                token = self._token
                try:
                    await self._register.wait(token)
                except RdzvError:
                    await sleep(self._machine, SLOW_S[2])
                    continue
                if token is self._token:
                    self._look_at = min(self._look_at, self._looked_at + self._quick_s)
                    self._bell.ring()
                await sleep(self._machine, self._quick_s)

    # ---- leases

    async def _keep_vigil(self) -> None:
        """End the leases whose beats we have seen unchanged for their time."""
        leases = self._document.leases
        beats: dict[int, int] = {}
        if self._register.beats:
            if self._machine.now() - self._beats_at < self._vigil_s:
                return
            ids = [id for id, lease in leases.items() if lease.beats == ELSEWHERE]
            if ids:
                beats = dict(zip(ids, await self._register.read_beats([str(id) for id in ids]), strict=True))
            self._beats_at = self._machine.now()
        for id in self._vigil.look(leases, beats, self._machine.now()):
            request = self._want(partial(Draft.end, id=id, beats=leases[id].beats))
            request.answer.add_done_callback(_ignore)

    async def _drop_beat(self, lease: int) -> None:
        if self._register.beats:
            with suppress(Unreachable):  # Then a few bytes stay behind.
                await self._register.drop_beat(str(lease))

    # ---- the end

    def _reset(self) -> EngineReset:
        return EngineReset(f"instance {self.instance} at {self.place} is gone")

    def _end(self, problem: Exception) -> None:
        """For good: every call and watch fails from now on."""
        if self._ended is not None:
            return
        self._ended = problem
        pending, self._pending = self._pending, []
        for request in pending:
            if not request.answer.done():
                request.answer.set_exception(problem)
        for watch in tuple(self._watches):
            watch.end(problem)


def _ignore(answer: asyncio.Future[Any]) -> None:
    """Nobody waits for it; the next look shows whether it happened."""
    if not answer.cancelled():
        answer.exception()
