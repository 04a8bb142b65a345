"""Views of a run in few words, so that a test shows only what matters for its rule.

A run is written as one text, one word per member in the order in which they came: `"a b c:ready d:lost e:new"`. A name
alone is a member of the head's table that runs its workers or, where there is no table, one that waits to be in the
first. What may stand behind the colon is in `STATES`. The member called a has the id A and the host node-a, so that a
rule that mixes these up is found out. Those in the table have the ranks 0, 1, 2 ... in the order in which they are
written.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec

from rdzv.core.acts import Seal, Verdict
from rdzv.core.model import Era, Head, MemberRecord, Phase, RankEntry, RoundId, RoundReport, RunSettings
from rdzv.core.ranks import digest
from rdzv.core.view import LiveMember, View

ERA = Era(1, "e1")
NUMBER = 3
ROUND = RoundId(ERA, NUMBER)
FIRST_CREATED = 11
REVISION = 900
CALL_SEQ = 5
"""The write that set the call of the head."""

# Fields of a member's record and of its rank entry; None where it has no key or no entry.
_RUNS: dict[str, Any] = {}
STATES: dict[str, tuple[dict[str, Any] | None, dict[str, Any] | None]] = {
    "in": (_RUNS, {}),
    "ready": ({"left": ROUND}, {}),
    "drains": ({"drain": "SIGTERM"}, {}),
    "done": ({"done": True}, {}),
    "lost": (None, {}),
    "gave_up": (None, {"gave_up": "exit code 1"}),
    "went": (None, {"went": "scaled down"}),
    "gone": (None, {"done": True}),
    "sick": ({"left": ROUND, "unhealthy": "bad disk"}, {}),
    "new_sick": ({"unhealthy": "bad disk"}, None),
    "new": (_RUNS, None),
    "new_drains": ({"drain": "SIGTERM"}, None),
    # The entry is that of a former life of the member's key.
    "again": (_RUNS, {"created": 5}),
}


def member(called: str, **record: Any) -> MemberRecord:
    values = {"name": called, "host": f"node-{called}", "boot": f"node-{called}:29500", **record}
    return MemberRecord(**values)


def live(called: str, created: int = FIRST_CREATED, **record: Any) -> LiveMember:
    """A member whose key exists."""
    return LiveMember(called.upper(), member(called, **record), created, created + 100)


def entry(name: str, rank: int, created: int = 0, **fields: Any) -> RankEntry:
    values = {"host": f"node-{name}", "sealed_as": name.upper(), "since": 1, **fields}
    return RankEntry(rank=rank, name=name, created=created, **values)


def settings(min: int = 2, max: int = 4, **others: Any) -> RunSettings:
    return RunSettings(min_nodes=min, max_nodes=max, **others)


_SETTINGS = {"min", "max", *RunSettings.__struct_fields__}
_HEAD = set(Head.__struct_fields__)
_AGES = {
    "age": "call_age_s", "sealed_age": "sealed_age_s", "grown_age": "grown_age_s", "drain_age": "drain_age_s",
    "stall_age": "stall_age_s",
}  # fmt: skip


def view(phase: Phase | None, people: str = "", **given: Any) -> View:
    """The run as its leader sees it. Each argument goes where its name belongs: settings, head or view.

    `records` and `entries` hold further fields by name, as in `records={"a": {"order": "7"}}`.
    """
    records: Mapping[str, Any] = given.pop("records", {})
    fields: Mapping[str, Any] = given.pop("entries", {})
    members, entries = _people(phase, people, records, fields)
    agreed = settings(**{name: given.pop(name) for name in _SETTINGS & set(given)})
    in_head = {} if phase is None else {name: given.pop(name) for name in _HEAD & set(given)}
    given = {_AGES.get(name, name): value for name, value in given.items()}
    if given.pop("young", False):
        given = {"durable": False, "known_s": 1.0, **given}
    base = {"settings": agreed, "me": next(iter(members), ""), "revision": REVISION, "fresh": "fresh"}
    return View(**{**base, "head": head(phase, entries, **in_head), "members": members, "entries": entries, **given})


no_head = partial(view, None)
"""A view without a head: the run is new, or the engine forgot it."""
opened = partial(view, Phase.OPEN)
"""A view before the first round."""
sealed = partial(view, Phase.SEALED)
"""A view in which round 3 runs."""
broken = partial(view, Phase.BROKEN)
"""A view in which round 3 is over and the next is being formed."""
closed = partial(view, Phase.CLOSED)


def _people(
    phase: Phase | None, people: str, records: Mapping[str, Any], fields: Mapping[str, Any]
) -> tuple[dict[str, LiveMember], dict[str, RankEntry]]:
    members: dict[str, LiveMember] = {}
    entries: dict[str, RankEntry] = {}
    usual = "new" if phase in (None, Phase.OPEN) else "in"
    for index, word in enumerate(people.split()):
        name, _, state = word.partition(":")
        record, entry_fields = STATES[state or usual]
        created = FIRST_CREATED + index
        if record is not None:
            members[name.upper()] = live(name, created, **{**record, **records.get(name, {})})
        if entry_fields is not None:
            values = {"rank": len(entries), "created": created, **entry_fields, **fields.get(name, {})}
            entries[name.upper()] = entry(name, **values)
    return members, entries


def head(phase: Phase | None, entries: Mapping[str, RankEntry], **fields: Any) -> Head | None:
    """A head of round 3, or of none yet, that has been written seven times."""
    if phase is None:
        return None
    base: dict[str, Any] = {"run": "r1", "era": ERA, "next_era": ERA, "phase": phase, "seq": 7, "call_seq": CALL_SEQ}
    if phase is not Phase.OPEN:
        size = len(entries)
        base |= {"number": NUMBER, "table": "t3", "size": size, "top": size, "boot": "node-a:29400"}
        base |= {"digest": digest(entries.values()), "seen": 800}
    return Head(**{**base, **fields})


def after(before: View, **changes: Any) -> Head:
    """The head that the next write makes: `changes` and the counts that every write moves."""
    assert before.head is not None
    seq = before.head.seq + 1
    moved = {"seq": seq}
    if changes.get("call", before.head.call) is not before.head.call:
        moved["call_seq"] = seq
    return msgspec.structs.replace(before.head, **moved, **changes)


def seal_of(verdict: Verdict) -> Seal:
    assert isinstance(verdict.act, Seal), verdict
    return verdict.act


def ranks_of(verdict: Verdict) -> dict[str, int]:
    """Name and rank of the members that a verdict seals in, by rank."""
    entries = sorted(seal_of(verdict).entries.values(), key=lambda entry: entry.rank)
    return {entry.name: entry.rank for entry in entries}


def report(number: int = NUMBER, era: Era = ERA, **fields: Any) -> RoundReport:
    """A member's report to an emptied engine of a round of two."""
    base: dict[str, Any] = {"run": "r1", "table": f"t{number}", "size": 2, "digest": "d", "next_era": era}
    return RoundReport(era=era, number=number, **{**base, **fields})


told = report
