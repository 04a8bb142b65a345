"""The calls of a round's store as steps: which transactions each needs, and what it makes of their outcomes. No I/O.

A call can be carried out by a task of the event loop or by the thread that made it (`store.py`); both take its steps from here.
A step that failed is not the end of a call: its next attempt goes on from what it knows.

Every write compares the writer's own entry in the round's table, so a late writer of an old round is refused (RoundOver) and
never reaches the new one. It compares the writer's own key too: the entry stands until the next seal, but an evicted
member must not write (G8, seed 55).

A write whose outcome is unknown is not repeated blindly. Beside its value every write puts a mark with the operation's
id and result, so that reading the mark tells whether the write took effect. An id inside the value would say nothing
once another member has overwritten it (seed 239: an `add` counted twice), and a `set` that is repeated would undo what another
member wrote meanwhile (H16). There is one mark per operation that a member has under way, so their number stays small. The mark
also fences the member's own attempts: one that was given up and arrives late is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import count
from typing import Generic, TypeAlias, TypeVar

import msgspec

from ..config import arguments
from ..engines.port import Compare, Delete, Get, Item, List, Modified, Operation, Outcome, Put, Session
from ..errors import LimitExceeded, RoundOver
from ..system.node import Node
from .presence import Presence

T = TypeVar("T")

KEY_MAX = 1024
VALUE_MAX = 1024 * 1024
TIMEOUT_S = 300.0
PAGE = 8
"""Keys of the first page of many. One answer can hold them on every engine, whatever their values."""


class StoreRequest(msgspec.Struct, frozen=True, gc=False):
    """A transaction to be sent to this session."""

    session: Session
    compares: tuple[Compare, ...] = ()
    then: tuple[Operation, ...] = ()
    otherwise: tuple[Operation, ...] = ()


Steps: TypeAlias = Generator[StoreRequest, Outcome, T]
Plan: TypeAlias = Callable[[Item | None], tuple[bytes, list[Operation]]]
"""Makes of a key's present state the result of an operation, and what it writes."""


class _Mark(msgspec.Struct, frozen=True, array_like=True):
    """An operation that took effect, and its result."""

    operation: str
    result: bytes


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Mark).decode


class Missing(Exception):
    """Keys that a call waits for are not set yet."""


class StoreOperation(ABC, Generic[T]):
    """One call, made by `StoreCalls`."""

    def __init__(self, name: str, calls: StoreCalls, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self.deadline = calls.node.now() + limit_s
        self._calls = calls

    @abstractmethod
    def attempt(self) -> Steps[T]:
        """Make one attempt. It may be broken off at any step, and made again. A step that is refused raises ValueError."""

    def end(self) -> None:
        """Release what the call holds. It is not attempted any more."""


class Read(StoreOperation[T]):
    """A call that reads once."""

    def __init__(self, name: str, calls: StoreCalls, reads: Sequence[Operation], pick: Callable[[Outcome], T]) -> None:
        super().__init__(name, calls, calls.timeout_s)
        self._reads = tuple(reads)
        self._pick = pick

    def attempt(self) -> Steps[T]:
        return self._pick((yield StoreRequest(self._calls.presence.session, (), self._reads)))


class KeyNames(StoreOperation[T]):
    """A call that reads the names of all keys: at once, or in pages if the engine refuses to send so many values at once.

    The pages may be of different revisions. A key that is there all the time is read exactly once, and no key twice.
    """

    def __init__(self, name: str, calls: StoreCalls, prefix: str, pick: Callable[[list[str]], T]) -> None:
        super().__init__(name, calls, calls.timeout_s)
        self._prefix = prefix
        self._pick = pick

    def attempt(self) -> Steps[T]:
        session, limit, after = self._calls.presence.session, 0, ""
        names: list[str] = []
        while True:
            self._calls.check_round()  # A round that ends meanwhile takes its keys with it.
            try:
                outcome = yield StoreRequest(session, (), (List(self._prefix, limit=limit, after=after),))
            except ValueError:
                if limit == 1:
                    raise
                limit = limit // 2 or PAGE
                continue
            page = outcome.reads[0]
            names += [item.key[len(self._prefix) : -1] for item in page]
            if not limit or len(page) < limit:
                return self._pick(names)
            limit, after = 2 * limit, page[-1].key


class AwaitedRead(StoreOperation[T]):
    """A call that reads keys and waits for those that are missing."""

    def __init__(
        self, name: str, calls: StoreCalls, keys: Sequence[str], timeout_s: float | None, pick: Callable[[list[bytes]], T]
    ) -> None:
        super().__init__(name, calls, calls.timeout_s if timeout_s is None else arguments.seconds(name, timeout_s))
        self._full = [calls.key(key) for key in keys]
        self._pick = pick
        self._found: dict[str, bytes] = {}
        self.missing = dict(zip(self._full, keys, strict=True))
        """The keys that have not been seen, with their names to the caller."""
        self.known_by: Session | None = None
        """The session that has shown them to be missing up to revision `since`; None: they must be read."""
        self.since = 0

    def attempt(self) -> Steps[T]:
        """Read what is missing, unless that is known. Raise Missing if anything is."""
        session = self._calls.presence.session
        if self.missing and self.known_by is not session:  # Revisions of two engines must not be compared.
            outcome = yield StoreRequest(session, (), tuple([Get(key) for key in self.missing]))
            for items in outcome.reads:
                self.learn(items)
            self.known_by, self.since = session, outcome.revision
        if self.missing:
            raise Missing
        return self._pick([self._found[key] for key in self._full])

    def learn(self, items: Iterable[Item]) -> None:
        """Note keys that are there, or were."""
        for item in items:
            if self.missing.pop(item.key, None) is not None:
                self._found[item.key] = item.value


class Write(StoreOperation[T]):
    """A call that carries out what its plan makes of a key's present state, exactly once; without a key, whatever its state."""

    def __init__(self, name: str, calls: StoreCalls, plan: Plan, key: str, pick: Callable[[bytes], T]) -> None:
        super().__init__(name, calls, calls.timeout_s)
        self._plan = plan
        self._key = key
        self._pick = pick
        self._operation = calls.node.token()
        self._slot = calls.take_slot()
        self._seen: Outcome | None = None
        """The mark, and the key, as they were found by the last transaction that was refused."""
        self._doubt = bool(key)
        """They must be read: the operation may have taken effect, or it depends on the key's state."""

    def attempt(self) -> Steps[T]:
        return self._pick((yield from self._attempt()))

    def _attempt(self) -> Steps[bytes]:
        calls, key, presence = self._calls, self._key, self._calls.presence
        mark = f"{calls.marks}{presence.id}/{self._slot}"
        reads: tuple[Operation, ...] = (Get(mark), Get(key)) if key else (Get(mark),)
        if self._doubt and self._seen is None:
            self._seen = yield StoreRequest(presence.session, (), reads)
        while True:
            item: Item | None = None
            if self._seen is not None:
                marked, item = self._seen.item(0), self._seen.item(1) if key else None
                calls.marked[mark] = marked.modified if marked is not None else 0
                if marked is not None and _decode(marked.value).operation == self._operation:
                    return _decode(marked.value).result
            result, writes = self._plan(item)
            if not writes:
                return result
            # The mark's revision fences the member's own attempts: one that was given up but arrives late is refused.
            compares: tuple[Compare, ...] = (Modified(mark, calls.marked.get(mark, 0)),)
            if key:
                compares += (Modified(key, item.modified if item else 0),)
            self._seen, self._doubt = None, True
            marking = calls.put(mark, _encode(_Mark(self._operation, result)))
            outcome = yield from calls.guarded(presence, compares, (*writes, marking), reads)
            if outcome.succeeded:
                calls.marked[mark] = outcome.revision
                return result
            self._seen = msgspec.structs.replace(outcome, reads=outcome.reads[2:])

    def end(self) -> None:
        self._calls.slots.append(self._slot)


class StoreCalls:
    """Makes the calls of one round's store, and keeps what they share. Any thread may make calls."""

    def __init__(self, presence: Presence, table: str, round_number: int, node: Node) -> None:
        self.presence = presence
        self.node = node
        self.timeout_s = TIMEOUT_S
        self.over = ""
        """Why the round is over; empty while it stands."""
        self.round_number = round_number
        self._table = table
        prefix = presence.keys.kv(table)
        self._values = prefix + "value/"
        self.marks = prefix + "mark/"
        self.slots: list[int] = []
        """Numbers of marks that no operation uses now."""
        self._slot_numbers = count(1)
        self.marked: dict[str, int] = {}
        """Revision of each of the member's own marks, as far as it is known."""

    # ---- writing

    def set(self, key: str, value: bytes | str) -> Write[None]:
        return self._write("set", {arguments.text("set", "key", key): value})

    def multi_set(self, values: Mapping[str, bytes | str]) -> Write[None]:
        return self._write("multi_set", values)

    def _write(self, name: str, values: Mapping[str, bytes | str]) -> Write[None]:
        given = arguments.pairs(name, values)
        data = {self.key(key): _bounded(key, value) for key, value in given.items()}

        def plan(_: Item | None) -> tuple[bytes, list[Operation]]:
            room = self.presence.session.writes_max - 1  # One is for the mark.
            if len(data) > room:
                problem = f"multi_set: {len(data)} keys, but this engine writes at most {room} at once; use several calls"
                raise ValueError(problem)
            return b"", [self.put(key, value) for key, value in data.items()]

        return Write(name, self, plan, "", _nothing)

    def add(self, key: str, amount: int) -> Write[int]:
        key, increment = arguments.text("add", "key", key), arguments.whole("add", "amount", amount)

        def more(old: bytes | None) -> bytes:
            try:
                return b"%d" % (int(old or b"0") + increment)
            except ValueError:
                problem = f"add: the value of {key!r} is not a whole number"
                raise ValueError(problem) from None

        return self._change("add", key, more, int)

    def append(self, key: str, value: bytes | str) -> Write[None]:
        key, data = arguments.text("append", "key", key), arguments.data("append", key, value)
        return self._change("append", key, lambda old: (old or b"") + data, _nothing)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> Write[bytes]:
        name, key = "compare_set", arguments.text("compare_set", "key", key)
        wanted, new = (_bounded(key, arguments.data(name, key, value)) for value in (expected, desired))
        return self._change(name, key, lambda old: new if (old or b"") == wanted else old or b"", bytes)

    def delete(self, key: str) -> Write[bool]:
        full = self.key(arguments.text("delete", "key", key))
        return Write("delete", self, lambda old: (b"1" if old else b"", [Delete(full)]), full, bool)

    def _change(
        self, name: str, key: str, make: Callable[[bytes | None], bytes], pick: Callable[[bytes], T]
    ) -> Write[T]:
        """Make a new value of the old one; again if another writer was quicker."""
        full = self.key(key)

        def plan(item: Item | None) -> tuple[bytes, list[Operation]]:
            old = None if item is None else item.value
            new = _bounded(key, make(old))
            return new, [] if new == (old or b"") else [self.put(full, new)]

        return Write(name, self, plan, full, pick)

    # ---- reading

    def get(self, key: str, timeout_s: float | None) -> AwaitedRead[bytes]:
        return AwaitedRead("get", self, [arguments.text("get", "key", key)], timeout_s, lambda values: values[0])

    def multi_get(self, keys: Sequence[str], timeout_s: float | None) -> AwaitedRead[list[bytes]]:
        return AwaitedRead("multi_get", self, arguments.keys("multi_get", keys), timeout_s, lambda values: values)

    def wait(self, keys: Iterable[str], timeout_s: float | None) -> AwaitedRead[None]:
        return AwaitedRead("wait", self, arguments.keys("wait", keys), timeout_s, _nothing)

    def check(self, keys: Iterable[str]) -> Read[bool]:
        reads = [Get(self.key(key)) for key in arguments.keys("check", keys)]
        return Read("check", self, reads, lambda outcome: all(outcome.reads))

    def num_keys(self) -> KeyNames[int]:
        return KeyNames("num_keys", self, self._values, len)

    def list_keys(self) -> KeyNames[list[str]]:
        return KeyNames("list_keys", self, self._values, sorted)

    # ---- for the calls

    def check_round(self) -> None:
        """Raise RoundOver if the round is known to be over."""
        if self.over:
            raise RoundOver(self.round_number, self.over)

    def lapsed(self) -> RoundOver:
        """Return the error for a write under the run's lease, which has ended."""
        return RoundOver(self.round_number, "the run's records have expired")

    def take_slot(self) -> int:
        """Return the number of a mark that no other operation uses. Calls may come from several threads at once."""
        try:
            return self.slots.pop()
        except IndexError:
            return next(self._slot_numbers)

    def key(self, key: str) -> str:
        size = len(key.encode())
        if size > KEY_MAX:
            raise LimitExceeded(f"store key {key[:40]!r}...", size, KEY_MAX)
        # A key that ends with '/' would be a prefix to the engine.
        return f"{self._values}{key}="

    def put(self, key: str, value: bytes) -> Put:
        return Put(key, value, self.presence.run_lease)

    def guarded(
        self, presence: Presence, compares: tuple[Compare, ...], writes: tuple[Operation, ...], otherwise: tuple[Operation, ...]
    ) -> Steps[Outcome]:
        """Transact, guarded by the own entry (gone with the next seal) and the own key (gone with an eviction)."""
        entry, own = presence.entry_guard(self._table), presence.own_guard
        reads = (Get(entry.key), Get(own.key), *otherwise)
        outcome = yield StoreRequest(presence.session, (entry, own, *compares), writes, reads)
        if not outcome.succeeded:
            for guard, item in ((entry, outcome.item(0)), (own, outcome.item(1))):
                if item is None or item.created != guard.revision:
                    why = self.over or "a later round has been sealed, or this member was evicted"
                    raise RoundOver(self.round_number, why)
        return outcome


def _nothing(_: object) -> None:
    """Drop what a call has found: its caller only waits for its end."""


def _bounded(key: str, value: bytes) -> bytes:
    if len(value) > VALUE_MAX:
        raise LimitExceeded(f"store value of {key[:40]!r}", len(value), VALUE_MAX)
    return value
