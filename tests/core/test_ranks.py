"""Rank assignment, R1 to R6, as examples and as properties."""

from __future__ import annotations

import hashlib
import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.model import WorkerRanks
from rdzv.core.ranks import Candidate, assign, digest, first_order, natural, worker_ranks
from support.timing import within
from support.views import entry


def who(name, host="", order="", created=0, path=""):
    return Candidate(name.upper(), name, host or f"node-{name}", order, created, path)


def ranked(chosen, kept=None, vacant=()):
    """Names in the order of the ranks they are given."""
    kept = {name.upper(): rank for name, rank in (kept or {}).items()}
    ranks = assign(chosen, kept, vacant)
    assert sorted(ranks.values()) == list(range(len(chosen)))
    names = {one.id: one.name for one in chosen}
    return " ".join(names[id] for id, _ in sorted(ranks.items(), key=lambda item: item[1]))


# ---- the first round


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        # By host, in natural order, and not by who came first.
        ([who("n10", "n10", created=1), who("n9", "n9", created=2), who("n1", "n1", created=3)], "n1 n9 n10"),
        # One host together, then by name.
        ([who("x/1", "x"), who("y/0", "y"), who("x/10", "x"), who("x/2", "x")], "x/1 x/2 x/10 y/0"),
        # The order key comes before all that.
        ([who("a", order="10"), who("b", order="9"), who("c", order="8")], "c b a"),
        # A path comes before an order key, and members of one rack stand together.
        ([who("a", order="1", path="r2/a"), who("b", order="2", path="r1/b"), who("c", order="3", path="r2/c")], "b a c"),
        ([who("a", path="r10/a"), who("b", path="r9/b"), who("c", path="r9/c"), who("d")], "b c a d"),
        # Within one place the order key counts.
        ([who("a", order="10", path="r1"), who("b", order="9", path="r1")], "b a"),
        # r1 and r01 are two racks although numbers are compared.
        ([who("a", path="r1/1"), who("b", path="r01/2"), who("c", path="r1/3"), who("d", path="r01/4")], "b d a c"),
        # With an order key before without.
        ([who("a"), who("b", order="9")], "b a"),
        ([], ""),
    ],
)
def test_the_first_ranks_go_by_order_key_then_host_then_name_then_arrival(chosen, expected):
    """R4."""
    assert ranked(chosen) == expected


def test_of_two_alike_the_first_to_come_has_the_lower_rank():
    """R4."""
    assert assign([Candidate("B", "a", "h", "", 2), Candidate("A", "a", "h", "", 1)], {}, []) == {"A": 0, "B": 1}


# ---- later rounds


def test_members_keep_their_ranks():
    """R1."""
    assert ranked([who("a"), who("b"), who("c")], {"a": 2, "b": 0, "c": 1}) == "b c a"


def test_rank_0_stays_where_it_is():
    """R1: however few remain."""
    assert ranked([who("z")], {"z": 0}) == "z"
    assert ranked([who("a"), who("z")], {"z": 0, "a": 7}) == "z a"


def test_when_the_world_shrinks_the_highest_move_into_the_holes():
    """R3: in the order of their former ranks."""
    assert ranked([who("a"), who("d"), who("e")], {"a": 0, "d": 3, "e": 4}) == "a d e"
    assert ranked([who("a"), who("b"), who("e")], {"a": 0, "b": 2, "e": 4}) == "a e b"


LOST = [entry("x", 1, host="hx", order="7"), entry("y", 2, host="hy", order="8")]


@pytest.mark.parametrize(
    ("newcomers", "expected"),
    [
        # Without likeness: the lowest hole, in the order of newcomers.
        ([who("p"), who("q")], "a p q"),
        # By name, although another one is on that host or has that order key.
        ([who("y"), who("q", "hy", "8")], "a q y"),
        # By order key before host.
        ([who("p", "hy", "7"), who("q", "hx", "8")], "a p q"),
        # By host.
        ([who("p", "hy"), who("q")], "a q p"),
        ([who("p", "hy"), who("q", "hx")], "a q p"),
        # An order key that nobody gave is no likeness.
        ([who("p", order=""), who("q", "hx")], "a q p"),
    ],
)
def test_a_newcomer_takes_the_rank_of_the_lost_member_it_resembles(newcomers, expected):
    """R2."""
    assert ranked([who("a"), *newcomers], {"a": 0}, LOST) == expected


def test_no_likeness_is_seen_in_what_is_empty_on_both_sides():
    """R2: else any newcomer without an order key would be taken for any lost member without one."""
    lost = [entry("x", 1, host="hx"), entry("y", 2, host="hy")]
    assert ranked([who("a"), who("p", "hy"), who("q")], {"a": 0}, lost) == "a q p"


def test_several_lost_members_of_one_host_are_inherited_from_the_lowest_rank():
    """R2."""
    lost = [entry("x/1", 2, host="hx"), entry("x/0", 1, host="hx"), entry("x/2", 3, host="hx")]
    chosen = [who("a"), who("n/0", "hx"), who("n/1", "hx"), who("b", "ha")]
    assert ranked(chosen, {"a": 0}, lost) == "a n/0 n/1 b"


def test_a_rank_is_inherited_once():
    """R2: by name, so it is not free for the one with the same host."""
    lost = [entry("x", 1, host="hx")]
    assert ranked([who("a"), who("x", "hq"), who("p", "hx")], {"a": 0}, lost) == "a x p"


def test_a_rank_that_does_not_exist_any_more_is_not_inherited():
    """R2."""
    assert ranked([who("a"), who("x"), who("b")], {"a": 0}, [entry("x", 5), entry("b", 1)]) == "a b x"


def test_those_who_were_in_move_before_newcomers_are_placed():
    """R3: d, of rank 3 of 4, and p, new; 1 and 2 are free."""
    assert ranked([who("a"), who("p"), who("d")], {"a": 0, "d": 3}) == "a d p"


def test_an_heir_goes_before_those_who_move():
    """R2, R3: x takes the rank of x, and d the other."""
    assert ranked([who("a"), who("x"), who("d")], {"a": 0, "d": 3}, [entry("x", 1), entry("y", 2)]) == "a x d"


names = st.sampled_from(["a", "b", "c", "n1", "n2", "n10", ""])


@st.composite
def formations(draw):
    """A former table of which some are chosen again, and newcomers who may resemble those who are not."""
    former = draw(st.integers(0, 8))
    ids = [f"M{index}" for index in range(former)]
    again = draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
    ranks = dict(zip(ids, draw(st.permutations(range(former))), strict=True))
    count = draw(st.integers(0, 6))
    chosen = [Candidate(id, draw(names), draw(names), draw(names), index) for index, id in enumerate(again)]
    chosen += [Candidate(f"N{index}", draw(names), draw(names), draw(names), 100 + index) for index in range(count)]
    vacant = [
        entry(draw(names), ranks[id], host=draw(names), order=draw(names), sealed_as=id)
        for id in ids
        if id not in again
    ]
    return draw(st.permutations(chosen)), {id: ranks[id] for id in again}, vacant


@given(formations())
def test_ranks_are_complete_and_kept_whatever_comes(formation):
    """G2, R1, R2, R3."""
    chosen, kept, vacant = formation
    ranks = assign(chosen, kept, vacant)
    assert set(ranks) == {one.id for one in chosen}
    assert sorted(ranks.values()) == list(range(len(chosen)))
    for id, rank in kept.items():
        assert ranks[id] == rank or rank >= len(chosen)
    # Somebody with a lost member's own name inherits its rank, if anybody new has that name.
    newcomers = [one for one in chosen if one.id not in kept]
    for line in vacant:
        alike = [one for one in newcomers if one.name and one.name == line.name]
        rivals = [other for other in vacant if other.name == line.name and other.rank <= line.rank]
        if line.rank < len(chosen) and len(alike) >= len(rivals):
            assert line.rank in {ranks[one.id] for one in alike}


@given(formations(), st.randoms())
def test_the_order_in_which_members_are_listed_does_not_matter(formation, random):
    """R1 to R4: two leaders that see the same would seal the same."""
    chosen, kept, vacant = formation
    other, others = list(chosen), list(vacant)
    random.shuffle(other)
    random.shuffle(others)
    assert assign(other, kept, others) == assign(chosen, kept, vacant)


def test_twenty_thousand_are_ranked_in_linear_time():
    """R2: twice as many as are planned for, half of them replaced. Quadratic, it took more than 5 s; linear 0.1 s."""
    count = 20_000
    kept = [who(f"n{index}") for index in range(0, count, 2)]
    new = [Candidate(f"N{index}", f"n{index}", f"node-n{index}", "", index) for index in range(1, count, 2)]
    lost = [entry(f"n{index}", index) for index in range(1, count, 2)]
    began = time.perf_counter()
    ranks = assign([*new, *kept], {one.id: 2 * index for index, one in enumerate(kept)}, lost)
    within(time.perf_counter() - began, 2.5)
    assert all(ranks[f"N{index}"] == index for index in range(1, count, 2))


# ---- natural order


@pytest.mark.parametrize(
    "ordered",
    [
        ["node1", "node2", "node10", "node20", "node100"],
        ["1", "2", "10", "a"],
        ["r1-n2", "r1-n10", "r2-n1", "r10-n1"],
        ["", "0", "a", "a0", "a1", "a1b", "a2", "b"],
        ["n8", "n009", "n10"],
        ["aa", "ab1", "b", "b1"],
        ["9" * 20, "1" + "0" * 20, "9" * 5000, "1" + "0" * 5000],
    ],
)
def test_numbers_in_names_are_numbers(ordered):
    """R5."""
    for one, next_one in itertools.pairwise(ordered):
        assert natural(one) < natural(next_one)


def test_zeros_before_a_number_say_nothing():
    """R5."""
    assert natural("n007") == natural("n7") != natural("n70")


def test_numbers_come_before_everything_else():
    """R5: so that two keys can always be compared."""
    assert natural("12") < natural("!") < natural("a")


@pytest.mark.parametrize("text", ["²", "²3", "①", "٣", "x" * 9000 + "1" * 9000])
def test_no_name_stops_the_leader(text):
    """R5: not digits that Python will not convert, nor more of them than it converts."""
    assert min([text, "a", "1"], key=natural) == "1"


texts = st.text(st.characters(codec="utf-8"))


@given(texts, texts)
def test_any_two_names_can_be_compared(one, other):
    """R5."""
    first, second = natural(one), natural(other)
    assert [first < second, first == second, first > second].count(True) == 1


@given(st.text(alphabet="abn-."), st.integers(0, 10**30), st.integers(0, 10**30))
def test_natural_order_is_that_of_the_numbers(stem, one, other):
    """R5: against the obvious other way."""
    assert (natural(f"{stem}{one}") < natural(f"{stem}{other}")) is (one < other)


@given(names, names, names, names)
def test_an_order_key_beats_all_names(host, other_host, name, other_name):
    """R4."""
    with_key = Candidate("B", name, host, "9", 2)
    without = Candidate("A", other_name, other_host, "", 1)
    assert first_order(with_key) < first_order(without)


# ---- R6: the digest


def test_the_digest_is_that_of_a_text_anybody_can_make():
    """R6: as somebody would who writes this anew in another language."""
    lines = [entry("b", 1), entry("a", 0)]
    assert digest(lines) == hashlib.sha256(b"0 A a\n1 B b").hexdigest()[:32]


def test_the_digest_does_not_change_when_members_die_or_mark_their_lines():
    """R6: or come back to an emptied engine, under another id and create revision."""
    before = [entry("a", 0, 11), entry("b", 1, 12)]
    marks = entry("b", 1, 99, done=True, gave_up="x", went="y", since=7, order="9", host="elsewhere")
    assert digest([marks, before[0]]) == digest(before)


@pytest.mark.parametrize("other", [entry("c", 1), entry("b", 2), entry("b", 1, sealed_as="C")])
def test_the_digest_changes_with_a_rank_an_id_or_a_name(other):
    """R6."""
    assert digest([entry("a", 0), other]) != digest([entry("a", 0), entry("b", 1)])


# ---- workers


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ("t:8 t:4 t:2", [(0, 14, 0, 14), (8, 14, 8, 14), (12, 14, 12, 14)]),
        ("t:1", [(0, 1, 0, 1)]),
        ("t:2 reader:1 t:3 reader:4", [(0, 10, 0, 5), (2, 10, 0, 5), (3, 10, 2, 5), (6, 10, 1, 5)]),
        ("t:8 t:0 t:2", [None, None, None]),
        (":1 :1", [(0, 2, 0, 2), (1, 2, 1, 2)]),
    ],
)
def test_h31_the_ranks_of_workers_follow_those_of_their_members(shares, expected):
    """R7: as torch's agents compute them; if a member does not say how many workers it has, there are none."""
    given = [(role, int(count)) for role, count in (share.split(":") for share in shares.split())]
    assert worker_ranks(given) == [None if one is None else WorkerRanks(*one) for one in expected]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=12))
def test_every_worker_has_one_rank_in_the_world_and_one_in_its_role(shares):
    found = worker_ranks(shares)
    world = [one.first + local for one, (_, count) in zip(found, shares, strict=True) for local in range(count)]
    assert world == list(range(found[0].total))
    for role in {role for role, _ in shares}:
        mine = [(one, count) for one, (other, count) in zip(found, shares, strict=True) if other == role]
        assert [one.role_first + local for one, count in mine for local in range(count)] == list(range(mine[0][0].role_total))
