"""Counts of keys: concurrent requests are merged, and all spans are read at one revision."""

from __future__ import annotations

import asyncio

from rdzv.engines.etcd.client.counting import KeyCounter, KeyCounts
from rdzv.engines.etcd.client.errors import Compacted
from rdzv.engines.etcd.client.messages import Header, RangeResponse, TxnResponse


async def test_concurrent_counts_share_a_transaction_and_only_a_compacted_one_fails():
    asked: list[list[tuple[bytes, int]]] = []

    async def read(ranges) -> TxnResponse:
        asked.append([(one.key, one.revision) for one in ranges])
        if any(one.revision == 3 for one in ranges):
            raise Compacted("forgotten")
        return TxnResponse(Header(revision=50), True, tuple(RangeResponse(count=len(one.key) - 1) for one in ranges))

    counter = KeyCounter(read)
    a, b = (b"a", b""), (b"bb", b"")

    async def count(*request) -> KeyCounts | Exception:
        result = asyncio.get_running_loop().create_future()
        counter.count(*request, result.set_result)
        return await result

    first, second, late = await asyncio.gather(count([a, b], [a, b], 7), count([b], [], 0), count([a], [a], 3))
    # The revision of a single key that exists tells what was before. A missing key, or a prefix, must be counted.
    assert first == KeyCounts(50, {a: RangeResponse(count=0), b: RangeResponse(count=1)}, {a: 0})
    assert second.before == {}
    assert isinstance(late, Compacted)
    assert asked[0] == [(b"a", 0), (b"bb", 0)]
    many = [(b"%d" % n, b"") for n in range(300)]
    asked.clear()
    assert len((await count(many, [], 0)).now) == 300
    assert [len(one) for one in asked] == [127, 127, 46]
    assert {revision for one in asked[1:] for _, revision in one} == {50}
