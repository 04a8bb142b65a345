"""An engine came back empty, and its members tell it what they know: T13 to T15."""

from __future__ import annotations

import pytest

from rdzv.core import recovery
from rdzv.core.acts import Seal, Verdict, WriteHead
from rdzv.core.model import BACK_S, Call, Cause, CauseKind, Era, Head, Phase, RoundId
from rdzv.core.rules import lead
from support.views import ERA, broken, no_head, opened, ranks_of, report, seal_of

LOST = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))
DONE = Cause(kind=CauseKind.SUCCESS, text="all 2 members of round 3 are done")
NEXT = Era(2, "fresh")


def forgot(*tellers, young=True, **changes):
    """Members on an engine that knows nothing. Each teller is what its record holds beyond its name."""
    names = "abcdefgh"[: len(tellers)]
    records = dict(zip(names, tellers, strict=True))
    return no_head(" ".join(names), records=records, young=young, **changes)


def holds(rank, **fields):
    return {"holds": report(rank=rank, **fields), "heard": report(rank=rank, **fields)}


def heard(rank=-1, **fields):
    return {"heard": report(rank=rank, **fields)}


def made(phase, **fields):
    """The head of round 3 as it is made again."""
    base = {"run": "r1", "era": ERA, "number": 3, "table": "t3", "size": 2, "digest": "d", "call_seq": 1}
    return Head(**{**base, "phase": phase, "next_era": NEXT, **fields})


# ---- T14: go on


def test_when_all_who_hold_the_round_are_back_nobody_is_disturbed():
    """T14.2, T14.3: at once, however young the engine is."""
    extra = {"boot": "node-a:29500", "top": 4, "grown": 2, "incarnation": 5}
    assert lead(forgot(holds(1, **extra), holds(0, **extra))) == Verdict(
        WriteHead(made(Phase.SEALED, adopted=True, **extra)), "round 3 goes on: all 2 members came back to the engine"
    )


def test_a_head_made_again_begins_its_own_count():
    """T14.2: the engine has no journal of before, and nobody's flaps are remembered."""
    head = lead(forgot(holds(0), holds(1))).act.head
    assert (head.seq, head.call, head.flaps, head.seen) == (1, Call.NONE, {}, 0)


def test_the_round_goes_on_whoever_else_is_there():
    """T14.3: newcomers and spares change nothing."""
    view = forgot({}, heard(), holds(0), holds(1), heard(), {})
    assert lead(view).act == WriteHead(made(Phase.SEALED, adopted=True))


def test_the_round_goes_on_though_one_heard_that_it_was_broken():
    """T14.3: whoever gave it up does not hold it; any other cause will be seen again."""
    view = forgot(holds(0), {"holds": report(rank=1), "heard": report(rank=1, phase=Phase.BROKEN, cause=LOST)})
    assert lead(view).act == WriteHead(made(Phase.SEALED, adopted=True))


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (heard(1), "it gave the round up, or never took it"),
        (holds(0), "the same rank twice is one member that came twice"),
        (holds(1, digest="other"), "not the same member list"),
        ({"holds": report(2, rank=1), "heard": report(3, rank=-1)}, "it holds an earlier round"),
        ({**holds(1), "left": RoundId(ERA, 3)}, "it holds the round no longer"),
        ({"holds": report(rank=1, table="other")}, "not the same table"),
    ],
)
def test_the_round_does_not_go_on_unless_all_hold_it(second, why):
    """T14.3."""
    verdict = lead(forgot(holds(0), second, young=False))
    assert verdict.act.head.phase is Phase.BROKEN, why


def test_the_round_goes_on_when_it_was_larger_than_the_run_may_now_be():
    """T14.3: going on asks for no quorum."""
    assert lead(forgot(holds(0), holds(1), min=3)).act == WriteHead(made(Phase.SEALED, adopted=True))


# ---- W14: the best


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (report(4), report(3)),
        (report(1, Era(2, "e1")), report(9, Era(1, "e1"))),
        (report(1, Era(1, "e2")), report(9, Era(1, "e1"))),
        (report(1, incarnation=1), report(9)),
        (report(3, phase=Phase.BROKEN), report(3)),
        (report(1, phase=Phase.CLOSED), report(9)),
        (report(1, phase=Phase.CLOSED), report(9, incarnation=1)),
        (report(9, phase=Phase.CLOSED), report(1, phase=Phase.CLOSED)),
        (report(1, phase=Phase.CLOSED, incarnation=1), report(9, phase=Phase.CLOSED)),
    ],
)
def test_the_newest_round_is_the_best(one, other):
    """W14: and a close is final."""
    assert recovery.best_report(forgot({"heard": one}, {"heard": other})) == one
    assert recovery.best_report(forgot({"heard": other}, {"holds": one})) == one


def test_h10_the_best_is_what_the_best_informed_knows():
    """W14: c, who comes first, has only heard of round 2; b knows 3. Rounds go on from 3."""
    view = forgot(heard(number=2), holds(0, number=3, size=1))
    assert lead(view).act.head.number == 3


# ---- T14: closed


@pytest.mark.parametrize(
    ("cause", "kept", "text"),
    [
        (DONE, DONE, DONE.text),
        (
            None,
            Cause(kind=CauseKind.CLOSED, text="closed before the engine came back empty"),
            "closed before the engine came back empty",
        ),
    ],
)
def test_a_closed_run_stays_closed(cause, kept, text):
    """T14.1: also if all who hold its round are here."""
    view = forgot(holds(0), {"holds": report(rank=1), "heard": report(rank=1, phase=Phase.CLOSED, cause=cause)})
    assert lead(view) == Verdict(WriteHead(made(Phase.CLOSED, cause=kept)), f"the run was closed: {text}")


# ---- T15


def test_on_a_young_engine_the_others_are_waited_for():
    """T15.1."""
    assert lead(forgot(holds(0))) == Verdict(
        None, "1 of 2 members of round 3 have come back to the engine: waiting for the others", BACK_S - 1.0
    )


def test_whoever_only_heard_of_the_round_has_not_come_back_to_it():
    """T15.1: rank -1 is a spare, or one that never learned its rank."""
    reason = lead(forgot(heard(-1), heard(-1))).reason
    assert reason == "0 of 2 members of round 3 have come back to the engine: waiting for the others"


def test_whoever_was_in_another_round_has_not_come_back_to_this_one():
    """T15.1: though it has a rank of its own to tell."""
    reason = lead(forgot(holds(0), heard(1, number=2))).reason
    assert reason == "1 of 2 members of round 3 have come back to the engine: waiting for the others"


def test_when_nobody_else_came_back_the_round_is_broken():
    """T15.2, T15.3: those who hold it are no quorum."""
    text = "1 of 2 members came back after the engine was restarted"
    assert lead(forgot(holds(0), young=False)) == Verdict(
        WriteHead(made(Phase.BROKEN, cause=Cause(kind=CauseKind.RETOLD, text=text))), f"round 3 broken: {text}"
    )


@pytest.mark.parametrize("number", [1, 2])
def test_nobody_waits_for_others_when_all_of_a_round_are_back(number):
    """T15.1: of the first round as of any other."""
    assert lead(forgot(holds(0, number=number), heard(1, number=number))).act.head.number == number


def test_when_all_are_back_but_not_all_hold_the_round_nobody_waits():
    """T15.1, T15.2: young or not, nobody else can come back."""
    text = "2 of 2 members came back after the engine was restarted"
    broken_head = made(Phase.BROKEN, call=Call.REGROUP, cause=Cause(kind=CauseKind.RETOLD, text=text))
    assert lead(forgot(holds(0), heard(1))) == Verdict(WriteHead(broken_head), f"round 3 broken: {text}")


def test_a_round_that_was_broken_already_keeps_its_reason():
    """T15.2."""
    verdict = lead(forgot(heard(0, phase=Phase.BROKEN, cause=LOST), young=False))
    assert verdict == Verdict(
        WriteHead(made(Phase.BROKEN, cause=Cause(kind=CauseKind.RETOLD, text="c lost"))), "round 3 broken: c lost"
    )


@pytest.mark.parametrize("fields", [{"phase": Phase.BROKEN}, {"phase": Phase.SEALED, "cause": LOST}])
def test_a_round_that_was_not_broken_for_a_reason_gets_one(fields):
    """T15.2."""
    verdict = lead(forgot(heard(0, **fields), young=False))
    assert verdict.reason == "round 3 broken: 1 of 2 members came back after the engine was restarted"


@pytest.mark.parametrize(
    ("low", "tellers", "call"),
    [
        (2, [holds(0, size=3), holds(1, size=3)], Call.REGROUP),
        (2, [holds(0, size=3), heard(1, size=3)], Call.REGROUP),
        (2, [heard(0, size=3), heard(1, size=3)], Call.REGROUP),
        (2, [heard(0, size=3), heard(-1, size=3)], Call.NONE),
        (2, [holds(0, size=3), holds(0, size=3)], Call.NONE),
        (3, [holds(0, size=3), holds(1, size=3)], Call.NONE),
    ],
)
def test_those_who_were_in_the_round_regroup_if_they_are_a_quorum(low, tellers, call):
    """T15.3."""
    assert lead(forgot(*tellers, young=False, min=low)).act.head.call is call


def test_spares_that_are_back_first_do_not_break_the_round_however_many_they_are():
    """T15.1: two spares would fill the run, but those who hold its round are a moment behind (found by seed 2)."""
    assert lead(forgot(heard(), heard(), max=2)) == Verdict(
        None, "0 of 2 members of round 3 have come back to the engine: waiting for the others", BACK_S - 1.0
    )


def test_h9_a_spare_and_one_who_holds_the_round_do_not_make_a_full_run():
    """T15.1, W5: b is only a moment slower than spare c, and the round must not be broken for that."""
    assert lead(forgot(holds(0), heard(), max=2)) == Verdict(
        None, "1 of 2 members of round 3 have come back to the engine: waiting for the others", BACK_S - 1.0
    )


def test_a_run_without_a_round_begins_again():
    """T15.4: the same run, because somebody may remember it."""
    first = {"number": 0, "table": "", "size": 0, "digest": "", "phase": Phase.OPEN}
    verdict = lead(forgot(heard(**first), {}, young=False, incarnation=9))
    assert verdict == Verdict(
        WriteHead(made(Phase.OPEN, number=0, table="", size=0, digest="")),
        "2 of 2..4 nodes: the run begins again on an engine that came back empty",
    )


def test_a_run_without_a_round_waits_for_its_members_too():
    """T15.1: one of them may know of a round."""
    first = {"number": 0, "table": "", "size": 0, "digest": "", "phase": Phase.OPEN}
    assert lead(forgot(heard(**first))) == Verdict(
        None, "1 of 2..4 nodes on an engine that came back empty: waiting for the others", BACK_S - 1.0
    )
    assert lead(forgot(*[heard(**first)] * 4)).act.head.phase is Phase.OPEN


# ---- T6.2: sealing what was told


def missing_one(**changes):
    """Round 3 of two was told by a alone, who has given it up. b has not come back. c is new."""
    given = {"size": 2, "next_era": NEXT, "young": True, "call": Call.LAST, "age": 99.0, **changes}
    return broken("a:ready c:new", records={"a": heard(0)}, **given)


def test_nothing_is_sealed_while_a_teller_may_still_come_back():
    """T6.2, T5.5."""
    assert lead(missing_one()) == Verdict(
        None, "2 of 2..4 nodes: waiting for members of round 3 to come back", BACK_S - 1.0
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"young": False}, "the engine is not young any more"),
        ({"max": 2}, "full"),
        ({"size": 1}, "all who were in it are here"),
        ({"next_era": ERA}, "the head was made by a seal here and not told, so nobody is missing"),
    ],
)
def test_otherwise_what_was_told_is_sealed(changes, why):
    """T6.2."""
    assert isinstance(lead(missing_one(**changes)).act, Seal), why


def test_without_a_head_nobody_is_missing():
    """T6.2: missing is said of a head's table."""
    assert recovery.missing_reports(forgot(holds(0))) == 0


def test_fewer_than_none_cannot_be_missing():
    """T6.2: however many tell."""
    assert recovery.missing_reports(missing_one(size=0)) == 0


def test_after_the_wait_the_round_is_formed_as_usual():
    """T5.5: a young engine does not hide what else is waited for."""
    assert lead(missing_one(young=False, age=10.0)).reason == "2 of 2..4 nodes: last call, 20 s left"
    assert lead(missing_one(size=1, age=10.0)).reason == "2 of 2..4 nodes: last call, 20 s left"


# ---- T6.8, T15.5: the number and era of what is sealed next


def test_a_seal_is_numbered_above_every_number_told():
    """T6.8: b has heard of round 6, which this engine knows nothing of."""
    view = broken("a:ready b:ready", call=Call.REGROUP, records={"b": heard(number=6)})
    assert seal_of(lead(view)).head.number == 7


def test_numbers_of_another_run_do_not_count():
    """T6.8: b comes from another life of the run id."""
    view = broken("a:ready b:ready", call=Call.REGROUP, records={"b": heard(number=6, run="r0")})
    assert seal_of(lead(view)).head.number == 4


def test_numbers_below_the_heads_do_not_count():
    """T6.8."""
    view = broken("a:ready b:ready", call=Call.REGROUP, records={"b": heard(number=2)})
    assert seal_of(lead(view)).head.number == 4


ERAS = [
    # Head's next era, eras told, era of the seal.
    (Era(2, "e9"), [], Era(2, "e9")),
    (Era(2, "e9"), [Era(1, "e1")], Era(2, "e9")),
    (Era(2, "e9"), [Era(2, "e9")], Era(2, "e9")),
    (Era(2, "e9"), [Era(2, "e1")], Era(3, "e9")),
    (Era(2, "e9"), [Era(5, "e1")], Era(6, "e9")),
    (Era(2, "e9"), [Era(5, "e1"), Era(3, "e2")], Era(6, "e9")),
    (Era(2, "e9"), [Era(2, "e1"), Era(3, "e2")], Era(4, "e9")),
    (Era(2, "e9"), [Era(7, "e9")], Era(2, "e9")),
]


@pytest.mark.parametrize(("next_era", "eras", "sealed_in"), ERAS)
def test_h10_a_seal_is_in_an_era_above_all_that_another_head_may_have_used(next_era, eras, sealed_in):
    """T15.5."""
    names = "abcd"[: 1 + len(eras)]
    records = {name: heard(era=era) for name, era in zip(names[1:], eras, strict=True)}
    people = " ".join(f"{name}:ready" for name in names)
    view = broken(people, min=1, call=Call.REGROUP, next_era=next_era, records=records)
    assert seal_of(lead(view)).head.era == seal_of(lead(view)).head.next_era == sealed_in


def test_h10_an_era_that_was_only_planned_counts_too():
    """T15.5: another instance may have sealed in it without anybody here having heard."""
    records = {"b": {"heard": report(next_era=Era(2, "e1"))}}
    view = broken("a:ready b:ready", call=Call.REGROUP, next_era=Era(2, "e9"), records=records)
    assert seal_of(lead(view)).head.era == Era(3, "e9")


def test_h10_a_head_made_again_plans_an_era_above_all_told():
    """T14.2: above eras and next eras, of everybody and not of the best alone."""
    plans = lead(forgot(holds(0, next_era=Era(4, "e5")), heard(number=1, era=Era(1, "e0")), young=False)).act.head
    assert (plans.era, plans.next_era) == (ERA, Era(5, "fresh"))


def test_h10_two_instances_that_go_on_from_one_round_make_two_rounds():
    """T14.2: S1 served a only and died; S2 is told by b alone. Both plan era 2, and yet not the same."""
    one = lead(no_head("a", records={"a": holds(0)}, fresh="s1")).act.head.next_era
    other = lead(no_head("b", records={"b": holds(1)}, fresh="s2")).act.head.next_era
    assert one.level == other.level
    assert one != other


def told_to_regroup(**records):
    """Round 3 of three lost its server and b together; a and c had given it up before they came here, so they have no line."""
    return broken("a:new c:new", size=3, call=Call.REGROUP, next_era=NEXT, records=records)


def test_those_who_gave_the_round_up_before_they_came_re_form_without_a_last_call():
    """T15.3, T6.1: they are not strangers that meet for the first time."""
    view = told_to_regroup(a=heard(0, size=3), c=heard(2, size=3))
    assert isinstance(lead(view).act, Seal)


def test_who_only_heard_of_the_round_does_not_re_form_it():
    """T15.3, T5.3: a last call will follow."""
    verdict = lead(told_to_regroup(a=heard(0, size=3), c=heard(-1, size=3)))
    assert verdict.act.head.call is Call.NONE


def test_after_going_on_broken_former_members_keep_their_ranks():
    """T15.2, R1: a brought its line along."""
    view = broken("b:ready a:ready c:new", next_era=NEXT, call=Call.REGROUP, size=3)
    assert ranks_of(lead(view)) == {"b": 0, "a": 1, "c": 2}


def test_an_open_head_made_again_is_sealed_in_the_next_era():
    """T15.4, T6.9."""
    view = opened(
        "a b", next_era=NEXT, call=Call.LAST, age=30.0, records={"a": heard(number=0, table="")}
    )
    assert seal_of(lead(view)).head.round == RoundId(NEXT, 1)
