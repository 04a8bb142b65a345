"""How a broken round is formed again: T5, T6 and T8 with survivors, stragglers and newcomers."""

from __future__ import annotations

import pytest

from rdzv.core.acts import Evict, Seal, Verdict, WriteHead
from rdzv.core.model import Call, Cause, CauseKind, Era, Phase
from rdzv.core.ranks import digest
from rdzv.core.rules import lead
from support.views import NUMBER, REVISION, ROUND, after, broken, ranks_of, seal_of

CAUSE = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))


# ---- T5


def test_below_quorum_the_reason_names_those_who_may_still_come():
    """T5.5."""
    view = broken("a b:ready c", min=3, call=Call.REGROUP, age=5.0, max=4)
    assert lead(view) == Verdict(None, "1 of 3..4 nodes: waiting for 2 more (a and c stopping their workers)")


def test_below_quorum_without_stragglers_only_newcomers_help():
    """T5.5."""
    assert lead(broken("a:ready b:lost")) == Verdict(None, "1 of 2..4 nodes: waiting for 1 more")


def test_h18_newcomers_that_make_a_quorum_start_a_last_call_and_no_more():
    """T5.1: two of four were left, two came: others may follow in a moment, so nothing is sealed at once."""
    view = broken("a:ready b:ready c:lost d:lost e:new f:new", min=4, max=8)
    assert lead(view) == Verdict(WriteHead(after(view, call=Call.LAST)), "4 of 4..8 nodes: last call")


def test_h18_a_last_call_after_the_loss_of_quorum_is_waited_out():
    """T5.5, T6.6: the fast path is for survivors that are a quorum alone."""
    people = "a:ready b:ready c:lost d:lost e:new f:new"
    waits = Verdict(None, "4 of 4..8 nodes: last call, 20 s left", 20.0)
    assert lead(broken(people, min=4, max=8, call=Call.LAST, age=10.0)) == waits
    assert lead(broken(people, min=4, max=8, call=Call.LAST, age=30.0)).reason == "4 of 4..8 nodes: last call over"


def test_regrouping_stops_when_the_survivors_are_no_quorum_any_more():
    """T5.3: even if with newcomers they are."""
    view = broken("a:ready b:lost c:new", call=Call.REGROUP, age=1.0)
    reason = "2 of 2..4 nodes: too few of round 3 are left to go on without others"
    assert lead(view) == Verdict(WriteHead(after(view, call=Call.NONE)), reason)


def test_regrouping_goes_on_while_survivors_are_a_quorum_though_not_ready():
    """T5.3: stragglers are survivors."""
    assert lead(broken("a b:ready c:lost", call=Call.REGROUP)).act is None


def test_a_last_call_does_not_ask_for_survivors():
    """T5.2: only for ready ones."""
    assert lead(broken("a:lost b:new c:new", call=Call.LAST)).act is None


# ---- T6: when


def test_regrouping_is_sealed_at_once_when_all_who_live_are_ready():
    """T6.5."""
    verdict = lead(broken("a:ready b:ready c:lost", call=Call.REGROUP))
    assert isinstance(verdict.act, Seal)
    assert verdict.reason == "2 of 2..4 nodes: all who live are ready"


def test_a_replacement_is_waited_for_if_asked():
    """T6.5, T5.5."""
    waits = Verdict(None, "2 of 2..4 nodes: waiting 7 s for a replacement", 7.0)
    assert lead(broken("a:ready b:ready c:lost", call=Call.REGROUP, replace_wait=10.0, age=3.0)) == waits
    verdict = lead(broken("a:ready b:ready c:lost", call=Call.REGROUP, replace_wait=10.0, age=10.0))
    assert verdict.reason == "2 of 2..4 nodes: all who live are ready"


def test_nobody_waits_for_a_replacement_that_has_come():
    """T6.4: as many as there were."""
    verdict = lead(broken("a:ready b:ready c:lost d:new", call=Call.REGROUP, replace_wait=10.0))
    assert isinstance(verdict.act, Seal)
    assert verdict.reason == "3 of 2..4 nodes: all are back"


def test_as_many_as_there_were_do_not_end_a_last_call():
    """T6.4: that is for regrouping only."""
    assert lead(broken("a:ready b:lost c:new", call=Call.LAST, age=1.0)).look_again_s == 29.0


def test_a_last_call_is_not_ended_by_the_time_of_a_replacement():
    """T6.5: nor the other way round."""
    assert lead(broken("a:ready b:ready c:lost", call=Call.LAST, age=20.0, replace_wait=10.0)).look_again_s == 10.0
    view = broken("a:ready b:ready c:lost", call=Call.REGROUP, age=35.0, replace_wait=40.0)
    assert lead(view).look_again_s == 5.0


@pytest.mark.parametrize("call", [Call.NONE, Call.REGROUP, Call.LAST])
def test_a_full_round_is_sealed_at_once_if_nobody_straggles(call):
    """T6.3."""
    # Two survivors, because a call to regroup stops without a quorum of them.
    verdict = lead(broken("a:ready b:ready c:lost d:new e:new", call=call, replace_wait=10.0))
    assert verdict.reason == "4 of 2..4 nodes: full"


@pytest.mark.parametrize("call", [Call.NONE, Call.REGROUP, Call.LAST])
def test_h17_as_many_as_fit_are_not_enough_while_a_survivor_is_still_stopping(call):
    """T6.1: quick survivors and spares fill the round; the slow ones must not be thrown out for that."""
    view = broken("a b:ready c:ready d:lost e:new f:new", call=call, age=1.0)
    assert not isinstance(lead(view).act, Seal)


@pytest.mark.parametrize("call", [Call.REGROUP, Call.LAST])
def test_h2_nothing_is_sealed_over_workers_that_still_run(call):
    """T6.1, T5.5: however long ago the call was, until regroup."""
    view = broken("a b:ready c:ready", call=call, age=60.0)
    assert lead(view) == Verdict(None, "2 of 2..4 nodes: waiting for a to stop their workers, at most 15 s more", 15.0)


@pytest.mark.parametrize("state", ["drains", "done"])
def test_whoever_will_not_be_in_the_next_round_is_not_waited_for(state):
    """T6.1, W8."""
    assert ranks_of(lead(broken(f"a:{state} b:ready c:ready", call=Call.REGROUP))) == {"c": 0, "b": 1}


# ---- T6: what


def test_h17_survivors_are_chosen_before_those_who_came_earlier():
    """T6.7: spares e and f came first, and still the former members go first."""
    verdict = lead(broken("e:new f:new a:ready b:ready c:ready d:lost", call=Call.REGROUP))
    assert ranks_of(verdict) == {"a": 0, "b": 1, "c": 2, "e": 3}


def test_of_too_many_survivors_the_highest_ranks_are_left_out():
    """T6.7: as with a unit that is not full any more."""
    verdict = lead(broken("a:ready b:ready c:ready d:lost", unit=2, call=Call.REGROUP))
    assert ranks_of(verdict) == {"a": 0, "b": 1}


def test_h26_the_size_is_a_multiple_of_the_unit_also_when_it_shrinks():
    """W10, T6.7."""
    verdict = lead(broken("a:ready b:ready c:ready d:ready e:ready f:lost", max=8, unit=2, call=Call.REGROUP))
    assert seal_of(verdict).head.size == 4


def test_a_spare_is_promoted_in_the_place_of_a_lost_member():
    """T6.7, R3."""
    verdict = lead(broken("a:ready b:lost c:ready d:new", max=3, call=Call.REGROUP))
    assert ranks_of(verdict) == {"a": 0, "d": 1, "c": 2}


def test_a_replacement_has_the_rank_of_the_lost_member_it_resembles():
    """T6.7, R2: d bears the name of b, and so has its rank; c, who came before it, has the other."""
    view = broken("a:ready b:lost x:lost c:new d:new", min=1, call=Call.REGROUP, records={"d": {"name": "b"}})
    assert ranks_of(lead(view)) == {"a": 0, "b": 1, "c": 2}


def test_when_rank_0_is_lost_the_address_is_that_of_the_new_one():
    """T6.10."""
    seal = seal_of(lead(broken("a:lost b:ready c:ready d:new", call=Call.REGROUP)))
    assert (seal.first, seal.head.boot) == ("D", "node-d:29500")


def test_the_next_head_is_complete():
    """T6.8, T6.9, T6.10: every field of it."""
    view = broken("a:ready b:ready c:lost", call=Call.REGROUP, cause=CAUSE, flaps={"node-x": 1}, grown=2, adopted=True)
    seal = seal_of(lead(view))
    assert seal.head == after(
        view,
        number=4,
        phase=Phase.SEALED,
        table="fresh",
        size=2,
        digest=digest(seal.entries.values()),
        boot="node-a:29500",
        seen=REVISION,
        call=Call.NONE,
        cause=None,
        adopted=False,
    )
    assert (seal.head.top, seal.head.grown, seal.head.flaps) == (3, 2, {"node-x": 1})
    assert (seal.first, seal.former_table) == ("A", "t3")


def test_h16_the_seal_names_the_table_whose_store_ends_with_it():
    """T6.10: tables have random names, so a late writer of the old one can never reach into the new."""
    seal = seal_of(lead(broken("a:ready b:ready", call=Call.REGROUP)))
    assert (seal.former_table, seal.head.table) == ("t3", "fresh")


def test_after_an_empty_restart_the_next_round_is_in_the_next_era():
    """T6.9."""
    seal = seal_of(lead(broken("a:ready b:ready", call=Call.REGROUP, next_era=Era(2, "e1"))))
    assert (seal.head.era, seal.head.next_era, seal.head.number) == (Era(2, "e1"), Era(2, "e1"), 4)


def test_members_keep_the_round_in_which_they_came():
    """T6.11."""
    view = broken("a:ready b:ready c:new", call=Call.REGROUP, lines={"a": {"since": 1}, "b": {"since": 2}})
    assert {line.name: line.since for line in seal_of(lead(view)).entries.values()} == {"a": 1, "b": 2, "c": 4}


def test_a_new_line_bears_no_mark_of_the_former_one():
    """T6.11: nor a former id."""
    view = broken("a:ready b:ready", call=Call.REGROUP, lines={"a": {"sealed_as": "before"}})
    line = seal_of(lead(view)).entries["A"]
    assert (line.sealed_as, line.done, line.gave_up, line.went) == ("A", False, "", "")


def test_h5_a_member_that_came_again_is_sealed_in_as_new():
    """T6.11: with the create revision and the round of its present life."""
    view = broken("a:ready b:ready c:again", call=Call.REGROUP)
    line = seal_of(lead(view)).entries["C"]
    assert (line.rank, line.created, line.since) == (2, view.members["C"].created, NUMBER + 1)


@pytest.mark.parametrize(
    ("top", "grown", "after_top", "after_grown"),
    [(3, 0, 3, 0), (3, 2, 3, 2), (2, 0, 3, NUMBER + 1), (2, 2, 3, NUMBER + 1), (4, 1, 4, 1)],
)
def test_a_size_that_the_run_never_had_is_a_growth(top, grown, after_top, after_grown):
    """T6.10: one it had before is a replacement."""
    sealed = seal_of(lead(broken("a:ready b:ready c:new", call=Call.REGROUP, top=top, grown=grown))).head
    assert (sealed.top, sealed.grown) == (after_top, after_grown)


# ---- T8

LATE = [(Call.REGROUP, 75.0), (Call.LAST, 75.0), (Call.REGROUP, 500.0)]


@pytest.mark.parametrize(("call", "age"), LATE)
def test_h7_stragglers_are_evicted_when_the_others_have_waited_long_enough(call, age):
    """T8.1."""
    view = broken("a:ready b:ready c d", call=call, age=age)
    assert lead(view) == Verdict(Evict(("C", "D")), "c and d did not stop within 75 s: evicted")


@pytest.mark.parametrize(("call", "age"), [(Call.REGROUP, 74.5), (Call.LAST, 74.5)])
def test_h7_stragglers_are_not_evicted_before(call, age):
    """T8.1."""
    verdict = lead(broken("a:ready b:ready c", call=call, age=age))
    assert (verdict.act, verdict.look_again_s) == (None, 0.5)


@pytest.mark.parametrize(("call", "age"), LATE)
def test_stragglers_are_not_evicted_if_the_others_are_no_quorum(call, age):
    """T8.1: it would help nobody. What happens instead depends on the call."""
    verdict = lead(broken("a:ready b c", call=call, age=age))
    assert not isinstance(verdict.act, Evict)


def test_without_a_call_nobody_is_evicted():
    """T8.1: the others must be given notice first."""
    view = broken("a:ready b:ready c", call=Call.NONE, age=500.0)
    assert lead(view) == Verdict(WriteHead(after(view, call=Call.LAST)), "2 of 2..4 nodes: last call")


def test_a_leader_that_straggles_is_evicted_last():
    """T8.3: nothing it writes after its own key is gone takes effect."""
    view = broken("a b c:ready d:ready e", call=Call.REGROUP, age=75.0, max=8)
    assert view.me == "A"
    assert lead(view).act == Evict(("B", "E", "A"))


def test_evictions_go_by_the_order_of_coming():
    """T8.3."""
    view = broken("a:ready b:ready z y x", call=Call.REGROUP, age=75.0, max=8)
    assert lead(view).act == Evict(("Z", "Y", "X"))


def test_when_the_stragglers_are_gone_the_round_is_sealed():
    """T8.1, T6.5: and not with them."""
    view = broken("a:ready b:ready c:lost d:lost", call=Call.REGROUP, age=75.1)
    assert ranks_of(lead(view)) == {"a": 0, "b": 1}


def test_banned_members_are_evicted_before_anything_is_sealed():
    """T8.2."""
    view = broken("a:ready b:ready c:ready", call=Call.REGROUP, banned={"node-b": "bad memory"})
    assert lead(view) == Verdict(Evict(("B",)), "b banned: bad memory")


def test_h3_a_member_that_gave_the_round_up_untaken_is_waited_for_no_longer():
    """T4.1, W5: a and b never took round 3; once they say so, it can be formed again."""
    assert lead(broken("a b c:lost", call=Call.REGROUP, age=0.0)).act is None
    view = broken("a b c:lost", call=Call.REGROUP, records={"a": {"left": ROUND}, "b": {"left": ROUND}})
    assert isinstance(lead(view).act, Seal)
