"""The round's key-value store, for trainers and agents.

A store belongs to one round: its keys are named by the round's rank table and are deleted by the seal of the next. Waits end
when the round breaks. `store_calls.py` knows what each call needs of the engine. Here a call is carried out: by a task, which
tries until the engine answers and waits for keys that are missing, or at once by the thread that made it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from ..config import arguments
from ..engines.port import EngineReset, Gap, LeaseGone, NotNow, TxnNow
from ..errors import StoreTimeout, Unreachable
from ..system.node import Node
from ..system.timers import OutOfTime, TimeLimit, Wakeup, sleep
from .presence import Presence
from .store_calls import AwaitedRead, Missing, Steps, StoreCalls, StoreOperation

T = TypeVar("T")

LAST_S = 1.0
"""Time of the last attempt of a call whose time is over, so that a call with no time to wait can be answered."""
WATCHED_MAX = 32
"""Keys that one wait watches; once these have come, all that is missing is read again. Engines limit what a run may watch, and
hundreds of members may wait for hundreds of keys each."""
WAITS_MAX = 128
"""Waits of one member that watch. The others read again every `PAUSE_S`, as do those whose watch the engine ends."""
PAUSE_S = 1.0


class AsyncStore:
    """The key-value store of one round. Values are bytes; text is encoded as UTF-8."""

    def __init__(self, presence: Presence, table: str, round_number: int, node: Node) -> None:
        self.calls = StoreCalls(presence, table, round_number, node)
        self._node = node
        self._bells: set[Wakeup] = set()

    @property
    def timeout_s(self) -> float:
        """How long a call waits if it does not say."""
        return self.calls.timeout_s

    @property
    def over(self) -> str:
        """Why the round is over; empty while it stands."""
        return self.calls.over

    # ---- writing

    async def set(self, key: str, value: bytes | str) -> None:
        """Write a key."""
        await self.finish(self.calls.set(key, value))

    async def multi_set(self, values: Mapping[str, bytes | str]) -> None:
        """Write several keys in one transaction: a reader that sees one of them sees all. Limited by the engine."""
        await self.finish(self.calls.multi_set(values))

    async def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and return the sum. Exactly once, even if an answer was lost."""
        return await self.finish(self.calls.add(key, amount))

    async def append(self, key: str, value: bytes | str) -> None:
        """Append bytes to a value, which starts empty."""
        await self.finish(self.calls.append(key, value))

    async def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected` (empty: if there is none); return the value there is afterwards."""
        return await self.finish(self.calls.compare_set(key, expected, desired))

    async def delete(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return await self.finish(self.calls.delete(key))

    # ---- reading

    async def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value, and wait for it if it is not set yet."""
        return await self.finish(self.calls.get(key, timeout_s))

    async def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Return the values, and wait for those that are not set yet."""
        return await self.finish(self.calls.multi_get(keys, timeout_s))

    async def wait(self, keys: Iterable[str], timeout_s: float | None = None) -> None:
        """Wait until all of the keys are set."""
        await self.finish(self.calls.wait(keys, timeout_s))

    async def check(self, keys: Iterable[str]) -> bool:
        """Return whether all of the keys are set now."""
        return await self.finish(self.calls.check(keys))

    async def num_keys(self) -> int:
        """Return how many keys this round has.

        Values of more than 16 MiB in all may be read in several steps. A key that is set or deleted meanwhile may count or not.
        """
        return await self.finish(self.calls.num_keys())

    async def list_keys(self) -> list[str]:
        """Return the names of this round's keys, sorted. Large stores are read in steps, as by `num_keys`."""
        return await self.finish(self.calls.list_keys())

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long later calls wait if they do not say."""
        self.calls.timeout_s = arguments.seconds("set_timeout", timeout_s)

    # ---- the round's end

    def end(self, reason: str) -> None:
        """End the round: every wait ends, and every later call is refused."""
        if not self.calls.over:
            self.calls.over = reason or "no reason was given"
            for bell in self._bells:
                bell.ring()

    def moved_to(self, presence: Presence) -> None:
        """Go on, empty, on an engine that came back."""
        self.calls.presence = presence
        for bell in self._bells:
            bell.ring()

    # ---- carrying out

    def try_now(self, call: StoreOperation[T]) -> T:
        """Carry a call out in the calling thread, which the session's loop must not run in.

        Raises NotNow if that cannot be, or cannot be brought to its end: `finish` goes on from there.
        """
        txn_now: TxnNow | None = getattr(self.calls.presence.session, "txn_now", None)
        if txn_now is None:
            raise NotNow
        self.calls.check_round()
        steps = call.attempt()
        try:
            request = next(steps)
            while True:
                left_s = max(call.deadline - self._node.now(), LAST_S)
                try:
                    outcome = txn_now(request.compares, request.then, request.otherwise, left_s)
                except ValueError as refusal:
                    request = steps.throw(refusal)
                else:
                    request = steps.send(outcome)
        except StopIteration as done:
            result: T = done.value
            return result
        except LeaseGone:
            raise self.calls.lapsed() from None
        except (Missing, Unreachable, EngineReset):
            raise NotNow from None

    async def finish(self, call: StoreOperation[T]) -> T:
        """Carry a call out, or go on with one that `try_now` has begun."""
        try:
            while True:
                try:
                    return await self._until_sure(call)
                except Missing:
                    assert isinstance(call, AwaitedRead), "only such a call waits"
                    await self._listen(call)
        finally:
            call.end()

    async def _until_sure(self, call: StoreOperation[T]) -> T:
        """Try until the engine answers, the round ends or the time is up."""
        while True:
            self.calls.check_round()
            try:
                with TimeLimit(self._node, max(call.deadline - self._node.now(), LAST_S)):
                    return await _drive(call.attempt())
            except OutOfTime:
                raise Unreachable("of this run", "no answer", call.limit_s) from None
            except LeaseGone:
                raise self.calls.lapsed() from None
            except (Unreachable, EngineReset) as error:
                if self._node.now() >= call.deadline:
                    if isinstance(error, Unreachable):
                        raise
                    raise Unreachable("of this run", "it was restarted", call.limit_s) from error
                await sleep(self._node, 0.1 + 0.2 * self._node.jitter())

    async def _listen(self, call: AwaitedRead[T]) -> None:
        """Wait until the keys are there, the round ends, the engine is another, or the time is up.

        The watch shows the values, so that nothing is read again, unless the watch ended without them.
        """
        self.calls.check_round()
        left_s = call.deadline - self._node.now()
        if left_s <= 0:
            raise StoreTimeout(list(call.missing.values()), call.limit_s, self.calls.round_number)
        bell = Wakeup(self._node)
        self._bells.add(bell)
        try:
            if len(self._bells) > WAITS_MAX:
                await bell.wait(min(left_s, PAUSE_S))
            else:
                await self._watch(call, bell, left_s)
        finally:
            self._bells.discard(bell)
        call.known_by = None

    async def _watch(self, call: AwaitedRead[T], bell: Wakeup, left_s: float) -> None:
        """Learn the first of the missing keys from a watch, until all of these are known or the bell rings."""
        assert call.known_by is not None, "it has been read"
        watched = list(call.missing)[:WATCHED_MAX]
        watch = call.known_by.watch(watched, call.since)

        async def pump() -> None:
            try:
                async for batch in watch:
                    call.learn([event.item for event in batch.events if event.item is not None])
                    if call.missing.keys().isdisjoint(watched):
                        break
            except Gap:
                await sleep(self._node, PAUSE_S)  # The engine may have no room for it, or be too busy to keep it.
            except (EngineReset, Unreachable):
                pass  # Reading again is what the caller does then.
            bell.ring()

        listening = asyncio.get_running_loop().create_task(pump(), name="rdzv store wait")
        try:
            await bell.wait(left_s)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await watch.aclose()


async def _drive(steps: Steps[T]) -> T:
    """Send each step to its engine."""
    try:
        request = next(steps)
        while True:
            try:
                outcome = await request.session.txn(request.compares, request.then, request.otherwise)
            except ValueError as refusal:
                request = steps.throw(refusal)
            else:
                request = steps.send(outcome)
    except StopIteration as done:
        result: T = done.value
        return result
