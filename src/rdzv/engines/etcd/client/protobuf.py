"""The part of protocol buffers that etcd's messages need: varints and length-prefixed fields.

This module replaces the protobuf package on purpose. Generated code works with a range of protobuf versions only, and
training programs bring their own version, often pinned by another package. Descriptors made at run time would work with
any version, but would be a second dependency for a dozen messages. Measured, the difference in speed is lost in the
time of a call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....errors import Incompatible

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_FIELDS = 7
"""Field numbers that `collect` keeps: etcd's replies have nothing above 6 that rdzv reads, besides a repeated field."""
_SMALL = [bytes([n]) for n in range(128)]
"""One-byte varints, precomputed: all tags that rdzv sends and most lengths are below 128."""


def varint(value: int) -> bytes:
    """Encode an integer in base 128, lowest digits first. Negative numbers take 64 bits, as protobuf requires."""
    if 0 <= value < 128:
        return _SMALL[value]
    value &= _MASK
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def number(field: int, value: int) -> bytes:
    """Encode an integer or bool field. Zero is left out: protobuf reads an absent field as zero."""
    if not value:
        return b""
    return varint(field << 3) + (_SMALL[value] if 0 < value < 128 else varint(value))


def block(field: int, data: bytes) -> bytes:
    """Encode a field of bytes, text or a message, even an empty one."""
    size = len(data)
    tag = _SMALL[field << 3 | _BYTES] if field < 16 else varint(field << 3 | _BYTES)
    return tag + (_SMALL[size] if size < 128 else varint(size)) + data


def nonempty(field: int, data: bytes) -> bytes:
    """Encode a field of bytes or text. Empty content is left out."""
    return block(field, data) if data else b""


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yield every field as (field number, integer value or 0, bytes or b""). Raises Incompatible."""
    at, end = 0, len(data)
    try:
        while at < end:
            tag = data[at]
            at += 1
            if tag > 127:
                tag, at = _rest(data, at, tag)
            kind = tag & 7
            if kind == _BYTES:
                size = data[at]
                at += 1
                if size > 127:
                    size, at = _rest(data, at, size)
                start, at = at, at + size
                if at > end:
                    raise IndexError  # noqa: TRY301  A slice past the end would be cut silently.
                yield tag >> 3, 0, data[start:at]
            elif kind == _VARINT:
                value = data[at]
                at += 1
                if value > 127:
                    value, at = _rest(data, at, value)
                yield tag >> 3, value, b""
            elif kind in {_FIXED64, _FIXED32}:
                at += 8 if kind == _FIXED64 else 4  # etcd 3.4-3.6 sends none; skip them like other unknown fields.
            else:
                raise Incompatible("a message of etcd", f"a field of kind {kind} is in it")
    except IndexError:
        raise Incompatible("a message of etcd", f"it ends within a field, after {end} bytes") from None


def collect(data: bytes, repeated: int = 0) -> tuple[list[int], list[bytes], list[bytes]]:
    """Return a message's integers and its blocks by field number, and in order the blocks of the one repeated field.

    Absent fields read as 0 and b"". A field of the wrong wire type reads as absent. Raises Incompatible.
    """
    numbers, blocks, items = [0] * _FIELDS, [b""] * _FIELDS, []
    for field, value, part in fields(data):
        if field == repeated:
            items.append(part)
        elif field < _FIELDS:
            numbers[field], blocks[field] = value, part
    return numbers, blocks, items


def _rest(data: bytes, at: int, value: int) -> tuple[int, int]:
    """Decode the remaining digits of a varint that is longer than one byte."""
    value &= 127
    shift = 7
    while True:
        digit = data[at]
        at += 1
        value |= (digit & 127) << shift
        if digit < 128:
            return value & _MASK, at
        shift += 7
        if shift > 63:
            raise Incompatible("a message of etcd", "a number of more than 64 bits is in it")


def signed(value: int) -> int:
    """Read an unsigned 64-bit varint as an int64."""
    return value - (1 << 64) if value & _SIGN else value
