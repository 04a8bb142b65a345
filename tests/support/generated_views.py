"""Random views of a run, likely or not, for properties that hold for every view."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
from hypothesis import strategies as st

from rdzv.core.model import (
    NO_ROUND,
    Call,
    Cause,
    CauseKind,
    DrainNotice,
    Era,
    Phase,
    QuarantineLimit,
    Reach,
    RoundId,
    RoundReport,
    RunSettings,
)
from rdzv.core.view import View
from support.views import CALL_SEQ, STATES, view

CALLS = {
    Phase.OPEN: (Call.NONE, Call.LAST),
    Phase.SEALED: (Call.NONE, Call.SETTLE, Call.NOTICE),
    Phase.BROKEN: (Call.NONE, Call.LAST, Call.REGROUP),
    Phase.CLOSED: (Call.NONE,),
}
"""The timers that can run in each phase: views are drawn with these, and verdicts must keep to them."""

AGES = ("known_s", "call_age_s", "sealed_age_s", "grown_age_s", "drain_age_s", "stall_age_s", "away_asked_s")

# Most parts are picked from lists that are made once, by chance but the same each time: to draw every field of every
# record anew is slow, and most of what comes of it looks alike to the rules.

chance = random.Random(1)
pick = chance.choice

INSTANCES = ["e1", "e2", "e3"]
TIMES = [0.0, 1.0, 2.5, 30.0, 75.0]
# Halves, so that sums of ages are exact.
AGE = [0.0, 0.0, 0.5, 0.5, 1.0, 2.5, 3.0, 30.0, 59.5, 60.0, 75.0, 1000.0]
CAUSE = Cause(kind=CauseKind.LOST, text="x lost")
STOPPED = Cause(kind=CauseKind.RESTARTED, text="the workers of a stopped: a new round is wanted", members=("a",))


def an_era() -> Era:
    return Era(chance.randint(1, 3), pick(INSTANCES))


def an_agreement() -> RunSettings:
    unit, low = pick([1, 1, 2, 3]), pick([1, 2, 2, 3])
    segment = pick([1, 1, 1, unit, 2 if unit == 1 else 1])
    step = max(unit, segment)
    return RunSettings(
        min_nodes=low, max_nodes=max(low, math.ceil(low / step) * step + chance.randint(0, 4)), unit=unit, segment=segment,
        last_call=pick(TIMES), regroup=pick(TIMES[1:]), settle=pick(TIMES), grow=pick(["settle", "settle", "now", "never"]),
        grow_every=pick(TIMES), replace_wait=pick(TIMES), drain_settle=pick(TIMES), on_failure=pick(["close", "wait"]),
        drain_notice=pick([0.0, 0.0, 30.0]), futile_rounds=pick([0, 0, 1, 3]),
        quarantine=pick([None, None, QuarantineLimit(1, 60.0), QuarantineLimit(3, 60.0)]),
    )  # fmt: skip


def a_told() -> RoundReport:
    return RoundReport(
        run=pick(["r1", "r1", "r2"]), era=an_era(), number=chance.randint(0, 6), table=pick(["t3", "t3", "t4"]),
        phase=pick([Phase.OPEN, Phase.SEALED, Phase.SEALED, Phase.BROKEN, Phase.CLOSED]), size=chance.randint(0, 3),
        rank=chance.randint(-1, 2), digest=pick(["d", "d", "d2"]), incarnation=chance.randint(0, 1), next_era=an_era(),
        cause=pick([None, CAUSE]),
    )  # fmt: skip


def a_head(phase: Phase) -> dict[str, Any]:
    era = an_era()
    fields = {
        "era": era, "next_era": pick([era, era, Era(era.level + 1, pick(INSTANCES))]),
        "call": pick(CALLS[phase]), "cause": pick([None, CAUSE, STOPPED]), "flaps": pick([{}, {"f": 1, "g": 30}]),
        "flapped": pick([(), (), ("a", "b")]), "reach": pick([None, Reach(step=7), Reach(step=7, rounds=2, cause="x lost")]),
    }  # fmt: skip
    if phase is Phase.SEALED:
        # A notice that runs was given, and one that was given may be over.
        given = DrainNotice(reason="a draining", limit_s=pick([2.5, 30.0]), drains=pick([1, 2]))
        fields["notice"] = given if fields["call"] is Call.NOTICE else pick([None, None, given])
    if phase is not Phase.OPEN:
        fields |= {"adopted": pick([False, True]), "grown": pick([0, 2]), "number": chance.randint(1, 5)}
    return fields


PLACES: list[dict[str, str]] = [
    {}, {},
    {name: f"b1/r{index % 2}/{name}" for index, name in enumerate("abcdefg")},
    {name: f"b{index // 4}/r{index // 2}/{name}" for index, name in enumerate("abcdefg")},
    {"a": "r1/a", "b": "r1/b", "c": "r2/c", "e": "r2", "f": "/", "g": "r1//g/"},
]  # fmt: skip
"""Paths by name: none, racks in turn, blocks of two racks, and some that no setting would take."""
AGREED = [an_agreement() for _ in range(300)]
TOLDS = [a_told() for _ in range(300)]
HEADS = {phase: [a_head(phase) for _ in range(100)] for phase in Phase}
MANY_AGES = [{age: pick(AGE) for age in AGES} for _ in range(300)]
MOODS = ["in", "ready", "ready", "in ready", "in in ready done gone", "in ready drains lost went", " ".join(STATES)]
"""Sets of states that the members of one table are drawn from: most runs are not in all of them at once."""


@st.composite
def views(draw):
    """Head, table and what members say are drawn apart, so that they need not fit: the rules must bear with that."""
    phase = draw(st.sampled_from([None, *Phase, Phase.SEALED, Phase.BROKEN]))
    mood = ["new", "new", "new", "new_drains"]
    if phase not in (None, Phase.OPEN):
        mood = draw(st.sampled_from(MOODS)).split()
    states = draw(st.lists(st.sampled_from(mood), max_size=5)) + draw(st.sampled_from([[], ["new"], ["new", "new"]]))
    people = [f"{name}:{state}" for name, state in zip("edcbafg", states, strict=False)]
    people = people[:: draw(st.sampled_from([1, -1]))]
    given = {} if phase is None else draw(st.sampled_from(HEADS[phase]))
    here = NO_ROUND if phase is None else RoundId(given["era"], given.get("number", 0))
    before = RoundId(Era(1, "e0"), 1)
    said: dict[str, dict[str, Any]] = {}
    places = draw(st.sampled_from(PLACES))
    for word in people:
        record = said[word[0]] = {"order": {"c": "2", "d": "10"}.get(word[0], ""), "topology": places.get(word[0], "")}
        if word.endswith(":ready"):
            record["left"] = draw(st.sampled_from([here, here, here, here, before]))
            record["reached"] = draw(st.sampled_from([-1, 7, 8]))
        elif word.endswith((":in", ":drains")):
            record["saved"], record["grace"] = draw(st.sampled_from([(0, 0.0), (CALL_SEQ, 0.0), (CALL_SEQ, 2.5), (0, 30.0)]))
        elif word.endswith(":sick"):
            record["left"] = here  # The put that says unhealthy gives the round up.
    for name in draw(st.lists(st.sampled_from([word[0] for word in people]), max_size=3)) if people else []:
        said[name] |= {draw(st.sampled_from(["holds", "heard"])): draw(st.sampled_from(TOLDS))}
    agreed = msgspec.structs.asdict(draw(st.sampled_from(AGREED)))
    return view(
        phase, " ".join(people), records=said,
        entries={
            word[0]: {"since": 1 + index % 5, "topology": places.get(word[0], "")} for index, word in enumerate(people)
        },
        durable=draw(st.booleans()), linger_s=draw(st.sampled_from([0.0, 2.0, 8.0])),
        orphans=[] if phase is None else draw(st.sampled_from([[], [], [], ["x1", "x2"]])),
        asked=draw(st.sampled_from([{}, {}, {}, {"C": "maintenance"}])),
        banned=draw(st.sampled_from([{}, {}, {}, {"node-a": "bad memory"}, {"node-e": "bad memory"}])),
        strikes=draw(st.sampled_from([{}, {}, {"node-a": {"t1": 1, "t2": 1}, "node-b": {"t3": 1}}])),
        quarantined=draw(st.sampled_from([{}, {}, {"node-c": "broke"}, {"node-b": "broke", "node-d": "broke"}])),
        min=agreed.pop("min_nodes"), max=agreed.pop("max_nodes"), **agreed, **given, **draw(st.sampled_from(MANY_AGES)),
    )  # fmt: skip


def later(view: View, seconds: float) -> View:
    """The same, if nothing happens for so long."""
    return msgspec.structs.replace(view, **{age: getattr(view, age) + seconds for age in AGES})
