"""The contract of the driver port, which every driver must pass unchanged: sessions, transactions, lists and leases.

Watches have their own file. `support/engine_contract.py` says how to add a driver.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from rdzv.engines.port import (
    AllCreated,
    Away,
    Case,
    Compare,
    Created,
    Delete,
    DeletePrefix,
    Empty,
    EngineReset,
    Equals,
    Get,
    Item,
    LeaseGone,
    List,
    Modified,
    Operation,
    Order,
    Put,
    Session,
)
from rdzv.errors import Unreachable
from support.engine_contract import Reader, Rig, contract, delete, get, keys, put, revision, soon, write

# ---- the session


@contract
async def test_sessions_of_one_engine_agree_on_what_it_is(rig: Rig) -> None:
    """Instance, place and durability are the engine's, and the limits allow for the smallest engine's transactions."""
    one, other = await rig.connect(), await rig.connect()
    assert (one.instance, one.place, one.durable) == (other.instance, other.place, other.durable)
    assert one.instance
    assert one.place
    assert min(one.compares_max, one.writes_max) >= 100


@contract
async def test_two_sessions_see_each_other(rig: Rig) -> None:
    one, other = await rig.connect(), await rig.connect()
    wrote = await put(one, rig.root + "k", b"from one")
    assert await get(other, rig.root + "k") == Item(rig.root + "k", b"from one", wrote, wrote)
    assert await revision(one) == await revision(other) == wrote


@contract
async def test_a_closed_session_does_nothing(rig: Rig) -> None:
    """Every call says Unreachable and surely not applied, a waiting watch ends so, and what was written stays."""
    session, other = await rig.connect(), await rig.connect()
    lease = await session.grant(60)
    await put(session, rig.root + "k", b"", lease)
    reader = Reader(session, rig.root, since=await revision(session))
    waiting = asyncio.create_task(reader.batch())
    await asyncio.sleep(0)
    await session.close()
    with pytest.raises(Unreachable):
        await soon(waiting)
    for call in (put(session, rig.root + "x"), session.grant(60), session.renew(lease), session.revoke(lease)):
        with pytest.raises(Unreachable) as caught:
            await call
        assert caught.value.applied is False
    with pytest.raises(Unreachable):
        await Reader(session, rig.root, since=1).batch()
    await session.close()
    assert await keys(other, rig.root) == ["k"]


@contract
async def test_an_engine_that_came_back_empty_is_another(rig: Rig) -> None:
    """Calls and watches of the old session say EngineReset from then on; a new session finds nothing."""
    if type(rig).restart_empty is Rig.restart_empty:
        # Before the watch begins: a skip later would leave its reader behind, with an exception that nobody reads.
        pytest.skip("this engine does not come back empty")
    session = await rig.connect()
    since = await put(session, rig.root + "k")
    lease = await session.grant(60)
    reader = Reader(session, rig.root, since=since)
    waiting = asyncio.create_task(reader.batch())
    await rig.restart_empty()
    with pytest.raises(EngineReset):
        await soon(waiting)
    for call in (put(session, rig.root + "x"), session.renew(lease), session.grant(60)):
        with pytest.raises(EngineReset):
            await soon(call)
    fresh = await rig.connect()
    assert fresh.instance != session.instance
    assert await keys(fresh, rig.root) == []


# ---- revisions and values


@contract
async def test_a_write_raises_the_revision_by_one(rig: Rig) -> None:
    """However many keys a transaction writes."""
    session = await rig.connect()
    before = await revision(session)
    outcome = await write(session, *(Put(f"{rig.root}{n}", b"") for n in range(5)))
    assert outcome.revision == before + 1
    assert await delete(session, rig.root + "3") == before + 2
    assert await revision(session) == before + 2


@contract
async def test_a_transaction_that_changes_nothing_leaves_the_revision(rig: Rig) -> None:
    """Reads, empty transactions, refused ones and deletions of nothing do not count as writes."""
    session = await rig.connect()
    before = await put(session, rig.root + "k")
    assert (await write(session, Get(rig.root + "k"), List(rig.root))).revision == before
    assert (await write(session, Delete(rig.root + "absent"), DeletePrefix(rig.root + "absent/"))).revision == before
    refused = await session.txn([Created(rig.root + "k", 0)], [Put(rig.root + "k", b"")])
    assert (refused.succeeded, refused.revision) == (False, before)
    assert await revision(session) == before


@contract
async def test_created_and_modified(rig: Rig) -> None:
    """A put of an existing key moves `modified` only, even if the value stays; a re-created key is created anew."""
    session = await rig.connect()
    key = rig.root + "k"
    first = await put(session, key, b"same")
    second = await put(session, key, b"same")
    assert await get(session, key) == Item(key, b"same", first, second)
    await delete(session, key)
    assert await get(session, key) is None
    third = await put(session, key, b"\x00\xff" * 1000)
    assert await get(session, key) == Item(key, b"\x00\xff" * 1000, third, third)


# ---- transactions


@contract
async def test_branches(rig: Rig) -> None:
    """All compares hold: `then`, else `otherwise`; never both."""
    session = await rig.connect()
    key = rig.root + "k"
    then: list[Operation] = [Put(key, b"then"), Get(key)]
    otherwise: list[Operation] = [Get(key), Put(rig.root + "other", b"")]
    taken = await session.txn(iter([Created(key, 0), Empty(rig.root)]), iter(then), iter(otherwise))
    assert taken.succeeded
    assert taken.reads == ((), (Item(key, b"then", taken.revision, taken.revision),))
    refused = await session.txn([Created(key, taken.revision), Empty(rig.root)], then, otherwise)
    assert not refused.succeeded
    assert refused.reads == ((Item(key, b"then", taken.revision, taken.revision),), ())
    assert await keys(session, rig.root) == ["k", "other"]


@contract
async def test_compares(rig: Rig) -> None:
    """Each compare holds exactly when it should, also for absent keys."""
    session = await rig.connect()
    key, other, absent = rig.root + "k", rig.root + "o", rig.root + "absent"
    made = await put(session, key, b"first")
    changed = await put(session, key, b"second")
    both = await put(session, other)
    expected: list[tuple[Compare, bool]] = [
        (Created(key, made), True),
        (Created(key, changed), False),
        (Created(key, 0), False),
        (Created(absent, 0), True),
        (Created(absent, made), False),
        (Modified(key, changed), True),
        (Modified(key, made), False),
        (Modified(key, 0), False),
        (Modified(absent, 0), True),
        (Modified(absent, changed), False),
        (Equals(key, b"second"), True),
        (Equals(key, b"first"), False),
        (Equals(other, b""), True),
        (Equals(absent, b""), False),
        (AllCreated({key: made, other: both}), True),
        (AllCreated({key: made, other: both, absent: 0}), True),
        (AllCreated({key: made, other: made}), False),
        (AllCreated({key: made, absent: made}), False),
        (AllCreated({}), True),
        (Empty(rig.root), False),
        (Empty(rig.root + "k"), False),
        (Empty(rig.root + "k/"), True),
        (Empty(rig.root + "ab"), True),
        (Away(key, 0.0), False),
        (Away(absent, 0.0), False),
    ]
    for compare, holds in expected:
        assert (await session.txn([compare])).succeeded is holds, compare


@contract
async def test_a_member_whose_session_lives_is_never_away(rig: Rig) -> None:
    """Nor one that said goodbye, whose lease then decides."""
    session, other, key = await rig.connect(), await rig.open(), rig.root + "member"
    await other.txn(then=[Put(key, b"", await other.grant(60.0, presence=True))])
    assert not (await session.txn([Away(key, 0.0)])).succeeded
    await other.close()
    outcome = await session.txn([Away(key, 0.0)], [], [Get(key)])
    assert not outcome.succeeded
    assert outcome.item(0) is not None


@contract
async def test_the_first_case_that_holds_is_done(rig: Rig) -> None:
    """Only that case is done; if none holds, `otherwise`. The answer has the reads of the branch taken."""
    session = await rig.connect()
    key, absent = rig.root + "k", rig.root + "absent"
    made = await put(session, key, b"value")
    holds, fails = Created(key, made), Created(key, 0)

    async def done(first: Compare, second: Compare, third: Compare) -> tuple[bool, int, list[str], bytes]:
        outcome = await session.txn(
            [first],
            [Put(rig.root + "did", b"1"), Get(key)],
            [Get(absent)],
            [Case((second,), (Put(rig.root + "did", b"2"), Get(absent), Get(key))), Case((third,), (Get(key),))],
        )
        did = await get(session, rig.root + "did")
        return outcome.succeeded, outcome.case, [len(read) for read in outcome.reads], did.value if did else b""

    assert await done(fails, fails, fails) == (False, 0, [0], b"")
    assert await done(fails, fails, holds) == (True, 2, [1], b"")
    assert await done(fails, holds, holds) == (True, 1, [0, 0, 1], b"2")
    assert await done(holds, holds, fails) == (True, 0, [0, 1], b"1")


@contract
async def test_empty_follows_the_last_key(rig: Rig) -> None:
    """A prefix is empty again when its last key is gone, at any depth."""
    session = await rig.connect()
    await write(session, Put(rig.root + "a/b/c", b""), Put(rig.root + "a/d", b""))
    await delete(session, rig.root + "a/d")
    assert not (await session.txn([Empty(rig.root + "a/")])).succeeded
    await delete(session, rig.root + "a/b/c")
    assert (await session.txn([Empty(rig.root + "a/"), Empty(rig.root)])).succeeded


@contract
async def test_empty_since_a_revision(rig: Rig) -> None:
    """Keys created up to that revision do not count, however late they were modified; re-created ones do."""
    session = await rig.connect()
    await put(session, rig.root + "a/1")
    since = await put(session, rig.root + "a/2")

    async def nobody_came(prefix: str) -> bool:
        return (await session.txn([Empty(rig.root + prefix, since)])).succeeded

    await put(session, rig.root + "a/1", b"modified")
    await put(session, rig.root + "b")
    assert await nobody_came("a/")
    assert not await nobody_came("")
    assert not (await session.txn([Empty(rig.root + "a/", since - 1)])).succeeded
    await delete(session, rig.root + "a/1")
    assert await nobody_came("a/")
    await put(session, rig.root + "a/1", b"re-created")
    assert not await nobody_came("a/")
    assert await nobody_came("a/2")


@contract
async def test_many_compares(rig: Rig) -> None:
    """As many keys as the session says can be compared at once, and one that differs is noticed."""
    session = await rig.connect()
    count = min(session.compares_max, 1000)
    names = [f"{rig.root}{n:04d}" for n in range(count)]
    revisions: dict[str, int] = {}
    step = min(session.writes_max, 100)
    for start in range(0, count, step):
        some = names[start : start + step]
        made = await write(session, *(Put(name, b"") for name in some))
        revisions.update(dict.fromkeys(some, made.revision))
    assert (await session.txn([AllCreated(revisions)])).succeeded
    await write(session, Delete(names[-1]))
    assert not (await session.txn([AllCreated(revisions)])).succeeded


@contract
async def test_reads_see_the_writes_before_them(rig: Rig) -> None:
    """Operations apply in order: a read sees what the same transaction wrote before it, not what it writes after."""
    session = await rig.connect()
    a, b = rig.root + "d/a", rig.root + "d/b"
    await put(session, a, b"old")
    outcome = await write(
        session, Get(a), Put(b, b"new"), List(rig.root + "d/", Order.NEWEST, 1), Delete(a), Get(a), List(rig.root)
    )
    new = Item(b, b"new", outcome.revision, outcome.revision)
    assert outcome.item(0) is not None
    assert outcome.reads[1:] == ((), (new,), (), (), (new,))


@contract
async def test_a_key_is_written_once_per_transaction(rig: Rig) -> None:
    """Twice is the caller's mistake and says so, and nothing of that transaction is applied."""
    session = await rig.connect()
    key = rig.root + "d/k"
    before = await revision(session)
    for twice in (
        (Put(key, b"1"), Put(key, b"2")),
        (Put(key, b""), Delete(key)),
        (Delete(key), Put(key, b"")),
        (DeletePrefix(rig.root + "d/"), Put(key, b"")),
        (Put(key, b""), DeletePrefix(rig.root)),
    ):
        with pytest.raises(ValueError, match=rig.root):
            await write(session, Put(rig.root + "x", b""), *twice)
    assert await revision(session) == before


@contract
async def test_concurrent_transactions_apply_one_at_a_time(rig: Rig) -> None:
    """Many transactions from several sessions create one key: exactly one succeeds, and the others read its value."""
    sessions = [await rig.connect() for _ in range(5)]
    key = rig.root + "k"

    async def attempt(session: Session, n: int) -> tuple[bool, bytes]:
        outcome = await session.txn([Created(key, 0)], [Put(key, b"%d" % n), Get(key)], [Get(key), Get(key)])
        found = outcome.item(1)
        assert found is not None
        return outcome.succeeded, found.value

    results = await asyncio.gather(*(attempt(sessions[n % 5], n) for n in range(25)))
    assert [succeeded for succeeded, _ in results].count(True) == 1
    assert len({value for _, value in results}) == 1


# ---- lists and deletions


@contract
async def test_list_orders_and_limits(rig: Rig) -> None:
    """Lists are sorted by key or by creation; a later modification does not move a key, and the limit cuts last."""
    session = await rig.connect()
    for name in ("b", "d", "a", "c"):
        await put(session, rig.root + name)
    await put(session, rig.root + "b", b"modified last")
    assert await keys(session, rig.root) == ["a", "b", "c", "d"]
    assert await keys(session, rig.root, Order.OLDEST) == ["b", "d", "a", "c"]
    assert await keys(session, rig.root, Order.NEWEST) == ["c", "a", "d", "b"]
    assert await keys(session, rig.root, Order.KEY, 2) == ["a", "b"]
    assert await keys(session, rig.root, Order.OLDEST, 1) == ["b"]
    assert await keys(session, rig.root, Order.NEWEST, 2) == ["c", "a"]
    assert await keys(session, rig.root, Order.NEWEST, 9) == ["c", "a", "d", "b"]
    assert sorted(await keys(session, rig.root, Order.ANY)) == ["a", "b", "c", "d"]
    assert len(await keys(session, rig.root, Order.ANY, 1)) == 1


@contract
async def test_list_created_below(rig: Rig) -> None:
    """Only keys created before that revision, whenever they were modified; so a key finds its predecessor."""
    session = await rig.connect()
    made = {name: await put(session, rig.root + name) for name in ("a", "b", "c", "d")}
    await put(session, rig.root + "a", b"modified")
    for order, expected in ((Order.KEY, ["a", "b"]), (Order.OLDEST, ["a", "b"]), (Order.NEWEST, ["b", "a"])):
        assert await keys(session, rig.root, order, created_below=made["c"]) == expected
    assert await keys(session, rig.root, Order.NEWEST, 1, made["d"]) == ["c"]
    assert await keys(session, rig.root, Order.NEWEST, 1, made["a"]) == []
    await delete(session, rig.root + "c")
    await put(session, rig.root + "b", b"modified")
    assert await keys(session, rig.root, Order.NEWEST, 1, made["d"]) == ["b"]
    await delete(session, rig.root + "b")
    await put(session, rig.root + "b", b"re-created")
    assert await keys(session, rig.root, Order.NEWEST, 1, made["d"]) == ["a"]


@contract
async def test_list_after_a_key(rig: Rig) -> None:
    """Only keys behind that one, whether it is there or not, within the prefix or outside."""
    session = await rig.connect()
    for name in ("b", "d/x", "d", "c", "e"):
        await put(session, rig.root + name)
    for after, expected in (("", "bcde"), ("a", "bcde"), ("b", "cde"), ("bb", "cde"), ("d", "e"), ("e", ""), ("f", "")):
        found = await keys(session, rig.root, after=rig.root + after)
        assert [name for name in found if name != "d/x"] == list(expected)
        assert ("d/x" in found) is (after < "d/x")
    assert await keys(session, rig.root, Order.KEY, 2, after=rig.root + "b") == ["c", "d"]
    assert await keys(session, rig.root, Order.NEWEST, 1, after=rig.root + "c") == ["e"]
    assert await keys(session, rig.root, Order.ANY, 1, after=rig.root + "d/x") == ["e"]
    assert await keys(session, rig.root + "d", after=rig.root + "b") == ["", "/x"]
    assert await keys(session, rig.root + "d", after=rig.root + "e") == []


@contract
async def test_list_takes_any_prefix(rig: Rig) -> None:
    """A prefix may end within a name and span directories; keys beside it, however similar, are left out."""
    session = await rig.connect()
    for name in ("ab", "a/x", "a", "a/y/z", "a-", "b/a"):
        await put(session, rig.root + name)
    assert await keys(session, rig.root + "a") == ["", "-", "/x", "/y/z", "b"]
    assert await keys(session, rig.root + "a/") == ["x", "y/z"]
    assert await keys(session, rig.root + "a/", Order.NEWEST) == ["y/z", "x"]
    assert await keys(session, rig.root + "a", Order.OLDEST, 3) == ["b", "/x", ""]
    assert await keys(session, rig.root + "a", Order.NEWEST, 2) == ["-", "/y/z"]
    assert await keys(session, rig.root + "c") == []


@contract
async def test_delete_prefix(rig: Rig) -> None:
    """Deletes all below it and nothing beside it, at one revision."""
    session = await rig.connect()
    await write(session, *(Put(rig.root + name, b"") for name in ("a/1", "a/2", "a/b/3", "ab", "b/1")))
    before = await revision(session)
    outcome = await write(session, DeletePrefix(rig.root + "a/"), List(rig.root))
    assert outcome.revision == before + 1
    assert await keys(session, rig.root) == ["ab", "b/1"]
    assert [item.key for item in outcome.reads[1]] == [rig.root + "ab", rig.root + "b/1"]


# ---- leases


@contract
async def test_an_expired_lease_takes_all_its_keys(rig: Rig) -> None:
    """The keys go after the lease's time, not before, at one revision. The lease cannot be used any more."""
    session, other = await rig.connect(), await rig.connect()
    reader = Reader(other, rig.root, since=await revision(other))
    granted = time.monotonic()
    lease = await session.grant(rig.ttl_s)
    await put(session, rig.root + "a", b"", lease)
    await put(session, rig.root + "b/c", b"", lease)
    await put(session, rig.root + "stays")
    assert len(await reader.events(3)) == 3
    gone = await reader.batch()
    assert time.monotonic() - granted >= rig.ttl_s
    assert {(event.key, event.item) for event in gone.events} == {(rig.root + "a", None), (rig.root + "b/c", None)}
    assert len({event.revision for event in gone.events}) == 1
    assert await keys(session, rig.root) == ["stays"]
    with pytest.raises(LeaseGone):
        await session.renew(lease)
    with pytest.raises(LeaseGone):
        await put(session, rig.root + "a", b"", lease)


@contract
async def test_renewing_keeps_a_lease(rig: Rig) -> None:
    """A lease that is renewed outlives others of the same length that are not."""
    session = await rig.connect()
    kept = await session.grant(rig.ttl_s)
    await put(session, rig.root + "kept", b"", kept)
    reader = Reader(session, rig.root, since=await revision(session))

    async def renew() -> None:
        while True:
            await session.renew(kept)
            await asyncio.sleep(rig.ttl_s / 5)

    renewing = asyncio.create_task(renew())
    for _ in range(2):
        await put(session, rig.root + "left", b"", await session.grant(rig.ttl_s))
        assert await reader.events(2) == [(rig.root + "left", b""), (rig.root + "left", None)]
    assert not renewing.done()
    renewing.cancel()
    assert await reader.events(1) == [(rig.root + "kept", None)]


@contract
async def test_a_lease_that_stands_for_a_process(rig: Rig) -> None:
    """As long as the connection is there it is a lease like any other: it keeps its keys and can be revoked."""
    session = await rig.connect()
    lease = await session.grant(60, presence=True)
    await put(session, rig.root + "k", b"", lease)
    await session.renew(lease)
    assert await keys(session, rig.root) == ["k"]
    await session.revoke(lease)
    assert await keys(session, rig.root) == []


@contract
async def test_revoking_a_lease(rig: Rig) -> None:
    """Deletes its keys at once and at one revision; doing it again, from anywhere, is no error."""
    session, other = await rig.connect(), await rig.connect()
    lease = await session.grant(60)
    await write(session, Put(rig.root + "a", b"", lease), Put(rig.root + "b", b"", lease), Put(rig.root + "c", b""))
    before = await revision(session)
    await other.revoke(lease)
    assert await keys(session, rig.root) == ["c"]
    assert await revision(session) == before + 1
    await other.revoke(lease)
    await session.revoke(lease)
    assert await revision(session) == before + 1
    with pytest.raises(LeaseGone):
        await session.renew(lease)


@contract
async def test_a_put_moves_a_key_to_its_lease(rig: Rig) -> None:
    """A key belongs to the lease of its last put, or to none, and a deleted one to none."""
    session = await rig.connect()
    first, second = await session.grant(60), await session.grant(60)
    assert first != second
    assert 0 not in (first, second)
    for name in ("moved", "freed", "again", "first"):
        await put(session, rig.root + name, b"", first)
    await put(session, rig.root + "moved", b"", second)
    await put(session, rig.root + "freed")
    await delete(session, rig.root + "again")
    await put(session, rig.root + "again")
    listed = await write(session, List(rig.root, Order.OLDEST))
    assert [item.lease for item in listed.reads[0]] == [second, 0, first, 0]
    await session.revoke(first)
    assert await keys(session, rig.root) == ["again", "freed", "moved"]
    await session.revoke(second)
    assert await keys(session, rig.root) == ["again", "freed"]


@contract
async def test_a_put_under_an_ended_lease_applies_nothing(rig: Rig) -> None:
    """LeaseGone means that no write of the transaction happened; in the branch not taken it does not matter."""
    session = await rig.connect()
    lease = await session.grant(60)
    await session.revoke(lease)
    before = await put(session, rig.root + "k", b"old")
    for gone in (lease, lease + 12345):
        with pytest.raises(LeaseGone):
            await write(session, Put(rig.root + "x", b""), Delete(rig.root + "k"), Put(rig.root + "y", b"", gone))
    assert await revision(session) == before
    assert await keys(session, rig.root) == ["k"]
    untaken = await session.txn([Created(rig.root + "k", 0)], [Put(rig.root + "y", b"", lease)], [Get(rig.root + "k")])
    assert not untaken.succeeded


@contract
async def test_leases_outlive_their_session(rig: Rig) -> None:
    """Closing a session ends no lease; another session can renew and revoke it."""
    session, other = await rig.connect(), await rig.connect()
    lease = await session.grant(60)
    await put(session, rig.root + "k", b"", lease)
    await session.close()
    await other.renew(lease)
    assert await keys(other, rig.root) == ["k"]
    await other.revoke(lease)
    assert await keys(other, rig.root) == []
