"""The terms of the protocol: what each member counts as at one revision."""

from __future__ import annotations

import itertools

import msgspec
import pytest

from rdzv.core.model import NO_ROUND, Call, Era, Head, Phase, RoundId
from rdzv.core.ranks import Candidate
from rdzv.core.view import candidate, names
from support.views import ROUND, broken, closed, entry, live, no_head, opened, report, sealed

EVERYBODY = (
    "in:in ready:ready drains:drains done:done lost:lost gave_up:gave_up went:went gone:gone "
    "new:new new_drains:new_drains again:again"
)

WORDS = [
    # W1: no line, no key, or a key of another life (H5): not in the table.
    ("in_table", "in ready drains done"),
    # W2
    ("lost", "lost gave_up went again"),
    # W3, of those in the table
    ("drains", "drains"),
    # W4
    ("candidates", "in ready new again"),
    # W5
    ("ready", "ready new again"),
    # W6
    ("newcomers", "new again"),
    # W7
    ("survivors", "in ready"),
    # W8
    ("stragglers", "in"),
    ("restarted", "ready"),
    # W9
    ("done", "done gone"),
    ("gave_up", "gave_up"),
]


def ids(found):
    """The ids of what a term yields: ids, or members."""
    return [one if isinstance(one, str) else one.id for one in found]


@pytest.mark.parametrize("make", [sealed, broken, closed])
@pytest.mark.parametrize(("word", "who"), WORDS)
def test_everybody_counts_as_what_the_words_say(make, word, who):
    """W1, W2, W3, W4, W5, W6, W7, W8, W9."""
    found = ids(getattr(make(EVERYBODY), word))
    assert sorted(found) == sorted(name.upper() for name in who.split())


def test_whoever_an_operator_asks_to_drain_is_draining_in_the_table_or_not():
    """W3, T9.1: the ask alone counts; the member may be too busy to answer."""
    view = sealed("a b c:new", asked={"A": "maintenance", "C": "maintenance"})
    assert ids(view.drains) == ["A"]
    assert ids(view.survivors) == ["B"]
    assert ids(view.ready) == []


def test_whoever_is_done_does_not_drain():
    """W3: it is about to go anyway, and nobody need re-form for that."""
    assert ids(sealed("a b:done", asked={"B": "maintenance"}).drains) == []


def test_a_member_on_a_banned_host_stays_nowhere():
    """W4."""
    view = broken("a b:ready c:new", banned={"node-b": "bad memory", "node-c": "bad memory", "a": "no such host"})
    assert ids(view.candidates) == ["A"]
    assert ids(view.ready) == []


def test_h2_ready_is_tied_to_the_round_of_the_head():
    """W5: a record that said ready for an earlier round says nothing about this one."""
    earlier, later = RoundId(ROUND.era, 2), RoundId(ROUND.era, 4)
    view = broken("a b c", records={"a": {"left": earlier}, "b": {"left": ROUND}, "c": {"left": later}})
    assert ids(view.ready) == ["B", "C"]
    assert ids(view.stragglers) == ["A"]


def test_h2_a_round_of_a_later_era_is_above_all_of_earlier_ones():
    """W5: numbers alone do not order rounds."""
    view = broken("a b", era=Era(2, "e2"), number=1, records={"a": {"left": RoundId(Era(1, "e1"), 9)}})
    assert ids(view.ready) == []


def test_h9_without_a_head_whoever_holds_a_round_is_not_ready():
    """W5: its workers run, although the engine has forgotten their round."""
    view = no_head("a b c", records={"a": {"holds": report()}, "b": {"heard": report()}})
    assert ids(view.ready) == ["B", "C"]
    assert view.round == NO_ROUND


@pytest.mark.parametrize("make", [opened, sealed, broken])
def test_h9_whoever_holds_another_round_is_not_ready_until_it_has_given_that_up(make):
    """W5, W6: it came to an emptied engine whose head is of a round it was not in."""
    records = {"a": {"holds": report(2)}, "b": {"holds": report(2), "left": RoundId(ROUND.era, 2)}}
    view = make("a:new b:new c:new", records=records)
    assert ids(view.ready) == ids(view.newcomers) == ["B", "C"]
    assert ids(view.candidates) == ["A", "B", "C"]


@pytest.mark.parametrize(
    ("low", "high", "unit", "sizes"),
    [
        (2, 4, 1, [0, 0, 2, 3, 4, 4, 4]),
        (1, 4, 2, [0, 0, 2, 2, 4, 4, 4]),
        (3, 7, 2, [0, 0, 0, 0, 4, 4, 6, 6, 6]),
        (3, 3, 3, [0, 0, 0, 3, 3]),
    ],
)
def test_what_fits_is_in_whole_units_and_between_the_bounds(low, high, unit, sizes):
    """W10."""
    view = opened(min=low, max=high, unit=unit)
    assert [view.fitting(count) for count in range(len(sizes))] == sizes
    assert view.capacity == max(sizes)


@pytest.mark.parametrize(("people", "full"), [("a b c", False), ("a b c d", True), ("a b c d e", True)])
def test_a_run_is_full_when_as_many_are_ready_as_a_round_can_have(people, full):
    """W11: with units of 2 that is 4, not max_nodes."""
    assert opened(people, max=5, unit=2).is_full is full


@pytest.mark.parametrize(
    ("view", "missing"),
    [
        (opened("a b", max=5, unit=2), 2),
        (opened("a b c d", max=5, unit=2), 0),
        (opened("a b c d e f", max=5, unit=2), 0),
        (broken("a b c:ready"), 2),
        (broken("a:ready b:ready c:ready", max=4), 1),
    ],
)
def test_a_round_misses_its_stragglers_or_else_as_many_as_it_has_room_for(view, missing):
    assert view.missing == missing


@pytest.mark.parametrize(
    ("durable", "known_s", "young"), [(False, 0.0, True), (False, 2.99, True), (False, 3.0, False), (True, 0.0, False)]
)
def test_an_engine_is_young_while_its_members_may_still_come_back(durable, known_s, young):
    """W13: a durable engine never is, because it forgets nothing."""
    assert no_head(durable=durable, known_s=known_s).young is young


def test_what_is_told_is_all_that_the_living_hold_or_heard():
    """W14."""
    view = no_head("a b c", records={"a": {"holds": report(3), "heard": report(4)}, "b": {"heard": report(2)}})
    assert [(one.id, what.number) for one, what in view.reports] == [("A", 3), ("A", 4), ("B", 2)]


@pytest.mark.parametrize(("low", "high", "text"), [(2, 4, "3 of 2..4 nodes"), (4, 4, "3 of 4 nodes")])
def test_a_reason_begins_with_how_far_along_we_are(low, high, text):
    """W16."""
    assert opened("a b c", min=low, max=high).here == text


@pytest.mark.parametrize(
    ("people", "text"),
    [
        ("a", "a"),
        ("b a", "a and b"),
        ("c a b", "a, b and c"),
        ("d c b a", "a, b, c and 1 more"),
        ("e d c b a", "a, b, c and 2 more"),
    ],
)
def test_a_few_names_are_listed_and_many_are_counted(people, text):
    assert names(list(opened(people).members.values())) == text
    assert names(list(sealed(" ".join(f"{name}:lost" for name in people.split())).entries.values())) == text


@pytest.mark.parametrize(
    ("record", "order", "path"),
    [({"order": "7"}, "7", ""), ({"topology": "s1/n2"}, "", "s1/n2"), ({"order": "7", "topology": "s1"}, "7", "s1")],
)
def test_a_candidate_has_the_order_key_and_the_path_of_its_record(record, order, path):
    """R4."""
    assert candidate(live("a", 12, **record)) == Candidate("A", "a", "node-a", order, 12, path)


PLACES = {"a": "r1/a", "b": "r1/b", "c": "r1/c", "d": "r2/d", "e": "r2/e", "f": "", "g": ""}


@pytest.mark.parametrize(
    ("people", "segment", "usable"),
    [("a b c d e", 1, 5), ("a b c d e", 2, 4), ("a b c d", 2, 2), ("a b c d e", 3, 3), ("a d f", 2, 0), ("a b f g", 2, 4)],
)
def test_only_whole_segments_of_neighbours_count(people, segment, usable):
    """W17: those without a path are neighbours of each other."""
    view = opened(people, records={name: {"topology": PLACES[name]} for name in PLACES}, max=6, segment=segment)
    assert view.usable(view.ready) == view.usable(view.ready[:0], view.ready) == usable
    assert view.fits(view.ready) == (usable if usable >= 2 else 0)
    assert view.capacity == 6 // segment * segment
    assert view.is_full is (usable >= view.capacity)


# ---- G3: the order of rounds


def test_rounds_are_ordered_by_level_then_id_then_number():
    ordered = [(1, "a", 1), (1, "a", 2), (1, "b", 1), (2, "a", 1), (10, "a", 1)]
    for one, next_one in itertools.pairwise([NO_ROUND, *(RoundId(Era(level, id), number) for level, id, number in ordered)]):
        assert one < next_one


def test_h10_the_same_number_under_two_heads_is_not_the_same_round():
    """The era has a random part, so that two heads that both went on from one round never make the same."""
    one, other = RoundId(Era(2, "e1"), 2), RoundId(Era(2, "e2"), 2)
    assert one != other
    assert (one < other) is not (other < one)


def test_a_head_and_what_is_told_of_it_speak_of_one_round():
    head = Head(run="r", era=Era(2, "e2"), number=5, next_era=Era(3, "e3"))
    assert head.round == RoundId(Era(2, "e2"), 5) == report(5, Era(2, "e2")).round


def test_h19_every_timer_that_a_head_can_start_is_named_in_it():
    """Ages are measured from head writes, so a timer that is in no head would start anew with each leader."""
    assert [call.value for call in Call] == ["none", "last", "regroup", "settle", "notice"]
    assert {"call", "call_seq"} <= set(Head.__struct_fields__)


def test_records_are_values_that_nobody_can_change():
    for record in (live("a"), live("a").record, entry("a", 0), sealed("a").head, report()):
        with pytest.raises(AttributeError):
            record.name = "b"
    assert msgspec.structs.replace(entry("a", 0), done=True) != entry("a", 0)


def test_a_view_without_anybody_has_nobody_in_it():
    view = sealed("")
    for word, _ in WORDS:
        assert not getattr(view, word)
    assert view.head.phase is Phase.SEALED


@pytest.mark.parametrize(("record", "ready"), [({}, False), ({"same_port": True}, True), ({"boot": "node-b:29401"}, True)])
def test_h32_a_member_at_the_address_of_the_former_round_is_not_ready(record, ready):
    """W5, T4.5: late workers of that round could meet those of the next one there."""
    view = broken("a:lost b:new", boot="node-b:29400", records={"b": {"boot": "node-b:29400", **record}})
    assert [one.id for one in view.ready] == (["B"] if ready else [])
