"""All that one process wants of one register, in one line: see `register` for the whole.

One task takes everything that waits in the line, applies it to the state it knows and offers the result in one swap. It is also
the one that looks at the register, tells the watches and times the leases, so that a process with many members costs the
register no more than one with a single member.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

from ...errors import LimitExceeded, RdzvError, Unreachable
from ...system.node import Node
from ...system.timers import Wakeup, sleep
from ..port import EngineReset, LeaseGone
from .backend import Register, Version
from .document import ELSEWHERE, Document, Draft, StoredLease, decode, encode
from .expiry import GAP, ExpiryObserver
from .watch import RegisterWatch

QUICK_S = (0.02, 0.002)
"""Between two looks while much happens: at least, and per lease, since every look of every member fetches everything."""
SLOW_S = (0.5, 0.01, 1.0)
"""Between two looks while nothing does: at least, per lease, at most."""
SLOWER = 1.5
"""Each look that showed nothing new makes the time until the next one so much longer."""
DOUBLINGS_MAX = 6
BACKOFF_MAX_S = 2.0
"""The pause after a lost swap is drawn from a time that doubles with each: from two swaps' length to 64, or this."""

Act = Callable[[Draft], object]
_Key = tuple[asyncio.AbstractEventLoop, str, int, str]


class SwapRequest:
    """Something to be done to the state, and who waits for it."""

    __slots__ = ("act", "answer", "asked_at", "births", "looks")

    def __init__(
        self, act: Act, answer: asyncio.Future[Any], looks: int, asked_at: float, births: Iterable[int]
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


class SwapLoop:
    """Shared by the sessions of one process, on one event loop, with one instance. Ends with the last of them."""

    _hubs: ClassVar[dict[_Key, SwapLoop]] = {}

    def __init__(self, key: _Key, register: Register, node: Node, version: Version, timeout_s: float) -> None:
        self.instance = key[-1]
        self.place = register.place
        self.unborn: dict[int, StoredLease] = {}
        """Leases that were granted, and begin with the first put under them."""
        self.ended: Exception | None = None
        self.watches: dict[RegisterWatch, None] = {}
        self._key = key
        self._registers = [register]
        """The first is used; the others would do as well."""
        self._node = node
        self._timeout_s = timeout_s
        self._state, self._token = version
        self.document = decode(self._state)
        self._draft: Draft | None = None
        self._looks = 0
        self._swap_s = 0.0
        """How long the last swap took."""
        self._interval_s = 0.0
        self._looked_at = self._beats_at = self._look_at = node.now()
        self._vigil = ExpiryObserver()
        self._set_pace(self.document.leases)
        self._pending: list[SwapRequest] = []
        self._bell = Wakeup(node)
        loop = key[0]
        self._tasks = [loop.create_task(self._serve(), name=f"rdzv register {register.endpoint}")]
        if register.waits:
            self._tasks.append(loop.create_task(self._await_changes(), name=f"rdzv waits for {register.endpoint}"))

    @classmethod
    def enter(cls, register: Register, node: Node, version: Version, timeout_s: float) -> SwapLoop:
        """The process's hub for the instance that was read, with one more register to reach it by."""
        key = (asyncio.get_running_loop(), node.host, node.pid, decode(version[0]).instance)
        hub = cls._hubs.get(key)
        if hub is None or hub.place != register.place:
            hub = cls._hubs[key] = SwapLoop(key, register, node, version, timeout_s)
        else:
            hub._registers.append(register)
        return hub

    async def leave(self, register: Register) -> None:
        """One session less."""
        self._registers.remove(register)
        if not self._registers:
            self._end(Unreachable(register.endpoint, "the session is closed", applied=False))
            tasks = [task for task in self._tasks if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _register(self) -> Register:
        return self._registers[0]

    def want(self, act: Act, births: Iterable[int] = ()) -> SwapRequest:
        """Stand in line."""
        request = SwapRequest(act, asyncio.get_running_loop().create_future(), self._looks, self._node.now(), births)
        self._pending.append(request)
        self._bell.ring()
        return request

    async def _serve(self) -> None:
        try:
            while self.ended is None:
                try:
                    if self._pending:
                        await self._settle()
                    await self._idle()
                except Unreachable as problem:
                    self._refuse(problem)
                    if len(self._registers) > 1:
                        self._registers.append(self._registers.pop(0))
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
            draft = self._draft = self._draft or Draft(self.document)
            answers = [request.judge(draft) for request in requests]
            if draft.changed:
                try:
                    settled = await self._swap(draft, partial(self._answer, requests, answers, draft.leases))
                    if not settled:
                        lost += 1
                        await self._back_off(lost, requests)
                except LimitExceeded as problem:
                    self._draft, together = None, False
                    if len(requests) == 1:
                        self._answer(requests, [problem], {})
                    continue
            elif settled := await self._is_fresh(requests):
                self._answer(requests, answers, draft.leases)

    async def _is_fresh(self, requests: Sequence[SwapRequest]) -> bool:
        """What is known was true at some moment since they all were asked."""
        if all(request.looks < self._looks for request in requests):
            return True
        document = self.document
        await self._look()
        return document is self.document

    def _answer(self, requests: Sequence[SwapRequest], answers: Sequence[object], leases: dict[int, StoredLease]) -> None:
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

    def _beget(self, request: SwapRequest, leases: dict[int, StoredLease] | None) -> None:
        """A lease is born once: if that may have happened unheard, it is there or it is gone (None: nobody knows)."""
        for id in request.births:
            if leases is None or id in leases:
                self.unborn.pop(id, None)

    def _refuse(self, problem: Unreachable) -> None:
        """The register does not answer: nobody's wish is repeated unasked."""
        pending, self._pending = self._pending, []
        for request in pending:
            if problem.applied is not False:
                self._beget(request, None)
            if not request.answer.done():
                request.answer.set_exception(problem)

    async def _back_off(self, lost: int, requests: Sequence[SwapRequest]) -> None:
        now = self._node.now()
        waited_s = now - min(request.asked_at for request in requests)
        if lost > 1 and waited_s > self._timeout_s:
            problem = f"{lost} swaps were lost to others"
            raise Unreachable(self._register.endpoint, problem, waited_s, applied=False)
        longest_s = min(self._swap_s * 2 ** min(lost, DOUBLINGS_MAX), BACKOFF_MAX_S)
        await sleep(self._node, longest_s * self._node.jitter())
        # The others have gone on meanwhile, and a swap of what we knew before could only be lost.
        await self._look()

    # ---- looking and swapping

    async def _idle(self) -> None:
        """Wait for a wish, or for the time to look again."""
        wait_s = self._look_at - self._node.now()
        if wait_s > 0 and (self._pending or await self._bell.wait(wait_s)):
            return
        before = self.document.revision
        # Set first: a look that fails must not be repeated at once.
        self._plan(before)
        await self._look()
        self._plan(before)
        await self._keep_vigil()

    def _plan(self, before: int) -> None:
        """When to look next."""
        if self._register.waits:
            self._interval_s = self._slow_s
        elif self.document.revision != before:
            self._interval_s = self._quick_s
        else:
            self._interval_s = min(max(self._interval_s, self._quick_s) * SLOWER, self._slow_s)
        self._looked_at = self._node.now()
        self._look_at = self._looked_at + self._interval_s * (0.75 + 0.25 * self._node.jitter())

    def _set_pace(self, leases: Mapping[int, StoredLease]) -> None:
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
        leases = self.document.leases
        document = draft.finish(self._node.token())
        state = encode(document)
        self._looks += 1
        self._draft = None
        asked_at = self._node.now()
        answer = await self._register.swap(state, self._token)
        self._swap_s = self._node.now() - asked_at
        if answer is None:
            version = await self._register.read()
            if version is None:
                raise self.reset()
            answer = (*version, False)
        now, token, won = answer
        if won or now == state:
            self._state, self._token, self._draft = state, token, draft
            answer_all()
            self._show(document)
            for id in leases.keys() - document.leases.keys():
                await self.drop_beat(id)
            return True
        self._take((now, token))
        return False

    def _take(self, version: Version | None) -> None:
        """This is the state now."""
        if version is None:
            raise self.reset()
        state, token = version
        if state == self._state:
            return  # And its token stays the same object, by which `_await_changes` knows it.
        document = decode(state)
        if document.instance != self.instance or document.serial < self.document.serial:
            raise self.reset()
        self._state, self._token, self._draft = state, token, None
        self._show(document)

    def _show(self, document: Document) -> None:
        if len(document.leases) != len(self.document.leases):
            self._set_pace(document.leases)
        self.document = document
        for watch in tuple(self.watches):
            watch.show(document)

    async def _await_changes(self) -> None:
        """Where the backend can wait, look soon after a change; but not at every one of a burst."""
        with suppress(asyncio.CancelledError):
            while self.ended is None:
                token = self._token
                try:
                    await self._register.wait(token)
                except RdzvError:
                    await sleep(self._node, SLOW_S[2])
                    continue
                if token is self._token:
                    self._look_at = min(self._look_at, self._looked_at + self._quick_s)
                    self._bell.ring()
                await sleep(self._node, self._quick_s)

    # ---- leases

    async def _keep_vigil(self) -> None:
        """End the leases whose beats we have seen unchanged for their time."""
        leases = self.document.leases
        beats: dict[int, int] = {}
        if self._register.beats:
            if self._node.now() - self._beats_at < self._vigil_s:
                return
            ids = [id for id, lease in leases.items() if lease.beats == ELSEWHERE]
            if ids:
                beats = dict(zip(ids, await self._register.read_beats([str(id) for id in ids]), strict=True))
            self._beats_at = self._node.now()
        for id in self._vigil.look(leases, beats, self._node.now()):
            request = self.want(partial(Draft.end, id=id, beats=leases[id].beats))
            request.answer.add_done_callback(_ignore)

    async def drop_beat(self, lease: int) -> None:
        """The counter of an ended lease is not needed any more."""
        if self._register.beats:
            with suppress(Unreachable):  # Then a few bytes stay behind.
                await self._register.drop_beat(str(lease))

    # ---- the end

    def reset(self) -> EngineReset:
        """The error for an instance that is no more."""
        return EngineReset(f"instance {self.instance} at {self.place} is gone")

    def _end(self, problem: Exception) -> None:
        """For good: every call and watch fails from now on."""
        if self.ended is not None:
            return
        self.ended = problem
        if SwapLoop._hubs.get(self._key) is self:
            del SwapLoop._hubs[self._key]
        pending, self._pending = self._pending, []
        for request in pending:
            if not request.answer.done():
                request.answer.set_exception(problem)
        for watch in tuple(self.watches):
            watch.end(problem)


def _ignore(answer: asyncio.Future[Any]) -> None:
    """Nobody waits for it; the next look shows whether it happened."""
    if not answer.cancelled():
        answer.exception()
