"""A run on paper: the rules, a list of records, and a clock that the test moves.

There is no network, no lease and no race; every read sees everything. Transcripts show what the rules alone do, and
`test_rules_hold.py` searches for a story that ends badly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import msgspec

from rdzv.core import model
from rdzv.core.acts import Evict, Seal, StrikeHost, Sweep, Verdict, WriteHead, close_head
from rdzv.core.evictions import evict_leader
from rdzv.core.member_rules import TakeResult, change_for, report, still_ours, take_result, worth_examining
from rdzv.core.model import NO_ROUND, CauseKind, Head, MemberRecord, Phase, RankEntry, RoundReport, RunSettings
from rdzv.core.rules import lead
from rdzv.core.view import LiveMember, View
from support.views import member

LOOKS_MAX = 20
"""A leader that acts more often without an event in between never comes to rest."""


@dataclass
class Person:
    """A member as it knows itself, which outlives its key and the engine."""

    name: str
    id: str
    holds: RoundReport | None = None
    entry: RankEntry | None = None
    left: model.RoundId = NO_ROUND
    heard: Head | None = None
    heard_rank: int = -1
    examined: str = ""
    is_away: bool = False
    """The engine came back empty, and the member has not come back to it yet."""


class Story:
    """One run. Methods are what members, operators, time and the engine do; `look` is what the leader does."""

    def __init__(self, settings: RunSettings, *, durable: bool = True) -> None:
        self.settings = settings
        self.durable = durable
        self.now = 0.0
        self.people: dict[str, Person] = {}
        self.linger_s = 0.0
        """0: the engine does not see the end of a process."""
        self._joins = 0
        self._ports: dict[str, int] = {}
        self._made = 0
        self._start_engine()

    def _start_engine(self) -> None:
        self.revision = 0
        self.head: Head | None = None
        self.members: dict[str, LiveMember] = {}
        self.tables: dict[str, dict[str, RankEntry]] = {}
        self.asked: dict[str, str] = {}
        self.banned: dict[str, str] = {}
        self.strikes: dict[tuple[str, str], tuple[int, float]] = {}
        """By host and table: the count of a strike, and when its lease ends."""
        self.quarantined: dict[str, tuple[str, float]] = {}
        self.known_at = self.call_at = self.sealed_at = self.grown_at = self.now
        self.drains_at: float | None = None
        self.killed: dict[str, float] = {}
        """When the processes of these members ended."""
        self.away_asked_at = -math.inf

    # ---- what members do

    def join(self, name: str, **record: Any) -> None:
        """T1: as new."""
        person = self.people[name] = Person(name, self._new_id(name))
        self._put(person, member(name, **{"boot": self._bind(name), **record}))

    def ready(self, name: str, unhealthy: str = "") -> None:
        """T4: the member's workers have stopped. `unhealthy`: why the check of its node fails (T4.6)."""
        person = self.people[name]
        if person.holds is not None:
            person.left = max(person.left, person.holds.round)
            person.holds = person.entry = None
        record = self.members[person.id].record
        heard = record.heard or record.holds
        boot = self._bind(name)
        given = {"left": person.left, "boot": boot, "holds": None, "heard": heard, "done": False, "unhealthy": unhealthy}
        self._put(person, msgspec.structs.replace(record, **given))

    def put(self, name: str, **record: Any) -> None:
        """Change the member's record: drain, done."""
        person = self.people[name]
        self._put(person, msgspec.structs.replace(self.members[person.id].record, **record))

    def die(self, name: str) -> None:
        """End the member's lease, without its knowledge."""
        self.members.pop(self.people[name].id, None)

    def go(self, name: str, **mark: Any) -> None:
        """T11: the member marks its entry, if it holds a round, and deletes its key."""
        person = self.people.pop(name)
        table = self.tables.get(person.holds.table, {}) if person.holds is not None else {}
        if person.id in table:
            table[person.id] = msgspec.structs.replace(table[person.id], **mark)
        self.members.pop(person.id, None)

    def notice(self, name: str) -> str:
        """T3, T4, T10, T15: the member looks at the head. Return what it does."""
        person, head = self.people[name], self.head
        live = self.members.get(person.id)
        if person.is_away:
            return "is away"
        if live is None:
            del self.people[name]
            return "evicted"
        if head is not None:
            known = person.heard is not None and person.heard.table == head.table
            person.heard, person.heard_rank = head, person.heard_rank if known else -1
        if person.holds is not None:
            told = change_for(person.holds, head)
            return f"told {told.kind.value}: {told.reason}" if told else f"runs round {person.holds.number}"
        if head is None or not worth_examining(head, person.left, person.examined):
            return "waits"
        entry = self.tables.get(head.table, {}).get(person.id)
        result = take_result(head, head.table, entry, live.created)
        person.examined = head.table
        if result is TakeResult.GIVEN and entry is not None:
            person.holds, person.entry, person.heard_rank = report(head, entry.rank), entry, entry.rank
            return f"given rank {entry.rank} of {head.size} in round {head.number}"
        if result is TakeResult.GIVE_UP:
            person.left = head.round
            self.ready(name)
            return f"gives up round {head.number}, which it never took"
        return "waits"

    def kill(self, name: str) -> None:
        """The member's process ends, and its lease does not yet."""
        self.killed[self.people[name].id] = self.now

    # ---- what others do

    def ask(self, name: str, reason: str) -> None:
        """An operator asks a member to drain."""
        self.asked[self.people[name].id] = reason

    def ban(self, host: str, reason: str) -> None:
        """An operator bans a host."""
        self.banned[host] = reason

    def close(self, reason: str) -> None:
        """An operator closes the run."""
        if self.head is not None and self.head.phase is not Phase.CLOSED:
            self._set_head(close_head(self.head, model.Cause(kind=CauseKind.CLOSED, text=reason)))

    def forget(self) -> None:
        """The engine comes back empty, and nobody is there yet."""
        self._start_engine()
        for person in self.people.values():
            person.is_away = True

    def back(self, name: str) -> str:
        """T13: a member comes to another engine instance and reports what it knows."""
        person = self.people[name]
        person.id, person.examined, person.is_away = self._new_id(name), "", False
        heard = None if person.heard is None else report(person.heard, person.heard_rank)
        if person.holds is not None and not still_ours(person.holds, self.head):
            del self.people[name]
            return "evicted"
        self._put(person, member(name, boot=self._bind(name), holds=person.holds, heard=heard))
        if person.holds is not None and person.entry is not None:
            person.entry = msgspec.structs.replace(person.entry, created=self.members[person.id].created)
            self.tables.setdefault(person.holds.table, {})[person.id] = person.entry
        return "back"

    def wait(self, seconds: float) -> None:
        """Time passes, and nobody looks."""
        self.now += seconds

    # ---- what the leader does

    def view(self) -> View:
        """The leader's view, with ages as a real leader measures them."""
        table = self.head.table if self.head is not None else ""
        leader = min(self.members.values(), key=lambda live: live.created, default=None)
        view = View(
            settings=self.settings,
            me=leader.id if leader is not None else "",
            durable=self.durable,
            known_s=self.now - self.known_at,
            revision=self.revision,
            head=self.head,
            members=dict(self.members),
            entries=dict(self.tables.get(table, {})),
            orphans=[] if self.head is None else [one for one in self.tables if one != table],
            asked=dict(self.asked),
            banned=dict(self.banned),
            strikes=self._strikes(),
            quarantined={host: reason for host, (reason, until) in self.quarantined.items() if until > self.now},
            call_age_s=self.now - self.call_at,
            sealed_age_s=self.now - self.sealed_at,
            grown_age_s=self.now - self.grown_at,
            linger_s=self.linger_s,
            away_asked_s=self.now - self.away_asked_at,
            fresh=f"x{self._made + 1}",
        )
        if not view.drains:
            self.drains_at = None
            return view
        if self.drains_at is None:
            self.drains_at = self.now
        return msgspec.structs.replace(view, drain_age_s=self.now - self.drains_at)

    def look(self) -> tuple[View, Verdict]:
        """Judge once and carry the verdict out."""
        view = self.view()
        verdict = lead(view)
        act = verdict.act
        if isinstance(act, WriteHead):
            self._set_head(act.head)
        elif isinstance(act, Seal):
            self.tables[act.head.table] = dict(act.entries)
            self.tables.pop(act.former_table, None)
            self._set_head(act.head)
        elif isinstance(act, Evict):
            for id in self._evictable(act):
                del self.members[id]
                self.asked.pop(id, None)
        elif isinstance(act, StrikeHost):
            assert self.head is not None
            for table in act.replaced:
                del self.strikes[act.host, table]
            self.strikes[act.host, self.head.table] = act.strike.count, self.now + act.lasts_s
            if act.quarantine is not None:
                self.quarantined[act.host] = act.quarantine.reason, self.now + act.quarantine_s
        elif isinstance(act, Sweep):
            for table in act.tables:
                del self.tables[table]
        self.revision += 1
        return view, verdict

    def _strikes(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (host, table), (count, until) in self.strikes.items():
            if until > self.now:
                found.setdefault(host, {})[table] = count
        return found

    def inherit(self, name: str) -> Verdict | None:
        """T8.6: a follower asks whether the leader is dead."""
        verdict = evict_leader(msgspec.structs.replace(self.view(), me=self.people[name].id))
        if verdict is not None and isinstance(verdict.act, Evict):
            for id in self._evictable(verdict.act):
                del self.members[id]
        return verdict

    def _evictable(self, act: Evict) -> list[str]:
        if act.away_s is None:
            return list(act.ids)
        away = [id for id in act.ids if self.now - self.killed.get(id, math.inf) >= act.away_s]
        if not away:
            self.away_asked_at = self.now
        return away[:1]

    def rest(self) -> list[tuple[View, Verdict]]:
        """Look until there is nothing to do; without members, or while the leader is dead, nobody looks."""
        looks: list[tuple[View, Verdict]] = []
        while self.members and min(self.members.values(), key=lambda live: live.created).id not in self.killed:
            looks.append(self.look())
            if looks[-1][1].act is None:
                break
            assert len(looks) <= LOOKS_MAX, "the leader does not come to rest"
        return looks

    # ---- how

    def _new_id(self, name: str) -> str:
        self._joins += 1
        return f"{name.upper()}{self._joins}"

    def _bind(self, name: str) -> str:
        """Return the address of a new bootstrap socket."""
        port = self._ports[name] = self._ports.get(name, 29499) + 1
        return f"node-{name}:{port}"

    def _put(self, person: Person, record: MemberRecord) -> None:
        self.revision += 1
        before = self.members.get(person.id)
        created = before.created if before is not None else self.revision
        self.members[person.id] = LiveMember(person.id, record, created, self.revision)

    def _set_head(self, head: Head) -> None:
        """Replace the head, and start the ages that a real member would."""
        old, self.head = self.head, head
        self._made += f"x{self._made + 1}" in (head.run, head.table)
        if old is None or old.run != head.run or old.call_seq != head.call_seq:
            self.call_at = self.now
        if old is None or old.table != head.table:
            self.sealed_at = self.now
        if old is None or old.grown != head.grown:
            self.grown_at = self.now
