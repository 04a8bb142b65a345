"""The round's key-value store, for trainers and agents.

A store belongs to one round: its keys are named by the round's rank table and are deleted by the seal of the next.
Every write compares the writer's own entry in that table, so a late writer of an old round is refused (RoundOver) and
never reaches the new one. It compares the writer's own key too: the entry stands until the next seal, but an evicted
member must not write (G8, seed 55). Waits end when the round breaks.

A write whose outcome is unknown is not repeated blindly. Beside its value every write puts a mark with the operation's
id and result, so that reading the mark tells whether the write took effect. An id inside the value would say nothing
once another member has overwritten it (seed 239: an `add` counted twice). There is one mark per operation that a member
has under way, so their number stays small. The mark also fences the member's own attempts: one that was given up and
arrives late is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec

from ..engines.port import Delete, EngineReset, Gap, Get, Item, LeaseGone, List, Modified, Operation, Outcome, Put
from ..errors import LimitExceeded, RoundOver, StoreTimeout, Unreachable
from ..system.node import Node
from ..system.timers import Wakeup, sleep
from .presence import Presence

T = TypeVar("T")

KEY_MAX = 1024
VALUE_MAX = 1024 * 1024
TIMEOUT_S = 300.0


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """An operation that took effect, and its result."""

    operation: str
    result: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Mark).decode


class AsyncStore:
    """The key-value store of one round. Values are bytes; text is encoded as UTF-8."""

    def __init__(self, presence: Presence, table: str, round_number: int, node: Node) -> None:
        self._presence = presence
        self._table = table
        self._round = round_number
        self._node = node
        prefix = presence.keys.kv(table)
        self._values = prefix + "value/"
        self._marks = prefix + "mark/"
        self._mark_slots: list[int] = []
        self._mark_slots_made = 0
        self._marked: dict[str, int] = {}
        """Revision of each of the member's own marks, as far as it is known."""
        self._bells: set[Wakeup] = set()
        self.timeout_s = TIMEOUT_S
        self.over = ""
        """Why the round is over; empty while it stands."""

    # ---- writing

    async def set(self, key: str, value: bytes | str) -> None:
        """Write a key."""
        await self.multi_set({key: value})

    async def multi_set(self, values: Mapping[str, bytes | str]) -> None:
        """Write several keys in one transaction: a reader that sees one of them sees all. Limited by the engine."""
        room = self._presence.session.writes_max - 1  # One is for the mark.
        if len(values) > room:
            problem = f"multi_set: {len(values)} keys, but this engine writes at most {room} at once; use several calls"
            raise ValueError(problem)
        data = {self._key(key): _bytes(key, value) for key, value in values.items()}
        if data:
            await self._once(lambda _: (b"", [self._put(key, value) for key, value in data.items()]))

    async def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and return the sum. Exactly once, even if an answer was lost."""

        def more(old: bytes | None) -> bytes:
            try:
                return b"%d" % (int(old or b"0") + amount)
            except ValueError:
                problem = f"add: the value of {key!r} is not a whole number"
                raise ValueError(problem) from None

        return int(await self._change(key, more))

    async def append(self, key: str, value: bytes | str) -> None:
        """Append bytes to a value, which starts empty."""
        data = _bytes(key, value)
        await self._change(key, lambda old: (old or b"") + data)

    async def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Write if the value is `expected` (empty: if there is none); return the value there is afterwards."""
        wanted, new = _bytes(key, expected), _bytes(key, desired)
        return await self._change(key, lambda old: new if (old or b"") == wanted else old or b"")

    async def delete(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        full = self._key(key)
        return bool(await self._once(lambda old: (b"1" if old else b"", [Delete(full)]), full))

    # ---- reading

    async def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Return the value, and wait for it if it is not set yet."""
        return (await self.multi_get([key], timeout_s))[0]

    async def multi_get(self, keys: Sequence[str], timeout_s: float | None = None) -> list[bytes]:
        """Return the values, and wait for those that are not set yet."""
        found = await self._await(keys, timeout_s)
        return [found[self._key(key)].value for key in keys]

    async def wait(self, keys: Iterable[str], timeout_s: float | None = None) -> None:
        """Wait until all of the keys are set."""
        await self._await(list(keys), timeout_s)

    async def check(self, keys: Iterable[str]) -> bool:
        """Return whether all of the keys are set now."""
        outcome = await self._read([Get(self._key(key)) for key in keys])
        return all(outcome.reads)

    async def num_keys(self) -> int:
        """Return how many keys this round has."""
        return len((await self._read([List(self._values)])).reads[0])

    def set_timeout(self, timeout_s: float) -> None:
        """Set how long later calls wait if they do not say."""
        self.timeout_s = timeout_s

    # ---- the round's end

    def end(self, reason: str) -> None:
        """End the round: every wait ends, and every later call is refused."""
        if not self.over:
            self.over = reason or "no reason was given"
            for bell in self._bells:
                bell.ring()

    def moved_to(self, presence: Presence) -> None:
        """Go on, empty, on an engine that came back."""
        self._presence = presence
        for bell in self._bells:
            bell.ring()

    def _check(self) -> None:
        if self.over:
            raise RoundOver(self._round, self.over)

    # ---- how

    def _key(self, key: str) -> str:
        size = len(key.encode())
        if size > KEY_MAX:
            raise LimitExceeded(f"store key {key[:40]!r}...", size, KEY_MAX)
        # A key that ends with '/' would be a prefix to the engine.
        return f"{self._values}{key}="

    async def _until_sure(self, attempt: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T:
        """Try until the engine answers, the round ends or the time is up. `attempt` must be safe to repeat."""
        limit_s = self.timeout_s if limit_s is None else limit_s
        deadline = self._node.now() + limit_s
        while True:
            self._check()
            try:
                return await attempt()
            except (Unreachable, EngineReset) as error:
                if self._node.now() >= deadline:
                    if isinstance(error, Unreachable):
                        raise
                    raise Unreachable("of this run", "it was restarted", limit_s) from error
                await sleep(self._node, 0.1 + 0.2 * self._node.jitter())

    async def _txn(self, compares: Sequence[Modified], writes: list[Operation], otherwise: list[Operation]) -> Outcome:
        """Transact, guarded by the own entry (gone with the next seal) and the own key (gone with an eviction)."""
        presence = self._presence
        entry, own = presence.entry_guard(self._table), presence.own_guard
        reads = [Get(entry.key), Get(own.key), *otherwise]
        try:
            outcome = await presence.session.txn([entry, own, *compares], writes, reads)
        except LeaseGone:
            raise RoundOver(self._round, "the run's records have expired") from None
        if not outcome.succeeded:
            for guard, item in ((entry, outcome.item(0)), (own, outcome.item(1))):
                if item is None or item.created != guard.revision:
                    why = self.over or "a later round has been sealed, or this member was evicted"
                    raise RoundOver(self._round, why)
        return outcome

    async def _read(self, reads: list[Operation], limit_s: float | None = None) -> Outcome:
        return await self._until_sure(lambda: self._presence.session.txn(then=reads), limit_s)

    def _put(self, key: str, value: bytes) -> Put:
        return Put(key, value, self._presence.run_lease)

    async def _change(self, key: str, make: Callable[[bytes | None], bytes]) -> bytes:
        """Make a new value of the old one; again if another writer was quicker."""
        full = self._key(key)

        def plan(item: Item | None) -> tuple[bytes, list[Operation]]:
            old = None if item is None else item.value
            new = _bytes(key, make(old))
            return new, [] if new == (old or b"") else [self._put(full, new)]

        return await self._once(plan, full)

    async def _once(self, plan: Callable[[Item | None], tuple[bytes, list[Operation]]], key: str = "") -> bytes:
        """Carry out what `plan` makes of the key's present state, exactly once; without a key, whatever its state."""
        operation = self._node.token()
        if not self._mark_slots:
            self._mark_slots_made += 1
            self._mark_slots.append(self._mark_slots_made)
        slot = self._mark_slots.pop()
        seen: Outcome | None = None
        doubt = bool(key)

        async def attempt() -> bytes:
            nonlocal seen, doubt
            mark = f"{self._marks}{self._presence.id}/{slot}"
            reads: list[Operation] = [Get(mark), *([Get(key)] if key else [])]
            if doubt and seen is None:
                seen = await self._presence.session.txn(then=reads)
            while True:
                item: Item | None = None
                if seen is not None:
                    marked, item = seen.item(0), seen.item(1) if key else None
                    self._marked[mark] = marked.modified if marked is not None else 0
                    if marked is not None and _decode(marked.value).operation == operation:
                        return _decode(marked.value).result
                result, writes = plan(item)
                if not writes:
                    return result
                # The mark's revision fences the member's own attempts: one that was given up but arrives late is
                # refused.
                compares = [Modified(mark, self._marked.get(mark, 0))]
                compares += [Modified(key, item.modified if item else 0)] if key else []
                seen, doubt = None, True
                marking = self._put(mark, _encode(_Mark(operation, result)))
                outcome = await self._txn(compares, [*writes, marking], reads)
                if outcome.succeeded:
                    self._marked[mark] = outcome.revision
                    return result
                seen = msgspec.structs.replace(outcome, reads=outcome.reads[2:])

        try:
            return await self._until_sure(attempt)
        finally:
            self._mark_slots.append(slot)

    async def _await(self, keys: Sequence[str], timeout_s: float | None) -> dict[str, Item]:
        """Return all of the keys, and watch for those that are not there yet."""
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        deadline = self._node.now() + limit_s
        found: dict[str, Item] = {}
        while True:
            missing = [key for key in dict.fromkeys(keys) if self._key(key) not in found]
            outcome = await self._read([Get(self._key(key)) for key in missing], deadline - self._node.now())
            for items in outcome.reads:
                found.update({item.key: item for item in items})
            missing = [key for key in missing if self._key(key) not in found]
            if not missing:
                return found
            self._check()
            left_s = deadline - self._node.now()
            if left_s <= 0:
                raise StoreTimeout(missing, limit_s, self._round)
            await self._listen([self._key(key) for key in missing], outcome.revision, left_s)

    async def _listen(self, targets: list[str], since: int, timeout_s: float) -> None:
        """Wait until one of them changes, the round ends, the engine is another, or the time is up."""
        bell = Wakeup(self._node)
        self._bells.add(bell)
        watch = self._presence.session.watch(targets, since)

        async def pump() -> None:
            try:
                async for _ in watch:
                    break
            except (Gap, EngineReset, Unreachable):
                pass  # Reading again is what the caller does anyway.
            bell.ring()

        listening = asyncio.get_running_loop().create_task(pump(), name="rdzv store wait")
        try:
            await bell.wait(timeout_s)
        finally:
            self._bells.discard(bell)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await watch.aclose()


def _bytes(key: str, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > VALUE_MAX:
        raise LimitExceeded(f"store value of {key[:40]!r}", len(data), VALUE_MAX)
    return data
