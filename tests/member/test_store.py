"""The store of a round: its calls, its limits, and that it begins and ends with the round."""

from __future__ import annotations

import asyncio

import pytest

from rdzv.engines.port import EngineReset, Gap, List
from rdzv.errors import LimitExceeded, RoundOver, StoreTimeout, Unreachable
from rdzv.member import store
from rdzv.member.store_calls import KEY_MAX, PAGE, TIMEOUT_S, VALUE_MAX
from support.memory_members import LONG_S, Party, join, run, until


def with_stores(count: int, use) -> None:
    """Let the members of one round use their stores."""

    async def scenario():
        async with Party(count, count) as party:
            _, worlds = await party.form(*(f"n{index}" for index in range(count)))
            await use(*(world.store for world in worlds))

    run(scenario)


# ---- one call after the other


def test_what_one_member_sets_another_gets():
    async def use(a, b):
        await a.set("text", "grüezi")
        await a.set("bytes", b"\x00\xff")
        await a.set("empty", b"")
        assert await b.get("text") == "grüezi".encode()
        assert await b.multi_get(["bytes", "empty", "bytes"]) == [b"\x00\xff", b"", b"\x00\xff"]
        await b.set("text", b"again")
        assert await a.get("text") == b"again"

    with_stores(2, use)


@pytest.mark.parametrize("key", ["", "/", "a/", "a/b", "=", "a=", "../x", "%2F", "ключ", " "])
def test_a_key_can_be_any_text(key):
    async def use(a):
        await a.set("a", "other")
        await a.set(key, "value")
        assert await a.get(key, timeout_s=1) == b"value"
        assert await a.num_keys() == 2
        assert await a.delete(key)
        assert await a.num_keys() == 1
        assert await a.get("a") == b"other"

    with_stores(1, use)


def test_several_keys_appear_together():
    async def use(a, b):
        waiting = asyncio.create_task(b.multi_get(["x", "y", "z"]))
        await asyncio.sleep(0)
        await a.multi_set({"x": "1", "y": b"2", "z": "3"})
        assert await waiting == [b"1", b"2", b"3"]
        assert await a.num_keys() == 3
        await a.multi_set({})
        assert await a.multi_get([]) == []

    with_stores(2, use)


def test_more_keys_at_once_than_the_engine_writes_are_refused_with_both_numbers(monkeypatch):
    async def use(a):
        monkeypatch.setattr(type(a.calls.presence.session), "writes_max", 4)
        await a.multi_set({"x": "1", "y": "2", "z": "3"})
        with pytest.raises(ValueError, match="4 keys, but this engine writes at most 3 at once; use several calls"):
            await a.multi_set(dict.fromkeys("wxyz", "4"))
        assert await a.multi_get(["x", "y", "z"]) == [b"1", b"2", b"3"]

    with_stores(1, use)


def test_add_counts_from_zero_and_down_too():
    async def use(a, b):
        assert [await a.add("n", 5), await b.add("n", -7), await a.add("n", 0)] == [5, -2, -2]
        assert await b.get("n") == b"-2", "it is text, as others' stores have it"
        await a.set("n", "40")
        assert await b.add("n", 2) == 42
        assert await b.add("large", 10**30) == 10**30

    with_stores(2, use)


def test_add_to_what_is_no_number_is_refused():
    async def use(a):
        await a.set("word", "three")
        with pytest.raises(ValueError, match="add: the value of 'word' is not a whole number"):
            await a.add("word", 1)
        assert await a.get("word") == b"three"

    with_stores(1, use)


def test_append_puts_bytes_behind_those_that_are_there():
    async def use(a, b):
        await a.append("log", "one ")
        await b.append("log", b"two")
        assert await a.get("log") == b"one two"

    with_stores(2, use)


def test_compare_set_writes_only_over_what_is_expected():
    async def use(a, b):
        assert await a.compare_set("k", "", "first") == b"first", "there was none"
        assert await b.compare_set("k", "", "second") == b"first", "there was one"
        assert await b.compare_set("k", "first", "second") == b"second"
        assert await a.get("k") == b"second"
        assert await a.compare_set("missing", "something", "new") == b""
        assert not await a.check(["missing"])

    with_stores(2, use)


def test_of_all_who_compare_and_set_one_wins():
    async def use(*stores):
        found = await asyncio.gather(*(store.compare_set("k", "", str(i)) for i, store in enumerate(stores)))
        assert len(set(found)) == 1
        assert await stores[0].get("k") == found[0]

    with_stores(4, use)


def test_check_and_delete_tell_what_is_there():
    async def use(a, b):
        assert await a.check([])
        assert not await a.check(["x"])
        await b.set("x", "1")
        assert await a.check(["x"])
        assert not await a.check(["x", "y"])
        assert await a.delete("x") is True
        assert await b.delete("x") is False
        assert not await b.check(["x"])

    with_stores(2, use)


# ---- many at once


def test_add_counts_each_call_once_whoever_else_adds():
    async def use(*stores):
        calls = [store.add("n", 1) for _ in range(25) for store in stores]
        assert sorted(await asyncio.gather(*calls)) == list(range(1, 25 * len(stores) + 1))

    with_stores(8, use)


def test_every_append_of_many_is_in_the_value_once():
    async def use(*stores):
        await asyncio.gather(*(store.append("log", bytes([65 + i])) for i, store in enumerate(stores) for _ in range(5)))
        assert sorted(await stores[0].get("log")) == sorted(bytes(65 + i for i in range(len(stores))) * 5)

    with_stores(6, use)


def lose_answers(store, applied: bool, problem: Exception, times: int = 1) -> None:
    """Let the engine's next answers to writes be lost: after the write took effect, or before."""
    session = store.calls.presence.session
    txn = session.txn
    left = times

    async def unlucky(compares=(), then=(), otherwise=()):
        nonlocal left
        if not tuple(compares) or not left:
            return await txn(compares, then, otherwise)
        left -= 1
        if applied:
            await txn(compares, then, otherwise)
        raise problem

    session.txn = unlucky


@pytest.mark.parametrize("applied", [True, False])
def test_a_write_whose_answer_is_lost_takes_effect_once(applied):
    async def use(a, b):
        problem = Unreachable("memory", "no answer", 1.0, None)
        lose_answers(a, applied, problem)
        assert await a.add("n", 3) == 3
        lose_answers(a, applied, problem)
        await a.append("log", "x")
        lose_answers(a, applied, problem)
        await a.set("k", "v")
        lose_answers(a, applied, problem)
        assert await a.compare_set("c", "", "d") == b"d"
        assert [await b.get(key) for key in ("n", "log", "k", "c")] == [b"3", b"x", b"v", b"d"]

    with_stores(2, use)


def test_a_write_that_took_effect_does_not_happen_again_after_others_wrote():
    async def use(a, b):
        problem = Unreachable("memory", "no answer", 1.0, None)
        lose_answers(a, True, problem)
        adding = asyncio.create_task(a.add("n", 3))
        await until(lambda: b.check(["n"]))
        assert await b.add("n", 1) == 4
        assert await adding == 3
        lose_answers(a, True, problem)
        setting = asyncio.create_task(a.set("k", "early"))
        await until(lambda: b.check(["k"]))
        await b.set("k", "later")
        await setting
        assert await b.multi_get(["n", "k"]) == [b"4", b"later"]

    with_stores(2, use)


@pytest.mark.parametrize("problem", [Unreachable("memory", "no answer"), EngineReset()])
def test_an_engine_that_stays_away_is_unreachable_once_the_time_is_up(problem):
    async def use(a):
        a.set_timeout(0.2)
        lose_answers(a, False, problem, times=100)
        with pytest.raises(Unreachable):
            await a.set("k", "v")

    with_stores(1, use)


def test_a_call_that_says_how_long_it_waits_waits_no_longer_for_an_engine_that_is_away():
    async def use(a):
        async def away(*_, **__):
            raise Unreachable("memory", "no answer")

        session = a.calls.presence.session
        txn, session.txn = session.txn, away
        with pytest.raises(Unreachable):
            await asyncio.wait_for(a.get("k", timeout_s=0.2), LONG_S / 2)
        session.txn = txn

    with_stores(1, use)


# ---- waiting


def test_get_and_wait_go_on_as_soon_as_the_keys_are_there():
    async def use(a, b):
        waits = [
            asyncio.create_task(b.get("x")),
            asyncio.create_task(b.wait(["x", "y"])),
            asyncio.create_task(b.multi_get(["y", "x"])),
        ]
        await asyncio.sleep(0)
        await a.set("x", "1")
        assert await waits[0] == b"1"
        assert not waits[1].done()
        await a.add("y", 2)
        assert await waits[1] is None
        assert await waits[2] == [b"2", b"1"]

    with_stores(2, use)


def test_a_wait_says_which_keys_did_not_come():
    async def use(a):
        await a.set("here", "1")
        with pytest.raises(StoreTimeout) as late:
            await a.wait(["here", "missing", "too"], timeout_s=0.1)
        assert late.value.keys == ("missing", "too")
        assert late.value.sentence == (
            "store of round 1: 'missing', 'too' not set within 0.1 s; "
            "the member that should set it is slow, or waits for something else"
        )
        with pytest.raises(TimeoutError):
            await a.get("missing", timeout_s=0)

    with_stores(1, use)


def test_the_time_to_wait_can_be_set_for_all_later_calls():
    async def use(a):
        assert a.timeout_s == TIMEOUT_S
        a.set_timeout(0.1)
        assert a.timeout_s == 0.1
        with pytest.raises(StoreTimeout) as late:
            await a.get("missing")
        assert late.value.waited_s == 0.1

    with_stores(1, use)


def test_a_wait_that_is_given_up_leaves_no_watch_behind():
    async def use(a):
        watches = a.calls.presence.session.watches
        before = len(watches)
        with pytest.raises(StoreTimeout):
            await a.get("missing", timeout_s=0.05)
        waiting = asyncio.create_task(a.get("missing"))
        while len(watches) == before:  # noqa: ASYNC110  No event of ours tells.
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert len(watches) == before

    with_stores(1, use)


class Watched:
    """The watches of a session from now on: the keys of each, and how many there were at once."""

    def __init__(self, session) -> None:
        self.targets = []
        self.most = 0
        self._watch = session.watch
        self._session = session
        self._before = len(session.watches)
        session.watch = self

    def __call__(self, targets, since, ends=()):
        watch = self._watch(targets, since, ends)
        self.targets.append(list(targets))
        self.most = max(self.most, len(self._session.watches) - self._before)
        return watch


def test_a_wait_for_many_keys_watches_a_few_at_a_time(monkeypatch):
    """Hundreds of members that waited for hundreds of keys each were disconnected, and evicted."""
    monkeypatch.setattr(store, "WATCHED_MAX", 3)

    async def use(a, b):
        keys = [f"k{number}" for number in range(8)]
        watched = Watched(b.calls.presence.session)
        waiting = asyncio.create_task(b.multi_get(keys))
        for key in reversed(keys):
            await asyncio.sleep(0.01)
            await a.set(key, key)
        assert await waiting == [key.encode() for key in keys]
        assert watched.targets[0] == [b.calls.key(key) for key in keys[:3]]
        assert max(map(len, watched.targets)) == 3

    with_stores(2, use)


def test_of_many_waits_a_few_watch_and_the_others_read_again(monkeypatch):
    monkeypatch.setattr(store, "WAITS_MAX", 2)
    monkeypatch.setattr(store, "PAUSE_S", 0.05)

    async def use(a, b):
        watched = Watched(b.calls.presence.session)
        waiting = [asyncio.create_task(b.get(f"k{number}")) for number in range(6)]
        await asyncio.sleep(0.2)
        for number in reversed(range(6)):
            await a.set(f"k{number}", str(number))
            assert await waiting[number] == str(number).encode()
        assert watched.most == 2

    with_stores(2, use)


def test_a_wait_whose_watch_is_refused_reads_again_after_a_pause(monkeypatch):
    monkeypatch.setattr(store, "PAUSE_S", 0.1)

    async def use(a, b):
        session = b.calls.presence.session
        watch, refused = session.watch, []

        def refuse(targets, since, ends=()):
            refused.append(watch(targets, since, ends))
            refused[-1].end(Gap("no room"))
            return refused[-1]

        session.watch = refuse
        waiting = asyncio.create_task(b.get("k"))
        await asyncio.sleep(0.35)
        assert 2 <= len(refused) <= 4
        await a.set("k", "v")
        assert await waiting == b"v"

    with_stores(2, use)


# ---- limits


def test_what_is_too_large_is_refused_before_anything_is_sent():
    async def use(a):
        await a.set("k" * KEY_MAX, b"v" * VALUE_MAX)
        for call in (
            lambda: a.set("k", b"v" * (VALUE_MAX + 1)),
            lambda: a.set("k" * (KEY_MAX + 1), b"v"),
            lambda: a.get("k" * (KEY_MAX + 1)),
            lambda: a.append("k" * KEY_MAX, b"w"),
            lambda: a.compare_set("k", "", "ü" * VALUE_MAX),
        ):
            with pytest.raises(LimitExceeded, match="at most"):
                await call()
        assert await a.num_keys() == 1
        assert len(await a.get("k" * KEY_MAX)) == VALUE_MAX

    with_stores(1, use)


def bound_answers(store, size_max: int) -> list[int]:
    """Let the engine refuse answers of more bytes. Return the limits of the lists that it is asked for."""
    session, asked = store.calls.presence.session, []
    txn = session.txn

    async def bounded(compares=(), then=(), otherwise=()):
        outcome = await txn(compares, then, otherwise)
        if then and isinstance(then[0], List):
            asked.append(then[0].limit)
            if sum(len(item.value) for item in outcome.reads[0]) > size_max:
                raise ValueError("the answer would be too large")
        return outcome

    session.txn = bounded
    return asked


def test_keys_are_listed_in_pages_if_one_answer_cannot_hold_their_values():
    """Found by review: `num_keys` failed once the values had more than 16 MiB."""

    async def use(a):
        sizes = [1] * 40 + [300] * 5 + [1] * 5 + [1000] + [1] * 60
        keys = {f"{number:03}": b"v" * size for number, size in enumerate(sizes)}
        await a.multi_set(keys)
        asked = bound_answers(a, 1000)
        assert await a.list_keys() == sorted(keys)
        assert await a.num_keys() == len(keys)
        assert asked[:5] == [0, PAGE, 2 * PAGE, 4 * PAGE, 2 * PAGE]
        assert 1 in asked
        assert len(asked) < 60
        bound_answers(a, 999)
        with pytest.raises(ValueError, match="too large"):
            await a.num_keys()

    with_stores(1, use)


def test_a_round_that_ends_while_its_keys_are_listed_is_over():
    async def use(a):
        await a.multi_set({f"k{number}": b"v" * 10 for number in range(2 * PAGE)})
        asked, session = bound_answers(a, 10 * PAGE), a.calls.presence.session
        txn = session.txn

        async def ending(*branches):
            outcome = await txn(*branches)
            if asked[-1] == PAGE:
                a.end("a node was lost")
            return outcome

        session.txn = ending
        with pytest.raises(RoundOver, match="a node was lost"):
            await a.list_keys()
        assert asked == [0, PAGE]

    with_stores(1, use)


# ---- the round


async def test_each_round_has_a_store_of_its_own():
    async with Party(2, 3) as party:
        (a, b, c), worlds = await party.form("a", "b", "c")
        await worlds[0].store.set("k", "old")
        await c.leave()
        await asyncio.gather(a.wait_changed(LONG_S), b.wait_changed(LONG_S))
        first, second = await join(a, b)
        assert not await first.store.check(["k"])
        assert await first.store.num_keys() == 0
        await second.store.set("k", "new")
        assert await first.store.get("k") == b"new"
        left = await party.operator.txn(then=[List(party.keys.kv(worlds[0].table))])
        assert left.reads == ((),), "and the old one is gone from the engine"


async def test_waits_end_when_the_round_breaks():
    async with Party(2, 3) as party:
        (_, b, c), worlds = await party.form("a", "b", "c")
        waits = [asyncio.create_task(world.store.get("never")) for world in worlds[:2]]
        await c.leave(reason="tired")
        for wait in waits:
            with pytest.raises(RoundOver, match=r"round 1 is over: c left: tired; call join\(\) for the next one"):
                await wait
        assert b.changed
        with pytest.raises(RoundOver):
            await worlds[1].store.set("k", "v")


async def test_a_late_writer_is_refused_by_the_engine_whatever_it_believes():
    async with Party(1, 2) as party:
        (a, b), (old, _) = await party.form("a", "b")
        await b.leave()
        await a.wait_changed(LONG_S)
        new = await a.join()
        old.store.calls.over = ""  # As if it had not heard yet.
        for call in (
            lambda: old.store.set("k", "v"),
            lambda: old.store.multi_set({"k": "v"}),
            lambda: old.store.add("k", 1),
            lambda: old.store.append("k", "v"),
            lambda: old.store.compare_set("k", "", "v"),
            lambda: old.store.delete("k"),
        ):
            with pytest.raises(RoundOver, match="a later round has been sealed, or this member was evicted"):
                await call()
        assert await new.store.num_keys() == 0
