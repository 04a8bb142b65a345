"""How the first round is formed: T2, T5 and T6 while the run is open."""

from __future__ import annotations

import msgspec
import pytest

from rdzv.core.acts import Evict, Seal, Verdict, WriteHead
from rdzv.core.model import BACK_S, Call, Era, Head, Phase, RankEntry
from rdzv.core.ranks import digest
from rdzv.core.rules import RULES, lead
from support.views import REVISION, after, no_head, opened, ranks_of, seal_of, told

# ---- T2: the first head

NEW_HEAD = Head(run="fresh", era=Era(1, "fresh"), next_era=Era(1, "fresh"))


def test_the_leader_makes_the_head():
    """T2.1."""
    assert lead(no_head("a")) == Verdict(WriteHead(NEW_HEAD), "1 of 2..4 nodes: the run begins")
    assert (NEW_HEAD.phase, NEW_HEAD.number, NEW_HEAD.call, NEW_HEAD.table) == (Phase.OPEN, 0, Call.NONE, "")


def test_the_first_head_bears_the_incarnation_of_its_leader():
    """T2.1."""
    verdict = lead(no_head("a", incarnation=3))
    assert verdict.act == WriteHead(msgspec.structs.replace(NEW_HEAD, incarnation=3))


def test_on_a_young_engine_the_leader_waits_for_members_of_an_earlier_round():
    """T2.2."""
    assert lead(no_head("a b", young=True)) == Verdict(
        None, "2 of 2..4 nodes: waiting for members of an earlier round to come back to this engine", BACK_S - 1.0
    )


def test_on_a_young_engine_who_is_alone_is_told_that_others_are_missing():
    """T2.2: what comes next is decided by them."""
    assert lead(no_head("a", young=True)) == Verdict(None, "1 of 2..4 nodes: waiting for 1 more", BACK_S - 1.0)


def test_on_a_young_engine_a_full_run_need_not_wait():
    """T2.2: a run of which nobody has heard is, most likely, a new one."""
    verdict = lead(no_head("a b c d", young=True))
    assert isinstance(verdict.act, Seal)
    assert verdict.reason == "4 of 2..4 nodes: full"


def test_a_run_that_is_full_before_it_has_a_head_is_sealed_by_the_write_that_makes_it():
    """T2.4: the very round that would be sealed next. The fifth is a spare."""
    view = no_head("a b c d e")
    verdict = lead(view)
    assert isinstance(verdict.act, Seal)
    assert verdict == lead(msgspec.structs.replace(view, head=NEW_HEAD))
    assert (verdict.act.head.run, verdict.act.head.number, verdict.act.head.size) == ("fresh", 1, 4)


def test_who_is_banned_does_not_make_a_run_full():
    """T2.4."""
    verdict = lead(no_head("a b c d", banned={"node-d": "bad memory"}))
    assert verdict == Verdict(WriteHead(NEW_HEAD), "3 of 2..4 nodes: the run begins")


def test_an_engine_that_is_not_young_any_more_has_nobody_to_wait_for():
    """T2.2."""
    verdict = lead(no_head("a", durable=False, known_s=BACK_S))
    assert verdict == Verdict(WriteHead(NEW_HEAD), "1 of 2..4 nodes: the run begins")


def test_h9_a_newcomer_does_not_begin_a_run_that_somebody_tells_of():
    """T2.1: C comes first to the emptied engine; A, who holds round 3, is there too. C must not begin at 1."""
    verdict = lead(no_head("c a", min=1, records={"a": {"holds": told(rank=0)}}))
    assert isinstance(verdict.act, WriteHead)
    assert (verdict.act.head.number, verdict.act.head.phase) == (3, Phase.BROKEN)


# ---- T5: the call


def test_below_quorum_only_an_event_helps():
    """T5.5."""
    assert lead(opened("a", min=3)) == Verdict(None, "1 of 3..4 nodes: waiting for 2 more")


@pytest.mark.parametrize(
    ("people", "low", "unit", "missing"),
    [("", 2, 1, 2), ("a", 2, 1, 1), ("a b c", 3, 2, 1), ("a", 3, 2, 3), ("a b c", 4, 1, 1), ("a b c", 4, 4, 1)],
)
def test_what_is_missing_is_counted_in_whole_units(people, low, unit, missing):
    """T5.5: three are not a quorum of 3 if the size must be even."""
    wanted = "4" if low == 4 else f"{low}..4"
    reason = f"{len(people.split())} of {wanted} nodes: waiting for {missing} more"
    assert lead(opened(people, min=low, unit=unit)) == Verdict(None, reason)


def test_quorum_starts_the_last_call():
    """T5.1."""
    view = opened("a b")
    assert lead(view) == Verdict(WriteHead(after(view, call=Call.LAST)), "2 of 2..4 nodes: last call")
    assert after(view, call=Call.LAST).call_seq == 8


def test_a_last_call_is_waited_out():
    """T5.5."""
    assert lead(opened("a b", call=Call.LAST, age=12.0)) == Verdict(None, "2 of 2..4 nodes: last call, 18 s left", 18.0)


def test_the_last_call_stops_when_quorum_is_lost():
    """T5.2."""
    view = opened("a", call=Call.LAST, age=12.0)
    assert lead(view) == Verdict(WriteHead(after(view, call=Call.NONE)), "1 of 2..4 nodes: quorum lost")


def test_the_last_call_stops_even_when_it_is_over():
    """T5.2: losing quorum comes first."""
    assert lead(opened("a", call=Call.LAST, age=30.0)).reason == "1 of 2..4 nodes: quorum lost"


def test_h19_more_members_do_not_start_the_last_call_anew():
    """T5.4: there is nothing to write while it runs, so its age goes on."""
    for people in ("a b", "a b c"):
        verdict = lead(opened(people, call=Call.LAST, age=29.0))
        assert (verdict.act, verdict.look_again_s) == (None, 1.0)


def test_h19_a_new_leader_goes_on_from_the_age_it_measured_itself():
    """T5.4: who leads makes no difference; the age does, and no instant is in the head."""
    verdicts = [lead(opened("a b", call=Call.LAST, age=29.0, me=me)) for me in ("A", "B")]
    assert verdicts[0] == verdicts[1]
    assert not [name for name in Head.__struct_fields__ if name.endswith(("_at", "_s"))]


# ---- T6: the seal


def test_the_first_round_is_sealed_when_the_last_call_is_over():
    """T6.6."""
    verdict = lead(opened("a b", call=Call.LAST, age=30.0))
    assert isinstance(verdict.act, Seal)
    assert (verdict.reason, verdict.look_again_s) == ("2 of 2..4 nodes: last call over", None)


@pytest.mark.parametrize("call", [Call.NONE, Call.LAST])
def test_the_first_round_is_sealed_at_once_when_full(call):
    """T6.3: without waiting for a call."""
    verdict = lead(opened("a b c d", call=call, age=0.0))
    assert isinstance(verdict.act, Seal)
    assert verdict.reason == "4 of 2..4 nodes: full"


def test_a_last_call_of_no_time_is_over_at_once():
    """T6.6: but it is written first, so that everybody knows what happens."""
    assert lead(opened("a b", last_call=0.0)).reason == "2 of 2..4 nodes: last call"
    assert lead(opened("a b", last_call=0.0, call=Call.LAST)).reason == "2 of 2..4 nodes: last call over"


def test_a_quorum_alone_is_not_sealed():
    """T6.1."""
    assert not isinstance(lead(opened("a b", age=1000.0)).act, Seal)


def test_the_sealed_head_is_complete():
    """T6.8, T6.9, T6.10: every field of it."""
    view = opened("a b", call=Call.LAST, age=30.0, incarnation=2)
    seal = seal_of(lead(view))
    assert seal.head == after(
        view,
        number=1,
        phase=Phase.SEALED,
        table="fresh",
        size=2,
        digest=digest(seal.entries.values()),
        boot="node-a:29500",
        seen=REVISION,
        call=Call.NONE,
        top=2,
    )
    assert (seal.first, seal.former_table) == ("A", "")
    assert seal.head.incarnation == 2


def test_the_lines_of_the_first_table_are_complete():
    """T6.11."""
    seal = seal_of(
        lead(opened("a b", call=Call.LAST, age=30.0, records={"a": {"topology": "s1"}, "b": {"order": "9"}}))
    )
    assert seal.entries == {
        "A": RankEntry(rank=1, created=11, name="a", host="node-a", order="s1", sealed_as="A", since=1),
        "B": RankEntry(rank=0, created=12, name="b", host="node-b", order="9", sealed_as="B", since=1),
    }


def test_h23_the_address_of_rank_0_is_part_of_the_seal():
    """T6.10: it was bound before the seal, so that nobody has to be asked for it afterwards."""
    seal = seal_of(lead(opened("b a", call=Call.LAST, age=30.0)))
    assert (seal.first, seal.head.boot) == ("A", "node-a:29500")


def test_h1_the_seal_names_the_create_revision_of_everybody_it_seals_in():
    """T6.11: this is what the transaction compares, so that nobody who has died meanwhile is sealed in."""
    view = opened("a b c", call=Call.LAST, age=30.0)
    lines = seal_of(lead(view)).entries
    assert {id: line.created for id, line in lines.items()} == {id: one.created for id, one in view.members.items()}


@pytest.mark.parametrize(
    ("people", "unit", "chosen"),
    [
        ("a b c d e f", 1, "a b c d"),
        ("f e d c b a", 1, "c d e f"),
        ("a b c", 2, "a b"),
        ("c b a", 2, "b c"),
        ("e d c b a", 3, "c d e"),
    ],
)
def test_whoever_came_first_is_chosen(people, unit, chosen):
    """T6.7, G2: and then ranked by host, not by arrival."""
    verdict = lead(opened(people, unit=unit, call=Call.LAST, age=30.0))
    assert ranks_of(verdict) == {name: rank for rank, name in enumerate(chosen.split())}


def test_whoever_drains_is_not_chosen():
    """T6.7."""
    assert ranks_of(lead(opened("a:new_drains b c", call=Call.LAST, age=30.0))) == {"b": 0, "c": 1}


def test_the_first_round_is_no_growth():
    """T6.10."""
    sealed = seal_of(lead(opened("a b c d"))).head
    assert (sealed.top, sealed.grown) == (4, 0)


def test_banned_members_are_evicted_from_an_open_run():
    """T8.2."""
    view = opened("a b c d", banned={"node-b": "bad memory"})
    assert lead(view) == Verdict(Evict(("B",)), "b banned: bad memory")


# ---- the table of rules


def test_every_phase_has_its_rules():
    assert set(RULES) == {None, *Phase}


def test_a_phase_without_a_rule_that_speaks_would_be_a_defect(monkeypatch):
    """Somebody always has something to say; were that not so, the leader would stop without a word."""
    monkeypatch.setitem(RULES, Phase.OPEN, ())
    with pytest.raises(AssertionError, match="no rule speaks for"):
        lead(opened("a"))
