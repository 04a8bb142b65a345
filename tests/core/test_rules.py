"""The leader's rules, as tables: a view of the run and the verdict, as text (`support.verdicts.said`).

The first column begins with the sentences of docs/protocol.md that a row shows, and with the number of the hole (H17) that it
keeps closed, if there is one. `said` also checks what must hold for every verdict, such as the counters of a head.
"""

from __future__ import annotations

import msgspec
import pytest

from rdzv.core.acts import Evict, Seal, Sweep, Verdict, WriteHead
from rdzv.core.evictions import evict_leader
from rdzv.core.model import (
    CAUSE_MEMBERS_MAX,
    FLAPS_MAX,
    Call,
    Cause,
    CauseKind,
    Era,
    Head,
    Phase,
    RankEntry,
    StallReport,
    WorkerRanks,
)
from rdzv.core.ranks import digest
from rdzv.core.rules import RULES, lead
from support.verdicts import said
from support.views import NUMBER, REVISION, ROUND, after, broken, closed, live, no_head, opened, report, seal_of, sealed

NONE, LAST, REGROUP, SETTLE, _ = Call
SOON = ": c was lost soon after it came in"
BACK = {"heard": report(rank=1)}
"""The record of a member that was in the broken round and comes again."""
BAD = "bad memory"
BEGINS = "the run begins | run=fresh era=1.fresh next_era=1.fresh"
BROKEN = "phase=broken call=regroup cause"
RUNS = "round 3 runs with 2 nodes"


def stalled(people, told, for_s=600.0, **given):
    """A view in which members tell of a stall: step and ranks by name."""
    reports = {
        name: {"stalled": StallReport(table="t3", step=step, ranks=ranks, for_s=for_s)} for name, (step, *ranks) in told.items()
    }
    return sealed(people, **{"stall": 600.0, "records": reports, **given})


def table(*rows):
    return pytest.mark.parametrize(("view", "expected"), [row[1:] for row in rows], ids=[row[0] for row in rows])


# ---- no head


@table(
    ("T2.1 the leader makes the head", no_head("a"), f"1 of 2..4 nodes: {BEGINS}"),
    ("T2.1 the head bears the leader's incarnation", no_head("a", incarnation=3), f"1 of 2..4 nodes: {BEGINS} incarnation=3"),
    ("T2.2 a young engine: members of an earlier round may come back", no_head("a b", young=True),
     "2 of 2..4 nodes: waiting for members of an earlier round to come back to this engine @ 2"),
    ("T2.2 a young engine: a lone member is told what is missing", no_head("a", young=True),
     "1 of 2..4 nodes: waiting for 1 more @ 2"),
    ("T2.2 a young engine: the reason says who is unhealthy", no_head("a:sick", young=True),
     "0 of 2..4 nodes: waiting for 2 more (a unhealthy: bad disk) @ 2"),
    ("T2.2 a full run does not wait: it is most likely new", no_head("a b c d", young=True),
     "4 of 2..4 nodes: full | seal a b c d"),
    ("T2.7 a declared place: members may still be on their way", no_head("a b", durable=False, known_s=6.0, promised=True),
     "2 of 2..4 nodes: waiting for members of an earlier round to come back to this engine @ 2"),
    ("T2.7 a declared place: not for ever", no_head("a", durable=False, known_s=8.0, promised=True),
     f"1 of 2..4 nodes: {BEGINS}"),
    ("T2.7 a declared place: not beyond the last call", no_head("a", durable=False, known_s=4.0, promised=True, last_call=4.0),
     f"1 of 2..4 nodes: {BEGINS}"),
    ("T2.2 an engine that is not young any more", no_head("a", durable=False, known_s=3.0), f"1 of 2..4 nodes: {BEGINS}"),
    ("T2.4 a full run is sealed with its first head; the fifth is spare", no_head("a b c d e"),
     "5 of 2..4 nodes: full | seal a b c d"),
    ("T2.4 a banned member does not make a run full", no_head("a b c d", banned={"node-d": BAD}),
     f"3 of 2..4 nodes: last call | {BEGINS.partition(' | ')[2].replace(' next', ' call=last next')}"),
    ("T2.6 the last call of a quorum began while members of an earlier round were waited for",
     no_head("a b", durable=False, known_s=3.0, quorum_age_s=2.5),
     "2 of 2..4 nodes: last call | run=fresh era=1.fresh call=last waited=2.5 next_era=1.fresh"),
    ("T2.6 but no more of it than that wait takes", no_head("a b", quorum_age_s=50.0),
     "2 of 2..4 nodes: last call | run=fresh era=1.fresh call=last waited=3.0 next_era=1.fresh"),
)  # fmt: skip
def test_how_the_first_head_is_made(view, expected):
    assert said(view) == expected


def test_the_first_seal_is_the_one_that_would_follow_the_first_head():
    """T2.4, T2.1."""
    view = no_head("a b c d e")
    head = Head(run="fresh", era=Era(1, "fresh"), next_era=Era(1, "fresh"))
    first, following = lead(view), lead(msgspec.structs.replace(view, head=head))
    assert (first.act, first.reason) == (following.act, following.reason)
    assert (first.rule, following.rule) == ("first_head", "seal")


def test_h9_a_newcomer_does_not_begin_a_run_that_a_member_reports():
    """T2.1: C comes first to the emptied engine; A, which holds round 3, is there too. C must not begin at 1."""
    head = lead(no_head("c a", min=1, records={"a": {"holds": report(rank=0)}})).act.head
    assert (head.number, head.phase) == (3, Phase.BROKEN)


# ---- open or broken: the call


@table(
    ("T5.5 below quorum only an event helps", opened("a", min=3), "1 of 3..4 nodes: waiting for 2 more"),
    *[
        (f"T5.5 missing members are counted in whole units: {people!r} {low} {unit}", opened(people, min=low, unit=unit),
         f"{len(people.split())} of {'4' if low == 4 else f'{low}..4'} nodes: waiting for {missing} more")
        for people, low, unit, missing in [
            ("", 2, 1, 2), ("a", 2, 1, 1), ("a b c", 3, 2, 1), ("a", 3, 2, 3), ("a b c", 4, 1, 1), ("a b c", 4, 4, 1)
        ]
    ],
    ("T5.5 below quorum: stragglers may still come", broken("a b:ready c", min=3, call=REGROUP, age=5.0),
     "1 of 3..4 nodes: waiting for 2 more (a and c stopping their workers)"),
    ("T5.5 below quorum without stragglers", broken("a:ready b:lost"), "1 of 2..4 nodes: waiting for 1 more"),
    ("T5.1 quorum starts the last call", opened("a b"), "2 of 2..4 nodes: last call | call=last"),
    ("T5.1 H18 newcomers that make a quorum start a last call: others may be right behind",
     broken("a:ready b:ready c:lost d:lost e:new f:new", min=4, max=8), "4 of 4..8 nodes: last call | call=last"),
    ("T5.6 members that come back after a cut are a round again, without a last call",
     broken("a:ready b:lost c:lost e:new", records={"e": BACK}),
     "2 of 2..4 nodes: enough of round 3 are back to go on | call=regroup"),
    ("T5.6 H18 but a process that was started anew is not", broken("a:ready b:lost c:lost e:new", records={"e": {"name": "b"}}),
     "2 of 2..4 nodes: last call | call=last"),
    ("T5.6 T6.15 the last of them may be a moment behind",
     broken("a:ready b:lost c:lost e:new", call=REGROUP, age=2.0, records={"e": BACK}),
     "2 of 2..4 nodes: waiting 1 s for members of round 3 to come back @ 1"),
    ("T6.15 no longer", broken("a:ready b:lost c:lost e:new", call=REGROUP, age=3.0, records={"e": BACK}),
     "2 of 2..4 nodes: all who live are ready | seal a e"),
    *[(f"T6.15 not for one that {how} ", broken(f"a:ready b:lost c:{how} e:new", call=REGROUP, records={"e": BACK}),
       "2 of 2..4 nodes: all who live are ready | seal a e") for how in ("gave_up", "went", "gone")],
    ("T6.15 nor if the survivors alone are a quorum",
     broken("a:ready b:ready c:lost d:lost e:new", max=9, call=REGROUP, records={"e": BACK}),
     "3 of 2..9 nodes: all who live are ready | seal a b e"),
    ("T6.15 nor on an engine that came back empty, which has waited already",
     broken("a:ready b:lost c:lost e:new", call=REGROUP, call_seq=1, records={"e": BACK}),
     "2 of 2..4 nodes: all who live are ready | seal a e"),
    ("T6.15 a longer wait for a replacement counts",
     broken("a:ready b:lost c:lost e:new", call=REGROUP, age=2.0, replace_wait=5.0, records={"e": BACK}),
     "2 of 2..4 nodes: waiting 3 s for a replacement @ 3"),
    ("T5.5 a last call is waited out", opened("a b", call=LAST, age=12.0), "2 of 2..4 nodes: last call, 18 s left @ 18"),
    ("T5.5 T6.6 H18 also after the loss of quorum",
     broken("a:ready b:ready c:lost d:lost e:new f:new", min=4, max=8, call=LAST, age=10.0),
     "4 of 4..8 nodes: last call, 20 s left @ 20"),
    ("T5.2 lost quorum stops the last call", opened("a", call=LAST, age=12.0), "1 of 2..4 nodes: quorum lost | call=none"),
    ("T5.2 even when it is over", opened("a", call=LAST, age=30.0), "1 of 2..4 nodes: quorum lost | call=none"),
    ("T5.2 a last call needs ready members, not survivors", broken("a:lost b:new c:new", call=LAST),
     "2 of 2..4 nodes: last call, 30 s left @ 30"),
    ("T5.4 H19 more members do not restart it", opened("a b c", call=LAST, age=29.0),
     "3 of 2..4 nodes: last call, 1 s left @ 1"),
    ("T5.4 H19 another leader goes on from the age that it measured", opened("a b", call=LAST, age=29.0, me="B"),
     "2 of 2..4 nodes: last call, 1 s left @ 1"),
    ("T5.3 regrouping stops when survivors are no quorum, even if newcomers make up for it",
     broken("a:ready b:lost c:new", call=REGROUP, age=1.0),
     "2 of 2..4 nodes: too few of round 3 are left to go on without others | call=none"),
    ("T5.3 stragglers are survivors", broken("a b:ready c:lost", call=REGROUP),
     "1 of 2..4 nodes: waiting for 1 more (a stopping their workers)"),
)  # fmt: skip
def test_when_the_call_starts_and_stops(view, expected):
    assert said(view) == expected


def test_h19_no_instant_is_in_the_head():
    """T5.4: a leader measures ages by its own clock."""
    assert not [name for name in Head.__struct_fields__ if name.endswith(("_at", "_s"))]


# ---- open or broken: when a round is sealed, and who is in it


@table(
    ("T2.6 T6.6 what a quorum had waited before the head was made is part of the last call",
     opened("a b", call=LAST, age=27.0, waited=3.0), "2 of 2..4 nodes: last call over | seal a b"),
    ("T2.6 T5.5 and of the time left", opened("a b", call=LAST, age=12.0, waited=3.0),
     "2 of 2..4 nodes: last call, 15 s left @ 15"),
    ("T6.6 the last call is over", opened("a b", call=LAST, age=30.0), "2 of 2..4 nodes: last call over | seal a b"),
    ("T6.6 H18 after the loss of quorum too", broken("a:ready b:ready c:lost e:new", min=3, max=8, call=LAST, age=30.0),
     "3 of 3..8 nodes: last call over | seal a b e"),
    ("T6.6 a last call of no time is written first", opened("a b", last_call=0.0),
     "2 of 2..4 nodes: last call | call=last"),
    ("T6.6 and then over", opened("a b", last_call=0.0, call=LAST), "2 of 2..4 nodes: last call over | seal a b"),
    ("T6.1 a quorum alone is not sealed", opened("a b", age=1000.0), "2 of 2..4 nodes: last call | call=last"),
    *[(f"T6.3 full, with call {call.value}", opened("a b c d", call=call), "4 of 2..4 nodes: full | seal a b c d")
      for call in (NONE, LAST)],
    # Two survivors, because a call to regroup stops without a quorum of them.
    *[(f"T6.3 full again, with call {call.value}", broken("a:ready b:ready c:lost d:new e:new", call=call, replace_wait=10.0),
       "4 of 2..4 nodes: full | seal a b d e") for call in (NONE, REGROUP, LAST)],
    ("T6.5 regrouping: all who live are ready", broken("a:ready b:ready c:lost", call=REGROUP),
     "2 of 2..4 nodes: all who live are ready | seal a b"),
    ("T6.5 T5.5 a replacement is waited for if asked",
     broken("a:ready b:ready c:lost", call=REGROUP, replace_wait=10.0, age=3.0),
     "2 of 2..4 nodes: waiting 7 s for a replacement @ 7"),
    ("T6.5 not for longer", broken("a:ready b:ready c:lost", call=REGROUP, replace_wait=10.0, age=10.0),
     "2 of 2..4 nodes: all who live are ready | seal a b"),
    ("T6.5 replace_wait ends no last call", broken("a:ready b:ready c:lost", call=LAST, age=20.0, replace_wait=10.0),
     "2 of 2..4 nodes: last call, 10 s left @ 10"),
    ("T6.5 and last_call no regrouping", broken("a:ready b:ready c:lost", call=REGROUP, age=35.0, replace_wait=40.0),
     "2 of 2..4 nodes: waiting 5 s for a replacement @ 5"),
    ("T6.4 nobody waits for a replacement that has come",
     broken("a:ready b:ready c:lost d:new", call=REGROUP, replace_wait=10.0),
     "3 of 2..4 nodes: all are back | seal a b d"),
    ("T6.4 as many as before do not end a last call", broken("a:ready b:lost c:new", call=LAST, age=1.0),
     "2 of 2..4 nodes: last call, 29 s left @ 29"),
    *[(f"T6.1 T5.5 H2 nothing is sealed over running workers, with call {call.value}",
       broken("a b:ready c:ready", call=call, age=60.0),
       "2 of 2..4 nodes: waiting for a to stop their workers, at most 15 s more @ 15") for call in (REGROUP, LAST)],
    *[(f"T6.1 H17 survivors and spares that fill the round wait for a slow survivor, with call {call.value}",
       broken("a b:ready c:ready d:lost e:new f:new", call=call, age=1.0),
       "4 of 2..4 nodes: waiting for a to stop their workers, at most 74 s more @ 74") for call in (REGROUP, LAST)],
    *[(f"T6.1 W8 a member that {state} is not waited for", broken(f"a:{state} b:ready c:ready", call=REGROUP),
       "2 of 2..4 nodes: all who live are ready | seal c b") for state in ("drains", "done")],
    ("T4.1 W5 H3 a member that gave the round up untaken is not waited for",
     broken("a b c:lost", call=REGROUP, records={"a": {"left": ROUND}, "b": {"left": ROUND}}),
     "2 of 2..4 nodes: all who live are ready | seal a b"),
    # Who is in, and with which rank.
    ("T6.7 the first to come are chosen, then ranked by host", opened("f e d c b a", call=LAST, age=30.0),
     "6 of 2..4 nodes: full | seal c d e f"),
    *[(f"T6.7 in whole units: {people}", opened(people, unit=unit, call=LAST, age=30.0),
       f"{len(people.split())} of 2..4 nodes: {why} | seal {chosen}") for people, unit, why, chosen in [
           ("a b c", 2, "last call over", "a b"), ("c b a", 2, "last call over", "b c"), ("e d c b a", 3, "full", "c d e")]],
    ("T6.7 a draining member is not chosen", opened("a:new_drains b c", call=LAST, age=30.0),
     "2 of 2..4 nodes: last call over | seal b c"),
    ("T6.7 H17 survivors go before spares that came earlier",
     broken("e:new f:new a:ready b:ready c:ready d:lost", call=REGROUP), "5 of 2..4 nodes: full | seal a b c e"),
    ("T6.7 of too many survivors the highest ranks are left out",
     broken("a:ready b:ready c:ready d:lost", unit=2, call=REGROUP), "3 of 2..4 nodes: all who live are ready | seal a b"),
    ("W10 T6.7 H26 a shrunk round has whole units too",
     broken("a:ready b:ready c:ready d:ready e:ready f:lost", max=8, unit=2, call=REGROUP),
     "5 of 2..8 nodes: all who live are ready | seal a b c d"),
    ("T6.7 R3 a spare is promoted in the place of a lost member",
     broken("a:ready b:lost c:ready d:new", max=3, call=REGROUP), "3 of 2..3 nodes: full | seal a d c"),
    ("T6.7 R2 a replacement of the same name has the lost member's rank",
     broken("a:ready b:lost x:lost c:new d:new", min=1, call=REGROUP, records={"d": {"name": "b"}}),
     "3 of 1..4 nodes: all are back | seal a b c"),
)  # fmt: skip
def test_when_a_round_is_sealed_and_with_whom(view, expected):
    assert said(view) == expected


def test_the_first_sealed_head_is_complete():
    """T6.8, T6.9, T6.10: every field of it."""
    view = opened("a b", call=LAST, age=30.0, incarnation=2)
    seal = seal_of(lead(view))
    sealed_as = digest(seal.entries.values())
    fields = {"number": 1, "phase": Phase.SEALED, "table": "fresh", "size": 2, "digest": sealed_as, "top": 2}
    assert seal.head == after(view, **fields, came=("a", "b"), boot="node-a:29500", seen=REVISION, fence=1, call=NONE)
    assert (seal.first, seal.former_table, seal.head.incarnation) == ("A", "", 2)


def test_h16_the_next_sealed_head_is_complete():
    """T6.8, T6.9, T6.10: every field of it. Table ids are random, so a late writer to the old store reaches no new one."""
    cause = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))
    view = broken("a:ready b:ready c:lost", call=REGROUP, cause=cause, flaps={"x": 1}, grown=2, adopted=True)
    seal = seal_of(lead(view))
    sealed_as = digest(seal.entries.values())
    fields = {"number": 4, "phase": Phase.SEALED, "table": "fresh", "size": 2, "digest": sealed_as, "boot": "node-a:29500"}
    assert seal.head == after(view, **fields, seen=REVISION, fence=1, call=NONE, adopted=False)
    assert (seal.head.top, seal.head.grown, seal.head.flaps) == (3, 2, {"x": 1})
    assert (seal.first, seal.former_table) == ("A", "t3")


def test_h1_the_entries_of_the_first_table_are_complete():
    """T6.11: with the create revisions, which the transaction compares, so that no dead member is sealed in."""
    records = {"a": {"topology": "s1"}, "b": {"order": "9"}}  # A path goes before an order key.
    assert seal_of(lead(opened("a b", call=LAST, age=30.0, records=records))).entries == {
        "A": RankEntry(rank=0, created=11, name="a", host="node-a", topology="s1", sealed_as="A", since=1),
        "B": RankEntry(rank=1, created=12, name="b", host="node-b", order="9", sealed_as="B", since=1),
    }


def test_h31_the_ranks_of_workers_are_part_of_the_seal():
    """T6.11 R7: in the order of the members' ranks, whoever came first."""
    records = {"a": {"workers": 4, "role": "t", "order": "2"}, "b": {"workers": 8, "role": "t", "order": "1"}}
    entries = seal_of(lead(opened("a b", call=LAST, age=30.0, records=records))).entries
    assert {id: entry.workers for id, entry in entries.items()} == {
        "B": WorkerRanks(0, 12, 0, 12), "A": WorkerRanks(8, 12, 8, 12)
    }  # fmt: skip


def test_h5_the_entries_of_the_next_table_are_complete():
    """T6.11: members keep the round in which they came; marks and former ids go; a member that came again is new."""
    former = {"a": {"since": 1, "sealed_as": "before"}, "b": {"since": 2}}
    view = broken("a:ready b:ready c:again", call=REGROUP, entries=former)
    assert {entry.name: entry.since for entry in seal_of(lead(view)).entries.values()} == {"a": 1, "b": 2, "c": NUMBER + 1}


def test_h23_the_address_of_rank_0_is_part_of_the_seal():
    """T6.10: it was bound before the seal. When rank 0 is lost, it is that of the new one."""
    for view, first in ((opened("b a", call=LAST, age=30.0), "a"), (broken("a:lost b:ready c:ready d:new", call=REGROUP), "d")):
        seal = seal_of(lead(view))
        assert (seal.first, seal.head.boot) == (first.upper(), f"node-{first}:29500")


@pytest.mark.parametrize(
    ("top", "grown", "after_top", "after_grown"),
    [(3, 0, 3, 0), (3, 2, 3, 2), (2, 0, 3, NUMBER + 1), (2, 2, 3, NUMBER + 1), (4, 1, 4, 1)],
)
def test_a_size_that_the_run_never_had_is_growth(top, grown, after_top, after_grown):
    """T6.10: a size it had before is a replacement, and the first round is no growth."""
    head = seal_of(lead(broken("a:ready b:ready c:new", call=REGROUP, top=top, grown=grown))).head
    assert (head.top, head.grown) == (after_top, after_grown)
    assert seal_of(lead(opened("a b c d"))).head.grown == 0


def test_after_an_empty_restart_the_next_round_is_in_the_next_era():
    """T6.9."""
    head = seal_of(lead(broken("a:ready b:ready", call=REGROUP, next_era=Era(2, "e1")))).head
    assert (head.era, head.next_era, head.number) == (Era(2, "e1"), Era(2, "e1"), 4)


# ---- evictions

LATE = "c and d did not stop within 75 s: evicted | evict C D"


@table(
    *[(f"T8.1 H7 stragglers are evicted after regroup: {call.value} {age:g}",
       broken("a:ready b:ready c d", call=call, age=age), LATE)
      for call, age in [(REGROUP, 75.0), (LAST, 75.0), (REGROUP, 500.0)]],
    *[(f"T8.1 H7 not before, with call {call.value}", broken("a:ready b:ready c", call=call, age=74.5),
       "2 of 2..4 nodes: waiting for c to stop their workers, at most 0 s more @ 0.5") for call in (REGROUP, LAST)],
    ("T8.1 not if the others are no quorum", broken("a:ready b c", call=REGROUP, age=75.0),
     "1 of 2..4 nodes: waiting for 1 more (b and c stopping their workers)"),
    ("T8.1 nor without a call, which gives notice", broken("a:ready b:ready c", age=500.0),
     "2 of 2..4 nodes: enough of round 3 are back to go on | call=regroup"),
    ("T8.3 a leader that straggles is last: nothing that it writes afterwards takes effect",
     broken("a b c:ready d:ready e", call=REGROUP, age=75.0, max=8),
     "a, b and e did not stop within 75 s: evicted | evict B E A"),
    ("T8.3 the others in the order of coming", broken("a:ready b:ready z y x", call=REGROUP, age=75.0, max=8),
     "x, y and z did not stop within 75 s: evicted | evict Z Y X"),
    *[(f"T8.5 the engine is asked for stragglers that are away: {call.value} {age:g} s, asked {asked:g} s ago",
       broken("a:ready b:ready c", call=call, age=age, away_asked_s=asked, linger_s=2.0),
       "2 of 2..4 nodes: waiting for c, unless their processes have ended | evict C if away for 0.5 s")
      for call, age, asked in [(REGROUP, 0.5, 99.0), (LAST, 0.5, 99.0), (REGROUP, 1.0, 0.5), (REGROUP, 2.4, 0.5)]],
    *[(f"T8.5 not before: {age:g} s, asked {asked:g} s ago",
       broken("a:ready b:ready c", call=REGROUP, age=age, away_asked_s=asked, linger_s=2.0),
       f"2 of 2..4 nodes: waiting for c to stop their workers, at most {75 - age:.0f} s more @ {again:g}")
      for age, asked, again in [(0.0, 99.0, 0.5), (0.25, 99.0, 0.25), (1.0, 0.25, 0.25)]],
    *[(f"T8.5 not after the first linger: {age:g} s, asked {asked:g} s ago",
       broken("a:ready b:ready c", call=REGROUP, age=age, away_asked_s=asked, linger_s=2.0),
       f"2 of 2..4 nodes: waiting for c to stop their workers, at most {75 - age:.0f} s more @ {75 - age:g}")
      for age, asked in [(2.5, 99.0), (2.25, 0.0)]],
    ("T8.5 not if the others are no quorum", broken("a:ready b c", call=REGROUP, age=1.0, linger_s=2.0),
     "1 of 2..4 nodes: waiting for 1 more (b and c stopping their workers)"),
    ("T8.5 not where the engine does not see the end of a process", broken("a:ready b:ready c", call=REGROUP, age=1.0),
     "2 of 2..4 nodes: waiting for c to stop their workers, at most 74 s more @ 74"),
    ("T8.5 not about many", broken("a:ready b:ready c d e f", call=REGROUP, age=1.0, linger_s=2.0, max=8),
     "2 of 2..8 nodes: waiting for c, d, e and 1 more to stop their workers, at most 74 s more @ 74"),
    ("T8.5 about three at once, and not about the leader itself",
     broken("a b:ready c:ready d e f", call=REGROUP, age=1.0, linger_s=2.0, max=8),
     "2 of 2..8 nodes: waiting for d, e and f, unless their processes have ended | evict D E F if away for 0.5 s"),
    ("T8.5 never in a running round", sealed("a b:ready c", age=1.0, linger_s=2.0),
     "round 3 broken: the workers of b stopped: a new round is wanted | phase=broken call=regroup cause=restarted(b)"),
    ("W4 an unhealthy member is not waited for, and not sealed in", broken("a:ready b:ready c:sick", call=REGROUP),
     "2 of 2..4 nodes: all who live are ready | seal a b"),
    ("W4 a spare takes its place", broken("a:ready b:sick c:new d:new_sick", min=2, max=2),
     "2 of 2 nodes: full | seal a c"),
    ("T5.5 the reason says who is unhealthy", broken("a:ready b:sick"),
     "1 of 2..4 nodes: waiting for 1 more (b unhealthy: bad disk)"),
    ("T7.3 the round of an unhealthy member is broken", sealed("a b c:sick"),
     "round 3 broken: the workers of c stopped: a new round is wanted | phase=broken call=regroup cause=restarted(c)"),
    ("T7.7 an unhealthy newcomer is not useful", sealed("a b c:new_sick"), RUNS),
    ("T11.2 an unhealthy member may be well again", broken("a:ready b:sick c:gave_up"),
     "1 of 2..4 nodes: waiting for 1 more (b unhealthy: bad disk)"),
    ("T8.1 T6.5 when they are gone the round is sealed", broken("a:ready b:ready c:lost d:lost", call=REGROUP, age=75.1),
     "2 of 2..4 nodes: all who live are ready | seal a b"),
    *[(f"T8.2 a ban takes effect at once: {make.args[0].value}",
       make("a b c d", banned={"node-c": BAD, "node-b": BAD}, orphans=["t1"]), f"b and c banned: {BAD} | evict B C")
      for make in (opened, sealed, broken)],
    ("T8.2 before a seal", broken("a:ready b:ready c:ready", call=REGROUP, banned={"node-b": BAD}),
     f"b banned: {BAD} | evict B"),
    ("T8.2 before success", sealed("a:done b:done", banned={"node-b": BAD}), f"b banned: {BAD} | evict B"),
    ("T8.2 hosts are banned, not names or ids", sealed("a b", banned={"node-c": BAD, "a": "a name", "B": "an id"}), RUNS),
    ("T8.2 all members of the host",
     sealed("a b c", records={"a": {"host": "h"}, "c": {"host": "h"}}, banned={"h": BAD}, me="B"),
     f"a and c banned: {BAD} | evict A C"),
    ("T8.3 a banned leader evicts itself last", sealed("a b c", banned={"node-a": BAD, "node-b": BAD}),
     f"a and b banned: {BAD} | evict B A"),
)  # fmt: skip
def test_which_members_are_evicted_and_when(view, expected):
    assert said(view) == expected


def follower(make, people, me="B", **given):
    """A view of a member that does not lead, on an engine that sees the end of a process."""
    return make(people, **{"me": me, "linger_s": 2.0, **given})


@table(
    ("T8.6 one that gave up the round asks about the leader", follower(sealed, "a b:ready c:ready"), "2 of 2..4"),
    ("T8.6 in a broken round, too", follower(broken, "a b:ready c:ready"), "2 of 2..4"),
    ("T8.6 the oldest of those that gave it up", follower(sealed, "a b c:ready d:ready", me="C"), "2 of 2..4"),
    ("T8.6 one whose node is unhealthy may ask", follower(sealed, "a b:sick c:ready d:ready"), "2 of 2..4"),
    ("T8.6 newcomers may make up the quorum", follower(sealed, "a b:ready c d:new"), "2 of 2..4"),
    ("T8.6 about a leader that is not in the round", follower(sealed, "a:new b:ready c:ready"), "3 of 2..4"),
    ("T8.6 about a leader that drains", follower(sealed, "a:drains b:ready c:ready"), "2 of 2..4"),
    ("T8.6 about a leader that was ready before it died", follower(broken, "a:ready b:ready c:ready"), "3 of 2..4"),
    ("T8.6 which does not count for the quorum", follower(broken, "a:ready b:ready"), None),
    ("T8.6 not if quorum needs the leader", follower(sealed, "a b:ready c:ready", min=3), None),
    ("T8.6 nor while too many others run their workers", follower(sealed, "a b:ready c"), None),
    ("T8.6 never in a round that runs (G7)", follower(sealed, "a b c:new d:new"), None),
    ("T8.6 nor on the word of others (G7)", follower(sealed, "a b c:ready d:ready"), None),
    ("T8.6 a second one does not ask", follower(sealed, "a b:ready c:ready", me="C"), None),
    ("T8.6 the leader does not ask about itself", follower(sealed, "a:ready b:ready c:ready", me="A"), None),
    ("T8.6 not about a leader that is done", follower(sealed, "a:done b:ready c:ready"), None),
    ("T8.6 not where the end of a process is not seen", follower(sealed, "a b:ready c:ready", linger_s=0.0), None),
    ("T8.6 not when the run is closed", follower(closed, "a b:ready c:ready"), None),
    ("T8.6 not when nobody is there", follower(sealed, "a:lost"), None),
)  # fmt: skip
def test_who_asks_whether_the_leader_is_dead(view, expected):
    verdict = evict_leader(view)
    if expected is None:
        assert verdict is None
    else:
        text = f"{expected} nodes: waiting for a to lead, unless its process has ended"
        assert verdict == Verdict(Evict(("A",), 0.5), text)


# ---- sealed: losses, restarts, drains


def lost(people, text, about, **given):
    """A row in which round 3 breaks. The kind of cause comes before the names."""
    return f"T7.1 {people} {given or ''}", sealed(people, **given), f"round 3 broken: {text} | {BROKEN}={about}"


@table(
    ("T7.13 a quiet round", sealed("a b c"), "round 3 runs with 3 nodes"),
    lost("a b c:lost", "c lost", "lost(c)"),
    lost("a b c:lost d:lost", "c and d lost", "lost(c d)"),
    ("T7.1 H5 a member that came again is lost to its round", sealed("a b c:again"),
     f"round 3 broken: c lost | {BROKEN}=lost(c)"),
    # All said why they went; otherwise the one that did not is the news.
    lost("a b c:went", "c left: scaled down", "left(c)"),
    lost("a b c:went d:went", "c and d left: scaled down", "left(c d)"),
    lost("a b c:went d:lost", "c and d lost", "lost(c d)"),
    # A failure says more than the losses that may have followed from it.
    lost("a b c:gave_up", "c gave up: exit code 1", "gave_up(c)"),
    lost("a b c:lost d:gave_up", "d gave up: exit code 1", "gave_up(d)"),
    lost("a b c:went d:gave_up e:gave_up", "d gave up: exit code 1", "gave_up(d e)"),
    # The loss of a banned member is the operator's doing, unless another one failed.
    lost("a b c:lost d:lost", f"c banned: {BAD}", "banned(c)", banned={"node-c": BAD}),
    lost("a b c:went d:went", f"c banned: {BAD}", "banned(c)", banned={"node-c": BAD}),
    lost("a b c:lost d:gave_up", "d gave up: exit code 1", "gave_up(d)", banned={"node-c": BAD}),
    ("T7.2 a break ends the settling of newcomers", sealed("a b c:lost d:new", call=SETTLE, age=1.9),
     f"round 3 broken: c lost | {BROKEN}=lost(c)"),
    *[(f"T7.2 H18 survivors regroup only if they are a quorum alone: {people}",
       sealed(people, min=low, unit=unit, on_failure="wait"),
       f"round 3 broken: {text} lost | phase=broken cause=lost({about})") for people, low, unit, text, about in [
           ("a b:lost c:lost", 2, 1, "b and c", "b c"), ("a b c d:lost", 3, 2, "d", "d"), ("a b:lost c:new", 2, 1, "b", "b"),
           ("a b:done c:lost", 2, 1, "c", "c"), ("a b:drains c:lost", 2, 1, "c", "c")]],
    ("T7.3 H6 a member that restarts its workers breaks the round", sealed("a b:ready c"),
     f"round 3 broken: the workers of b stopped: a new round is wanted | {BROKEN}=restarted(b)"),
    ("T7.3 several are one cause", sealed("a:ready b:ready c"),
     f"round 3 broken: the workers of a and b stopped: a new round is wanted | {BROKEN}=restarted(a b)"),
    ("T7.1 T7.3 a loss goes before the restart that follows from it", sealed("a b:ready c:lost"),
     f"round 3 broken: c lost | {BROKEN}=lost(c)"),
    ("T7.3 only survivors restart", sealed("a b c:drains", records={"c": {"left": ROUND}}),
     "round 3: c draining, gathering others @ 1"),
    ("T7.15 stalls are gathered", stalled("a b c", {"b": (10, 3)}, stall_age=2.0),
     "round 3: no progress for 600 s: rank 3 at step 10 (b), gathering others @ 3"),
    ("T7.15 not for long", stalled("a b c", {"b": (10, 3)}, stall_age=5.0),
     f"round 3 broken: no progress for 600 s: rank 3 at step 10 (b) | {BROKEN}=stalled(b)"),
    ("T7.15 nor for longer than a stall takes", stalled("a b c", {"b": (10, 3)}, stall=2.0, stall_age=2.0),
     f"round 3 broken: no progress for 600 s: rank 3 at step 10 (b) | {BROKEN}=stalled(b)"),
    ("T7.15 the ranks at the lowest step are named", stalled("a b c:done d", {"a": (11, 0, 1), "b": (10, 3), "d": (10, 6, 7)}),
     f"round 3 broken: no progress for 600 s: ranks 3, 6, 7 at step 10, others at 11 (b and d) | {BROKEN}=stalled(b d)"),
    ("T7.15 so are others of the same member", sealed("a b", stall=600.0, stall_age=5.0, records={
        "b": {"stalled": StallReport(table="t3", step=9, ranks=(3,), for_s=600.0, furthest=10)}}),
     f"round 3 broken: no progress for 600 s: rank 3 at step 9, others at 10 (b) | {BROKEN}=stalled(b)"),
    ("T7.15 a stall of an earlier round does not count",
     sealed("a b", stall=600.0, records={"b": {"stalled": StallReport(table="t2", step=1, ranks=(0,), for_s=9.0)}}), RUNS),
    ("T7.1 T7.15 a loss goes first: the others may have stalled for it", stalled("a b:lost c", {"a": (10, 0)}),
     f"round 3 broken: b lost | {BROKEN}=lost(b)"),
    ("T7.15 T7.4 and drains come later", stalled("a b c:drains", {"a": (10, 0)}, stall_age=5.0, drain_age=9.0),
     f"round 3 broken: no progress for 600 s: rank 0 at step 10 (a) | {BROKEN}=stalled(a)"),
    ("T7.15 many ranks are counted", stalled("a b", {"a": (9, *range(8)), "b": (9, 8)}, for_s=9.0),
     ("round 3 broken: no progress for 9 s: ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more at step 9 (a and b) "
      f"| {BROKEN}=stalled(a b)")),
    ("T7.4 drains are gathered", sealed("a b c:drains", drain_age=0.25), "round 3: c draining, gathering others @ 0.75"),
    ("T7.4 and break the round", sealed("a b c:drains d:drains", drain_age=1.0),
     f"round 3 broken: c and d draining: SIGTERM | {BROKEN}=drained(c d)"),
    ("T7.4 at once if that takes no time", sealed("a b c:drains", drain_settle=0.0),
     f"round 3 broken: c draining: SIGTERM | {BROKEN}=drained(c)"),
    ("T9.1 T7.4 H22 an operator's request needs no answer", sealed("a b c", asked={"C": "maintenance"}, drain_age=1.0),
     f"round 3 broken: c draining: maintenance | {BROKEN}=drained(c)"),
    ("T7.4 the member's own reason goes first", sealed("a b c:drains", asked={"C": "maintenance"}, drain_age=1.0),
     f"round 3 broken: c draining: SIGTERM | {BROKEN}=drained(c)"),
    ("T7.5 not if too few would remain", sealed("a b:drains c:drains", drain_age=5.0),
     "round 3 runs with 3 nodes; b and c draining, but too few would remain without"),
    ("T7.4 T7.2 newcomers may take their place, after a last call", sealed("a b:drains c:new", drain_age=1.0),
     "round 3 broken: b draining: SIGTERM | phase=broken cause=drained(b)"),
    ("T7.4 one survivor may be a quorum", sealed("a b:drains", min=1, drain_age=1.0),
     f"round 3 broken: b draining: SIGTERM | {BROKEN}=drained(b)"),
    ("T7.5 T7.13 more than a unit may be missing", sealed("a:drains b:drains c:drains d:new", drain_age=5.0),
     "round 3 runs with 3 nodes; d waiting; a, b and c draining, but too few would remain without"),
    ("T7.1 a loss does not wait for drains", sealed("a b c:drains d:lost"), f"round 3 broken: d lost | {BROKEN}=lost(d)"),
    # Flaps: lost less than 60 s after the round in which it came; forgiven if the round lasted longer.
    *[(f"T7.6 H26 flaps {before} become {noted}: {age:g} s, since {since}",
       sealed("a b c:lost", sealed_age=age, flaps=before, entries={"c": {"since": since}}),
       f"round 3 broken: c lost{said} | {BROKEN}=lost(c)" + (f" flaps={noted}" if noted != before else "")
       + (" flapped=('c',)" if age < 60.0 and since == 3 else ""))
      for age, since, before, noted, said in [
          (59.0, 3, {}, {"c": 1}, " (c was lost soon after it came in: it waits 4 s when it comes again)"),
          (59.0, 3, {"c": 2}, {"c": 3}, " (c was lost soon after it came in, 3 times: it waits 16 s when it comes again)"),
          (59.0, 3, {"c": 30}, {"c": 30}, ""),
          (59.0, 3, {"c": 29, "x": 1}, {"c": 30, "x": 1},
           " (c was lost soon after it came in, 30 times: it waits 600 s when it comes again)"),
          (59.0, 2, {}, {}, ""), (60.0, 3, {}, {}, ""), (60.0, 3, {"c": 2}, {"c": 2}, ""), (59.0, 2, {"a": 2}, {"a": 2}, ""),
          (60.0, 2, {"a": 2, "x": 1}, {"x": 1}, "")]],
    ("T7.6 nobody flaps in the first round", sealed("a b c:lost", number=1, entries={"c": {"since": 1}}),
     f"round 1 broken: c lost | {BROKEN}=lost(c)"),
)  # fmt: skip
def test_when_a_running_round_is_broken(view, expected):
    assert said(view) == expected


def test_h21_a_cause_names_a_few_members_only():
    """T7.1: the head goes to every member, so its size must not depend on the number of losses."""
    names = [f"x{index:02d}" for index in range(20)]
    cause = lead(sealed("a b " + " ".join(f"{name}:lost" for name in reversed(names)), max=40)).act.head.cause
    assert cause.members == tuple(names[:CAUSE_MEMBERS_MAX])
    assert cause.text == "x00, x01, x02 and 17 more lost"


def test_names_flap_and_not_hosts():
    """T7.6: two members of one host count for themselves, and two of one name count once."""
    lost = {name: {"since": NUMBER, "host": "h"} for name in "cd"}
    view = sealed("a b c:lost d:lost", sealed_age=9.0, entries=lost)
    assert lead(view).act.head.flaps == {"c": 1, "d": 1}
    same = {id: msgspec.structs.replace(entry, name="c") if id == "D" else entry for id, entry in view.entries.items()}
    assert lead(msgspec.structs.replace(view, entries=same)).act.head.flaps == {"c": 1}


def test_a_member_that_is_lost_after_the_break_flaps_too():
    """T7.6: once, whenever it is noticed; and nobody is forgiven by a seal."""
    entries = {"c": {"since": NUMBER}, "d": {"since": NUMBER}}
    given = {"call": REGROUP, "entries": entries, "flaps": {"c": 1, "a": 2}, "flapped": ("c",)}
    head = seal_of(lead(broken("a:ready b:ready c:lost d:lost", sealed_age=59.0, **given))).head
    assert (head.flaps, head.flapped) == ({"c": 1, "a": 2, "d": 1}, ())
    head = seal_of(lead(broken("a:ready b:ready c:lost d:lost", sealed_age=61.0, **given))).head
    assert (head.flaps, head.flapped) == ({"c": 1, "a": 2}, ())


def test_h21_only_the_worst_flaps_are_kept():
    """T7.6."""
    before = {f"x{index:02d}": 1 + index % 2 for index in range(FLAPS_MAX + 4)}
    noted = lead(sealed("a b c:lost", sealed_age=1.0, flaps=before, entries={"c": {"since": NUMBER}})).act.head.flaps
    assert len(noted) == FLAPS_MAX
    assert [name for name, count in noted.items() if count == 2] == [name for name, count in before.items() if count == 2]
    assert [name for name, count in noted.items() if count == 1] == ["c", "x00", "x02", "x04", "x06", "x08"]


# ---- sealed: growth

QUIET = [
    ("a b c d e:new", {}, "round 3 runs with 4 nodes; e spare"),
    ("a b c d e:new f:new", {"max": 5, "unit": 2}, "round 3 runs with 4 nodes; e and f spare"),
    ("a b c:new", {"unit": 2}, f"{RUNS}; c waiting for a unit of 2"),
    ("a b c:new", {"grow": "never"}, f"{RUNS}; c waiting: this run does not grow"),
    ("a b:done c:new", {}, f"{RUNS}; c waiting: some members are done already"),
    ("a b:gone c:new", {}, f"{RUNS}; c waiting: some members are done already"),
]
COMES = f"{RUNS}; c waiting to come in"
C_JOINS = f"round 3 broken: c came to join | {BROKEN}=growth(c)"


@table(
    ("T7.7 T7.9 a useful newcomer starts the settling", sealed("a b c:new"), f"{COMES} | call=settle"),
    ("T7.9 T7.12 however short", sealed("a b c:new", settle=0.25), f"{COMES} | call=settle"),
    ("T7.11 newcomers gather", sealed("a b c:new", call=SETTLE, age=0.5), f"{COMES} @ 1.5"),
    ("T7.11 H26 counted from the first newcomer", sealed("a b c:new d:new", call=SETTLE, age=1.5),
     f"{RUNS}; c and d waiting to come in @ 0.5"),
    ("T7.11 and break the round together", sealed("a b c:new d:new", call=SETTLE, age=2.0),
     f"round 3 broken: c and d came to join | {BROKEN}=growth(c d)"),
    ("T7.10 settling stops when they are gone", sealed("a b", call=SETTLE, age=1.5), f"{RUNS} | call=none"),
    ("T7.12 without settling at once", sealed("a b c:new", grow="now"), C_JOINS),
    ("T7.12 with no time to settle too", sealed("a b c:new", settle=0.0), C_JOINS),
    ("T7.12 then one that flapped too", sealed("a b c:new", grow="now", flaps={"c": 3}), C_JOINS),
    *[(f"T7.7 as many are useful as the round would grow by: {people} {given}", sealed(people, call=SETTLE, age=2.0, **given),
       f"round 3 broken: {text} came to join | {BROKEN}=growth({about})") for people, given, text, about in [
           ("a b c:new d:new", {"max": 3}, "c", "c"), ("a b d:new c:new", {"max": 3}, "d", "d"),
           ("a b c:new d:new e:new", {"max": 8, "unit": 2}, "c and d", "c d"),
           ("a b c:new d:new e:new", {"max": 8}, "c, d and e", "c d e")]],
    ("T7.7 W6 a draining newcomer is of no use", sealed("a b c:new_drains"), RUNS),
    *[(f"T7.8 T7.13 {people} {given}: only an event helps", sealed(people, **given), reason)
      for people, given, reason in QUIET],
    *[(f"T7.10 {people} {given}: settling stops", sealed(people, call=SETTLE, age=9.0, **given), f"{reason} | call=none")
      for people, given, reason in QUIET],
    ("T7.8 T7.13 the run grew a moment ago", sealed("a b c:new", grown=2, grown_age=59.5),
     f"{RUNS}; c waiting: the run grew a moment ago @ 0.5"),
    *[(f"T7.8 {why}", sealed("a b c:new", **given), f"{COMES} | call=settle") for why, given in [
        ("it grew long enough ago", {"grown": 2, "grown_age": 60.0}), ("it never grew", {"grown": 0}),
        ("it had that size before", {"grown": 2, "top": 3}), ("no limit", {"grown": 2, "grow_every": 0.0})]],
    ("T7.8 a replacement is let in, and a newcomer along with it", sealed("a b c:new d:new", grown=2, grown_age=45.0, top=3),
     f"{RUNS}; c and d waiting to come in | call=settle"),
    *[(f"T7.12 H26 {flaps} flaps: a name waits twice as long each time",
       sealed("a b c:new", call=SETTLE, age=wait - 0.5, flaps={"c": flaps, "x": 5}), f"{COMES}{said} @ 0.5")
      for flaps, wait, said in [(0, 2.0, ""), (1, 4.0, f"{SOON}, 0 s left"), (2, 8.0, f"{SOON}, 2 times, 0 s left"),
                                (8, 512.0, f"{SOON}, 8 times, 0 s left"), (30, 600.0, f"{SOON}, 30 times, 0 s left")]],
    ("T7.12 T7.13 the wait is told", sealed("a b c:new", flaps={"c": 3}), f"{COMES}{SOON}, 3 times, 16 s left | call=settle"),
    ("T7.13 an observer that came later says at most", sealed("a b c:new", call=SETTLE, age=4.0, late=True, flaps={"c": 3}),
     f"{COMES}{SOON}, 3 times, at most 12 s left @ 12"),
    ("T7.12 but no longer", sealed("a b c:new", call=SETTLE, age=600.0, flaps={"c": 30}), C_JOINS),
    ("T7.12 a settle longer than that stays", sealed("a b c:new", call=SETTLE, settle=700.0, age=650.0, flaps={"c": 3}),
     f"{COMES}{SOON}, 3 times, 50 s left @ 50"),
    ("T7.11 the shortest wait counts", sealed("a b c:new d:new", call=SETTLE, age=2.0, flaps={"c": 5}),
     f"round 3 broken: c and d came to join | {BROKEN}=growth(c d)"),
    ("T7.4 growth waits while drains gather", sealed("a b c:drains d:new", call=SETTLE, age=9.0, drain_age=0.5),
     "round 3: c draining, gathering others @ 0.5"),
)  # fmt: skip
def test_when_newcomers_are_let_in(view, expected):
    assert said(view) == expected


# ---- closing

DONE = "all 2 members of round 3 are done | phase=closed cause=success()"


def closes(cites, people, text, about, **given):
    """Rows in which the run is closed, whether its round is sealed or broken."""
    expected = f"{text} | phase=closed cause={about}"
    return [(f"{cites} {make.args[0].value} {people}", make(people, **given), expected) for make in (sealed, broken)]


def goes_on(cites, people, *, breaks_for, reforms, **given):
    """Rows in which the run is not closed: a sealed round is broken for that reason, and a broken one is re-formed."""
    rows = (sealed, breaks_for), (broken, reforms)
    return [(f"{cites} {make.args[0].value} {people}", make(people, **given), expected) for make, expected in rows]


ONE_LEFT = "1 of at least 2 nodes remain"
MORE = "1 of 2..4 nodes: waiting for 1 more"


@table(
    *[(f"T11.1 all are done: {make.args[0].value} {people}", make(people), DONE) for make in (sealed, broken)
      for people in ("a:done b:done", "a:gone b:done", "a:gone b:gone c:new", "a:done b:done c:new")],
    ("T11.1 not while one is not", sealed("a:done b:done c", max=3), "round 3 runs with 3 nodes"),
    ("T11.1 nor in a broken round", broken("a:done b:done c", max=3),
     "0 of 2..3 nodes: waiting for 2 more (c stopping their workers)"),
    ("T11.1 W2 T7.1 H25 a done member that leaves is not lost", sealed("a:gone b"), RUNS),
    ("T11.1 a newcomer that is done does not count", sealed("a b:done c:new", records={"c": {"done": True}}), RUNS),
    ("T11.1 two entries of one rank are one member", sealed("a:done b c:done", entries={"c": {"rank": 0}}, size=2),
     "round 3 runs with 2 nodes"),
    ("T11.1 nobody of none is not everybody", opened("a"), MORE),
    ("T11.1 success goes before a failure", sealed("a:done b:gone", entries={"b": {"gave_up": "exit code 1"}}), DONE),
    ("T11.11 the close stops the call", sealed("a:done b:done", call=SETTLE, grown=2, flaps={"x": 1}),
     "all 2 members of round 3 are done | phase=closed call=none cause=success()"),
    *closes("T11.2 a member gave up", "a b:gave_up", f"b gave up: exit code 1; {ONE_LEFT}", "gave_up(b)"),
    *closes("T11.2 a member that vanished may be why", "a b:gave_up c:lost", f"c lost; b gave up: exit code 1; {ONE_LEFT}",
            "gave_up(b)"),
    *closes("T11.2 the lowest rank is named", "a b:gave_up c:gave_up", f"c gave up: first; {ONE_LEFT}", "gave_up(c)",
            entries={"b": {"rank": 2, "gave_up": "second"}, "c": {"rank": 1, "gave_up": "first"}}),
    *[row for state in ("c:drains", "c:done", "c:new_drains")
      for row in closes("T11.2 W4 no quorum with members about to go", f"a:gave_up b {state}",
                        f"a gave up: exit code 1; {ONE_LEFT}", "gave_up(a)")],
    *closes("T11.2 W10 a quorum is counted in units", "a b c d:gave_up", "d gave up: exit code 1; 3 of at least 3 nodes remain",
            "gave_up(d)", min=3, unit=2),
    *closes("T11.3 a loss after others were done cannot be made good", "a:done b:lost c:gone d:lost e",
            f"b and d lost after others were done; {ONE_LEFT}", "lost(b d)"),
    *[(f"T11.2 a quorum can be met: {people}", sealed(people),
       f"round 3 broken: a gave up: exit code 1 | phase=broken {call}cause=gave_up(a)")
      for people, call in [("a:gave_up b c", "call=regroup "), ("a:gave_up b c:new", ""), ("a:gave_up b:new c:new", ""),
                           ("a:gave_up b:ready c:ready", "call=regroup ")]],
    ("T11.2 also with a member that came again", sealed("a:gave_up b:again c"),
     "round 3 broken: a gave up: exit code 1 | phase=broken cause=gave_up(a)"),
    *goes_on("T11.3 if only done members are left, the lost one may come back", "a:done b:lost",
             breaks_for="round 3 broken: b lost | phase=broken cause=lost(b)", reforms="0 of 2..4 nodes: waiting for 2 more"),
    ("T11.3 a quorum makes the loss good", sealed("a:done b:lost c:new d:new"),
     "round 3 broken: b lost | phase=broken cause=lost(b)"),
    ("T11.3 of survivors too", sealed("a:done b c d:lost"), f"round 3 broken: d lost | {BROKEN}=lost(d)"),
    *goes_on("T11.2 a mere loss never closes", "a b:lost", breaks_for="round 3 broken: b lost | phase=broken cause=lost(b)",
             reforms="0 of 2..4 nodes: waiting for 2 more (a stopping their workers)"),
    *goes_on("T11.2 not even of all", "a:lost b:lost", breaks_for="round 3 broken: a and b lost | phase=broken cause=lost(a b)",
             reforms="0 of 2..4 nodes: waiting for 2 more"),
    *goes_on("T11.4 on_failure=wait", "a b:gave_up", on_failure="wait",
             breaks_for="round 3 broken: b gave up: exit code 1 | phase=broken cause=gave_up(b)",
             reforms="0 of 2..4 nodes: waiting for 2 more (a stopping their workers)"),
    *[(f"T11.5 H25 nothing happens after the close: {people} {given}",
       closed(people, cause=Cause(kind=CauseKind.CLOSED, text="enough (by ops)"), **given), "closed: enough (by ops)")
      for people in ("a b", "a b:lost", "a:done b:done", "a:ready b:ready c:new d:new", "a b:gave_up", "")
      for given in ({}, {"call": LAST, "age": 1000.0}, {"banned": {"node-a": BAD}}, {"orphans": ["t1"]},
                    {"asked": {"A": "maintenance"}, "drain_age": 9.0})],
    ("T11.5 a close without a reason says so", closed("a"), "closed: no reason was given"),
)  # fmt: skip
def test_when_a_run_is_closed(view, expected):
    assert said(view) == expected


# ---- sweeping, and the table of rules


@pytest.mark.parametrize(
    ("view", "sweeps"),
    [
        (opened("a", orphans=["t1", "t2"]), True),
        (opened("a b", orphans=["t1", "t2"], call=LAST), True),
        (sealed("a b c:new", orphans=["t1", "t2"]), True),
        (broken("a b:ready c:ready", orphans=["t1", "t2"], call=REGROUP), True),
        (opened("a b", orphans=["t1"]), False),
        (opened("a b c d", orphans=["t1"]), False),
        (sealed("a b c:lost", orphans=["t1"]), False),
        (sealed("a b c:drains", orphans=["t1"], drain_age=1.0), False),
        (broken("a:ready b:ready", orphans=["t1"], call=REGROUP), False),
    ],
)
def test_tables_that_no_head_names_are_swept(view, sweeps):
    """T12.1: after whatever changes the round. They are left over from refused seals."""
    assert (said(view) == "removing rank tables that no head names | sweep t1 t2") is sweeps
    assert isinstance(lead(view).act, Sweep) is sweeps


def test_h22_no_act_writes_a_record_of_a_member():
    """One writer per key: the leader can delete a member's key, and that is all it can do to it."""
    acts = {kind.__name__: kind.__struct_fields__ for kind in (WriteHead, Seal, Evict, Sweep)}
    assert acts == {
        "WriteHead": ("head",),
        "Seal": ("head", "entries", "first", "former_table"),
        "Evict": ("ids", "away_s"),
        "Sweep": ("tables",),
    }
    assert live("a").record == sealed("a").members["A"].record


def test_a_verdict_names_the_rule_that_decided():
    assert lead(sealed("a b:lost")).rule == "break_round"
    assert lead(sealed("a b")).rule == "grow"


def test_a_phase_without_a_rule_that_speaks_would_be_a_defect(monkeypatch):
    assert set(RULES) == {None, *Phase}
    monkeypatch.setitem(RULES, Phase.OPEN, ())
    with pytest.raises(AssertionError, match="no rule speaks for"):
        lead(opened("a"))
