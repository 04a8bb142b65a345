"""Honest frames of every kind, and what becomes of them on the way: cut, repeated, mixed up, made up."""

from __future__ import annotations

import msgspec

from rdzv.engines.embedded import features, frames
from rdzv.engines.embedded.frames import encode
from rdzv.engines.port import (
    AllCreated,
    Away,
    Batch,
    Case,
    Created,
    Delete,
    DeletePrefix,
    Empty,
    Equals,
    Event,
    Get,
    Item,
    List,
    Modified,
    Order,
    Outcome,
    Put,
)

ITEM = Item("k", b"\x00\xff", 3, 4, 5)
REQUESTS = [
    frames.Txn(
        1,
        (Created("a", 1), Modified("b", 2), Equals("l", b"\x02"), AllCreated({"c": 3}), Empty("d/", 4), Away("m", 0.25)),
        (Put("e", b"\x01", 7), Delete("f"), DeletePrefix("g/"), Get("h"), List("i/", Order.NEWEST, 2, 9, "i/j")),
        (),
        (Case((Created("k", 0),), (Get("k"),)),),
        (frames.LeaseGrant(7, 10.0), frames.LeaseGrant(8, 86400.0, presence=False)),
    ),
    frames.Renew(3, 7),
    frames.Revoke(4, 7),
    frames.WatchStart(5, ("a", "b/"), 12),
    features.EndsWatchStart(6, ("a", "b/"), 12, ("c",)),
    features.TxnThenWatch(
        2, (Created("a", 0),), (List("i/"), Put("a", b"\x01", 9)), (), (), (frames.LeaseGrant(9, 10.0),),
        7, ("b",), ("a",), (0, 5),
    ),
    frames.WatchStop(5),
    frames.Ping(6),
    frames.Bye(),
]
ANSWERS = [
    frames.TxnDone(1, Outcome(True, 9, ((), (ITEM,)))),
    frames.Acknowledged(3),
    frames.LeaseEnded(4, "gone"),
    frames.Refused(5, "no"),
    frames.LimitReached(6, "run", 10, 9),
    frames.WatchNews(7, Batch(9, (Event("k", 9, ITEM), Event("l", 9, None)))),
    frames.WatchGap(8, "gap"),
    frames.Rejected("go away"),
]
FIRST = [frames.Challenge(bytes(32)), frames.Proof(bytes(32)), frames.Hello("job", "s", 1)]


def mutations(rng, honest=REQUESTS):
    """Malformed, truncated, out of order and merely odd frames; half of them well framed."""
    odd = [None, True, -1, 2**64 - 1, 1.5, float("nan"), "", "x" * 3000, b"\xff", [], [[]], {}, {"a": 1}, [1, 2, 3]]
    numbers = [0, 1, 2**31, 2**62, 2**63, -(2**63)]
    while True:
        kind = rng.randrange(6)
        if kind == 0:
            payload = rng.randbytes(rng.randrange(64))
        elif kind == 1:
            payload = msgspec.msgpack.encode([rng.randrange(12), *rng.choices(odd + numbers, k=rng.randrange(6))])
        elif kind == 2:
            whole = bytearray(encode(rng.choice(honest))[4:])
            for _ in range(rng.randrange(1, 4)):
                whole[rng.randrange(len(whole))] = rng.randrange(256)
            payload = bytes(whole)
        elif kind == 3:
            payload = encode(rng.choice(honest))[4:][: rng.randrange(20)]
        elif kind == 4:
            payload = encode(rng.choice(ANSWERS + REQUESTS + FIRST))[4:]
        else:
            yield rng.randbytes(rng.randrange(40))
            continue
        yield len(payload).to_bytes(4, "big") + payload
