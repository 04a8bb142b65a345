"""The hand-written protobuf codec: fields survive a round trip, and malformed bytes are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.engines.etcd.client.protobuf import block, fields, signed, varint
from rdzv.errors import Incompatible


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_number_survives_a_round_trip(value):
    ((field, found, _),) = fields(varint(1 << 3) + varint(value))
    assert (field, signed(found)) == (1, value)


@given(st.lists(st.tuples(st.integers(1, 2**29 - 1), st.binary(max_size=300))))
def test_fields_survive_a_round_trip_in_order(parts):
    data = b"".join(block(field, content) for field, content in parts)
    assert [(field, content) for field, _, content in fields(data)] == parts


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\x0a\x05abc", "it ends within a field, after 5 bytes"),
        (b"\x08", "it ends within a field, after 1 bytes"),
        (b"\x08" + b"\xff" * 10, "a number of more than 64 bits is in it"),
        (b"\x0b", "a field of kind 3 is in it"),
    ],
)
def test_the_error_says_what_is_wrong_with_a_message(data, problem):
    with pytest.raises(Incompatible) as caught:
        list(fields(data))
    assert caught.value.problem == problem


def test_fields_of_fixed_size_are_skipped():
    assert list(fields(b"\x09" + b"x" * 8 + b"\x15" + b"x" * 4 + b"\x18\x07")) == [(3, 7, b"")]
