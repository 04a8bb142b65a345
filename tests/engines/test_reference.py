"""The reference engine beyond the contract: its history, its callbacks, its costs, and a naive model it must agree with."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rdzv.engines.port import (
    AllCreated,
    Batch,
    Case,
    Compare,
    Created,
    Delete,
    DeletePrefix,
    Empty,
    Equals,
    Event,
    Gap,
    Get,
    Item,
    LeaseGone,
    List,
    Modified,
    Operation,
    Order,
    Put,
)
from rdzv.engines.reference import Engine, starred
from rdzv.engines.tree import DEAD_MIN, STEPS_PER_KEY


def put(engine: Engine, key: str, value: bytes = b"", lease: int = 0) -> int:
    return engine.txn(then=[Put(key, value, lease)]).revision


def listed(engine: Engine, *args: Any) -> list[str]:
    return [item.key for item in engine.txn(then=[List(*args)]).reads[0]]


def ignore(batch: Batch) -> None:
    """A watcher that does not care."""


def test_each_lease_that_ends_has_its_own_revision_unless_it_has_no_keys():
    engine = Engine("")
    one, two, _ = engine.grant(1), engine.grant(2), engine.grant(1)
    for number, lease in enumerate((one, two, one, two)):
        put(engine, f"d/{number}", b"", lease)
    batches: list[Batch] = []
    engine.observers.append(batches.append)
    engine.pass_time(5)
    assert [batch.events for batch in batches] == [
        (Event("d/0", 6, None), Event("d/2", 6, None)),
        (Event("d/1", 7, None), Event("d/3", 7, None)),
    ]
    assert not engine._owned


# ---- watches


def test_observers_get_every_commit_whole():
    engine = Engine("")
    calls: list[tuple[str, int, int]] = []
    engine.subscribe(["a"], 1, lambda batch: calls.append(("watcher", batch.revision, len(batch.events))))
    engine.observers.append(lambda batch: calls.append(("observer", batch.revision, len(batch.events))))
    engine.txn(then=[Put("a", b""), Put("b", b"")])
    engine.txn(then=[Get("a")])
    put(engine, "b")
    assert calls == [("observer", 2, 2), ("watcher", 2, 1), ("observer", 3, 1)]


def test_the_past_comes_as_one_batch_before_subscribe_returns():
    """The batch has the engine's revision, even if the last changes were not of the targets."""
    engine = Engine("")
    for key in ("a", "b", "a", "c"):
        put(engine, key)
    batches: list[Batch] = []
    engine.subscribe(["a"], 1, batches.append)
    engine.subscribe(["d"], 1, batches.append)
    engine.subscribe(["a"], 4, batches.append)
    [batch] = batches
    assert batch.revision == 5
    assert [(event.key, event.revision) for event in batch.events] == [("a", 2), ("a", 4)]


def test_a_revision_that_is_not_known_is_a_gap():
    engine = Engine("", history_max=4)
    for _ in range(10):
        put(engine, "k")
    assert engine.revision == 11
    for since in (-1, 0, 6, 12):
        with pytest.raises(Gap, match=str(since)):
            engine.subscribe(["other"], since, ignore)
    batches: list[Batch] = []
    engine.subscribe(["k"], 7, batches.append)
    assert [event.revision for event in batches[0].events] == [8, 9, 10, 11]
    engine.compact(100)
    engine.subscribe(["k"], engine.revision, ignore)  # The present is never forgotten.


def test_history_counts_bytes_too():
    engine = Engine("", history_max=100)
    for _ in range(100):
        put(engine, "k", bytes(50 * 1024))
    assert len(engine._history) == 1
    for _ in range(200):
        engine.txn(then=[Put("k", b"small"), Put("l", b"")])
    assert len(engine._history) == 50
    assert engine.history_size == 100


def test_forgotten_changes_leave_nothing_behind():
    """The index of changes is as bounded as the history."""
    engine = Engine("", history_max=10)
    for number in range(100):
        put(engine, f"d/{number}")
        engine.txn(then=[Delete(f"d/{number}")])
    assert len(engine._changed) <= 10
    engine.compact(engine.revision)
    assert not engine._changed
    assert engine.history_size == 0


def test_watchers_of_the_same_events_get_the_same_batch():
    """A server encodes it once for ten thousand watchers."""
    engine = Engine("")
    heads: list[Batch] = []
    wholes: list[Batch] = []
    for _ in range(3):
        engine.subscribe(["d/head"], 1, heads.append)
        engine.subscribe(["d/"], 1, wholes.append)
    engine.txn(then=[Put("d/head", b""), Put("d/x", b""), Put("d/y", b"")])
    assert len({id(batch) for batch in heads}) == len({id(batch) for batch in wholes}) == 1
    assert [len(heads[0].events), len(wholes[0].events)] == [1, 3]


def test_a_commit_does_not_touch_unrelated_watchers():
    engine = Engine("")
    looks = 0

    class Counted(dict[Any, None]):
        def __iter__(self) -> Any:
            nonlocal looks
            looks += len(self)
            return super().__iter__()

    for number in range(10_000):
        engine.subscribe([f"d/{number}", f"e/{number}/"], 1, ignore)
    for index in (engine._by_key, engine._by_prefix):
        for name, watchers in index.items():
            index[name] = Counted(dict.fromkeys(watchers))
    put(engine, "d/7")
    put(engine, "e/8/x/y")
    put(engine, "e/x")
    put(engine, "f")
    assert looks == 2


def test_unsubscribing_leaves_nothing_behind():
    engine = Engine("")
    got: list[Batch] = []
    stops = [engine.subscribe(["a", "b/", "b/c/"], 1, got.append) for _ in range(3)]
    for stop in (*stops, *stops):
        stop()
    put(engine, "a")
    assert not got
    assert not engine._by_key
    assert not engine._by_prefix


def test_a_watcher_that_ends_another_is_obeyed_at_once():
    engine = Engine("")
    got: list[int] = []
    stops = []
    engine.subscribe(["k"], 1, lambda batch: stops[0]())
    stops.append(engine.subscribe(["k"], 1, lambda batch: got.append(batch.revision)))
    put(engine, "k")
    assert got == []


def test_what_a_callback_changes_is_told_in_order():
    """A watcher's write is not seen by others before what it answered to, nor twice by a new one."""
    engine = Engine("")
    seen: list[list[int]] = [[], [], []]

    def answer(batch: Batch) -> None:
        seen[0].append(batch.revision)
        if batch.revision == 2:
            assert put(engine, "d/answer") == 3
            engine.subscribe(["d/"], 2, lambda batch: seen[2].append(batch.revision))

    engine.subscribe(["d/"], 1, answer)
    engine.subscribe(["d/"], 1, lambda batch: seen[1].append(batch.revision))
    assert put(engine, "d/k") == 2
    put(engine, "d/k")
    assert seen == [[2, 3, 4], [2, 3, 4], [3, 4]]


# ---- costs


def test_the_newest_are_found_without_a_walk():
    """The newest before a revision, too: each of ten thousand members asks for its predecessor."""
    engine = Engine("")
    revisions = [put(engine, f"d/{number}") for number in range(10_000)]
    looks = 0

    class Counted(dict[str, Item]):
        def get(self, *args: Any) -> Any:
            nonlocal looks
            looks += 1
            return super().get(*args)

    engine._tree.items = Counted(engine._tree.items)
    for number in range(1, 10_000, 100):
        assert listed(engine, "d/", Order.NEWEST, 1, revisions[number]) == [f"d/{number - 1}"]
    assert listed(engine, "d/", Order.NEWEST, 2) == ["d/9999", "d/9998"]
    assert listed(engine, "d/", Order.OLDEST, 1) == ["d/0"]
    assert looks < 200


def test_deleted_keys_leave_nothing_behind():
    engine = Engine("")
    for number in range(1000):
        put(engine, f"d/{number}")
        put(engine, f"e/{number}/x")
    for number in range(999):
        engine.txn(then=[Delete(f"d/{number}"), DeletePrefix(f"e/{number}/")])
    assert listed(engine, "") == ["d/999", "e/999/x"]
    assert engine._tree._names == ["d/", "e/999/"]
    assert len(engine._tree._directories["d/"].keys) < 50
    engine.txn(then=[DeletePrefix("")])
    assert len(engine) == len(engine._tree._directories) == 0


# ---- against a naive model

KEYS = ["a", "ab", "a/1", "a/2", "a/b/1", "b/1", "b/2"]
PREFIXES = ["", "a", "a/", "a/b/", "b/", "b/1", "c/"]
NOW = -1  # In a compare: the revision that makes it hold.

names, prefixes = st.sampled_from(KEYS), st.sampled_from(PREFIXES)
revisions = st.sampled_from([NOW, NOW, NOW, 0, 0, 1, 2, 3, 5, 8, 13])
compares = st.one_of(
    st.builds(Created, names, revisions),
    st.builds(Modified, names, revisions),
    st.builds(Equals, names, st.binary(max_size=2)),
    st.builds(AllCreated, st.dictionaries(names, revisions, max_size=3)),
    st.builds(Empty, prefixes, st.sampled_from([0, 0, 2, 4, 6, 10, 15])),
)
operations = st.one_of(
    st.builds(Put, names, st.binary(max_size=2), st.integers(0, 4)),
    st.builds(Put, names, st.binary(max_size=2), st.just(0)),
    st.builds(Delete, names),
    st.builds(DeletePrefix, prefixes),
    st.builds(Get, names),
    st.builds(
        List,
        prefixes,
        st.sampled_from(Order),
        st.integers(0, 3),
        st.sampled_from([0, 0, 2, 4, 6, 10, 15]),
        st.sampled_from(["", "", "", *KEYS, *PREFIXES]),
    ),
)
targets = st.lists(st.sampled_from([*KEYS, "a/", "a/b/", "b/", "c/", *map(starred, KEYS)]), min_size=1, max_size=3)


class Model:
    """The port's semantics in the fewest words, with no thought of speed."""

    def __init__(self) -> None:
        self.revision = 1
        self.items: dict[str, Item] = {}
        self.leases: dict[int, int] = {}
        self.log: list[Event] = []

    def found(self, prefix: str) -> list[Item]:
        return sorted((item for key, item in self.items.items() if key.startswith(prefix)), key=lambda item: item.key)

    def truth(self, compare: Compare) -> Compare:
        """Return the compare with the right revision in place of NOW."""
        if isinstance(compare, AllCreated):
            return AllCreated({key: self._fill("created", key, at) for key, at in compare.revisions.items()})
        if isinstance(compare, Created):
            return Created(compare.key, self._fill("created", compare.key, compare.revision))
        if isinstance(compare, Modified):
            return Modified(compare.key, self._fill("modified", compare.key, compare.revision))
        return compare

    def _fill(self, field: str, key: str, revision: int) -> int:
        return self._at(field, key) if revision == NOW else revision

    def _at(self, field: str, key: str) -> int:
        return getattr(self.items.get(key), field, 0)

    def holds(self, compare: Compare) -> bool:
        if isinstance(compare, Created):
            return self._at("created", compare.key) == compare.revision
        if isinstance(compare, Modified):
            return self._at("modified", compare.key) == compare.revision
        if isinstance(compare, Equals):
            return compare.key in self.items and self.items[compare.key].value == compare.value
        if isinstance(compare, AllCreated):
            return all(self._at("created", key) == revision for key, revision in compare.revisions.items())
        return all(item.created <= compare.since for item in self.found(compare.prefix))

    def refuses(self, branch: list[Operation]) -> bool:
        """A key of those that are used here, or one below a prefix, would be written twice."""
        candidates = [*KEYS, *(prefix + "?" for prefix in PREFIXES)]
        hits = [[key for key in candidates if self._writes(operation, key)] for operation in branch]
        return any(sum(key in hit for hit in hits) > 1 for key in candidates)

    def _writes(self, operation: Operation, key: str) -> bool:
        if isinstance(operation, (Put, Delete)):
            return operation.key == key
        return isinstance(operation, DeletePrefix) and key.startswith(operation.prefix)

    def apply(self, branch: list[Operation]) -> list[list[Item]]:
        """Apply; what was read, lists by key and not cut."""
        at = self.revision + 1
        before = len(self.log)
        reads: list[list[Item]] = []
        for operation in branch:
            read: list[Item] = []
            if isinstance(operation, Put):
                created = self._at("created", operation.key) or at
                self.items[operation.key] = Item(operation.key, operation.value, created, at, operation.lease)
                self.log.append(Event(operation.key, at, self.items[operation.key]))
            elif isinstance(operation, Get):
                read = [self.items[operation.key]] if operation.key in self.items else []
            elif isinstance(operation, List):
                below = operation.created_below or 10**9
                read = [
                    item
                    for item in self.found(operation.prefix)
                    if item.created < below and item.key > operation.after
                ]
            else:
                self.drop([key for key in sorted(self.items) if self._writes(operation, key)])
            reads.append(read)
        self.revision += len(self.log) > before
        return reads

    def drop(self, keys: list[str]) -> None:
        for key in keys:
            del self.items[key]
            self.log.append(Event(key, self.revision + 1, None))

    def end(self, lease: int) -> None:
        del self.leases[lease]
        owned = [key for key, item in self.items.items() if item.lease == lease]
        self.drop(owned)
        self.revision += bool(owned)


def agree(operation: Operation, got: tuple[Item, ...], expected: list[Item]) -> bool:
    """Lists by creation say nothing about the order of keys created together."""
    if not isinstance(operation, List):
        return list(got) == expected
    if operation.order is Order.ANY:
        count = min(operation.limit or len(expected), len(expected))
        return len(got) == count and len(set(got)) == len(got) and set(got) <= set(expected)
    if operation.order is not Order.KEY:
        ages = sorted((item.created for item in expected), reverse=operation.order is Order.NEWEST)
        ages = ages[: operation.limit] if operation.limit else ages
        return [item.created for item in got] == ages and len(set(got)) == len(got) and set(got) <= set(expected)
    return list(got) == (expected[: operation.limit] if operation.limit else expected)


class Agreement(RuleBasedStateMachine):
    """Random transactions, leases and watches: engine and model do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine("")
        self.model = Model()
        self.watches: list[tuple[list[str], list[str], int, list[Batch]]] = []

    @rule(
        compares=st.lists(compares, max_size=2),
        then=st.lists(operations, max_size=4),
        otherwise=st.lists(operations, max_size=2),
    )
    def txn(self, compares: list[Compare], then: list[Operation], otherwise: list[Operation]) -> None:
        compares = [self.model.truth(compare) for compare in compares]
        if self.model.refuses(then) or self.model.refuses(otherwise):
            with pytest.raises(ValueError, match="twice"):
                self.engine.txn(compares, then, otherwise)
            return
        succeeded = all(self.model.holds(compare) for compare in compares)
        branch = then if succeeded else otherwise
        wanted = {operation.lease for operation in branch if isinstance(operation, Put)}
        if not wanted <= {0, *self.model.leases}:
            with pytest.raises(LeaseGone):
                self.engine.txn(compares, then, otherwise)
            return
        outcome = self.engine.txn(compares, then, otherwise)
        reads = self.model.apply(branch)
        assert (outcome.succeeded, outcome.revision) == (succeeded, self.model.revision)
        assert len(outcome.reads) == len(branch)
        for operation, got, expected in zip(branch, outcome.reads, reads, strict=True):
            assert agree(operation, got, expected), (operation, got, expected)

    @rule(ttl=st.integers(1, 6))
    def grant(self, ttl: int) -> None:
        self.model.leases[self.engine.grant(ttl)] = ttl

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.model.leases)))
        self.engine.revoke(lease)
        self.model.end(lease)

    @rule()
    def pass_time(self) -> None:
        self.engine.pass_time(1)
        for lease in self.model.leases:
            self.model.leases[lease] -= 1
        for lease in [lease for lease, left in self.model.leases.items() if left == 0]:
            self.model.end(lease)

    @rule(watched=targets, ends=st.lists(st.sampled_from(KEYS), max_size=2), back=st.integers(0, 5))
    def watch(self, watched: list[str], ends: list[str], back: int) -> None:
        since = max(1, self.model.revision - back)
        batches: list[Batch] = []
        self.engine.subscribe(watched, since, batches.append, ends)
        self.watches.append((watched, ends, since, batches))

    @invariant()
    def same_items(self) -> None:
        outcome = self.engine.txn(then=[List("")])
        assert list(outcome.reads[0]) == self.model.found("")
        assert outcome.revision == self.model.revision

    @invariant()
    def every_watch_saw_all_of_its_events_once(self) -> None:
        for watched, ends, since, batches in self.watches:
            wanted = [
                event
                for event in self.model.log
                if event.revision > since
                and (any(matches(one, event.key) for one in watched) or (event.item is None and event.key in ends))
            ]
            got = [event for batch in batches for event in batch.events]
            assert sorted(got, key=_place) == sorted(wanted, key=_place)
            assert [event.revision for event in got] == sorted(event.revision for event in got)


def matches(target: str, key: str) -> bool:
    return re.fullmatch(re.escape(target).replace(r"\*", "[^/]*") + (".*" if target.endswith("/") else ""), key) is not None


def _place(event: Event) -> tuple[int, str]:
    return event.revision, event.key


Agreement.TestCase.settings = settings(max_examples=150, stateful_step_count=25, deadline=None)
TestAgreement = Agreement.TestCase


# ---- steps


def engine_of(count, steps_max=1000):
    engine = Engine("x", steps_max=steps_max)
    engine.txn((), [Put(f"d/{number:04}", b"") for number in range(count)])
    return engine


@pytest.mark.parametrize(
    "branch",
    [
        [List("d/x")] * 10, [List("d/")] * 10, [DeletePrefix(f"d/x{number}") for number in range(10)],
        [Put("new", b""), *[List("d/")] * 10], [List("", after="e", limit=1)] * 10,
    ],
)  # fmt: skip
def test_a_transaction_that_looks_at_too_many_keys_changes_nothing(branch):
    engine = engine_of(200)
    revision, steps = engine.revision, engine.meter.steps
    with pytest.raises(ValueError, match="looks at more keys than this server allows at once"):
        engine.txn((), branch)
    assert (engine.revision, len(engine)) == (revision, 200)
    assert engine.meter.steps - steps < 2000
    engine.txn((), [List("d/")] * 2)


def test_compares_that_look_at_too_many_keys_are_given_up():
    engine = engine_of(200)
    with pytest.raises(ValueError, match="looks at more keys"):
        engine.txn([Empty(f"d/x{number}") for number in range(10)], [Put("new", b"")])
    with pytest.raises(ValueError, match="looks at more keys"):
        engine.txn([Created("none", 1)], [], [], [Case((Empty(f"d/x{number}"), Created("none", 1)), ()) for number in range(8)])
    assert engine.txn([Empty("d/x"), Empty("d/", 2)]).succeeded


def test_keys_that_were_deleted_are_counted_while_they_are_in_the_way_and_are_soon_swept():
    engine = engine_of(200, steps_max=10_000)
    for number in range(150, 200):
        engine.txn((), [Delete(f"d/{number:04}")])
    before = engine.meter.steps
    engine.txn((), [List("d/", Order.NEWEST, limit=1)])
    assert engine.meter.steps - before >= 50
    for number in range(1, 150):
        engine.txn((), [Delete(f"d/{number:04}")])
    before = engine.meter.steps
    engine.txn((), [List("d/")])
    assert engine.meter.steps - before < 20


def test_a_whole_directory_can_be_deleted_however_large():
    engine = engine_of(900)
    engine.txn((), [DeletePrefix("d/"), Put("e", b"")])
    assert len(engine) == 1


def test_no_search_takes_more_steps_than_its_bound_even_if_deleted_keys_are_everywhere():
    engine = Engine("x", steps_max=STEPS_PER_KEY * 200)
    names = range(200)
    engine.txn((), [Put(f"d/{name}/k", b"") for name in names])
    for _ in range(DEAD_MIN + 1):
        engine.txn((), [Put(f"d/{name}/gone", b"") for name in names])
        engine.txn((), [Delete(f"d/{name}/gone") for name in names])
    before = engine.meter.steps
    assert len(engine.txn((), [List("d/")]).reads[0]) == 200
    assert engine.meter.steps - before == STEPS_PER_KEY * 200
    engine.txn((), [Put("e", b""), DeletePrefix("d/")])
    assert len(engine) == 1


def test_watchers_of_the_same_keys_share_a_batch_and_a_large_commit_is_looked_at_once():
    engine, told = Engine("x"), []
    for _ in range(100):
        engine.subscribe(["d/"], 1, told.append)
        engine.subscribe(["d/", "e"], 1, told.append)
    before = engine.meter.steps
    engine.txn((), [*(Put(f"d/{number}", b"") for number in range(1000)), Put("e", b""), Put("f", b"")])
    assert {len(batch.events) for batch in told} == {1000, 1001}
    assert len({id(batch) for batch in told}) == 2
    assert engine.meter.steps - before < 20_000
