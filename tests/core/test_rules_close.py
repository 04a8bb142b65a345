"""How a run ends, and what is tidied up: T11, T8's bans, T12."""

from __future__ import annotations

import pytest

from rdzv.core.acts import Evict, Seal, Sweep, Verdict, WriteHead
from rdzv.core.model import Call, Cause, CauseKind, Phase
from rdzv.core.rules import lead
from support.views import after, broken, closed, live, opened, sealed


def closes(view, kind, text, *about):
    """The verdict that closes the run."""
    cause = Cause(kind=kind, text=text, members=about)
    return Verdict(WriteHead(after(view, phase=Phase.CLOSED, call=Call.NONE, cause=cause)), text)


# ---- success


@pytest.mark.parametrize("make", [sealed, broken])
@pytest.mark.parametrize("people", ["a:done b:done", "a:gone b:done", "a:gone b:gone c:new", "a:done b:done c:new"])
def test_when_all_are_done_the_run_is_closed_with_success(make, people):
    """T11.1: whether they are still here or not, and also if the round was broken meanwhile, as for growth."""
    view = make(people)
    assert lead(view) == closes(view, CauseKind.SUCCESS, "all 2 members of round 3 are done")


@pytest.mark.parametrize("make", [sealed, broken])
def test_while_one_is_not_done_the_run_is_not_closed(make):
    """T11.1."""
    assert lead(make("a:done b:done c", max=3)).act is None


def test_h25_leaving_after_success_is_no_loss():
    """T11.1, W2: a was done, said so on its line and went; b is in its last step and must not be restarted."""
    assert lead(sealed("a:gone b")) == Verdict(None, "round 3 runs with 2 nodes")


def test_a_newcomer_that_is_done_does_not_count():
    """T11.1: done is said of the table's round."""
    assert lead(sealed("a b:done c:new", records={"c": {"done": True}})).act is None


def test_an_open_run_has_nobody_who_could_be_done():
    """T11.1: nobody of none is not everybody."""
    assert lead(opened("a")).reason == "1 of 2..4 nodes: waiting for 1 more"


def test_success_comes_before_a_failure_of_somebody_who_had_left_the_round():
    """T11.1 comes before T11.2."""
    view = sealed("a:done b:gone", lines={"b": {"gave_up": "exit code 1"}})
    assert lead(view) == closes(view, CauseKind.SUCCESS, "all 2 members of round 3 are done")


def test_to_close_stops_the_call_and_keeps_the_rest():
    """T11.11."""
    view = sealed("a:done b:done", call=Call.SETTLE, grown=2, flaps={"node-x": 1})
    before, head = view.head, lead(view).act.head
    assert (head.call, head.call_seq, head.seq) == (Call.NONE, 8, 8)
    assert (head.run, head.round, head.table, head.size) == (before.run, before.round, before.table, before.size)
    assert (head.digest, head.boot) == (before.digest, before.boot)


# ---- failure


@pytest.mark.parametrize("make", [sealed, broken])
def test_when_one_gave_up_and_the_others_are_too_few_the_run_is_closed(make):
    """T11.2."""
    view = make("a b:gave_up")
    assert lead(view) == closes(view, CauseKind.GAVE_UP, "b gave up: exit code 1; 1 of at least 2 nodes remain", "b")


def test_the_lowest_rank_that_gave_up_is_named():
    """T11.2: it does not matter in which order the lines were listed."""
    ranks = {"b": {"rank": 2, "gave_up": "second"}, "c": {"rank": 1, "gave_up": "first"}}
    view = sealed("a b:gave_up c:gave_up", lines=ranks)
    assert lead(view) == closes(view, CauseKind.GAVE_UP, "c gave up: first; 1 of at least 2 nodes remain", "c")


@pytest.mark.parametrize(
    "people",
    ["a:gave_up b c", "a:gave_up b c:new", "a:gave_up b:new c:new", "a:gave_up b:ready c:ready", "a:gave_up b:again c"],
)
def test_while_a_quorum_can_be_met_the_run_goes_on(people):
    """T11.2, G9: stragglers, spares and those who wait are counted."""
    view = sealed(people)
    assert lead(view).act.head.phase is Phase.BROKEN
    assert getattr(getattr(lead(broken(people)).act, "head", None), "phase", None) is not Phase.CLOSED


@pytest.mark.parametrize("people", ["a:gave_up b c:drains", "a:gave_up b c:done", "a:gave_up b c:new_drains"])
def test_whoever_is_about_to_go_makes_no_quorum(people):
    """T11.2, W4."""
    view = sealed(people)
    assert lead(view) == closes(view, CauseKind.GAVE_UP, "a gave up: exit code 1; 1 of at least 2 nodes remain", "a")


def test_a_quorum_is_counted_in_units():
    """T11.2, W10."""
    assert lead(sealed("a b c d:gave_up", min=3, unit=2)).act.head.phase is Phase.CLOSED


@pytest.mark.parametrize("make", [sealed, broken])
def test_a_loss_after_others_were_done_cannot_be_made_good(make):
    """T11.3: those who are done will not be in another round, and e would wait for nothing."""
    view = make("a:done b:lost c:gone d:lost e")
    text = "b and d lost after others were done; 1 of at least 2 nodes remain"
    assert lead(view) == closes(view, CauseKind.LOST, text, "b", "d")


def test_if_only_the_done_are_left_whoever_was_lost_may_come_back():
    """T11.3, G9: nobody waits in vain, so nobody need be told."""
    assert lead(sealed("a:done b:lost")).act.head.phase is Phase.BROKEN
    assert lead(broken("a:done b:lost")).act is None


@pytest.mark.parametrize("people", ["a:done b:lost c:new d:new", "a:done b c d:lost"])
def test_a_loss_after_others_were_done_is_made_good_by_a_quorum(people):
    """T11.3, G9."""
    assert lead(sealed(people)).act.head.phase is Phase.BROKEN


@pytest.mark.parametrize("people", ["a b:lost", "a:lost b:lost", "a b:went"])
def test_a_mere_loss_never_closes_the_run(people):
    """G9, T11.2: agents may be restarted by the cluster."""
    view = sealed(people)
    assert lead(view).act.head.phase is Phase.BROKEN
    assert lead(broken(people)).act is None


@pytest.mark.parametrize("people", ["a b:gave_up", "a:done b:lost"])
def test_a_run_that_waits_on_failure_is_not_closed(people):
    """T11.4."""
    assert lead(sealed(people, on_failure="wait")).act.head.phase is Phase.BROKEN
    assert lead(broken(people, on_failure="wait")).act is None


# ---- closed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"call": Call.LAST, "age": 1000.0},
        {"banned": {"node-a": "bad memory"}},
        {"orphans": ["t1"]},
        {"asked": {"A": "maintenance"}, "drain_age": 9.0},
    ],
)
@pytest.mark.parametrize(
    "people", ["a b", "a b:lost", "a:done b:done", "a:ready b:ready c:new d:new", "a b:gave_up", ""]
)
def test_h25_in_a_closed_run_nobody_is_lost_evicted_or_sealed(people, changes):
    """T11.5: nothing is written to the head, whatever happens."""
    cause = Cause(kind=CauseKind.CLOSED, text="enough (by ops)")
    assert lead(closed(people, cause=cause, **changes)) == Verdict(None, "closed: enough (by ops)")


def test_a_close_without_a_reason_says_so():
    """T11.5."""
    assert lead(closed("a")) == Verdict(None, "closed: no reason was given")


# ---- bans


@pytest.mark.parametrize("make", [opened, sealed, broken])
def test_a_ban_takes_effect_at_once(make):
    """T8.2: in any phase, and before anything else."""
    view = make("a b c d", banned={"node-c": "bad memory", "node-b": "bad memory"}, orphans=["t1"])
    assert lead(view) == Verdict(Evict(("B", "C")), "b and c banned: bad memory")


def test_a_ban_comes_before_success():
    """T8.2: else the banned would be taken for somebody whose work counts."""
    assert lead(sealed("a:done b:done", banned={"node-b": "bad memory"})).act == Evict(("B",))


def test_a_ban_that_is_not_about_anybody_here_changes_nothing():
    """T8.2: hosts are banned, not names."""
    assert lead(sealed("a b", banned={"node-c": "bad memory", "a": "a name", "B": "an id"})).act is None


def test_a_banned_leader_evicts_itself_last():
    """T8.3."""
    banned = {"node-a": "bad memory", "node-b": "bad memory"}
    assert lead(sealed("a b c", banned=banned)).act == Evict(("B", "A"))


def test_all_members_of_a_banned_host_are_evicted():
    """T8.2."""
    view = sealed("a b c", records={"a": {"host": "h"}, "c": {"host": "h"}}, banned={"h": "bad memory"}, me="B")
    assert lead(view).act == Evict(("A", "C"))


def test_h22_no_act_writes_a_record_of_a_member():
    """One writer per key: the leader can delete a member's key, and that is all it can do to it."""
    acts = {kind.__name__: kind.__struct_fields__ for kind in (WriteHead, Seal, Evict, Sweep)}
    assert acts == {
        "WriteHead": ("head",),
        "Seal": ("head", "entries", "first", "former_table"),
        "Evict": ("ids",),
        "Sweep": ("tables",),
    }
    assert live("a").record == sealed("a").members["A"].record


# ---- sweeping

SWEEPS = Verdict(Sweep(("t1", "t2")), "removing rank tables that no head names")


@pytest.mark.parametrize(
    "view",
    [
        opened("a", orphans=["t1", "t2"]),
        opened("a b", orphans=["t1", "t2"], call=Call.LAST),
        sealed("a b", orphans=["t1", "t2"]),
        sealed("a b c:new", orphans=["t1", "t2"]),
        broken("a b:ready c:ready", orphans=["t1", "t2"], call=Call.REGROUP),
    ],
)
def test_tables_that_no_head_names_are_swept(view):
    """T12.1: they are left over from seals that were refused."""
    assert lead(view) == SWEEPS


@pytest.mark.parametrize(
    "view",
    [
        opened("a b", orphans=["t1"]),
        opened("a b c d", orphans=["t1"]),
        sealed("a b c:lost", orphans=["t1"]),
        sealed("a b c:drains", orphans=["t1"], drain_age=1.0),
        broken("a:ready b:ready", orphans=["t1"], call=Call.REGROUP),
    ],
)
def test_sweeping_holds_up_nothing_that_is_due(view):
    """T12.1 comes after whatever changes the round."""
    assert not isinstance(lead(view).act, Sweep)
