"""etcd's messages, those that we send and read. Numbers are those of etcd's `rpc.proto` and `kv.proto`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache

import msgspec

from ....errors import Incompatible
from .protobuf import block, fields, number, signed, some, varint

REQUEST_MAX = 1024 * 1024 * 3 // 2
"""Bytes: what etcd takes unless it was told otherwise (--max-request-bytes)."""
OPERATIONS_MAX = 128
"""Per branch of a transaction, and as many compares (--max-txn-ops)."""


class Header(msgspec.Struct, frozen=True, gc=False):
    """Who answered, and how far the store was."""

    cluster: int = 0
    member: int = 0
    revision: int = 0
    term: int = 0


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A key as it was at one revision. A deleted one has its name and the revision it was deleted at."""

    key: bytes
    value: bytes = b""
    created: int = 0
    modified: int = 0
    lease: int = 0


class WatchEvent(msgspec.Struct, frozen=True, gc=False):
    """What a watch tells of one key."""

    deleted: bool
    kv: KeyValue


# ---- what is asked for


class Sort(IntEnum):
    """By what a range is sorted."""

    KEY = 0
    CREATED = 2
    MODIFIED = 3


class RangeRequest(msgspec.Struct, frozen=True, gc=False):
    """Read keys. `end` is the first key that is not meant; empty: the one key only."""

    key: bytes
    end: bytes = b""
    limit: int = 0
    revision: int = 0
    sort: Sort = Sort.KEY
    descending: bool = False
    serializable: bool = False
    keys_only: bool = False
    count_only: bool = False
    created_min: int = 0
    created_max: int = 0

    def encode(self) -> bytes:
        """As a RangeRequest."""
        data = some(1, self.key) + some(2, self.end)
        if self.limit:
            data += number(3, self.limit)
        if self.revision:
            data += number(4, self.revision)
        if self.sort or self.descending:
            data += number(5, 2 if self.descending else 1) + number(6, self.sort)
        if self.serializable or self.keys_only or self.count_only:
            data += number(7, self.serializable) + number(8, self.keys_only) + number(9, self.count_only)
        if self.created_min or self.created_max:
            data += number(12, self.created_min) + number(13, self.created_max)
        return data


class PutRequest(msgspec.Struct, frozen=True, gc=False):
    """Write a key."""

    key: bytes
    value: bytes
    lease: int = 0

    def encode(self) -> bytes:
        """As a PutRequest."""
        return some(1, self.key) + some(2, self.value) + number(3, self.lease)


class DeleteRequest(msgspec.Struct, frozen=True, gc=False):
    """Delete a key, or all up to `end`."""

    key: bytes
    end: bytes = b""

    def encode(self) -> bytes:
        """As a DeleteRangeRequest."""
        return some(1, self.key) + some(2, self.end)


Request = RangeRequest | PutRequest | DeleteRequest
_REQUEST_FIELD: dict[type[Request], int] = {RangeRequest: 1, PutRequest: 2, DeleteRequest: 3}
_WITHIN = 4
"""The field of a transaction within another, of its request and of its answer."""
_WITHIN_MAX = 8
"""How deep they may be."""


class Target(IntEnum):
    """Which of a key's revisions is compared, or its value; also the field this stands in, less four."""

    CREATED = 1
    MODIFIED = 2
    VALUE = 3


class Compare(msgspec.Struct, frozen=True, gc=False):
    """The revision or value equals the one given, or (`less`) is below it; of every key up to `end`, if there is one.

    A key that does not exist has revision 0, and no value.
    """

    key: bytes
    target: Target
    wanted: int | bytes
    less: bool = False
    end: bytes = b""

    def encode(self) -> bytes:
        """As a Compare."""
        field, wanted = 4 + self.target, self.wanted
        return b"".join((
            number(1, 2 if self.less else 0), number(2, self.target), some(3, self.key),
            block(field, wanted) if isinstance(wanted, bytes) else varint(field << 3) + varint(wanted), some(64, self.end),
        ))  # fmt: skip


class TxnBranch(msgspec.Struct, frozen=True):
    """What is compared and done where what was compared before did not hold."""

    compares: Sequence[Compare]
    then: Sequence[Request]


def encode_txn(
    compares: Iterable[Compare],
    then: Iterable[Request],
    otherwise: Iterable[Request],
    instead: Sequence[TxnBranch] = (),
) -> bytes:
    """A TxnRequest. The other cases are transactions within it, each in the branch not taken of the one before."""
    parts = [block(1, compare.encode()) for compare in compares]
    parts += [block(2, block(_REQUEST_FIELD[type(one)], one.encode())) for one in then]
    if instead:
        inner = encode_txn(instead[0].compares, instead[0].then, otherwise, instead[1:])
        return b"".join((*parts, block(3, block(_WITHIN, inner))))
    parts += [block(3, block(_REQUEST_FIELD[type(one)], one.encode())) for one in otherwise]
    return b"".join(parts)


def encode_watch(watch: int, key: bytes, end: bytes, start: int) -> bytes:
    """A WatchRequest that makes a watch, with a sign of life from time to time of how far it is."""
    return block(1, some(1, key) + some(2, end) + number(3, start) + number(4, 1) + number(7, watch))


def encode_unwatch(watch: int) -> bytes:
    """A WatchRequest that ends a watch."""
    return block(2, number(1, watch))


def encode_lease(lease: int, ttl_s: int = 0) -> bytes:
    """A LeaseGrantRequest; without a time, any other request that only names a lease."""
    return number(1, ttl_s) + number(2, lease) if ttl_s else number(1, lease)


def encode_login(name: str, password: str) -> bytes:
    """An AuthenticateRequest."""
    return some(1, name.encode()) + some(2, password.encode())


def encode_compaction(revision: int) -> bytes:
    """A CompactionRequest that answers when it is done."""
    return number(1, revision) + number(2, 1)


# ---- what is answered


class RangeResponse(msgspec.Struct, frozen=True, gc=False):
    """What one operation of a transaction, or a range by itself, answered. `count`: also of those beyond the limit."""

    items: tuple[KeyValue, ...] = ()
    count: int = 0


class TxnResponse(msgspec.Struct, frozen=True, gc=False):
    """A transaction's answer; `case` counts those that did not hold before the one that did."""

    header: Header
    succeeded: bool
    found: tuple[RangeResponse, ...]
    case: int = 0


class LeaseResponse(msgspec.Struct, frozen=True, gc=False):
    """A lease and the time it has left, in seconds; at most 0: it has ended."""

    header: Header
    id: int
    ttl_s: int


class StatusResponse(msgspec.Struct, frozen=True):
    """A member of the cluster about itself. `leader` is 0 if it knows of none."""

    header: Header
    version: str
    leader: int


class WatchResponse(msgspec.Struct, frozen=True, gc=False):
    """What a watch stream says."""

    header: Header
    watch: int
    changes: tuple[WatchEvent, ...] = ()
    created: bool = False
    canceled: bool = False
    compacted: int = 0
    reason: str = ""


def decode_header(data: bytes) -> Header:
    """The header of any answer, which is always its first field."""
    for field, _, part in fields(data):
        return _header(part) if field == 1 else Header()
    return Header()


def decode_range(data: bytes) -> tuple[Header, RangeResponse]:
    """A RangeResponse."""
    return decode_header(data), _found(data)


def decode_txn(data: bytes, depth: int = 0) -> TxnResponse:
    """A TxnResponse."""
    if depth > _WITHIN_MAX:
        raise Incompatible("an answer of etcd", f"it is a transaction more than {_WITHIN_MAX} deep")
    header, succeeded, found = Header(), False, []
    for field, value, part in fields(data):
        if field == 1:
            header = _header(part)
        elif field == 2:
            succeeded = bool(value)
        elif field == 3:
            kind, _, answer = next(fields(part), (0, 0, b""))
            if kind == _WITHIN:
                within = decode_txn(answer, depth + 1)
                return TxnResponse(header, within.succeeded, within.found, within.case + 1)
            found.append(_found(answer) if kind == _REQUEST_FIELD[RangeRequest] else RangeResponse())
    return TxnResponse(header, succeeded, tuple(found))


def decode_lease(data: bytes) -> LeaseResponse:
    """The answer to a grant, a renewal or a question for the time left."""
    header, lease, ttl_s = Header(), 0, 0
    for field, value, part in fields(data):
        if field == 1:
            header = _header(part)
        elif field == 2:
            lease = signed(value)
        elif field == 3:
            ttl_s = signed(value)
    return LeaseResponse(header, lease, ttl_s)


def decode_status(data: bytes) -> StatusResponse:
    """A StatusResponse."""
    header, version, leader = Header(), "", 0
    for field, value, part in fields(data):
        if field == 1:
            header = _header(part)
        elif field == 2:
            version = part.decode(errors="replace")
        elif field == 4:
            leader = value
    return StatusResponse(header, version, leader)


def decode_login(data: bytes) -> str:
    """The token of an AuthenticateResponse."""
    return next((part.decode() for field, _, part in fields(data) if field == 2), "")


def decode_watch(data: bytes) -> WatchResponse:
    """A WatchResponse."""
    header, watch, compacted, reason = Header(), 0, 0, ""
    created = canceled = False
    changes = []
    for field, value, part in fields(data):
        if field == 11:
            changes.append(_change(part))
        elif field == 1:
            header = _header(part)
        elif field == 2:
            watch = signed(value)
        elif field == 3:
            created = bool(value)
        elif field == 4:
            canceled = bool(value)
        elif field == 5:
            compacted = value
        elif field == 6:
            reason = part.decode(errors="replace")
    return WatchResponse(header, watch, tuple(changes), created, canceled, compacted, reason)


@lru_cache(maxsize=4)
def _header(data: bytes) -> Header:
    """Remembered: each is read twice, and all answers of one revision have the same."""
    values = [0] * 5
    for field, value, _ in fields(data):
        if field < 5:
            values[field] = value
    return Header(values[1], values[2], values[3], values[4])


def _key_value(data: bytes) -> KeyValue:
    key = content = b""
    created = modified = lease = 0
    for field, value, part in fields(data):
        if field == 1:
            key = part
        elif field == 2:
            created = value
        elif field == 3:
            modified = value
        elif field == 5:
            content = part
        elif field == 6:
            lease = signed(value)
    return KeyValue(key, content, created, modified, lease)


def _change(data: bytes) -> WatchEvent:
    deleted, kv = False, KeyValue(b"")
    for field, value, part in fields(data):
        if field == 1:
            deleted = bool(value)
        elif field == 2:
            kv = _key_value(part)
    return WatchEvent(deleted, kv)


def _found(data: bytes) -> RangeResponse:
    items, count = [], 0
    for field, value, part in fields(data):
        if field == 2:
            items.append(_key_value(part))
        elif field == 4:
            count = value
    return RangeResponse(tuple(items), count)


def prefix_end(prefix: bytes) -> bytes:
    """The first key behind all that begin so; for an empty prefix the end of everything."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"
