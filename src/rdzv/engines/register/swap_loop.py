"""The queue of one process's requests to one register, and the task that serves it.

The task applies all queued requests to the state it knows and offers the result in one swap. It also reads the
register, feeds the watches and ends silent leases. The members of one process share it, so that 64 of them cost the
register a few swaps.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, ClassVar

from ...errors import LimitExceeded, RdzvError, Unreachable
from ...system.node import Node
from ...system.timers import Wakeup, sleep
from ..port import Batch, EngineReset, Gap, LeaseGone
from ..watch_queue import WatchQueue, only_ends
from .backend import Register, Version
from .document import ELSEWHERE, Document, Draft, StoredLease, decode, encode, read_log
from .expiry import GAP, ExpiryObserver

logger = logging.getLogger("rdzv.register")

QUICK_S = (0.02, 0.002)
"""Time between two reads while much happens: at least, and per lease, since every read fetches everything."""
SLOW_S = (0.5, 0.01, 1.0)
"""Time between two reads while nothing happens: at least, per lease, at most."""
SLOWER = 1.5
"""Factor by which the time until the next read grows after a read that showed no change."""
DOUBLINGS_MAX = 6
BACKOFF_MAX_S = 2.0
"""The pause after a lost swap is random, up to 2 swaps' length, doubled with each loss to 64 swaps' length or this."""
TURN_JITTER = 0.5
"""Random part of the pause before a member's turn to renew, as a share of a swap's length."""

Act = Callable[[Draft], object]
_Key = tuple[asyncio.AbstractEventLoop, str, int, str]


@dataclass(eq=False, slots=True)
class SwapRequest:
    """A change or read of the state, and the future for its answer."""

    act: Act
    answer: asyncio.Future[Any]
    looks: int
    """Reads begun before the request: only a later read may answer it without a swap."""
    asked_at: float
    begins: Iterable[int]
    """Leases that begin with it."""
    renews: bool
    """Whether it only renews a lease, so that it can wait for its turn."""

    def judge(self, draft: Draft) -> object:
        """Apply it to the draft and return its answer, valid if the draft becomes the state."""
        try:
            return self.act(draft)
        except (LeaseGone, ValueError) as problem:
            return problem


class RegisterWatch(WatchQueue):
    """A watch, fed from the log of each new state."""

    def __init__(
        self, targets: Sequence[str], since: int, ends: Sequence[str], *lists: dict[RegisterWatch, None]
    ) -> None:
        """`lists`: those that the watch is in until it ends."""
        super().__init__(since, only_ends(targets, ends))
        self._prefixes = tuple(target for target in targets if target.endswith("/"))
        self._keys = frozenset((*targets, *ends))
        self._lists = lists
        for watches in lists:
            watches[self] = None

    def show(self, document: Document) -> None:
        """Deliver the changes up to the new state."""
        if self.seen < document.forgotten:
            self.end(Gap(f"changes after revision {document.forgotten} are known, not those after {self.seen}"))
            return
        if self.seen >= document.revision:
            return  # `since` may come from a session that has seen more than this one.
        changes = read_log(document, self.seen)
        events = tuple([event for event in changes if event.key in self._keys or event.key.startswith(self._prefixes)])
        self.seen = document.revision
        if events:
            self.deliver(Batch(document.revision, events))

    def ended(self) -> None:
        for watches in self._lists:
            watches.pop(self, None)


class SwapLoop:
    """The shared loop of all sessions of one process, on one event loop, with one engine instance."""

    _loops: ClassVar[dict[_Key, SwapLoop]] = {}

    def __init__(self, key: _Key, register: Register, node: Node, version: Version, timeout_s: float) -> None:
        self.instance = key[-1]
        self.place = register.place
        self.unstored: dict[int, StoredLease] = {}
        """Granted leases that begin with the first put under them."""
        self.presences: set[int] = set()
        """The leases of this process's members."""
        self.ended: Exception | None = None
        self.watches: dict[RegisterWatch, None] = {}
        self._key = key
        self._registers = [register]
        """Connections to the same register. The first is used; after a failure the next one."""
        self._node = node
        self._timeout_s = timeout_s
        self._state, self._token = version
        self.document = decode(self._state)
        self._draft: Draft | None = None
        self._looks = 0
        self._swap_s = 0.0
        """Duration of the last swap."""
        self._read_s = 0.0
        """Duration of the last read."""
        self._interval_s = 0.0
        self._looked_at = self._beats_at = self._look_at = node.now()
        self._expiry = ExpiryObserver()
        self._warned = False
        self._set_pace(self.document.leases)
        self._pending: list[SwapRequest] = []
        self._wakeup = Wakeup(node)
        loop = key[0]
        self._tasks = [loop.create_task(self._serve(), name=f"rdzv register {register.endpoint}")]
        if register.waits:
            self._tasks.append(loop.create_task(self._await_changes(), name=f"rdzv waits for {register.endpoint}"))

    @classmethod
    def enter(cls, register: Register, node: Node, version: Version, timeout_s: float) -> SwapLoop:
        """Return the process's loop for the instance that was read, and add this connection to it."""
        key = (asyncio.get_running_loop(), node.host, node.pid, decode(version[0]).instance)
        loop = cls._loops.get(key)
        if loop is None or loop.place != register.place:
            loop = cls._loops[key] = SwapLoop(key, register, node, version, timeout_s)
        else:
            loop._registers.append(register)
        return loop

    async def leave(self, register: Register) -> None:
        """Remove a session's connection. The last one ends the loop."""
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

    def request(self, act: Act, begins: Iterable[int] = (), *, renews: bool = False) -> SwapRequest:
        """Queue a request."""
        answer = asyncio.get_running_loop().create_future()
        request = SwapRequest(act, answer, self._looks, self._node.now(), begins, renews)
        self._pending.append(request)
        self._wakeup.ring()
        return request

    async def _serve(self) -> None:
        try:
            while self.ended is None:
                try:
                    if self._pending:
                        await self._carry_out()
                    await self._idle()
                except Unreachable as problem:
                    self._fail_pending(problem)
                    if len(self._registers) > 1:
                        self._registers.append(self._registers.pop(0))
        except Exception as problem:  # noqa: BLE001  Waiting sessions must get any error.
            self._end(problem)

    async def _carry_out(self) -> None:
        """Carry out all queued requests, in one swap if there is anything to write."""
        lost, together, done = 0, True, False
        # On a fast register the lease that is due is the oldest one. On a slow one others have waited longer for their turn.
        await self._await_turn(self._read_s)
        while self._pending and not done:
            self._pending = [request for request in self._pending if not request.answer.done()]
            requests = self._pending[:] if together else self._pending[:1]
            if not requests:
                return
            draft = self._draft = self._draft or Draft(self.document)
            answers = [request.judge(draft) for request in requests]
            if draft.changed:
                try:
                    done = await self._swap(draft, partial(self._answer, requests, answers, draft.leases))
                    if not done:
                        lost += 1
                        await self._back_off(lost, requests)
                        if not self._register.beats:
                            # A member of a busy register is never idle for long, and must notice dead ones, too.
                            await self._end_silent_leases()
                except LimitExceeded as problem:  # One by one from now on, to find the request that is too large.
                    self._draft, together = None, False
                    if len(requests) == 1:
                        self._answer(requests, [problem], {})
                    continue
            elif done := await self._is_fresh(requests):
                self._answer(requests, answers, draft.leases)

    async def _is_fresh(self, requests: Sequence[SwapRequest]) -> bool:
        """Whether the known state was the register's at some moment after all requests were made."""
        if all(request.looks < self._looks for request in requests):
            return True
        document = self.document
        await self._look()
        return document is self.document

    def _answer(self, requests: Sequence[SwapRequest], answers: Sequence[object], leases: dict[int, StoredLease]) -> None:
        # Removed before the futures are set: a session that is answered may send its next request at once.
        self._pending = [request for request in self._pending if request not in requests]
        for request, answer in zip(requests, answers, strict=True):
            self._mark_begun(request, leases)
            if request.answer.done():
                continue
            if isinstance(answer, Exception):
                request.answer.set_exception(answer)
            else:
                request.answer.set_result(answer)

    def _mark_begun(self, request: SwapRequest, leases: dict[int, StoredLease] | None) -> None:
        """Note the leases that began with the request. None: the outcome is unknown.

        A lease begins at most once, since its id is used for one presence only. After an unknown outcome it exists or
        is gone.
        """
        for id in request.begins:
            if leases is None or id in leases:
                self.unstored.pop(id, None)

    def _fail_pending(self, problem: Exception) -> None:
        """Fail all queued requests: only the callers may decide to repeat."""
        pending, self._pending = self._pending, []
        for request in pending:
            if not isinstance(problem, Unreachable) or problem.applied is not False:
                self._mark_begun(request, None)
            if not request.answer.done():
                request.answer.set_exception(problem)

    async def _back_off(self, lost: int, requests: Sequence[SwapRequest]) -> None:
        waited_s = self._node.now() - min(request.asked_at for request in requests)
        renewals = all(request.renews for request in requests)
        if lost > 1 and waited_s > max(self._timeout_s, self._expiry.turns_s if renewals else 0.0):
            raise Unreachable(self._register.endpoint, f"{lost} swaps were lost to others", waited_s, applied=False)
        turn = self._turn()
        # At once if it is this process's turn, for whatever it wants. A renewal goes at once, too, if all others could have
        # had their turns: dead members and bad luck must not keep it waiting. The lost swap has just shown the newest state.
        if turn == 0 or (turn and renewals and waited_s > len(self.document.leases) * self._swap_s):
            return
        if turn and renewals:
            await self._await_turn(self._swap_s)
            return
        longest_s = min(self._swap_s * 2 ** min(lost, DOUBLINGS_MAX), BACKOFF_MAX_S)
        if turn and any(request.renews for request in requests):
            longest_s = min(longest_s, 2 * turn * self._swap_s)  # On average until its turn.
        await sleep(self._node, longest_s * self._node.jitter())
        # Others have swapped during the pause, so a swap from the old state would be lost. An unlucky member starved by it
        # until its lease ended (register seeds 52 and 108).
        await self._look()

    def _turn(self) -> int | None:
        """Return how many members' leases have waited longer for a renewal than this process's. None: it has none.

        Random pauses alone let some members wait many times longer than others. On a register that takes half a second
        per swap, their leases ended (register seeds 950558 and 1550166).
        """
        leases = self.document.leases
        first = next((id for id in leases if id in self.presences), None)
        if first is None or leases[first].beats == ELSEWHERE:
            return None
        earlier = takewhile(partial(operator.ne, first), leases)
        # The run's own lease lasts for hours and is seldom renewed: it is in no hurry.
        return sum(leases[id].ttl_s <= leases[first].ttl_s for id in earlier)

    async def _await_turn(self, swap_s: float) -> None:
        """Give each earlier lease the time of one swap, and read. Any request but a renewal ends the wait.

        The last read comes after the swap of the member that is one turn earlier: that member's own read was a swap's time
        before. The wait is at most a third of the time after which others end the lease (`expiry.TURNS`). Meanwhile the
        register is read as usual: watches must be fed, and a register that became faster shortens the wait.
        """
        until = math.inf
        while all(request.renews for request in self._pending) and (turn := self._turn()):
            now = self._node.now()
            until = min(until, now + (turn - 1 + TURN_JITTER * self._node.jitter()) * swap_s)
            if self._look_at > now and until > now:
                await self._wakeup.wait(min(until, self._look_at) - now)
                continue
            await self._poll()
            if until <= now:
                return
            swap_s = self._read_s

    # ---- reading and swapping

    async def _idle(self) -> None:
        """Wait for a request, or for the time of the next read."""
        wait_s = self._look_at - self._node.now()
        if wait_s > 0 and (self._pending or await self._wakeup.wait(wait_s)):
            return
        await self._poll()

    async def _poll(self) -> None:
        """Read, feed the watches, and end silent leases."""
        before = self.document.revision
        # Planned before, too: a read that fails must not be repeated at once.
        self._plan(before)
        await self._look()
        self._plan(before)
        await self._end_silent_leases()

    def _plan(self, before: int) -> None:
        """Set the time of the next read."""
        if self._register.waits:
            self._interval_s = self._slow_s
        elif self.document.revision != before:
            self._interval_s = self._quick_s
        else:
            self._interval_s = min(max(self._interval_s, self._quick_s) * SLOWER, self._slow_s)
        self._looked_at = self._node.now()
        self._look_at = self._looked_at + self._interval_s * (0.75 + 0.25 * self._node.jitter())

    def _set_pace(self, leases: Mapping[int, StoredLease]) -> None:
        """Set how often to read: often enough to tell silence of the shortest lease from a pause of this process."""
        self._expiry_s = min((lease.ttl_s for lease in leases.values()), default=3600.0) * GAP / 2
        self._quick_s = max(QUICK_S[0], QUICK_S[1] * len(leases))
        self._slow_s = min(max(SLOW_S[0], SLOW_S[1] * len(leases)), SLOW_S[2], self._expiry_s)

    async def _look(self) -> None:
        self._looks += 1
        asked_at = self._node.now()
        version = await self._register.read()
        self._read_s = self._node.now() - asked_at
        self._take(version)

    async def _swap(self, draft: Draft, answer_all: Callable[[], None]) -> bool:
        """Offer the draft, and return whether it won. If not, the other writer's state is known afterwards.

        Requests are answered before the watches deliver the same swap's other changes: an answer must not be older than
        what its session has seen. In the other order a member saw its round broken, then took that round from the older
        answer, and nothing told it again (register seed 25).
        """
        leases = self.document.leases
        size_max = draft.size_max
        document = draft.finish(self._node.token())
        state = encode(document, size_max)
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
            for id in (leases.keys() - document.leases.keys()) if self._register.beats else ():
                with suppress(Unreachable):  # A few bytes stay behind then.
                    await self._register.drop_beat(str(id))
            return True
        self._take((now, token))
        return False

    def _take(self, version: Version | None) -> None:
        """Take a state that was read."""
        if version is None:
            raise self.reset()
        state, token = version
        if state == self._state:
            return  # Its token stays the same object, which `_await_changes` compares.
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
        """Read soon after the backend reports a change, but not after every change of a burst."""
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
                    self._wakeup.ring()
                await sleep(self._node, self._quick_s)

    # ---- leases

    async def _end_silent_leases(self) -> None:
        """End the leases that this process has seen silent for their time."""
        leases = self.document.leases
        beats: dict[int, int] = {}
        if self._register.beats:
            if self._node.now() - self._beats_at < self._expiry_s:
                return
            ids = [id for id, lease in leases.items() if lease.beats == ELSEWHERE]
            if ids:
                beats = dict(zip(ids, await self._register.read_beats([str(id) for id in ids]), strict=True))
            self._beats_at = self._node.now()
        for id in self._expiry.look(leases, beats, self._node.now(), max(self._read_s, self._swap_s)):
            request = self.request(partial(Draft.end, id=id, beats=leases[id].beats))
            # Retrieved and ignored: the next read shows whether it happened.
            request.answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        self._warn_if_slow()

    def _warn_if_slow(self) -> None:
        """Log once that leases last longer here than they were set to."""
        slow = [lease.ttl_s for lease in self.document.leases.values() if lease.beats != ELSEWHERE]
        if self._warned or min(slow, default=math.inf) >= self._expiry.steady_s:
            return
        self._warned = True
        logger.warning(
            "%s needs %.2g s for a swap, and %d leases are renewed in it, one swap at a time. A lease of %g s therefore ends "
            "after %.3g s without a renewal. Raise `lease`, or use a faster register or one with counters for renewals",
            *(self.place, max(self._read_s, self._swap_s), len(slow), min(slow), self._expiry.steady_s),
        )

    # ---- the end

    def reset(self) -> EngineReset:
        return EngineReset(f"instance {self.instance} at {self.place} is gone")

    def _end(self, problem: Exception) -> None:
        """End the loop: every call and watch fails from now on."""
        if self.ended is not None:
            return
        self.ended = problem
        if SwapLoop._loops.get(self._key) is self:
            del SwapLoop._loops[self._key]
        self._fail_pending(problem)
        for watch in tuple(self.watches):
            watch.end(problem)
