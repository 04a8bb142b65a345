"""T7.17 to T7.19: the notice that a drain gives to all workers before the round is broken."""

from __future__ import annotations

import msgspec
import pytest

from rdzv.core import member as machine
from rdzv.core.drain_notice import notice_for, past_notices
from rdzv.core.member_events import Draining
from rdzv.core.member_rules import Change, ChangeKind, report
from rdzv.core.member_state import Holding, Identity, MemberState, Standing
from rdzv.core.model import Call, DrainNotice, Phase
from rdzv.core.rules import lead
from support.verdicts import said
from support.views import CALL_SEQ, sealed

NONE, _, _, SETTLE, NOTICE = Call
GIVEN = DrainNotice(reason="c draining: SIGTERM", limit_s=90.0, drains=1)
SHOWN = "DrainNotice(reason={!r}, limit_s={}, drains={})"
BROKEN = "phase=broken call=regroup cause=drained(c)"
FEW = "; b and c draining, but too few would remain without"


def noticed(people, saved="", given=GIVEN, graces=None, **more):
    """A view in which a notice runs; `saved`: members whose workers have answered it."""
    records = {name: {"saved": CALL_SEQ} for name in saved.split()}
    for name, grace in (graces or {}).items():
        records.setdefault(name, {})["grace"] = grace
    return sealed(people, **{"drain_notice": 90.0, "call": NOTICE, "notice": given, "records": records, **more})


def table(*rows):
    return pytest.mark.parametrize(("view", "expected"), [row[1:] for row in rows], ids=[row[0] for row in rows])


@table(
    ("T7.17 a drain is told to the workers first", sealed("a b c:drains", drain_notice=90.0),
     f"round 3: c draining: SIGTERM; the workers have 90 s to save | call=notice notice={SHOWN.format(GIVEN.reason, 90.0, 1)}"),
    ("T7.17 and so is an operator's", sealed("a b c", drain_notice=90.0, asked={"C": "maintenance"}),
     ("round 3: c draining: maintenance; the workers have 90 s to save "
     f"| call=notice notice={SHOWN.format('c draining: maintenance', 90.0, 1)}")),
    ("T7.17 for as long as the node that drains has", sealed("a b c:drains", drain_notice=90.0, records={"c": {"grace": 25.0}}),
     f"round 3: c draining: SIGTERM; the workers have 25 s to save | call=notice notice={SHOWN.format(GIVEN.reason, 25.0, 1)}"),
    ("T7.17 it takes the place of growth", sealed("a b c:drains d:new", drain_notice=90.0, call=SETTLE, age=9.0),
     f"round 3: c draining: SIGTERM; the workers have 90 s to save | call=notice notice={SHOWN.format(GIVEN.reason, 90.0, 1)}"),
    ("T7.17 T7.5 even if the round will not be broken", sealed("a b:drains c:drains", drain_notice=90.0),
     ("round 3: b and c draining: SIGTERM; the workers have 90 s to save "
     f"| call=notice notice={SHOWN.format('b and c draining: SIGTERM', 90.0, 2)}")),
    ("T7.18 the round waits for the answers", noticed("a b c:drains", "a", age=30.0),
     "round 3: c draining: SIGTERM; waiting at most 60 s for the workers of b and c to save @ 60"),
    ("T7.18 newcomers wait too", noticed("a b c:drains d:new", "a", age=30.0),
     "round 3: c draining: SIGTERM; waiting at most 60 s for the workers of b and c to save @ 60"),
    ("T7.18 and is broken when all have answered", noticed("a b c:drains", "a b c", age=2.0),
     f"round 3 broken: c draining: SIGTERM; all workers have saved | {BROKEN} notice=None"),
    ("T7.18 members that are done need not answer", noticed("a b:done c:drains d e", "a c d e", max=5, age=2.0),
     f"round 3 broken: c draining: SIGTERM; all workers have saved | {BROKEN} notice=None"),
    ("T7.18 or when the time is over", noticed("a b c:drains", "a", age=90.0),
     ("round 3 broken: c draining: SIGTERM; the workers of b and c have not saved within 90 s "
     f"| {BROKEN} notice=None")),
    ("T7.18 an answer to an earlier notice does not count", noticed("a b c:drains", call_seq=4, saved="a b c", age=0.5),
     "round 3: c draining: SIGTERM; waiting at most 90 s for the workers of a, b and c to save @ 89.5"),
    ("T7.18 T7.5 if too few remain, those that drain are told that they may go",
     noticed("a b:drains c:drains", "a b c", given=msgspec.structs.replace(GIVEN, drains=2), age=2.0),
     "round 3: b and c may go | call=none"),
    ("T7.18 T7.5 and the round goes on", sealed("a b:drains c:drains", drain_notice=90.0,
        notice=msgspec.structs.replace(GIVEN, drains=2)), f"round 3 runs with 3 nodes{FEW}"),
    ("T7.18 until newcomers take their place", sealed("a b:drains c:drains d:new", drain_notice=90.0,
        notice=msgspec.structs.replace(GIVEN, drains=2)),
     "round 3 broken: b and c draining: SIGTERM | phase=broken cause=drained(b c) notice=None"),
    ("T7.17 one more that drains later gets another notice", sealed("a:drains b:drains c:drains", drain_notice=90.0,
        notice=msgspec.structs.replace(GIVEN, drains=2)),
     ("round 3: a, b and c draining: SIGTERM; the workers have 90 s to save "
     f"| call=notice notice={SHOWN.format('a, b and c draining: SIGTERM', 90.0, 3)}")),
    ("T7.17 one more that drains meanwhile shares it", noticed("a b:drains c:drains", "a", age=30.0),
     ("round 3: b and c draining: SIGTERM; the workers have 60 s to save "
     f"| notice={SHOWN.format('b and c draining: SIGTERM', 90.0, 2)}")),
    ("T7.17 which may shorten it", noticed("a b:drains c:drains", "a", graces={"b": 20.0}, age=30.0),
     ("round 3: b and c draining: SIGTERM; the workers have 20 s to save "
      f"| notice={SHOWN.format('b and c draining: SIGTERM', 50.0, 2)}")),
    ("T7.17 a grace is counted once", noticed("a b:drains c:drains", "a", graces={"b": 20.0}, age=30.9,
        given=DrainNotice(reason="b and c draining", limit_s=50.0, drains=2)),
     "round 3: b and c draining; waiting at most 19 s for the workers of b and c to save @ 19.1"),
    ("T7.17 a grace that another leader has not counted", noticed("a b c:drains", "a", graces={"c": 20.0}, age=30.0),
     f"round 3: c draining: SIGTERM; the workers have 20 s to save | notice={SHOWN.format(GIVEN.reason, 50.0, 1)}"),
    ("T7.18 a notice that nobody needs any more ends", noticed("a b c:done", "a"),
     "round 3: nobody drains any more | call=none notice=None"),
    ("T7.1 a loss ends it", noticed("a b c:lost", "a"),
     "round 3 broken: c lost | phase=broken call=regroup cause=lost(c) notice=None"),
    ("T7.4 without the setting drains are gathered", sealed("a b c:drains"), "round 3: c draining, gathering others @ 1"),
)  # fmt: skip
def test_what_a_drain_does_first(view, expected):
    assert said(view) == expected


def test_the_age_of_a_notice_goes_on_when_another_member_joins_it():
    """T5.4, T7.17: so a chain of drains cannot put off the end of the notice."""
    view = noticed("a b:drains c:drains", "a", age=30.0)
    assert lead(view).act.head.call_seq == CALL_SEQ


# ---- the member


def holder(head, now=0.0):
    me = Identity(run_id="job", name="a", endpoint="e", lease=10.0, outage_grace=900.0, closed_for=60.0, capacity=4)
    state = MemberState(me, standing=Standing.PRESENT, head=head, heard=head, renewed_at=now)
    state.holding, state.holds = Holding.HOLDING, report(head, 0)
    return state


RUNNING = noticed("a b c:drains").head
QUIET = sealed("a b c").head
OVER = msgspec.structs.replace(RUNNING, call=NONE)


def test_the_notice_that_runs_is_that_of_the_round_held():
    """T7.19."""
    mine = report(RUNNING, 0)
    assert notice_for(mine, RUNNING) == GIVEN
    for holds, head in (
        (None, RUNNING), (mine, None), (mine, QUIET), (mine, OVER),
        (report(msgspec.structs.replace(RUNNING, table="t2"), 0), RUNNING),
        (mine, msgspec.structs.replace(RUNNING, phase=Phase.BROKEN)),
    ):  # fmt: skip
        assert notice_for(holds, head) is None


def test_only_notices_that_are_over_count_as_past():
    assert [past_notices(head) for head in (None, QUIET, RUNNING, OVER)] == [0, 0, 0, 1]


def test_a_member_that_drains_keeps_its_workers_until_the_notice_is_over():
    """T7.19."""
    state = holder(QUIET)
    assert machine.drain_left_s(state, 1.0, 90.0) == 0.0, "it does not drain"
    machine.step(state, Draining("SIGTERM"), 1.0)
    assert machine.drain_left_s(state, 1.0, 90.0) == 90.0, "the leader has not seen it yet"
    state.head = RUNNING
    assert machine.drain_left_s(state, 31.0, 90.0) == 60.0
    assert machine.drain_left_s(state, 91.5, 90.0) == 0.0, "the leader should have ended it by now"
    assert machine.drain_left_s(state, 31.0, 0.0) == 0.0, "the run has no notices"
    state.head = OVER
    assert machine.drain_left_s(state, 2.0, 90.0) == 0.0
    state.head, state.change = RUNNING, Change(ChangeKind.ROUND, "broken")
    assert machine.drain_left_s(state, 2.0, 90.0) == 0.0
    state.change, state.holds = None, None
    assert machine.drain_left_s(state, 2.0, 90.0) == 0.0


def test_a_member_that_drains_after_an_earlier_notice_waits_for_its_own():
    state = holder(OVER)
    machine.step(state, Draining("SIGTERM", 25.0), 0.0)
    assert machine.drain_left_s(state, 5.0, 90.0) == 20.0, "no longer than its grace"
    machine.step(state, Draining("SIGTERM again", 90.0), 5.0)
    assert machine.drain_left_s(state, 5.0, 90.0) == 20.0, "which counts from the first word"
    state.head = msgspec.structs.replace(OVER, notice=msgspec.structs.replace(GIVEN, drains=2))
    assert machine.drain_left_s(state, 6.0, 90.0) == 0.0
