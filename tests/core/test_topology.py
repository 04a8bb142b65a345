"""Ranks that follow the network (R2, R3, R4, R8, T6.7, W17): tables and properties."""

from __future__ import annotations

import random
import sys
from itertools import groupby

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.choice import choose
from rdzv.core.model import Call
from rdzv.core.ranks import Candidate, assign, first_order
from rdzv.core.rules import lead
from rdzv.core.status import describe
from rdzv.core.topology import PARTS_MAX, beginnings, in_segments, neighbourhood, pair_nearest, with_host
from rdzv.core.view import candidate
from support.verdicts import said
from support.views import broken, entry, live, opened, ranks_of, sealed

# ---- paths


@pytest.mark.parametrize(
    ("path", "host", "full"),
    [
        ("", "n7", ""),
        ("b1/r2", "n7", "b1/r2/n7"),
        ("b1/r2/n7", "n7", "b1/r2/n7"),
        ("b1/r2/n7", "n7.cluster.example", "b1/r2/n7"),
        ("b1/r2/n7.cluster.example", "n7", "b1/r2/n7.cluster.example"),
        ("b1", "n7.cluster.example", "b1/n7"),
    ],
)
def test_a_path_ends_with_the_host(path, host, full):
    assert with_host(path, host) == full


def test_the_beginnings_of_a_path_are_in_whole_parts_and_bounded():
    assert beginnings("") == []
    assert beginnings("b1/r2/n7") == ["b1", "b1/r2", "b1/r2/n7"]
    assert neighbourhood("b1/r2/n7") == "b1/r2"
    long = "/".join(["x"] * 1000)
    assert (len(beginnings(long)), beginnings(long)[-1]) == (PARTS_MAX, long)


@pytest.mark.parametrize(
    ("movers", "places", "pairs"),
    [
        # The rack goes before the block, whoever comes first.
        ("b1/r2/x b1/r1/y", "b1/r1/k", {1: 0}),
        ("b1/r2/x b1/r1/y", "b1/r1/k b1/r3/l", {1: 0, 0: 1}),
        # Among equals, the first mover gets the first place.
        ("r1/x r1/y", "r1/k r1/l r1/m", {0: 0, 1: 1}),
        ("r1/x r1/y r1/z", "r1/k", {0: 0}),
        # A part is compared as a whole.
        ("r1/x", "r10/k", {}),
        ("r1", "r1/k", {0: 0}),
        ("r1/x", "- r2/k", {}),
        ("-", "r1/k", {}),
        ("", "r1/k", {}),
    ],
)
def test_the_nearest_are_paired_first(movers, places, pairs):
    def read(text):
        return [(index, path.strip("-")) for index, path in enumerate(text.split())]

    found = pair_nearest(read(movers), read(places))
    assert found == pairs
    assert list(found) == list(pairs), "the nearest come first"


paths = st.lists(st.sampled_from(["a", "b", "c", "1", "01"]), max_size=4).map("/".join)


@given(st.lists(paths, max_size=8), st.lists(paths, max_size=8))
def test_as_many_are_paired_at_each_level_as_can_be(movers, places):
    """R2: so no rack is split if its own spares are enough."""
    pairs = pair_nearest(list(enumerate(movers)), list(enumerate(places)))
    assert len(set(pairs.values())) == len(pairs)
    starts = {part for path in (*movers, *places) for part in beginnings(path)}
    for start in starts:
        inside = [index for index, path in enumerate(movers) if start in beginnings(path)]
        free = [index for index, path in enumerate(places) if start in beginnings(path)]
        together = sum(mover in pairs and pairs[mover] in free for mover in inside)
        # Laminar families: within each part of the network the number of pairs is the largest possible.
        assert together == min(len(inside), len(free))


@given(st.lists(paths, max_size=12), st.integers(1, 4))
def test_segments_are_counted_per_neighbourhood(found, segment):
    """W17."""
    groups = [len(list(group)) for _, group in groupby(sorted(found, key=neighbourhood), key=neighbourhood)]
    assert in_segments(found, segment) == sum(size - size % segment for size in groups)
    assert in_segments(found, 1) == len(found)


# ---- ranks


def at(index, path, created=0):
    name = f"n{index}"
    return Candidate(name.upper(), name, name, "", created or index, path)


def runs_of(ranks, chosen, key):
    """How many runs of equal keys the members have, in the order of their ranks."""
    keys = [key(one) for one in sorted(chosen, key=lambda one: ranks[one.id])]
    return len(list(groupby(keys)))


places = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30)


@given(places, st.randoms())
def test_first_ranks_are_contiguous_per_block_and_per_rack(found, chance):
    """R4."""
    chosen = [at(index, f"b{block}/r{rack}/n{index}") for index, (block, rack) in enumerate(found)]
    chance.shuffle(chosen)
    ranks = assign(chosen, {}, [])
    for depth in (1, 2):
        assert runs_of(ranks, chosen, lambda one, depth=depth: beginnings(one.path)[depth - 1]) == len(
            {beginnings(one.path)[depth - 1] for one in chosen}
        )


@st.composite
def losses(draw):
    """A table over racks with ranks by path, members that are lost, and spares of the same racks."""
    found = draw(places)
    former = [at(index, f"b{block}/r{rack}/n{index}") for index, (block, rack) in enumerate(found)]
    ranks = assign(former, {}, [])
    lost = draw(st.sets(st.sampled_from(range(len(former)))))
    spares = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12))
    new = [at(100 + index, f"b{block}/r{rack}/n{index}") for index, (block, rack) in enumerate(spares)]
    return former, ranks, lost, new


@given(losses())
def test_moves_are_minimal_and_replacements_are_near(given_losses):
    """R1, R2, R3: only members whose rank is gone move, and a rack with enough spares of its own stays as it was."""
    former, ranks, lost, new = given_losses
    staying = [one for index, one in enumerate(former) if index not in lost]
    gone = [one for index, one in enumerate(former) if index in lost]
    chosen = [*staying, *new[: len(gone)]]
    kept = {one.id: ranks[one.id] for one in staying}
    vacant = [entry(one.name, ranks[one.id], host=one.host, topology=one.path) for one in gone]
    after = assign(chosen, kept, vacant)
    assert sorted(after.values()) == list(range(len(chosen)))
    for id, rank in kept.items():
        assert after[id] == rank or rank >= len(chosen)
    by_rank = {rank: one.path for one, rank in ((one, after[one.id]) for one in chosen)}
    movers = [one.path for one in chosen if kept.get(one.id, len(chosen)) >= len(chosen)]
    holes = [one.path for one in gone if ranks[one.id] < len(chosen)]
    for rack in {neighbourhood(path) for path in holes}:
        wanted = sum(neighbourhood(path) == rack for path in holes)
        offered = sum(neighbourhood(path) == rack for path in movers)
        filled = [by_rank[ranks[one.id]] for one in gone if neighbourhood(one.path) == rack and ranks[one.id] < len(chosen)]
        assert sum(neighbourhood(path) == rack for path in filled) == min(wanted, offered)


@st.composite
def segmented(draw):
    """Nembers in whole segments, some of which had ranks in an aligned table before."""
    segment = draw(st.integers(2, 4))
    racks = [f"b{rack // 2}/r{rack}" for rack in range(draw(st.integers(1, 5)))]
    counts = {rack: draw(st.integers(0, 3)) for rack in racks}
    former = [rack for rack in racks for _ in range(counts[rack])]
    blocks = draw(st.permutations(range(len(former))))
    kept, vacant, chosen, number = {}, [], [], 0
    pool = {rack: [] for rack in racks}
    for rack, block in zip(former, blocks, strict=True):
        for index in range(segment):
            one = at(number, f"{rack}/n{number}")
            number += 1
            rank = block * segment + index
            if draw(st.booleans()):
                pool[rack].append((one, rank))
            else:
                vacant.append(entry(one.name, rank, host=one.host, topology=one.path))
    for rack in racks:
        for _ in range(draw(st.integers(0, segment))):
            pool[rack].append((at(number, f"{rack}/n{number}"), None))
            number += 1
        for one, rank in pool[rack][: len(pool[rack]) // segment * segment]:
            chosen.append(one)
            if rank is not None:
                kept[one.id] = rank
    return draw(st.permutations(chosen)), kept, vacant, segment


@given(segmented())
def test_each_block_of_ranks_belongs_to_neighbours(formation):
    """R8."""
    chosen, kept, vacant, segment = formation
    ranks = assign(chosen, kept, vacant, segment)
    assert sorted(ranks.values()) == list(range(len(chosen)))
    blocks = {}
    for one in chosen:
        blocks.setdefault(ranks[one.id] // segment, set()).add(neighbourhood(one.path))
    assert all(len(where) == 1 for where in blocks.values())
    # A member whose neighbourhood keeps its block keeps its rank.
    for one in chosen:
        home = kept.get(one.id, -1) // segment
        if blocks.get(home) == {neighbourhood(one.path)}:
            assert ranks[one.id] == kept[one.id]
    assert assign(list(reversed(chosen)), kept, list(reversed(vacant)), segment) == ranks, "in whatever order they are listed"


def test_a_lost_segment_is_replaced_by_one_of_its_block():
    """R8: the ranks 2 and 3 were in block b2."""
    chosen = [at(0, "b1/r1/0"), at(1, "b1/r1/1"), at(8, "b2/r5/8"), at(9, "b2/r5/9"), at(6, "b0/r9/6"), at(7, "b0/r9/7")]
    vacant = [entry("x", 2, topology="b2/r3/x"), entry("y", 3, topology="b2/r3/y")]
    ranks = assign(chosen, {"N0": 0, "N1": 1}, vacant, 2)
    assert ranks == {"N0": 0, "N1": 1, "N8": 2, "N9": 3, "N6": 4, "N7": 5}


# ---- a thousand members over 32 racks


def rack_of(index):
    return f"b{index % 32 // 8}/r{index % 32}"


def large(lost=20, spares=40, seed=1, size=1000):
    """A broken round of a thousand over 32 racks that has lost some, with spares in all racks."""
    chance = random.Random(seed)
    former = [at(index, f"{rack_of(index)}/n{index}") for index in range(size)]
    ranks = assign(former, {}, [])
    gone = set(chance.sample(range(size), lost))
    view = broken("", max=size, min=1, call=Call.REGROUP)
    head = msgspec.structs.replace(view.head, size=size, top=size, table="t3")
    entries = {
        one.id: entry(one.name, ranks[one.id], one.created + 1, host=one.host, topology=one.path, sealed_as=one.id)
        for one in former
    }
    members = {
        one.id: live(one.name, one.created + 1, topology=one.path, host=one.host, left=head.round)
        for index, one in enumerate(former)
        if index not in gone
    }
    for index in range(size, size + spares):
        one = at(index, f"{rack_of(chance.randrange(32))}/n{index}", created=5000 + index)
        members[one.id] = live(one.name, one.created, topology=one.path, host=one.host)
    # The view's helpers name the ids after the names, as `at` does.
    return msgspec.structs.replace(view, head=head, members=members, entries=entries, me=next(iter(members)))


def racks_by_rank(entries):
    """Return the racks in the order of their ranks, one for each row of ranks that stand side by side."""
    return [rack for rack, _ in groupby(neighbourhood(one.topology) for one in sorted(entries, key=lambda one: one.rank))]


def test_a_thousand_members_form_with_the_ranks_of_each_of_32_racks_side_by_side():
    view = large(spares=0)
    members = {id: live(one.name, one.created, topology=one.topology, host=one.host) for id, one in view.entries.items()}
    seal = lead(opened("", max=1000, min=1, members=members, me=next(iter(members)))).act
    assert len(seal.entries) == 1000
    racks = racks_by_rank(seal.entries.values())
    assert len(racks) == len(set(racks)) == 32
    blocks = [block for block, _ in groupby(rack.partition("/")[0] for rack in racks)]
    assert len(blocks) == len(set(blocks)) == 4


def test_twenty_of_a_thousand_are_lost_and_no_rack_is_split_where_each_has_spares():
    for seed in range(3):
        seal = lead(large(seed=seed, spares=400)).act  # More in each rack than it lost.
        assert len(racks_by_rank(seal.entries.values())) == 32


def test_a_thousand_members_over_32_racks_keep_their_racks_whole():
    """R1, R2, T6.7: no rack is split that has enough spares of its own, and nobody moves."""
    for seed in range(5):
        view = large(seed=seed, spares=120)
        seal = lead(view).act
        assert seal.head.size == 1000
        moved = [id for id, old in view.entries.items() if id in seal.entries and seal.entries[id].rank != old.rank]
        assert moved == []
        by_rank = {one.rank: neighbourhood(one.topology) for one in seal.entries.values()}
        before = {one.rank: neighbourhood(one.topology) for one in view.entries.values()}
        spare = [neighbourhood(one.record.topology) for id, one in view.members.items() if id not in view.entries]
        lost = [neighbourhood(one.topology) for id, one in view.entries.items() if id not in view.members]
        for rack in set(before.values()):
            own = [rank for rank, where in before.items() if where == rack]
            foreign = sum(by_rank[rank] != rack for rank in own)
            assert foreign == max(0, lost.count(rack) - spare.count(rack)), rack


@pytest.mark.parametrize("size", [1000, 4000])
def test_the_rule_takes_as_many_calls_for_each_member_however_many_they_are(size):
    """Calls of functions, in Python and in C: unlike the time (`bench/racks.py`), they do not depend on the machine."""
    view = large(size=size)
    chosen = [candidate(one) for one in view.ready]

    def calls_per_member(work):
        calls = 0

        def count(_frame, event, _argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            work()
        finally:
            sys.setprofile(None)
        return calls / size

    vacant = [one for id, one in view.entries.items() if id not in view.members]
    kept = {id: one.rank for id, one in view.entries.items() if id in view.members}
    assert calls_per_member(lambda: assign(chosen[:size], {}, [])) <= 22
    assert calls_per_member(lambda: assign(chosen[:size], kept, vacant)) <= 3
    assert calls_per_member(lambda: choose(view, view.ready, size)) <= 5


# ---- the leader's rules

RACKS = {"a": "r1/a", "b": "r1/b", "c": "r2/c", "d": "r2/d", "e": "r2/e", "f": "r1/f", "g": "r3/g", "h": "r3/h"}


def records(**others):
    return {name: {"topology": path, **others.get(name, {})} for name, path in RACKS.items()}


def placed(make, people, **given):
    entries = {name: {"topology": path} for name, path in RACKS.items()}
    return make(people, records=records(), entries=entries, **given)


def again(people, **given):
    """A round that is formed again."""
    return placed(broken, people, call=Call.REGROUP, **given)


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        # T6.7: the spare of the lost member's rack is chosen although another one came earlier, and gets its rank.
        (again("a:ready b:ready c:ready d:lost g:new e:new"), "5 of 2..4 nodes: full | seal a b c e"),
        (again("a:ready b:lost c:ready d:ready g:new e:new"), "5 of 2..4 nodes: full | seal a g c d"),
        (again("a:ready b:lost c:ready d:ready e:new f:new"), "5 of 2..4 nodes: full | seal a f c d"),
        # Members of the round go first all the same.
        (again("a:ready b:ready c:ready d:ready f:new"), "5 of 2..4 nodes: full | seal a b c d"),
        (again("a:ready b:ready c:ready d:ready f:new", max=3), "5 of 2..3 nodes: full | seal a b c"),
        # W17: only whole segments.
        (placed(opened, "a b c d e", segment=2, call=Call.LAST, age=30.0), "5 of 2..4 nodes: full | seal a b c d"),
        (placed(opened, "a c d e g", segment=2, call=Call.LAST, age=30.0), "5 of 2..4 nodes: last call over | seal c d"),
        (placed(opened, "a c g", segment=2), "3 of 2..4 nodes: waiting for 2 more in whole segments of 2 neighbours"),
        # A segment that cannot be made whole is left out, and its members are spares.
        (again("a:ready b:lost c:ready d:ready", segment=2),
         "3 of 2..4 nodes: all who live are ready | seal c d"),
        (again("a:ready b:lost c:ready d:ready g:new h:new", segment=2),
         "5 of 2..4 nodes: full | seal g h c d"),
        # Growth counts whole segments too.
        (placed(sealed, "c d a:new", segment=2), "round 3 runs with 2 nodes; a waiting for a segment of 2"),
        (placed(sealed, "c d a:new g:new", segment=2), "round 3 runs with 2 nodes; a and g waiting for a segment of 2"),
        (placed(sealed, "c d a:new g:new b:new", segment=2, settle=0.0),
         "round 3 broken: a and b came to join | phase=broken call=regroup cause=growth(a b)"),
    ],
)  # fmt: skip
def test_the_leader_chooses_by_place(view, expected):
    """T6.7, T7.7, W17, R8."""
    assert said(view) == expected


def test_a_member_in_no_whole_segment_is_spare():
    """S2."""
    status = describe("job", placed(sealed, "c d a:new g:new b:new", segment=2))
    assert {one.name: one.state for one in status.members} == {
        "c": "in", "d": "in", "a": "waiting", "b": "waiting", "g": "spare",
    }  # fmt: skip
    alone = describe("job", placed(opened, "a c", segment=2))
    assert {one.state for one in alone.members} == {"spare"}


def test_without_paths_nothing_is_compared_by_place():
    """R4: the sort key of a member without a path says nothing about places."""
    assert first_order(at(1, ""))[:2] == (True, ())
    assert ranks_of(lead(opened("c b a", call=Call.LAST, age=30.0))) == {"a": 0, "b": 1, "c": 2}
