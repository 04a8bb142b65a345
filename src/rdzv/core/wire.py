"""The encoding of records: JSON with a version, strict and with limits."""

# JSON, because an operator with `etcdctl` should be able to read a run. Strict, because an unknown field could change
# the meaning of the known ones. A record of another version is refused, and the error names both versions.
#
# Anyone with access to the engine can write a record, and its texts end up in logs, journals and terminals. So texts
# are cleaned here, where all of them come in: no reader ever has a line break, a NUL or a terminal escape in its hands.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from ..errors import Incompatible, LimitExceeded
from .model import (
    Ban,
    DrainRequest,
    Head,
    JournalEntry,
    MemberRecord,
    ProgressReport,
    Quarantine,
    RankEntry,
    Record,
    RunSettings,
    Strike,
)
from .text import NAME_MAX, REASON_MAX, clip

VERSION = 1

SIZES_MAX: dict[type[Record], int] = {
    Head: 8 * 1024,
    MemberRecord: 16 * 1024,
    RankEntry: 4 * 1024,
    RunSettings: 4 * 1024,
    DrainRequest: 1024,
    Ban: 1024,
    Strike: 1024,
    Quarantine: 1024,
    JournalEntry: 8 * 1024,
    ProgressReport: 1024,
}
"""Largest encoded size in bytes. Each change of the head goes to every member, so the head must be small."""

_BACKSLASH, _DELETE = b"\\\x7f"  # As numbers: Python looks for a byte far faster than for bytes.
PLAIN_MAX = 1024
"""Bytes of a record whose texts are looked at one by one only if a byte in it is suspicious. Most are far smaller."""
_NAMES = frozenset({"name", "host", "role", "by", "members", "came", "gone", "flaps"})
"""Fields that hold names, which are short. Any of them may end up in a head several times."""

R = TypeVar("R", bound=Record)

_VERSION = b'{"v":%d,' % VERSION
_VERSION_SIZE = len(_VERSION)
_STARTS = {kind: b'{"v":%d,"type":"%s"' % (VERSION, str(kind.__struct_config__.tag).encode()) for kind in SIZES_MAX}
"""The first bytes of every record of a kind, so that one kind is never read as another."""

_SINCE_0_1: dict[type[Record], tuple[str, ...]] = {MemberRecord: ("grace",), RunSettings: ("drain_notice",)}
"""Fields with fractions that release 0.1.0 does not know, and refuses. msgspec omits a default only if it is the same object.
That holds for small whole numbers, None and empty texts, and not for 0.0."""
_DEFAULTS = {
    kind: tuple((one.name, one.default) for one in msgspec.structs.fields(kind) if one.name in names)
    for kind, names in _SINCE_0_1.items()
}

_encoder = msgspec.json.Encoder()
_decode: dict[type[Record], Callable[[bytes], Any]] = {kind: msgspec.json.Decoder(kind).decode for kind in SIZES_MAX}


class _Version(msgspec.Struct):
    """The version that an unreadable record claims to have."""

    v: int = 0


_decode_version = msgspec.json.Decoder(_Version).decode


def encode(record: Record) -> bytes:
    """Return the record as it is written to the engine."""
    for name, default in _DEFAULTS.get(type(record), ()):
        if getattr(record, name) == default:
            record = msgspec.structs.replace(record, **{name: default})
    data = _VERSION + _encoder.encode(record)[1:]
    size_max = SIZES_MAX[type(record)]
    if len(data) > size_max:
        raise LimitExceeded(_name(type(record)), len(data), size_max)
    return data


def decode(kind: type[R], data: bytes) -> R:
    """Return the record in `data`, or raise Incompatible with the reason. Never executes or trusts anything in it.

    Texts are cleaned and clipped, except for `info`, which programs write for programs.
    """
    size = len(data)
    if size > SIZES_MAX[kind]:
        raise Incompatible(_name(kind), f"it has {size} bytes, at most {SIZES_MAX[kind]} are allowed")
    if not data.startswith(_STARTS[kind]):
        raise Incompatible(_name(kind), _why_foreign(data))
    try:
        record: R = _decode[kind](b"{" + data[_VERSION_SIZE:])
        # JSON has control characters only as escapes, so a record in plain ASCII without a backslash has none.
        is_plain = size <= PLAIN_MAX and _BACKSLASH not in data and _DELETE not in data and data.isascii()
        if not is_plain or not _has_short_names(record):
            record = msgspec.convert(_clean(msgspec.to_builtins(record)), kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Incompatible(_name(kind), str(error)) from error
    return record


def read_head(data: bytes) -> Head | None:
    """Return the head in `data`. One that cannot be read counts as none, so that a leader replaces it (T11.12)."""
    try:
        return decode(Head, data)
    except Incompatible:
        return None


def reason_of(kind: type[Ban | DrainRequest | Quarantine], data: bytes) -> str:
    """Return the reason in an operator's request or in a quarantine. One that cannot be read counts all the same."""
    try:
        return decode(kind, data).reason
    except Incompatible:
        return "no readable reason"


def _has_short_names(record: Record) -> bool:
    """Whether the names of a record are short, if PLAIN_MAX does not bound them."""
    if type(record) is MemberRecord or type(record) is RankEntry:
        return len(record.name) <= NAME_MAX and len(record.host) <= NAME_MAX
    return True


def _clean(value: Any, size_max: int = REASON_MAX) -> Any:
    """Clean and clip all texts of a record as builtins, names of fields and keys included."""
    if isinstance(value, str):
        return clip(value, size_max)
    if isinstance(value, list | tuple):
        return [_clean(one, size_max) for one in value]
    if not isinstance(value, dict):
        return value
    cleaned = {}
    for name, one in value.items():
        limit = NAME_MAX if name in _NAMES else size_max
        cleaned[clip(name, NAME_MAX)] = one if name == "info" else _clean(one, limit)
    return cleaned


def _why_foreign(data: bytes) -> str:
    """Say why a record does not begin as records of this version do."""
    try:
        version = _decode_version(data).v
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "it is not a record of rdzv"
    if version == VERSION:
        return "it is a record of another kind, or its fields are not in the order this version writes them"
    return f"it is of version {version}, this is version {VERSION}: all members of a run need one version"


def _name(kind: type[Record]) -> str:
    return f"record {kind.__struct_config__.tag!r}"
