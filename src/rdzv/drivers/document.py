"""What a register holds: the whole engine as one value, and how a change of it is prepared.

A compare-and-set register can do one thing: replace its value if it is still the one that was read. So the value is
everything: the keys, the leases, and a log of the latest changes, from which watches are told. Whoever wants to write loads
the reference engine from the value, lets it apply the transactions, and offers the result.

The value may come from anybody: it is measured before it is read, decoded strictly into the types below, and never
executed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from ..errors import Incompatible, LimitExceeded
from .base import Batch, Compare, Event, Item, LeaseGone, Operation, Outcome, Put
from .engine import Engine

MAGIC = b"rdzv register 1\n"
"""How every state begins, so that nothing else is taken for one."""
STATE_MAX = 1 << 20
"""Bytes. It goes over the wire twice with every write, so this is far above what can be fast: some 200 members."""
LOG_EVENTS_MAX = 256
LOG_BYTES_MAX = 64 * 1024
"""How much of the past is kept for watches: a burst of joins between two looks. Who is further behind lists again."""
ELSEWHERE = -1
"""Instead of a count of beats: the lease is renewed outside the document, in a key of its own."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Foreign = {b"\x80": "a pickle, as torch's own handler writes it: give the two groups different run ids"}


class Lease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A promise to renew. `beats` counts renewals: an observer that sees it unchanged for `ttl_s` may end the lease."""

    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    beats: Annotated[int, msgspec.Meta(ge=ELSEWHERE)]


class _Logged(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One change. `item`: what the key became; True: what it still is; False: it was deleted."""

    revision: _Count
    key: str
    item: Item | bool


class Document(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All of an engine, at one moment."""

    instance: str
    serial: _Count
    """How many swaps there have been."""
    writer: str
    """Random, and new for each attempt: no two states are equal, so whoever finds its own there knows that it won."""
    revision: _Count
    items: list[Item]
    """In the order of creation."""
    leases: dict[int, Lease]
    log: list[_Logged]
    forgotten: _Count
    """Up to which revision changes are no longer in the log."""


_decoder = msgspec.msgpack.Decoder(Document)
_encoder = msgspec.msgpack.Encoder()


def encode(document: Document) -> bytes:
    """The document as the register's value."""
    state = MAGIC + _encoder.encode(document)
    if len(state) > STATE_MAX:
        raise LimitExceeded("the run's state in the register", len(state), STATE_MAX)
    return state


def decode(state: object) -> Document:
    """The document in a register's value, or Incompatible with the reason."""
    what = "the state in the register"
    if not isinstance(state, bytes):
        raise Incompatible(what, f"its backend gives {type(state).__name__} instead of bytes")
    if len(state) > STATE_MAX:
        raise Incompatible(what, f"it has {len(state)} bytes, at most {STATE_MAX} are allowed")
    if not state.startswith(MAGIC):
        raise Incompatible(what, f"it is not rdzv's, or of another version: it begins with {_start(state)}")
    try:
        document = _decoder.decode(state[len(MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Incompatible(what, f"it is damaged: {error}") from None
    if not _is_sound(document):
        raise Incompatible(what, "it is damaged: its parts do not agree")
    return document


def _is_sound(document: Document) -> bool:
    """What `Draft` and `read_log` rely on."""
    created = [item.created for item in document.items]
    keys = {item.key: item.modified for item in document.items}
    past = [document.forgotten, *(logged.revision for logged in document.log), document.revision]
    return (
        len(keys) == len(created)
        and created == sorted(created)
        and all(0 < item.created <= item.modified <= document.revision for item in document.items)
        and all(item.lease == 0 or item.lease in document.leases for item in document.items)
        and past == sorted(past)
        and all(keys.get(logged.key) == logged.revision for logged in document.log if logged.item is True)
    )


def _start(state: bytes) -> str:
    return _Foreign.get(state[:1], "") or repr(state[: len(MAGIC)])


class Draft:
    """A document with changes that are not written yet: all of them, or none, will be."""

    def __init__(self, document: Document, log: Iterable[Batch]) -> None:
        self.document = document
        self.engine = Engine(document.instance, history_max=0)
        self.engine.load(document.items, document.revision)
        self.leases = dict(document.leases)
        for id, lease in document.leases.items():
            self.engine.leases.adopt(id, lease.ttl_s)
        self.log = deque(log)
        self._changes: list[Batch] = []
        self.engine.observers.append(self._changes.append)
        self.changed = False

    def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation],
        unborn: dict[int, Lease],
    ) -> Outcome:
        """Judge and apply. A lease of `unborn` is born by the first put under it, so that both are one swap."""
        puts = [one for one in (*then, *otherwise) if isinstance(one, Put)]
        born = {put.lease for put in puts if put.lease in unborn and put.lease not in self.leases}
        for id in born:
            self.engine.leases.adopt(id, unborn[id].ttl_s)
        before, used = self.engine.revision, set()
        try:
            outcome = self.engine.txn(compares, then, otherwise)
            used = {one.lease for one in (then if outcome.succeeded else otherwise) if isinstance(one, Put)}
        finally:
            for id in born - used:
                self.engine.leases.revoke(id)
        self.leases.update((id, unborn[id]) for id in born & used)
        self.changed |= self.engine.revision > before
        return outcome

    def renew(self, id: int) -> None:
        """Count a beat; LeaseGone if it has ended."""
        lease = self.leases.get(id)
        if lease is None:
            msg = f"lease {id} has ended"
            raise LeaseGone(msg)
        if lease.beats != ELSEWHERE:
            self.leases[id] = Lease(lease.ttl_s, lease.beats + 1)
            self.changed = True

    def end(self, id: int, beats: int | None = None) -> None:
        """End the lease, if it is there, and (given) has not beaten since."""
        lease = self.leases.get(id)
        if lease is None or (beats is not None and lease.beats != beats):
            return
        del self.leases[id]
        self.engine.revoke(id)
        self.changed = True

    def compact(self) -> None:
        """Forget all changes up to now."""
        self.log.clear()
        self._changes.clear()
        self.changed = True

    def finish(self, writer: str) -> Document:
        """The document to offer. The draft goes on from it."""
        self.log.extend(self._changes)
        self._changes.clear()
        _trim(self.log)
        engine, former = self.engine, self.document
        document = Document(
            instance=former.instance,
            serial=former.serial + 1,
            writer=writer,
            revision=engine.revision,
            items=list(engine.items()),
            leases=dict(self.leases),
            log=[_logged(event, engine) for batch in self.log for event in batch.events],
            forgotten=self.log[0].revision - 1 if self.log else engine.revision,
        )
        self.document = document
        self.changed = False
        return document


def first_document(instance: str, writer: str) -> Document:
    """Of an engine in which nothing has happened."""
    return Document(instance, 1, writer, 1, [], {}, [], 1)


def read_log(document: Document) -> tuple[Batch, ...]:
    """The latest changes, by revision."""
    items = {item.key: item for item in document.items}
    batches: list[Batch] = []
    events: list[Event] = []
    for logged in document.log:
        if events and events[-1].revision != logged.revision:
            batches.append(Batch(events[-1].revision, tuple(events)))
            events = []
        item = items[logged.key] if logged.item is True else logged.item or None
        events.append(Event(logged.key, logged.revision, item))
    if events:
        batches.append(Batch(events[-1].revision, tuple(events)))
    return tuple(batches)


def _logged(event: Event, engine: Engine) -> _Logged:
    """A value that still stands is written once, among the items."""
    if event.item is None:
        return _Logged(event.revision, event.key, False)
    present = engine.get(event.key)
    still = present is not None and present.modified == event.revision
    return _Logged(event.revision, event.key, True if still else event.item)


def _trim(log: deque[Batch]) -> None:
    """Forget the oldest. The newest batch stays, however large: most who watch have seen all before it."""
    events = sum(len(batch.events) for batch in log)
    size = sum(_size(batch.events) for batch in log)
    while len(log) > 1 and (events > LOG_EVENTS_MAX or size > LOG_BYTES_MAX):
        gone = log.popleft()
        events -= len(gone.events)
        size -= _size(gone.events)


def _size(events: Iterable[Event]) -> int:
    return sum(len(event.item.value) for event in events if event.item is not None)
