"""The root cause of a break (T7.14): the member whose loss stopped the workers of the others."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.acts import WriteHead
from rdzv.core.causes import root
from rdzv.core.model import BACK_S, Call, Cause, CauseKind, Phase
from rdzv.core.rules import lead
from support.generated_views import views
from support.verdicts import said
from support.views import NUMBER, broken, sealed

STOPPED = Cause(kind=CauseKind.RESTARTED, text="the workers of b stopped: a new round is wanted", members=("b",))
THEN = "; as a consequence the workers of b stopped"
REGROUPS = {"call": Call.REGROUP, "cause": STOPPED, "age": 1.0}
BAD = "bad memory"
BROKEN = "round 3 broken"
SOON = "c was lost soon after it came in: it waits 4 s when it comes again"
ALL_READY = "2 of 2..4 nodes: all who live are ready | seal a b"


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        # The lost member is named, whether others are ready already or not.
        (broken("a b:ready c:lost", **REGROUPS), f"{BROKEN}: c lost{THEN} | cause=lost(c)"),
        (broken("a:ready b:ready c:lost", **REGROUPS), f"{BROKEN}: c lost{THEN} | cause=lost(c)"),
        (broken("a b:ready c:lost d:lost", **REGROUPS), f"{BROKEN}: c and d lost{THEN} | cause=lost(c d)"),
        # Also if too few are left: the call stops in the next step.
        (broken("b:ready c:lost", **REGROUPS), f"{BROKEN}: c lost{THEN} | cause=lost(c)"),
        # A member that vanished goes before one that said why it went: its loss may be why.
        (broken("a b:ready c:lost d:gave_up", **REGROUPS), f"{BROKEN}: c lost{THEN} | cause=lost(c)"),
        (broken("a b:ready c:lost d:went", **REGROUPS), f"{BROKEN}: c lost{THEN} | cause=lost(c)"),
        (broken("a b:ready c:lost d:lost", banned={"node-c": BAD}, **REGROUPS), f"{BROKEN}: d lost{THEN} | cause=lost(d)"),
        # Then one that said why it went.
        (broken("a b:ready c:went", **REGROUPS), f"{BROKEN}: c left: scaled down{THEN} | cause=left(c)"),
        (broken("a b:ready c:went d:gave_up", **REGROUPS), f"{BROKEN}: c left: scaled down{THEN} | cause=left(c)"),
        # One that gave up may be a victim of the same failure, and a ban is the operator's doing.
        (broken("a:ready b:ready c:gave_up", **REGROUPS), ALL_READY),
        (broken("a:ready b:ready c:lost", banned={"node-c": BAD}, **REGROUPS), ALL_READY),
        # It came in with this round: the next of its name waits.
        (broken("a b:ready c:lost", sealed_age=9.0, entries={"c": {"since": NUMBER}}, **REGROUPS),
         f"{BROKEN}: c lost{THEN} ({SOON}) | cause=lost(c) flaps={{'c': 1}} flapped=('c',)"),
        # Nobody is lost, a finished member is not, or the loss is named already.
        (broken("a:ready b:ready c", **REGROUPS),
         "2 of 2..4 nodes: waiting for c to stop their workers, at most 74 s more @ 74"),
        (broken("a:ready b:ready c:gone", **REGROUPS), ALL_READY),
        (broken("a:ready b:ready c:lost", call=Call.REGROUP, cause=msgspec.structs.replace(STOPPED, kind=CauseKind.LOST)),
         ALL_READY),
        # A loss of another time has another cause: the lease of one that died with the break ends earlier.
        (broken("a:ready b:ready c:lost", call=Call.REGROUP, cause=STOPPED, lease=10.0, age=10.0 + BACK_S),
         ALL_READY),
        # A straggler that was evicted did not stop the workers of the others.
        (broken("a:ready b:ready c:lost", call=Call.REGROUP, cause=STOPPED, regroup=5.0, age=5.0),
         ALL_READY),
        # Without the call of the break nobody knows how long ago it was.
        (broken("a:ready b:lost", cause=STOPPED), "1 of 2..4 nodes: waiting for 1 more"),
    ],
)  # fmt: skip
def test_the_loss_behind_a_restart_is_named(view, expected):
    """T7.14."""
    assert said(view) == expected


def test_the_next_round_says_why_there_is_one():
    """T6.10, T7.14: from the break to the seal, as the leader of a real run goes through it."""
    view = sealed("a b:ready c")
    stopped = lead(view).act.head
    assert stopped.cause.kind is CauseKind.RESTARTED
    fields = {name: getattr(stopped, name) for name in ("cause", "call", "call_seq", "seq")}
    found = lead(broken("a:ready b:ready c:lost", **fields)).act.head
    assert (found.cause.text, found.cause.members) == (f"c lost{THEN}", ("c",))
    assert (found.call, found.call_seq) == (stopped.call, stopped.call_seq), "the wait goes on"
    again = broken("a:ready b:ready c:lost", cause=found.cause, call=found.call)
    assert lead(again).act.head.cause == found.cause


@given(views(), st.floats(0.0, 30.0))
def test_a_root_cause_is_named_once_and_only_of_the_lost(view, age):
    """T7.14."""
    view = msgspec.structs.replace(view, call_age_s=age)
    if view.head is None or view.head.phase is not Phase.BROKEN:
        return
    cause = root(view)
    if cause is None:
        return
    assert set(cause.members) <= {entry.name for entry in view.lost.values()}
    assert cause.kind is not CauseKind.RESTARTED
    verdict = lead(view)
    if verdict.rule == "name_root_cause":
        assert isinstance(verdict.act, WriteHead)
        assert root(msgspec.structs.replace(view, head=verdict.act.head)) is None
