"""The value of a register: a whole engine, and drafts of its next state.

A compare-and-set register can do one thing: replace its value if it is still the one that was read. So the value holds
the keys, the leases, and a log of the latest changes for watches. A writer loads the reference engine from the value,
lets it apply the transactions, and offers the result. Transactions, leases and watches therefore mean the same as on
every other engine, and there is no second set of rules. The price: every write carries everything.

The value may come from anybody. Its size is checked before it is decoded, strictly, into the types below. It is never
executed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated

import msgspec

from ...errors import Incompatible, LimitExceeded
from ..port import STORED, Batch, Case, Compare, Event, Item, LeaseGone, Operation, Outcome, Put, leases_of
from ..reference import Engine

VERSION = 1
_MAGIC = b"rdzv register "
MAGIC = b"%s%d\n" % (_MAGIC, VERSION)
"""The first bytes of every state, so that no other value is taken for one."""
STATE_MAX = 1 << 20
"""Bytes: some 200 members. It goes over the wire twice with every write, so far less is fast."""
STORED_MAX = STATE_MAX * 3 // 4
"""Bytes up to which a program may fill it with what it keeps in the round's store: the run's own records need the rest."""
LOG_EVENTS_MAX = 256
LOG_BYTES_MAX = 64 * 1024
"""Bounds of the log: room for a burst of joins between two reads. A watch that is further behind lists again."""
ELSEWHERE = -1
"""Value of `beats` if the lease is renewed outside the document, in a counter of its own."""

_WHAT = "the state in the register"
_Count = Annotated[int, msgspec.Meta(ge=0)]
_FOREIGN = {b"\x80": "a pickle, as torch's own handler writes it: give the two groups different run ids"}


class StoredLease(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A lease. `beats` counts its renewals; an observer that sees it unchanged for `ttl_s` may end the lease."""

    ttl_s: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    beats: Annotated[int, msgspec.Meta(ge=ELSEWHERE)]


class _Logged(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One change. `item`: what the key became; True: what it still is; False: it was deleted."""

    revision: _Count
    key: str
    item: Item | bool


class Document(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole engine at one moment."""

    instance: str
    serial: _Count
    """Number of swaps so far."""
    writer: str
    """Random for each attempt. No two states are equal, so a writer that finds its own state knows that it won."""
    revision: _Count
    items: list[Item]
    """Sorted by creation."""
    leases: dict[int, StoredLease]
    """Sorted by their last renewal, the longest unrenewed first."""
    log: list[_Logged]
    forgotten: _Count
    """The revision up to which changes are no longer in the log."""


_decoder = msgspec.msgpack.Decoder(Document)
_encoder = msgspec.msgpack.Encoder()


def encode(document: Document, size_max: int = STATE_MAX) -> bytes:
    state = MAGIC + _encoder.encode(document)
    if len(state) > size_max:
        raise LimitExceeded("the run's state in the register", len(state), size_max)
    return state


def decode(state: object) -> Document:
    """Read a register's value, or raise Incompatible with the reason."""
    if not isinstance(state, bytes):
        raise Incompatible(_WHAT, f"its backend gives {type(state).__name__} instead of bytes")
    if len(state) > STATE_MAX:
        raise Incompatible(_WHAT, f"it has {len(state)} bytes, at most {STATE_MAX} are allowed")
    if not state.startswith(MAGIC):
        raise Incompatible(_WHAT, _why_foreign(state))
    try:
        document = _decoder.decode(state[len(MAGIC) :])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Incompatible(_WHAT, f"it is damaged: {error}") from None
    if not _is_sound(document):
        raise Incompatible(_WHAT, "it is damaged: its parts do not agree")
    return document


def _why_foreign(state: bytes) -> str:
    """Say why a value does not begin as states of this version do."""
    version = state[len(_MAGIC) : len(_MAGIC) + 8].partition(b"\n")[0]
    if state.startswith(_MAGIC) and version.isdigit():
        return f"it is of version {int(version)}, this is version {VERSION}: all members of a run need one version"
    start = _FOREIGN.get(state[:1]) or repr(state[: len(MAGIC)])
    return f"it is not rdzv's: it begins with {start}"


def _is_sound(document: Document) -> bool:
    """Whether items and log are in the order that the engine and the watches rely on."""
    items, log, newest = document.items, document.log, document.revision
    created = [0, *(item.created for item in items)]
    logged = [document.forgotten, *(entry.revision for entry in log), newest if log else document.forgotten]
    if created != sorted(created) or logged != sorted(logged):
        return False
    written = {item.key: item.modified for item in items}
    return all(item.created <= item.modified <= newest for item in items) and all(
        entry.item is not True or written.get(entry.key) == entry.revision for entry in log
    )


class Draft:
    """A document with changes that are not written yet. One swap writes all of them or none."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.leases = dict(document.leases)
        self.changed = False
        self.size_max = STATE_MAX
        """Bytes that the document may have with these changes."""
        self._changes: list[Batch] = []
        self._compacted = False

    @cached_property
    def engine(self) -> Engine:
        """The engine, loaded when it is first needed: most swaps of a quiet run only count renewals."""
        engine = Engine(self.document.instance, history_max=0)
        engine.load(self.document.items, self.document.revision)
        for id, lease in self.leases.items():
            engine.leases.adopt(id, lease.ttl_s)
        engine.observers.append(self._changes.append)
        return engine

    def txn(
        self,
        compares: Sequence[Compare],
        then: Sequence[Operation],
        otherwise: Sequence[Operation],
        unstored: dict[int, StoredLease],
        instead: Sequence[Case] = (),
    ) -> Outcome:
        """Judge and apply. A lease of `unstored` begins with the first put under it, so that both are one swap."""
        branches = (then, *(case.then for case in instead), otherwise)
        begun = {lease for lease in leases_of(branches) if lease in unstored and lease not in self.leases}
        for id in begun:
            self.engine.leases.adopt(id, unstored[id].ttl_s)
        before, used = self.engine.revision, set()
        try:
            outcome = self.engine.txn(compares, then, otherwise, instead)
            done = branches[outcome.case if outcome.succeeded else -1]
            used = leases_of([done])
        finally:
            for id in begun - used:
                self.engine.leases.revoke(id)
        self.leases.update((id, unstored[id]) for id in begun & used)
        self.changed |= self.engine.revision > before
        if any(type(one) is Put and STORED in one.key for one in done):
            self.size_max = STORED_MAX
        return outcome

    def renew(self, id: int) -> None:
        """Count a heartbeat; LeaseGone if the lease has ended."""
        lease = self.leases.get(id)
        if lease is None:
            raise LeaseGone(f"lease {id} has ended")
        if lease.beats != ELSEWHERE:
            # Put back at the end: the leases stay in the order of their last renewal, by which members take turns.
            del self.leases[id]
            self.leases[id] = StoredLease(lease.ttl_s, lease.beats + 1)
            self.changed = True

    def end(self, id: int, beats: int | None = None) -> None:
        """End the lease if it exists and, if `beats` is given, was not renewed since."""
        lease = self.leases.get(id)
        if lease is None or (beats is not None and lease.beats != beats):
            return
        self.engine.revoke(id)
        del self.leases[id]
        self.changed = True

    def compact(self) -> None:
        """Forget the log."""
        self._compacted = self.changed = True

    def finish(self, writer: str) -> Document:
        """Return the document to offer. The draft continues from it."""
        former = self.document
        items, log, revision = former.items, former.log, former.revision
        if self._changes:
            engine = self.engine
            items, revision = list(engine.items()), engine.revision
            events = read_log(former, 0) + [event for batch in self._changes for event in batch.events]
            log = _trim([_logged(event, engine) for event in events])
        if self._compacted:
            log = []
        serial, forgotten = former.serial + 1, log[0].revision - 1 if log else revision
        self.document = Document(former.instance, serial, writer, revision, items, dict(self.leases), log, forgotten)
        self._changes.clear()
        self.changed = self._compacted = False
        self.size_max = STATE_MAX
        return self.document


def first_document(instance: str, writer: str) -> Document:
    """Return the document of a new, empty engine."""
    return Document(instance, 1, writer, 1, [], {}, [], 1)


def read_log(document: Document, since: int) -> list[Event]:
    """Return the logged changes after that revision."""
    items = {item.key: item for item in document.items}
    new = document.log[bisect_right(document.log, since, key=lambda logged: logged.revision) :]
    return [Event(one.key, one.revision, items[one.key] if one.item is True else one.item or None) for one in new]


def _stands(key: str, revision: int, engine: Engine) -> bool:
    item = engine.get(key)
    return item is not None and item.modified == revision


def _logged(event: Event, engine: Engine) -> _Logged:
    """Return the log entry of an event. A current value is stored once, among the items."""
    item = event.item is not None and (_stands(event.key, event.revision, engine) or event.item)
    return _Logged(event.revision, event.key, item)


def _trim(log: list[_Logged]) -> list[_Logged]:
    """Drop the oldest changes. The newest stay, however large: most watches have seen all before them."""
    room, keep = LOG_BYTES_MAX, len(log)
    while keep and len(log) - keep < LOG_EVENTS_MAX and room > 0:
        keep -= 1
        item = log[keep].item
        room -= len(item.value) if isinstance(item, Item) else 0
    # Whole transactions only, since a watch delivers each in one batch; but at least the newest one.
    if keep and log[keep - 1].revision == log[keep].revision:
        last = log[keep].revision
        later = bisect_right(log, last, key=lambda logged: logged.revision)
        keep = later if later < len(log) else bisect_left(log, last, key=lambda logged: logged.revision)
    return log[keep:]
