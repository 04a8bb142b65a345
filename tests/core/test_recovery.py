"""An engine came back empty, and its members report what they know: T13 to T15. Tables as in test_rules.py."""

from __future__ import annotations

import pytest

from rdzv.core import recovery
from rdzv.core.acts import Seal
from rdzv.core.model import Call, Cause, CauseKind, Era, Phase, RoundId
from rdzv.core.rules import lead
from support.verdicts import said
from support.views import ERA, broken, no_head, opened, ranks_of, report, seal_of

LOST = Cause(kind=CauseKind.LOST, text="c lost", members=("c",))
DONE = Cause(kind=CauseKind.SUCCESS, text="all 2 members of round 3 are done")
NEXT = Era(2, "fresh")
NO_ROUND_YET = {"number": 0, "table": "", "size": 0, "digest": "", "phase": Phase.OPEN}


def forgot(*reports, young=True, **changes):
    """Members on an engine that knows nothing. Each report is what a member's record holds beyond its name."""
    names = "abcdefgh"[: len(reports)]
    return no_head(" ".join(names), records=dict(zip(names, reports, strict=True)), young=young, **changes)


def holds(rank, **fields):
    return {"holds": report(rank=rank, **fields), "heard": report(rank=rank, **fields)}


def heard(rank=-1, **fields):
    return {"heard": report(rank=rank, **fields)}


def restored(phase, **fields):
    """The changes by which said() shows that the head of round 3 is made again."""
    base = {"run": "r1", "era": "1.e1", "number": 3, "phase": phase, "table": "t3", "size": 2, "digest": "d"}
    order = "run era number phase table size digest boot call cause adopted next_era top grown incarnation"
    given = {**base, "next_era": "2.fresh", **fields}
    return " ".join(f"{name}={given[name]}" for name in order.split() if name in given)


def table(*rows):
    return pytest.mark.parametrize(("view", "expected"), [row[1:] for row in rows], ids=[row[0] for row in rows])


GOES_ON = f"round 3 goes on: all 2 members came back to the engine | {restored('sealed', adopted=True)}"
COME_BACK = "of 2 members of round 3 have come back to the engine: waiting for the others @ 2"
ONE_BACK = "1 of 2 members came back after the engine was restarted"


@table(
    ("T14.3 all who hold the round are back, however young the engine", forgot(holds(1), holds(0)), GOES_ON),
    ("T14.2 a head made again has the reported fields",
     forgot(*[holds(rank, boot="a:1", top=4, grown=2, incarnation=5) for rank in (1, 0)]),
     "round 3 goes on: all 2 members came back to the engine | "
     + restored("sealed", boot="a:1", adopted=True, top=4, grown=2, incarnation=5)),
    ("T14.3 newcomers and spares change nothing", forgot({}, heard(), holds(0), holds(1), heard(), {}), GOES_ON),
    ("T14.3 nor does a member that heard of a break: its cause will be seen again",
     forgot(holds(0), {"holds": report(rank=1), "heard": report(rank=1, phase=Phase.BROKEN, cause=LOST)}), GOES_ON),
    ("T14.3 going on asks for no quorum", forgot(holds(0), holds(1), min=3), GOES_ON),
    ("T14.1 a closed run stays closed, even with all holders here",
     forgot(holds(0), {"holds": report(rank=1), "heard": report(rank=1, phase=Phase.CLOSED, cause=DONE)}),
     f"the run was closed: {DONE.text} | {restored('closed', cause='success()')}"),
    ("T14.1 without a cause too", forgot(holds(0), heard(1, phase=Phase.CLOSED)),
     f"the run was closed: closed before the engine came back empty | {restored('closed', cause='closed()')}"),
    ("T15.1 a young engine waits for the others", forgot(holds(0)), f"1 {COME_BACK}"),
    ("T15.1 rank -1 is a spare, or a member that never learned its rank", forgot(heard(-1), heard(-1)), f"0 {COME_BACK}"),
    ("T15.1 a member of another round has not come back to this one", forgot(holds(0), heard(1, number=2)), f"1 {COME_BACK}"),
    ("T15.1 spares that fill the run are back first (seed 2)", forgot(heard(), heard(), max=2), f"0 {COME_BACK}"),
    ("T15.1 W5 H9 a spare and a holder do not make a full run", forgot(holds(0), heard(), max=2), f"1 {COME_BACK}"),
    ("T15.2 T15.3 nobody else came: the holders are no quorum", forgot(holds(0), young=False),
     f"round 3 broken: {ONE_BACK} | {restored('broken', cause='retold()')}"),
    ("T15.1 T15.2 all are back, but not all hold it: nobody waits", forgot(holds(0), heard(1)),
     "round 3 broken: 2 of 2 members came back after the engine was restarted | "
     + restored("broken", call="regroup", cause="retold()")),
    ("T15.2 a round that was broken already keeps its reason", forgot(heard(0, phase=Phase.BROKEN, cause=LOST), young=False),
     f"round 3 broken: c lost | {restored('broken', cause='retold()')}"),
    *[(f"T15.2 a break without a reason gets one: {fields}", forgot(heard(0, **fields), young=False),
       f"round 3 broken: {ONE_BACK} | {restored('broken', cause='retold()')}")
      for fields in ({"phase": Phase.BROKEN}, {"phase": Phase.SEALED, "cause": LOST})],
    ("T15.4 a run without a round begins again", forgot(heard(**NO_ROUND_YET), {}, young=False, incarnation=9),
     "2 of 2..4 nodes: the run begins again on an engine that came back empty | run=r1 era=1.e1 call=last next_era=2.fresh"),
    ("T15.1 it waits too: a member may know of a round", forgot(heard(**NO_ROUND_YET)),
     "1 of 2..4 nodes on an engine that came back empty: waiting for the others @ 2"),
    ("T15.1 unless it is full", forgot(*[heard(**NO_ROUND_YET)] * 4),
     "4 of 2..4 nodes: the run begins again on an engine that came back empty | run=r1 era=1.e1 call=last next_era=2.fresh"),
)  # fmt: skip
def test_without_a_head(view, expected):
    assert said(view) == expected


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
    assert lead(forgot(holds(0), second, young=False)).act.head.phase is Phase.BROKEN, why


@pytest.mark.parametrize("number", [1, 2])
def test_nobody_waits_for_others_when_all_of_a_round_are_back(number):
    """T15.1: of the first round as of any other."""
    assert lead(forgot(holds(0, number=number), heard(1, number=number))).act.head.number == number


@pytest.mark.parametrize(
    ("low", "reports", "call"),
    [
        (2, [holds(0, size=3), holds(1, size=3)], Call.REGROUP),
        (2, [heard(0, size=3), heard(1, size=3)], Call.REGROUP),
        (2, [heard(0, size=3), heard(-1, size=3)], Call.NONE),
        (2, [holds(0, size=3), holds(0, size=3)], Call.NONE),
        (3, [holds(0, size=3), holds(1, size=3)], Call.NONE),
    ],
)
def test_members_of_the_round_regroup_if_they_are_a_quorum(low, reports, call):
    """T15.3: whether they still hold it or not."""
    assert lead(forgot(*reports, young=False, min=low)).act.head.call is call


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
def test_h10_the_newest_report_is_the_best(one, other):
    """W14: and a close is final."""
    assert recovery.best_report(forgot({"heard": one}, {"heard": other})) == one
    assert recovery.best_report(forgot({"heard": other}, {"holds": one})) == one


# ---- T6.2: sealing after a restored break


def missing_one(**changes):
    """Round 3 of two was reported by a alone, which has given it up. b has not come back. c is new."""
    retold = Cause(kind=CauseKind.RETOLD, text=ONE_BACK)
    given = {"size": 2, "next_era": NEXT, "cause": retold, "young": True, "call": Call.LAST, "age": 99.0, **changes}
    return broken("a:ready c:new", records={"a": heard(0)}, **given)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"young": False}, "the engine is not young any more"),
        ({"max": 2}, "full"),
        ({"size": 1}, "all who were in it are here"),
        ({"cause": LOST}, "all members of an adopted round were there, and what broke it since is no reason to wait"),
    ],
)
def test_nothing_is_sealed_while_a_member_may_still_come_back(changes, why):
    """T6.2, T5.5."""
    assert said(missing_one()) == "2 of 2..4 nodes: waiting for members of round 3 to come back @ 2"
    assert isinstance(lead(missing_one(**changes)).act, Seal), why


def test_nobody_is_missing_without_a_head_or_from_an_empty_round():
    """T6.2."""
    assert recovery.missing_reports(forgot(holds(0))) == recovery.missing_reports(missing_one(size=0)) == 0


@pytest.mark.parametrize("changes", [{"young": False}, {"size": 1}])
def test_after_the_wait_the_round_is_formed_as_usual(changes):
    """T5.5."""
    assert said(missing_one(age=10.0, **changes)) == "2 of 2..4 nodes: last call, 20 s left @ 20"


def test_members_that_gave_the_round_up_before_they_came_re_form_it_without_a_last_call():
    """T15.3, T6.1, T5.3: round 3 of three lost its server and b together; a and c have no entry. A spare does not count."""
    given = {"size": 3, "call": Call.REGROUP, "next_era": NEXT}
    view = broken("a:new c:new", records={"a": heard(0, size=3), "c": heard(2, size=3)}, **given)
    assert isinstance(lead(view).act, Seal)
    view = broken("a:new c:new", records={"a": heard(0, size=3), "c": heard(-1, size=3)}, **given)
    assert lead(view).act.head.call is Call.NONE


def test_after_a_restored_break_former_members_keep_their_ranks():
    """T15.2, R1: they brought their entries along."""
    view = broken("b:ready a:ready c:new", next_era=NEXT, call=Call.REGROUP, size=3)
    assert ranks_of(lead(view)) == {"b": 0, "a": 1, "c": 2}


def test_an_open_head_made_again_is_sealed_in_the_next_era():
    """T15.4, T6.9."""
    view = opened("a b", next_era=NEXT, call=Call.LAST, age=30.0, records={"a": heard(number=0, table="")})
    assert seal_of(lead(view)).head.round == RoundId(NEXT, 1)


# ---- T6.8, T15.5: number and era of the next seal


@pytest.mark.parametrize(
    ("known", "number"), [({"number": 6}, 7), ({"number": 6, "run": "r0"}, 4), ({"number": 2}, 4)]
)
def test_a_seal_is_numbered_above_every_number_reported_for_this_run(known, number):
    """T6.8."""
    view = broken("a:ready b:ready", call=Call.REGROUP, records={"b": heard(**known)})
    assert seal_of(lead(view)).head.number == number


@pytest.mark.parametrize(
    ("next_era", "eras", "sealed_in"),
    [
        (Era(2, "e9"), [], Era(2, "e9")),
        (Era(2, "e9"), [Era(1, "e1")], Era(2, "e9")),
        (Era(2, "e9"), [Era(2, "e9")], Era(2, "e9")),
        (Era(2, "e9"), [Era(2, "e1")], Era(3, "e9")),
        (Era(2, "e9"), [Era(5, "e1")], Era(6, "e9")),
        (Era(2, "e9"), [Era(5, "e1"), Era(3, "e2")], Era(6, "e9")),
        (Era(2, "e9"), [Era(2, "e1"), Era(3, "e2")], Era(4, "e9")),
        (Era(2, "e9"), [Era(7, "e9")], Era(2, "e9")),
    ],
)
@pytest.mark.parametrize("planned", [False, True])
def test_h10_a_seal_is_in_an_era_above_all_that_another_head_may_have_used(next_era, eras, sealed_in, planned):
    """T15.5: also if it was only planned: another instance may have sealed in it unheard."""
    names = "abcd"[: 1 + len(eras)]
    records = {
        name: {"heard": report(next_era=era) if planned else report(era=era)}
        for name, era in zip(names[1:], eras, strict=True)
    }
    people = " ".join(f"{name}:ready" for name in names)
    head = seal_of(lead(broken(people, min=1, call=Call.REGROUP, next_era=next_era, records=records))).head
    assert head.era == head.next_era == sealed_in


def test_h10_a_head_made_again_plans_an_era_above_all_reported():
    """T14.2: above eras and next eras, of every report and not of the best alone."""
    plans = lead(forgot(holds(0, next_era=Era(4, "e5")), heard(number=1, era=Era(1, "e0")), young=False)).act.head
    assert (plans.era, plans.next_era) == (ERA, Era(5, "fresh"))


def test_h10_two_instances_that_go_on_from_one_round_make_two_rounds():
    """T14.2: S1 served a only and died; S2 hears of b alone. Both plan era 2, and yet not the same."""
    one = lead(no_head("a", records={"a": holds(0)}, fresh="s1")).act.head.next_era
    other = lead(no_head("b", records={"b": holds(1)}, fresh="s2")).act.head.next_era
    assert one.level == other.level
    assert one != other
