"""Records as bytes: JSON with a version, strict and with limits.

JSON because an operator with `etcdctl` should be able to read a run; strict because a field we do not know could change the
meaning of those we do. A record of another version is refused with both versions named, never guessed at.
"""

from __future__ import annotations

from typing import TypeVar, cast

import msgspec

from ..errors import Incompatible, LimitExceeded
from .model import Ban, DrainRequest, Head, JournalEntry, MemberRecord, RankEntry, Record, RunSettings

VERSION = 1

SIZES_MAX: dict[type[Record], int] = {
    Head: 8 * 1024,
    MemberRecord: 16 * 1024,
    RankEntry: 4 * 1024,
    RunSettings: 4 * 1024,
    DrainRequest: 1024,
    Ban: 1024,
    JournalEntry: 8 * 1024,
}
"""Largest encoded size per kind. A head goes to every member at every change, so it is the one to keep small."""

R = TypeVar("R", bound=Record)

_VERSION = b'{"v":%d,' % VERSION
_STARTS = {kind: b'{"v":%d,"type":"%s"' % (VERSION, str(kind.__struct_config__.tag).encode()) for kind in SIZES_MAX}
"""How every record of a kind begins, so that one kind is never read as another."""

_encoder = msgspec.json.Encoder()
_decoders = {kind: msgspec.json.Decoder(kind) for kind in SIZES_MAX}


class _Version(msgspec.Struct):
    """Only the version, to say what a record that cannot be read claims to be."""

    v: int = 0


def encode(record: Record) -> bytes:
    """The record as it is written to the engine."""
    data = _VERSION + _encoder.encode(record)[1:]
    size_max = SIZES_MAX[type(record)]
    if len(data) > size_max:
        raise LimitExceeded(_name(type(record)), len(data), size_max)
    return data


def decode(kind: type[R], data: bytes) -> R:
    """The record in `data`, or Incompatible with the reason. Never executes or trusts anything in it."""
    if len(data) > SIZES_MAX[kind]:
        raise Incompatible(_name(kind), f"it has {len(data)} bytes, at most {SIZES_MAX[kind]} are allowed")
    if not data.startswith(_STARTS[kind]):
        raise Incompatible(_name(kind), _foreign(data))
    try:
        return cast(R, _decoders[kind].decode(b"{" + data[len(_VERSION) :]))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Incompatible(_name(kind), str(error)) from error


def _foreign(data: bytes) -> str:
    """Why a record does not start the way ours do."""
    try:
        version = msgspec.json.decode(data, type=_Version).v
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return "it is not a record of rdzv"
    if version == VERSION:
        return "it is a record of another kind, or its fields are not in the order this version writes them"
    return f"it is of version {version}, this is version {VERSION}: all members of a run need one version"


def _name(kind: type[Record]) -> str:
    return f"record {kind.__struct_config__.tag!r}"
