"""Protocol buffers, as much of them as etcd's messages need: varints and length-prefixed fields.

By hand and not with the protobuf package. Generated code binds a program to a range of protobuf versions, and training programs
bring their own, often pinned by something else; descriptors made at run time would work with any, but are a second
dependency for a dozen messages. Measured, the difference is lost in the time of a call.
"""

from __future__ import annotations

from collections.abc import Iterator

from ....errors import Incompatible

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MASK = (1 << 64) - 1
_SIGN = 1 << 63
_SMALL = [bytes([n]) for n in range(128)]
"""Numbers below 128 are one byte, and most are: every tag of ours, most lengths."""


def varint(value: int) -> bytes:
    """An integer in base 128, lowest digits first; negative ones as 64 bits, as protobuf has it."""
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
    """An integer or bool field; absent if it is zero, which is what absence means."""
    if not value:
        return b""
    return varint(field << 3) + (_SMALL[value] if 0 < value < 128 else varint(value))


def block(field: int, data: bytes) -> bytes:
    """A field of bytes, text or a message, also if it is empty."""
    size = len(data)
    tag = _SMALL[field << 3 | _BYTES] if field < 16 else varint(field << 3 | _BYTES)
    return tag + (_SMALL[size] if size < 128 else varint(size)) + data


def some(field: int, data: bytes) -> bytes:
    """A field of bytes or text; absent if it is empty."""
    return block(field, data) if data else b""


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Every field as (its number, its value if it is an integer, else its bytes). Raises Incompatible."""
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
                    raise IndexError  # noqa: TRY301  As for everything else that is cut off.
                yield tag >> 3, 0, data[start:at]
            elif kind == _VARINT:
                value = data[at]
                at += 1
                if value > 127:
                    value, at = _rest(data, at, value)
                yield tag >> 3, value, b""
            elif kind in {_FIXED64, _FIXED32}:
                at += 8 if kind == _FIXED64 else 4  # etcd has none; a later version's are skipped like other unknown fields.
            else:
                raise Incompatible("a message of etcd", f"a field of kind {kind} is in it")
    except IndexError:
        raise Incompatible("a message of etcd", f"it ends within a field, after {end} bytes") from None


def _rest(data: bytes, at: int, value: int) -> tuple[int, int]:
    """The rest of a varint that has more than one digit."""
    value &= 127
    shift = 7
    while True:
        digit = data[at]
        at += 1
        value |= (digit & 127) << shift
        if digit < 128:
            break
        shift += 7
        if shift > 63:
            raise Incompatible("a message of etcd", "a number of more than 64 bits is in it")
    return value & _MASK, at


def signed(value: int) -> int:
    """A varint that stands for an int64."""
    return value - (1 << 64) if value & _SIGN else value
