"""The contract of the driver port, which every driver must pass unchanged: watches."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.engines.port import (
    Batch,
    Case,
    Created,
    Delete,
    DeletePrefix,
    Equals,
    Gap,
    Get,
    Item,
    List,
    Put,
    Session,
    WatchPlan,
)
from rdzv.errors import Unreachable
from support.engine_contract import Reader, Rig, contract, delete, put, revision, soon, write


@contract
async def test_watch_a_key(rig: Rig) -> None:
    """A key that does not exist yet can be watched; every change comes, no matter who made it, and no other key's."""
    session, other = await rig.connect(), await rig.connect()
    key = rig.root + "k"
    reader = Reader(session, key, since=await revision(session))
    for near in (rig.root + "k2", rig.root + "k/x", rig.root + "j"):
        await put(other, near)
    made = await put(other, key, b"1")
    changed = await put(session, key, b"2")
    deleted = await delete(other, key)
    again = await put(other, key, b"3")
    events = [await reader.event() for _ in range(4)]
    assert [event.revision for event in events] == [made, changed, deleted, again]
    assert [event.key for event in events] == [key] * 4
    assert [event.item for event in events] == [
        Item(key, b"1", made, made),
        Item(key, b"2", made, changed),
        None,
        Item(key, b"3", again, again),
    ]


@contract
async def test_watch_a_prefix(rig: Rig) -> None:
    """All keys below it at any depth, and none beside it."""
    session = await rig.connect()
    reader = Reader(session, rig.root + "a/", since=await revision(session))
    for name in ("a", "ab", "a/1", "b/a/1", "a/b/c/2", "a-", "a/"):
        await put(session, rig.root + name, name.encode())
    await write(session, DeletePrefix(rig.root + "a/b/"))
    assert await reader.events(4) == [
        (rig.root + "a/1", b"a/1"),
        (rig.root + "a/b/c/2", b"a/b/c/2"),
        (rig.root + "a/", b"a/"),
        (rig.root + "a/b/c/2", None),
    ]


@contract
async def test_watch_several_targets(rig: Rig) -> None:
    """Each event once and in order, also if two targets cover it."""
    session = await rig.connect()
    targets = [rig.root + name for name in ("k", "d/", "d/e/", "d/e/x", "k", "later")]
    reader = Reader(session, *targets, since=await revision(session))
    for name in ("d/e/x", "no", "k", "d/1", "d/e/2", "x/k", "later"):
        await put(session, rig.root + name)
    found = [key for key, _ in await reader.events(5)]
    assert found == [rig.root + name for name in ("d/e/x", "k", "d/1", "d/e/2", "later")]


@contract
async def test_watch_a_star(rig: Rig) -> None:
    """A key in every directory beside each other, whether it is there already; each event once, whatever else is watched."""
    session = await rig.connect()
    if not session.stars:
        pytest.skip("watches of this engine know keys and prefixes only")
    since = await revision(session)
    await put(session, rig.root + "d/1/k", b"0")
    reader = Reader(session, rig.root + "d/*/k", rig.root + "d/1/k", rig.root + "d/2/", since=since)
    for name in ("d/k", "d/1/k", "d/1/kk", "d/1/2/k", "d/2/k", "d/3/x", "k"):
        await put(session, rig.root + name, b"1")
    await write(session, Put(rig.root + "d/3/k", b"1"), DeletePrefix(rig.root + "d/1/"))
    found = [(rig.root + "d/1/k", b"0"), *((rig.root + f"d/{name}/k", b"1") for name in (1, 2, 3)), (rig.root + "d/1/k", None)]
    assert await reader.events(5) == found


@contract
async def test_watch_ends_only(rig: Rig) -> None:
    """Of a key in `ends` only the deletion comes, also from the past; of one that is a target as well, everything."""
    session = await rig.connect()
    since = await revision(session)
    own, both, target = rig.root + "own", rig.root + "d/both", rig.root + "k"
    await put(session, own, b"past")
    await delete(session, own)
    reader = Reader(session, target, rig.root + "d/", since=since, ends=[own, both, target])
    assert await reader.events(1) == [(own, None)]
    await put(session, own, b"1")
    await put(session, both, b"2")
    await put(session, own, b"3")
    await put(session, target, b"4")
    await write(session, Put(rig.root + "d/other", b"5"), Delete(own))
    await delete(session, target)
    assert await reader.events(2) == [(both, b"2"), (target, b"4")]
    assert sorted(await reader.events(2)) == [(rig.root + "d/other", b"5"), (own, None)]
    assert await reader.events(1) == [(target, None)]


@contract
async def test_a_watch_that_begins_with_a_transaction(rig: Rig) -> None:
    """It shows what happened after the transaction, and the end of the first key that was found."""
    session, other = await rig.connect(), await rig.connect()
    own, found, head = rig.root + "m/own", rig.root + "m/found", rig.root + "head"
    await put(other, found)
    plan = WatchPlan((head,), (own,), (0, 1))
    reads = [List(rig.root + "none/"), List(rig.root + "m/"), Put(own, b"1")]
    outcome, watch = await session.txn_then_watch(plan, [Created(own, 0)], reads, [Get(own)])
    assert outcome.succeeded
    assert [item.key for item in outcome.reads[1]] == [found]
    assert watch is not None
    reader = Reader(session, since=outcome.revision, watch=watch)
    for key in (found, own, head):
        await put(other, key, b"2")
    await delete(other, found)
    await delete(other, own)
    assert await reader.events(3) == [(head, b"2"), (found, None), (own, None)]


@contract
async def test_a_watch_begins_only_with_a_transaction_that_succeeds(rig: Rig) -> None:
    """Another case of the transaction is a success, too, with what that case found. The refusal says what there is."""
    session = await rig.connect()
    own, found = rig.root + "own", rig.root + "m/found"
    await put(session, own, b"1")
    await put(session, found)
    plan = WatchPlan((own,), (), (0,))
    outcome, watch = await session.txn_then_watch(plan, [Created(own, 0)], [Put(own, b"2")], [Get(own)])
    assert (outcome.succeeded, outcome.reads[0][0].value, watch) == (False, b"1", None)
    case = Case((Equals(own, b"1"),), (List(rig.root + "m/"), Put(own, b"3")))
    outcome, watch = await session.txn_then_watch(plan, [Created(own, 0)], [Put(own, b"2")], [Get(own)], [case])
    assert (outcome.succeeded, outcome.case) == (True, 1)
    assert watch is not None
    reader = Reader(session, since=outcome.revision, watch=watch)
    await delete(session, found)
    await put(session, own, b"4")
    assert await reader.events(2) == [(found, None), (own, b"4")]


@contract
async def test_a_listener_is_told_everything_in_order(rig: Rig) -> None:
    """A watch calls its listener with each batch, in a callback of its own, until it is closed. The end comes to it, too."""
    session = await rig.connect()
    since = await revision(session)
    await put(session, rig.root + "a/1")
    watch, heard, told = session.watch([rig.root + "a/"], since), [], asyncio.Event()

    def listen(news: Batch | Exception) -> None:
        heard.extend([event.key for event in news.events] if isinstance(news, Batch) else [type(news)])
        if len(heard) == 2:
            told.set()

    watch.listen(listen)
    assert not heard, "not before the call has returned"
    await put(session, rig.root + "a/2")
    await soon(told.wait())
    assert heard == [rig.root + "a/1", rig.root + "a/2"]
    await watch.aclose()
    await put(session, rig.root + "a/3")
    last = session.watch([rig.root + "a/"], since)
    told.clear()
    last.listen(lambda news: told.set() if isinstance(news, Unreachable) else None)
    await session.close()
    await soon(told.wait())
    assert heard == [rig.root + "a/1", rig.root + "a/2"]


@contract
async def test_watch_from_the_past(rig: Rig) -> None:
    """Every change after the revision comes, also those before the watch, then the new ones; none at or before it."""
    session = await rig.connect()
    key = rig.root + "k"
    revisions = [await put(session, key, b"%d" % n) for n in range(6)]
    await delete(session, key)
    for start in (0, 3, 5):
        reader = Reader(session, key, since=revisions[start])
        expected = [(key, b"%d" % n) for n in range(start + 1, 6)]
        assert await reader.events(6 - start) == [*expected, (key, None)]
    await put(session, key, b"new")
    assert await reader.events(1) == [(key, b"new")]


@contract
async def test_a_transaction_is_watched_as_a_whole(rig: Rig) -> None:
    """All events of a transaction come in one batch, whose revision says how far the watch is."""
    session = await rig.connect()
    reader = Reader(session, rig.root, since=await revision(session))
    await put(session, rig.root + "old")
    assert len((await reader.batch()).events) == 1
    outcome = await write(
        session, Put(rig.root + "a", b"1"), Delete(rig.root + "old"), *(Put(f"{rig.root}b/{n}", b"") for n in range(20))
    )
    batch = await reader.batch()
    assert len(batch.events) == 22
    assert {event.revision for event in batch.events} == {outcome.revision}
    assert batch.revision >= outcome.revision


@contract
async def test_many_watches_of_many_sessions_see_the_same(rig: Rig) -> None:
    """Writes from several sessions at once reach all watches in one order, each once."""
    sessions = [await rig.connect() for _ in range(4)]
    since = await revision(sessions[0])
    readers = [Reader(session, rig.root, since=since) for session in sessions for _ in range(3)]

    async def churn(session: Session, n: int) -> None:
        for count in range(10):
            await put(session, f"{rig.root}{n}", b"%d" % count)

    await asyncio.gather(*(churn(session, n) for n, session in enumerate(sessions)))
    seen = [await reader.events(40) for reader in readers]
    assert all(other == seen[0] for other in seen)
    for n in range(4):
        assert [value for key, value in seen[0] if key == f"{rig.root}{n}"] == [b"%d" % count for count in range(10)]


@contract
async def test_watch_shows_deletion_by_lease(rig: Rig) -> None:
    """A revoked lease's keys are seen to go like any other deletion, also by a watch of just one of them."""
    session, other = await rig.connect(), await rig.connect()
    lease = await session.grant(60)
    since = await put(session, rig.root + "a", b"", lease)
    await put(session, rig.root + "b", b"", lease)
    one, both = Reader(other, rig.root + "a", since=since), Reader(other, rig.root, since=since)
    await session.revoke(lease)
    assert await one.events(1) == [(rig.root + "a", None)]
    assert await both.events(1) == [(rig.root + "b", b"")]
    assert sorted(await both.events(2)) == [(rig.root + "a", None), (rig.root + "b", None)]


@contract
async def test_a_gap_is_said(rig: Rig) -> None:
    """A watch from before what the engine remembers ends with Gap; list again and watch from there works."""
    session = await rig.connect()
    first = await put(session, rig.root + "k", b"1")
    for _ in range(3):
        await put(session, rig.root + "k", b"2")
    await rig.forget()
    for target in (rig.root + "k", rig.root, rig.root + "never written"):
        with pytest.raises(Gap):
            await Reader(session, target, since=first).batch()
    listed = await write(session, List(rig.root))
    reader = Reader(session, rig.root, since=listed.revision)
    await put(session, rig.root + "k", b"3")
    assert await reader.events(1) == [(rig.root + "k", b"3")]


@contract
async def test_closing_a_watch(rig: Rig) -> None:
    """A closed watch ends, also for whoever waits for it; other watches of the session go on."""
    session = await rig.connect()
    since = await revision(session)
    reader, other = Reader(session, rig.root, since=since), Reader(session, rig.root, since=since)
    waiting = asyncio.create_task(reader.batch())
    await asyncio.sleep(0)
    await reader.close()
    with pytest.raises(StopAsyncIteration):
        await soon(waiting)
    await put(session, rig.root + "k")
    assert await other.events(1) == [(rig.root + "k", b"")]
    with pytest.raises(StopAsyncIteration):
        await reader.batch()
    await reader.close()


@contract
async def test_giving_up_a_wait_loses_nothing(rig: Rig) -> None:
    """A read of a watch that is cancelled or timed out takes no batch with it."""
    session = await rig.connect()
    watch = aiter(session.watch([rig.root], await revision(session)))
    for n in range(10):
        waiting = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        await put(session, f"{rig.root}{n}")
        waiting.cancel()
        try:
            batch = await waiting
        except asyncio.CancelledError:
            batch = await soon(anext(watch))
        assert [event.key for event in batch.events] == [f"{rig.root}{n}"]


@contract
async def test_a_watch_with_nothing_to_say_waits(rig: Rig) -> None:
    """The watch neither ends nor delivers an empty batch, until one of its keys changes."""
    session = await rig.connect()
    reader = Reader(session, rig.root + "k", since=await revision(session))
    waiting = asyncio.create_task(reader.batch())
    for n in range(50):
        await put(session, f"{rig.root}other{n}")
    assert not waiting.done()
    made = await put(session, rig.root + "k")
    batch = await soon(waiting)
    assert [(event.key, event.revision) for event in batch.events] == [(rig.root + "k", made)]
