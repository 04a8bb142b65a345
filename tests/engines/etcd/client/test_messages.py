"""etcd's messages: requests are encoded as protobuf does it, replies are decoded, and any bytes are decoded or refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.engines.etcd.client import messages
from rdzv.engines.etcd.client.messages import Compare, DeleteRequest, PutRequest, RangeRequest, Sort, Target
from rdzv.engines.etcd.client.protobuf import block, number
from rdzv.errors import Incompatible


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(data):
    for decode in (
        messages.decode_range, messages.decode_txn, messages.decode_watch, messages.decode_lease, messages.decode_status
    ):  # fmt: skip
        try:
            decode(data)
        except Incompatible as error:
            assert str(error).startswith("a message of etcd cannot be read: ")  # noqa: PT017


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (PutRequest(b"k", b"v", 300), "0a016b12017618ac02"),
        (DeleteRequest(b"k", b"l"), "0a016b12016c"),
        (RangeRequest(b"k"), "0a016b"),
        (RangeRequest(b"k", limit=2, sort=Sort.CREATED, descending=True, created_max=9), "0a016b1802280230026809"),
        (RangeRequest(b"k", b"l", revision=5, sort=Sort.MODIFIED, keys_only=True), "0a016b12016c2005280130034001"),
        (RangeRequest(b"k", serializable=True, count_only=True, created_min=1), "0a016b380148016001"),
        (Compare(b"k", Target.CREATED, 0), "10011a016b2800"),
        (Compare(b"k", Target.MODIFIED, 7), "10021a016b3007"),
        (Compare(b"k", Target.VALUE, b"v"), "10031a016b3a0176"),
        (Compare(b"k", Target.CREATED, 1, less=True, end=b"l"), "080210011a016b28018204016c"),
    ],
)
def test_a_request_is_encoded_as_protobuf_does_it(request_, expected):
    assert request_.encode().hex() == expected


def test_whole_requests_are_encoded_as_protobuf_does_it():
    txn = messages.encode_txn([Compare(b"k", Target.CREATED, 0)], [PutRequest(b"k", b"v")], [RangeRequest(b"k")])
    assert txn.hex() == "0a0710011a016b2800" + "1208" + "12060a016b120176" + "1a05" + "0a030a016b"
    assert messages.encode_watch(3, b"k", b"", 5).hex() == "0a090a016b180520013803"
    assert messages.encode_unwatch(3).hex() == "12020803"
    assert messages.encode_lease(7, 10).hex() == "080a1007"
    assert messages.encode_lease(7).hex() == "0807"
    assert messages.encode_login("me", "pw").hex() == "0a026d6512027077"
    assert messages.encode_compaction(9).hex() == "08091001"


def test_replies_are_decoded():
    header = block(1, number(1, 2**64 - 1) + number(2, 5) + number(3, 77) + number(4, 2))
    item = block(1, b"k") + number(2, 3) + number(3, 4) + number(4, 2) + block(5, b"v") + number(6, 9)
    kv = messages.KeyValue(b"k", b"v", 3, 4, 9)
    known = messages.Header(2**64 - 1, 5, 77, 2)
    assert messages.decode_header(header) == known
    assert messages.decode_header(b"") == messages.decode_header(number(2, 1)) == messages.Header()
    assert messages.decode_range(header + block(2, item) + number(4, 8)) == messages.RangeResponse((kv,), 8)
    answer = header + number(2, 1) + block(3, block(1, block(2, item))) + block(3, block(2, b""))
    ranges = (messages.RangeResponse((kv,)), messages.RangeResponse())
    assert messages.decode_txn(answer) == messages.TxnResponse(known, True, ranges)
    told = header + number(2, 6) + block(11, block(2, item)) + block(11, number(1, 1) + block(2, block(1, b"k") + number(3, 5)))
    changes = (messages.WatchEvent(False, kv), messages.WatchEvent(True, messages.KeyValue(b"k", modified=5)))
    assert messages.decode_watch(told) == messages.WatchResponse(known, 6, changes)
    ended = number(2, 6) + number(3, 1) + number(4, 1) + number(5, 12) + block(6, b"why")
    assert messages.decode_watch(ended) == messages.WatchResponse(messages.Header(), 6, (), True, True, 12, "why")
    assert messages.decode_lease(header + number(2, 7) + number(3, -1)) == messages.LeaseResponse(known, 7, -1)
    status = messages.StatusResponse(known, "3.5.1", size=9, leader=3)
    assert messages.decode_status(header + block(2, b"3.5.1") + number(3, 9) + number(4, 3)) == status
    two = [block(2, number(1, 5) + block(2, b"a") + block(3, b"http://a:1")), block(2, number(1, 6))]
    members = [messages.MemberResponse(5, "a"), messages.MemberResponse(6, "")]
    assert messages.decode_members(header + b"".join(two)) == members
    assert messages.decode_login(header + block(2, b"token")) == "token"


@pytest.mark.parametrize(("prefix", "end"), [(b"a/", b"a0"), (b"a\xff", b"b"), (b"\xff", b"\0"), (b"", b"\0")])
def test_the_end_of_a_prefix_is_behind_all_its_keys(prefix, end):
    assert messages.prefix_end(prefix) == end
