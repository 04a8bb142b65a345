"""The etcd messages that rdzv sends and reads. Field numbers come from etcd's `rpc.proto` and `kv.proto`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from functools import lru_cache

import msgspec

from ....errors import Incompatible
from .protobuf import block, collect, fields, nonempty, number, signed, varint

REQUEST_MAX = 1024 * 1024 * 3 // 2  # Bytes in a request: etcd's default limit (--max-request-bytes).
OPERATIONS_MAX = 128  # Operations in one branch of a transaction, and compares: etcd's default limit (--max-txn-ops).


class Header(msgspec.Struct, frozen=True, gc=False):
    """The cluster and member that replied, the revision of the store and the term of etcd's leader."""

    cluster: int = 0
    member: int = 0
    revision: int = 0
    term: int = 0


class KeyValue(msgspec.Struct, frozen=True, gc=False):
    """A key at one revision. A deleted key has only its name and, in `modified`, the revision of its deletion."""

    key: bytes
    value: bytes = b""
    created: int = 0
    modified: int = 0
    lease: int = 0


class WatchEvent(msgspec.Struct, frozen=True, gc=False):
    deleted: bool
    kv: KeyValue


# ---- requests


class Sort(IntEnum):
    KEY = 0
    CREATED = 2
    MODIFIED = 3


class RangeRequest(msgspec.Struct, frozen=True, gc=False):
    """Read the keys from `key` up to but not including `end`; an empty `end` means the one key."""

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
        data = nonempty(1, self.key) + nonempty(2, self.end)
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
    key: bytes
    value: bytes
    lease: int = 0

    def encode(self) -> bytes:
        return nonempty(1, self.key) + nonempty(2, self.value) + number(3, self.lease)


class DeleteRequest(msgspec.Struct, frozen=True, gc=False):
    """Delete the keys from `key` up to but not including `end`; an empty `end` means the one key."""

    key: bytes
    end: bytes = b""

    def encode(self) -> bytes:
        return nonempty(1, self.key) + nonempty(2, self.end)


Request = RangeRequest | PutRequest | DeleteRequest
_REQUEST_FIELD: dict[type[Request], int] = {RangeRequest: 1, PutRequest: 2, DeleteRequest: 3}
_NESTED = 4  # The field number of a transaction inside a transaction, in requests and in replies.
_NESTED_MAX = 8
"""Depth up to which a reply is decoded. rdzv nests far less; the bound keeps a hostile reply from exhausting the stack."""


class Target(IntEnum):
    """The property of a key that is compared. The operand stands in field number 4 + this value."""

    CREATED = 1
    MODIFIED = 2
    VALUE = 3


class Compare(msgspec.Struct, frozen=True, gc=False):
    """Test that a revision or value equals `wanted` or, with `less`, is below it; with `end`, for every key of the range.

    A key that does not exist has revision 0 and no value.
    """

    key: bytes
    target: Target
    wanted: int | bytes
    less: bool = False
    end: bytes = b""

    def encode(self) -> bytes:
        field, wanted = 4 + self.target, self.wanted
        return b"".join((
            number(1, 2 if self.less else 0), number(2, self.target), nonempty(3, self.key),
            block(field, wanted) if isinstance(wanted, bytes) else varint(field << 3) + varint(wanted), nonempty(64, self.end),
        ))  # fmt: skip


class TxnBranch(msgspec.Struct, frozen=True):
    """An else-if of a transaction: compares that are tried when all earlier ones failed, and its operations."""

    compares: Sequence[Compare]
    then: Sequence[Request]


def encode_txn(
    compares: Iterable[Compare], then: Iterable[Request], otherwise: Iterable[Request],
    instead: Sequence[TxnBranch] = (),
) -> bytes:  # fmt: skip
    """Encode a TxnRequest. Each further case is a transaction nested in the else branch of the case before."""
    parts = [block(1, compare.encode()) for compare in compares]
    parts += [block(2, block(_REQUEST_FIELD[type(one)], one.encode())) for one in then]
    if instead:
        nested = encode_txn(instead[0].compares, instead[0].then, otherwise, instead[1:])
        return b"".join((*parts, block(3, block(_NESTED, nested))))
    parts += [block(3, block(_REQUEST_FIELD[type(one)], one.encode())) for one in otherwise]
    return b"".join(parts)


def encode_watch(watch: int, key: bytes, end: bytes, start: int) -> bytes:
    """Encode a WatchRequest that creates a watch with progress messages."""
    return block(1, nonempty(1, key) + nonempty(2, end) + number(3, start) + number(4, 1) + number(7, watch))


def encode_unwatch(watch: int) -> bytes:
    """Encode a WatchRequest that cancels a watch."""
    return block(2, number(1, watch))


def encode_lease(lease: int, ttl_s: int = 0) -> bytes:
    """Encode a LeaseGrantRequest or, without a time, any of the requests that only name a lease."""
    return number(1, ttl_s) + number(2, lease) if ttl_s else number(1, lease)


def encode_login(name: str, password: str) -> bytes:
    return nonempty(1, name.encode()) + nonempty(2, password.encode())


def encode_compaction(revision: int) -> bytes:
    """Encode a CompactionRequest. `physical` is set, so that etcd replies when it is done."""
    return number(1, revision) + number(2, 1)


# ---- replies


class RangeResponse(msgspec.Struct, frozen=True, gc=False):
    """The keys that a range found. `count` includes those beyond the limit."""

    items: tuple[KeyValue, ...] = ()
    count: int = 0


class TxnResponse(msgspec.Struct, frozen=True, gc=False):
    """The reply to a transaction. `case` is the index of the case that held; 0 is the first."""

    header: Header
    succeeded: bool
    found: tuple[RangeResponse, ...]
    case: int = 0


class LeaseResponse(msgspec.Struct, frozen=True, gc=False):
    """A lease and the seconds it has left. 0 or less means that it has ended."""

    header: Header
    id: int
    ttl_s: int


class StatusResponse(msgspec.Struct, frozen=True):
    """The status of a member: its version, the bytes of its database, and the id of the leader it follows (0: none)."""

    header: Header
    version: str
    size: int = 0
    leader: int = 0


class MemberResponse(msgspec.Struct, frozen=True):
    """One member of the cluster."""

    id: int
    name: str  # Empty until the member has started for the first time.


class WatchResponse(msgspec.Struct, frozen=True, gc=False):
    header: Header
    watch: int
    changes: tuple[WatchEvent, ...] = ()
    created: bool = False
    canceled: bool = False
    compacted: int = 0
    reason: str = ""


def decode_header(data: bytes) -> Header:
    """Decode the header of any reply. The header is always the first field, so the rest is not parsed."""
    for field, _, part in fields(data):
        return _header(part) if field == 1 else Header()
    return Header()


def decode_txn(data: bytes, depth: int = 0) -> TxnResponse:
    if depth > _NESTED_MAX:
        raise Incompatible("an answer of etcd", f"it is a transaction more than {_NESTED_MAX} deep")
    numbers, blocks, replies = collect(data, repeated=3)
    header, found = _header(blocks[1]), []
    for part in replies:
        kind, _, reply = next(fields(part), (0, 0, b""))
        if kind == _NESTED:
            nested = decode_txn(reply, depth + 1)
            return TxnResponse(header, nested.succeeded, nested.found, nested.case + 1)
        found.append(decode_range(reply) if kind == _REQUEST_FIELD[RangeRequest] else RangeResponse())
    return TxnResponse(header, bool(numbers[2]), tuple(found))


def decode_lease(data: bytes) -> LeaseResponse:
    """Decode the reply to a grant, a renewal or a request for the time left."""
    numbers, blocks, _ = collect(data)
    return LeaseResponse(_header(blocks[1]), signed(numbers[2]), signed(numbers[3]))


def decode_status(data: bytes) -> StatusResponse:
    numbers, blocks, _ = collect(data)
    return StatusResponse(_header(blocks[1]), blocks[2].decode(errors="replace"), signed(numbers[3]), numbers[4])


def decode_members(data: bytes) -> list[MemberResponse]:
    """Decode a MemberListResponse."""
    parts = [collect(one) for one in collect(data, repeated=2)[2]]
    return [MemberResponse(numbers[1], blocks[2].decode(errors="replace")) for numbers, blocks, _ in parts]


def decode_login(data: bytes) -> str:
    """Return the token of an AuthenticateResponse."""
    return collect(data)[1][2].decode()


def decode_watch(data: bytes) -> WatchResponse:
    numbers, blocks, events = collect(data, repeated=11)
    return WatchResponse(
        _header(blocks[1]), signed(numbers[2]), tuple(map(_event, events)), created=bool(numbers[3]),
        canceled=bool(numbers[4]), compacted=numbers[5], reason=blocks[6].decode(errors="replace"),
    )  # fmt: skip


@lru_cache(maxsize=4)
def _header(data: bytes) -> Header:
    """Decode a header. Cached: each is decoded twice, and all replies of one revision have equal headers."""
    numbers, _, _ = collect(data)
    return Header(numbers[1], numbers[2], numbers[3], numbers[4])


def _key_value(data: bytes) -> KeyValue:
    numbers, blocks, _ = collect(data)
    return KeyValue(blocks[1], blocks[5], numbers[2], numbers[3], signed(numbers[6]))


def _event(data: bytes) -> WatchEvent:
    numbers, blocks, _ = collect(data)
    return WatchEvent(bool(numbers[1]), _key_value(blocks[2]))


def decode_range(data: bytes) -> RangeResponse:
    numbers, _, items = collect(data, repeated=2)
    return RangeResponse(tuple(map(_key_value, items)), numbers[4])


def prefix_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with this prefix. An empty prefix gives etcd's sign for no end."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"
