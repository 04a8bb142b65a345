"""Quarantine: strikes and quarantines, as tables of views and verdicts (`support.verdicts.said`)."""

from __future__ import annotations

import pytest

from rdzv.core.model import Call, Cause, CauseKind, QuarantineLimit
from rdzv.core.quarantine import HOSTS_MAX, QUARANTINE_MAX_S
from rdzv.core.rules import lead
from rdzv.core.status import describe
from support.verdicts import said
from support.views import broken, no_head, opened, sealed

LIMIT = QuarantineLimit(3, 3600.0)
BROKE = "broke 3 rounds within 1 h, kept out for 10 min"
IS_OUT = {"node-c": BROKE}
KNOWN = {"call": Call.REGROUP, "age": 1.0, "quarantine": LIMIT}


def cause(kind, *members):
    return Cause(kind=kind, text="why", members=members)


def table(*rows):
    return pytest.mark.parametrize(("view", "expected"), [row[1:] for row in rows], ids=[row[0] for row in rows])


TWO = "2 of 2..4 nodes"
SEALS = f"{TWO}: all who live are ready | seal a b"
ONCE = "has broken 1 round within 1 h | strike node-{} 1 for 3600 s instead of 0"
RESTARTED, STALLED, LOST = CauseKind.RESTARTED, CauseKind.STALLED, CauseKind.LOST


@table(
    ("T17.1 a host that was lost gets a strike before the seal", broken("a:ready b:ready c:lost", **KNOWN),
     f"{TWO}: node-c {ONCE.format('c')}"),
    ("T17.1 not without the setting", broken("a:ready b:ready c:lost", call=Call.REGROUP, age=1.0), SEALS),
    ("T17.1 once for a round", broken("a:ready b:ready c:lost", strikes={"node-c": {"t3": 1}}, **KNOWN), SEALS),
    ("T17.1 not before the seal: others may be lost until then", broken("a:ready b c:lost", **KNOWN),
     "1 of 2..4 nodes: waiting for 1 more (b stopping their workers)"),
    ("T17.1 one that is lost after the break counts as well",
     broken("a:ready b:ready c:lost", cause=cause(CauseKind.GROWTH, "d"), **KNOWN), f"{TWO}: node-c {ONCE.format('c')}"),
    ("T17.1 a member that gave up", broken("a:ready b:ready c:gave_up", on_failure="wait", **KNOWN),
     f"{TWO}: node-c {ONCE.format('c')}"),
    ("T17.1 not if another was lost: it may have failed because of that",
     broken("a:ready b:ready c:gave_up d:lost", on_failure="wait", **KNOWN), f"{TWO}: node-d {ONCE.format('d')}"),
    ("T17.1 not if it said that it would go", broken("a:ready b:ready c:went", **KNOWN), SEALS),
    ("T17.1 not if an operator banned it", broken("a:ready b:ready c:lost", banned={"node-c": "bad"}, **KNOWN), SEALS),
    ("T17.1 the one whose workers stopped", broken("a:ready b:ready", cause=cause(RESTARTED, "b"), **KNOWN),
     f"{TWO}: node-b {ONCE.format('b')}"),
    ("T17.1 not if those of several did", broken("a:ready b:ready", cause=cause(RESTARTED, "a", "b"), **KNOWN),
     f"{TWO}: all are back | seal a b"),
    ("T17.1 those who stalled", broken("a:ready b:ready", cause=cause(STALLED, "a", "b"), **KNOWN),
     f"{TWO}: node-a {ONCE.format('a')}"),
    ("T17.1 one host after the other",
     broken("a:ready b:ready", cause=cause(STALLED, "a", "b"), strikes={"node-a": {"t3": 1}}, **KNOWN),
     f"{TWO}: node-b {ONCE.format('b')}"),
    ("T17.1 nobody, if the round was broken for a drain or for growth",
     broken("a:ready b:ready", cause=cause(CauseKind.GROWTH, "c"), **KNOWN), f"{TWO}: all are back | seal a b"),
    ("T17.1 nobody before the first round", opened("a b c d", quarantine=LIMIT), "4 of 2..4 nodes: full | seal a b c d"),
    ("T17.1 nobody, if many hosts were lost together: what they share has failed",
     broken("a:ready b:ready " + " ".join(f"{name}:lost" for name in "cdefghijk"), max=16, **KNOWN),
     "2 of 2..16 nodes: all who live are ready | seal a b"),
)
def test_which_hosts_get_a_strike(view, expected):
    assert said(view) == expected


@table(
    ("T17.2 the last one quarantines, and stands for all",
     broken("a:ready b:ready c:lost", strikes={"node-c": {"t1": 1, "t2": 1}}, **KNOWN),
     f"{TWO}: node-c {BROKE} | strike node-c 3 for 4200 s instead of 2, quarantine for 600 s"),
    ("T17.3 the next one within the time doubles it",
     broken("a:ready b:ready c:lost", strikes={"node-c": {"t2": 3}}, **KNOWN),
     (f"{TWO}: node-c broke 4 rounds within 1 h, kept out for 20 min | "
     "strike node-c 4 for 4800 s instead of 1, quarantine for 1200 s")),
    ("T17.3 but not beyond a day", broken("a:ready b:ready c:lost", strikes={"node-c": {"t2": 30}}, **KNOWN),
     (f"{TWO}: node-c broke 31 rounds within 1 h, kept out for 1 d | "
     "strike node-c 30 for 90000 s instead of 1, quarantine for 86400 s")),
    ("T17.3 nor whatever a record claims", broken("a:ready b:ready c:lost", strikes={"node-c": {"t2": 2**40}}, **KNOWN),
     (f"{TWO}: node-c broke {2**40 + 1} rounds within 1 h, kept out for 1 d | "
     f"strike node-c {2**40} for 90000 s instead of 1, quarantine for 86400 s")),
    ("T17.2 a limit of one", broken("a:ready b:ready c:lost", **{**KNOWN, "quarantine": QuarantineLimit(1, 60.0, 5.0)}),
     (f"{TWO}: node-c broke 1 round within 1 min, kept out for 5 s | "
     "strike node-c 1 for 65 s instead of 0, quarantine for 5 s")),
    ("T17.3 a day from the beginning",
     broken("a:ready b:ready c:lost", **{**KNOWN, "quarantine": QuarantineLimit(1, 60.0, QUARANTINE_MAX_S)}),
     (f"{TWO}: node-c broke 1 round within 1 min, kept out for 1 d | "
     "strike node-c 1 for 86460 s instead of 0, quarantine for 86400 s")),
)
def test_when_a_host_is_quarantined_and_for_how_long(view, expected):
    assert said(view) == expected


HELD = {"quarantined": IS_OUT, **KNOWN}
ENDS = f"; node-c quarantined: {BROKE}"


@table(
    ("T17.4 a host that was in the round is left out", broken("a:ready b:ready c:ready", **HELD),
     f"{TWO}: all who live are ready{ENDS} | seal a b"),
    ("T17.4 the others are full without it", broken("a:ready b:ready c:new d:ready e:ready", **HELD),
     f"4 of 2..4 nodes: full{ENDS} | seal a b d e"),
    ("T17.4 it is let in if quorum needs it", broken("a:ready c:ready b:lost", strikes={"node-b": {"t3": 1}}, **HELD),
     f"{TWO}: all who live are ready | seal a c"),
    ("T17.2 the seal says who was quarantined just now",
     broken("a:ready b:ready c:lost", strikes={"node-c": {"t3": 3}}, **HELD),
     f"{TWO}: all who live are ready{ENDS} | seal a b"),
    ("T17.4 of several, those with the fewest strikes, and no more than are needed",
     broken("a:ready b:ready c:ready d:ready", **{**HELD, "quarantined": {**IS_OUT, "node-d": BROKE, "node-b": BROKE}},
            strikes={"node-b": {"t1": 3}, "node-c": {"t1": 4}, "node-d": {"t1": 3}}),
     "2 of 2..4 nodes: all who live are ready; node-c and 1 more quarantined: " + BROKE + " | seal a b"),
    ("T17.4 it does not make a running round grow", sealed("a b c:new", quarantined=IS_OUT, quarantine=LIMIT),
     f"round 3 runs with 2 nodes{ENDS}"),
    ("T17.4 nor is it thrown out of one", sealed("a c", quarantined=IS_OUT, quarantine=LIMIT), "round 3 runs with 2 nodes"),
    ("T17.4 nor does it stop one that could not go on without it",
     sealed("a b:drains c:new", quarantined=IS_OUT, quarantine=LIMIT, drain_age=9.0),
     "round 3 broken: b draining: SIGTERM | phase=broken cause=drained(b)"),
    ("T17.4 stragglers are evicted if the others are a quorum with it",
     broken("a:ready b c:new", **{**HELD, "age": 80.0}), "b did not stop within 75 s: evicted | evict B"),
    ("T17.4 a first head is made with it", no_head("a c", quarantined=IS_OUT, quarantine=LIMIT, max=2),
     "2 of 2 nodes: full | seal a c"),
    ("T17.4 a run that cannot be formed with it either waits for others", opened("c", quarantined=IS_OUT, quarantine=LIMIT),
     "1 of 2..4 nodes: waiting for 1 more"),
)
def test_a_quarantined_host_is_kept_out_unless_quorum_needs_it(view, expected):
    assert said(view) == expected


def test_the_newest_members_of_a_host_that_is_let_in_do_not_displace_others():
    """T17.4: as many as are needed, whatever ranks they had: `choose` would prefer members of the table."""
    view = broken("c:ready d:ready a:ready b:new", min=3, max=3, **{**HELD, "quarantined": {**IS_OUT, "node-d": BROKE}})
    assert said(view).endswith("| seal c b a")


def test_as_many_hosts_as_the_limit_get_their_strikes():
    lost = " ".join(f"{name}:lost" for name in "cdefghij")
    assert len(lost.split()) == HOSTS_MAX
    assert "node-c has broken" in lead(broken(f"a:ready b:ready {lost}", max=16, **KNOWN)).reason


def test_a_member_that_is_kept_out_is_shown_with_its_reason():
    """S1: and one that quorum needs is shown as what it is."""
    out = describe("job", sealed("a b c:new", quarantined=IS_OUT, quarantine=LIMIT))
    assert [(one.name, one.state, one.problem) for one in out.members] == [
        ("a", "in", ""), ("b", "in", ""), ("c", "quarantined", BROKE)
    ]  # fmt: skip
    needed = describe("job", sealed("a c", quarantined=IS_OUT, quarantine=LIMIT))
    assert [(one.name, one.state, one.problem) for one in needed.members] == [("a", "in", ""), ("c", "in", "")]
