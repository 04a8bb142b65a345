"""A member's state, and what it does about what happens to it: a pure machine, as `rules` is for the leader.

Theory of operation
-------------------
`MemberState` is everything a member knows about itself. `step` alone changes it: it takes one *event* (a call of the
holder, an answer of the engine, a record that the watch showed) and the time on the member's own clock, and returns the
*actions* to carry out. The runner in `member/member.py` carries them out and feeds what comes of them back as events.
Nothing here asks a clock, waits, or talks to anybody.

Two small machines run side by side:

- `Standing`: where the member stands with the engine. `TRANSITIONS` lists which events count in which standing, and
  where each may lead. An event that the table does not list came too late (the answer to a request of a presence that
  has ended, a head seen after the member was evicted) and changes nothing. So nothing counts after an eviction but a
  new join, and nothing at all after the member has left.
- `Holding`: what the member has of rounds. It holds a round from the moment it is given one (T3) until the holder joins
  again (T4). After that it *owes* the others a record that says so, until that record is written.

Three questions are answered from the state alone: what the holder must be told (`change`, T10, computed anew after each
event, so that nothing is missed and nothing depends on the order of heads), what a waiting `join` does next
(`next_step`), and whether a call must be refused (`refusal`).

A *presence* is one key of this member on one engine instance. Its id, lease and watch are the runner's affair. Here a
presence begins with `Connected`, counts from `Registered` on, and ends with `EndPresence`, or with `EngineAway` if the
instance itself ended. The rules for heads are level, not edge: each looks at the present head only. A member that
missed heads in between, or reads one twice, comes to the same result.

The numbers T1 to T16 are those of docs/protocol.md. The tables are in `member_state.py`, which can also draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..errors import Closed, Drained, EngineMoved, Evicted, LeftAlready, RdzvError
from . import member_actions as do
from . import member_events as events
from .drain_notice import past_notices
from .member_actions import Actions
from .member_events import MemberEvent
from .member_rules import (
    GIVE_UP,
    GIVEN,
    LOOK_AGAIN,
    NOT_OURS,
    Change,
    ChangeKind,
    change_for,
    left_change,
    report,
    shares_address,
    still_ours,
    take_result,
    worth_examining,
)
from .member_state import (
    AWAY,
    ENDED,
    EVICTED,
    HOLDING,
    HOLDINGS,
    IDLE,
    LEAVING,
    LEFT,
    NOTHING,
    OWING,
    PRESENT,
    TRANSITIONS,
    Identity,
    MemberState,
)
from .model import CLOSED, NO_ROUND, OPEN, SEALED, CauseKind, Head, MemberRecord, RankEntry, RoundReport

# ---- questions


def away_s(state: MemberState, now: float) -> float:
    """How long the engine has given no sign of life; 0 while the member's lease cannot have ended."""
    if state.standing is PRESENT:
        return 0.0 if state.silent_at is None or is_fresh(state, now) else now - state.silent_at
    return 0.0 if state.away_at is None else now - state.away_at


def unrenewed_s(state: MemberState, now: float) -> float:
    """For how long the lease has not been renewed, by the member's own clock."""
    return now - state.renewed_at


def is_fresh(state: MemberState, now: float) -> bool:
    """Whether, by the member's own clock, its lease cannot have ended.

    This is only a reason to stop leading and taking. The truth is in the compares of each write.
    """
    return unrenewed_s(state, now) < state.me.lease


def is_elsewhere(state: MemberState, place: str) -> bool:
    """T16: this engine runs at another place, and may not know that the one this member knew still serves others."""
    return bool(state.place) and place != state.place and state.heard is not None


def successor_problem(state: MemberState, promised: str, began_at: float) -> str | None:
    """T16.4: why the server elsewhere is not the next one of the place that the platform promised; None: it may be.

    `began_at`: when it was started, by the member's own clock. The caller then asks whether the former still answers.
    """
    if not promised or promised != state.promised:
        return ""
    # No wall clock: each server tells how long it has been there, and the member counts both from its own present. An
    # older server is one that this member has left before, or that others left for the one that this member knows.
    if not began_at > state.began_at:  # In this form, an age that is not a number is refused, too.
        older_s = state.began_at - began_at
        known = f"the server of place {promised!r} that this member followed"
        return f"it was started {older_s:.1f} s before {known}, so it is the older one: end it"
    return None


def reports(state: MemberState) -> tuple[RoundReport | None, RoundReport | None, RankEntry | None]:
    """T13: the round held, the head heard last and the own entry, for an instance that may have forgotten them."""
    heard = None if state.heard is None else report(state.heard, state.heard_rank, state.left)
    return state.holds, heard, None if state.holds is None else state.entry


def closed_error(me: Identity, head: Head) -> Closed:
    cause = head.cause
    text = cause.text if cause else "no reason was given"
    return Closed(me.run_id, text, cause is not None and cause.kind is CauseKind.SUCCESS, me.closed_for)


def next_step(
    state: MemberState, now: float, announced: MemberRecord | None = None, *, unsure: bool = False
) -> do.Examine | do.PutReady | do.Raise | None:
    """The next step of a waiting join; None: wait until something changes.

    `announced`: the record on the engine; `unsure`: perhaps the one before it still is.
    """
    if state.standing is not PRESENT:
        return None
    if state.asked or state.drain:
        return do.Raise(Drained(state.me.run_id, state.me.name, state.asked or state.drain))
    head = state.head
    if head is not None and head.phase is CLOSED:
        return do.Raise(closed_error(state.me, head))
    if state.holding is OWING or unsure:
        return do.PutReady()
    if announced is not None and (announced.role, announced.workers) != (state.role, state.workers):
        return do.PutReady()
    # A member whose lease may have ended waits: what it read could be of a time when its key stood (scenario H4).
    if head is None or not is_fresh(state, now):
        return None
    if worth_examining(head, state.left, state.examined):
        return do.Examine(head.table)
    return do.PutReady() if announced is not None and shares_address(announced, head) else None


def unusable(state: MemberState, call: str) -> Exception | None:
    """Why this member can never be used again: it has left, or failed by a defect."""
    if state.standing is LEAVING or state.standing is LEFT:
        return LeftAlready(state.me.run_id, call)
    return None if state.end is None or isinstance(state.end, RdzvError) else state.end


def change_to_tell(state: MemberState) -> Change | None:
    """The change that the holder is told of. Its own leave comes before all others."""
    return left_change(state.me.run_id) if state.standing in (LEAVING, LEFT) else state.change


def summary(state: MemberState) -> str:
    """Return where the member is, in a few words."""
    if state.standing is LEAVING or state.standing is LEFT:
        return "has left"
    if state.holds is not None:
        text = f"rank {state.holds.rank} of {state.holds.size} in round {state.holds.number}"
    elif state.standing is IDLE:
        text = "has not joined"
    else:
        text = f"waits for a round ({state.standing.value})"
    return text if state.change is None else f"{text}, {state.change.kind.value}: {state.change.reason}"


def refusal(state: MemberState, call: str) -> Exception | None:
    """T10.8: why no call is answered at present: the member has left, was evicted, or met something final."""
    return unusable(state, call) or state.end


def join_refusal(state: MemberState, told_of: Exception | None) -> Exception | None:
    """Why a join cannot begin. After an eviction that the holder was told of, a join is that of a new member."""
    return state.end if state.standing is EVICTED and told_of is not state.end else unusable(state, "join")


def drain_left_s(state: MemberState, now: float, limit_s: float) -> float:
    """How long a member that drains keeps its workers, so that they can save; 0: it may stop them.

    `limit_s`: the setting `drain_notice`. The notice is over when the round is, when the leader says so, or in any case after
    that time or the member's own grace.
    """
    if state.drained_at is None or state.holds is None or state.change is not None:
        return 0.0
    if past_notices(state.head) > state.noticed:
        return 0.0
    return max(0.0, min(limit_s, state.grace or limit_s) - (now - state.drained_at))


# ---- the machine


def step(state: MemberState, event: MemberEvent, now: float) -> Actions:
    """Change the state by one event, and return what to do about it, in this order."""
    standings = TRANSITIONS[state.standing].get(type(event))
    if standings is None:
        return []
    held = state.holding
    actions = _HANDLERS[type(event)](state, event, now)
    assert state.standing in standings, f"{type(event).__name__} led to {state.standing}"
    assert state.holding is held or state.holding in HOLDINGS[held][type(event)], f"{held} became {state.holding}"
    if state.silent_at is not None or state.silent:
        _tell_of_silence(state, now, actions)
    change = _change(state, now)
    if change is not None and state.change is None and state.holding is HOLDING:
        actions.append(do.EndWorld(change.reason))
    state.change = change
    return actions


def _change(state: MemberState, now: float) -> Change | None:
    """T10: a function of the present state, so nothing is missed and nothing is told twice."""
    end = state.end
    if end is not None and not (isinstance(end, Closed) and end.success):
        if isinstance(end, Evicted):
            return Change(ChangeKind.EVICTED, end.reason)
        if not isinstance(end, RdzvError):
            return Change(ChangeKind.REFUSED, f"this member has failed: {end!r}")
        kinds = {Closed: ChangeKind.CLOSED, EngineMoved: ChangeKind.OUTAGE}
        return Change(kinds.get(type(end), ChangeKind.REFUSED), end.sentence)
    if state.holds is None:
        return None
    change = change_for(state.holds, state.heard)
    away = away_s(state, now)
    if change is None and away >= state.me.outage_grace:
        return Change(ChangeKind.OUTAGE, f"the engine has been away for {away:.0f} s: {state.trouble}")
    return change


def _tell_of_silence(state: MemberState, now: float, actions: Actions) -> None:
    """Tell of an engine that does not answer; connecting notices one that is gone, or is another."""
    present = state.standing is PRESENT
    was_silent, state.silent = state.silent, present and away_s(state, now) > 0
    if state.silent and not was_silent:
        actions.append(do.Tell("engine away", state.trouble))
    elif was_silent and present and not state.silent:
        actions.append(do.Tell("engine back", "it answers again"))


def _end(state: MemberState, error: Exception) -> Actions:
    state.standing, state.end = ENDED, error
    told: Actions = [do.Tell("ended", error.sentence)] if isinstance(error, RdzvError) else []
    return [do.EndPresence(), *told, do.WAKE]


def _evict(state: MemberState, reason: str) -> Actions:
    state.standing, state.end = EVICTED, Evicted(state.me.run_id, state.me.name, reason)
    return [do.EndPresence(), do.Tell("evicted", reason), do.WAKE]


def _lose_touch(state: MemberState, trouble: str, now: float) -> Actions:
    """The workers go on (G7). The observer hears of the first trouble only; an error later quotes the last one."""
    state.trouble = trouble
    if state.away_at is None:
        state.away_at = now
    told: Actions = [] if state.complained else [do.Tell("engine away", trouble)]
    state.complained = True
    return [*told, do.WAKE]


def _join(state: MemberState, event: events.Join, now: float) -> Actions:
    """T4: give up the round that is held, and be present."""
    actions: Actions = [do.ForgetShown()]
    state.role, state.workers = event.role, event.workers
    running = state.standing in (AWAY, PRESENT)
    if state.holds is not None:
        actions.append(do.EndWorld(state.change.reason if state.change else "this member joined again"))
        state.left = max(state.left, state.holds.round)
        state.holds = None
        # A presence that has ended has no entry that the others could wait for.
        state.holding = OWING if running else NOTHING
    state.done = False
    # A close is final, and a defect may have left anything behind. Every other refusal may be over by now.
    may_return = state.end is None or (isinstance(state.end, RdzvError) and not isinstance(state.end, Closed))
    if may_return and not running:
        state.standing, state.end, state.away_at = AWAY, None, now
        actions.append(do.Connect())
    return [*actions, do.WAKE]


def _connected(state: MemberState, event: events.Connected, _now: float) -> Actions:
    """A new presence has no entry in any table of this instance yet, and announces a fresh bootstrap socket."""
    state.head, state.examined, state.asked = None, "", ""
    state.engine_place = event.place
    if state.holding is OWING:
        state.holding = NOTHING
    return [do.Bind(event.addr)]


def _elsewhere(state: MemberState, event: events.Elsewhere, now: float) -> Actions:
    """T16: refuse it and keep the world. After `outage_grace` the member fails."""
    moved = EngineMoved(state.me.run_id, state.place, event.place, event.why or EngineMoved.why)
    actions = _lose_touch(state, moved.sentence, now)
    if state.refused != event.place:
        # Told at once, whatever else was: only an operator can help, and the workers go on for outage_grace at most.
        state.refused = event.place
        actions.append(do.Tell("engine away", moved.sentence))
    if away_s(state, now) >= state.me.outage_grace:
        return [*actions, *_end(state, moved)]
    return actions


def _engine_away(state: MemberState, event: events.EngineAway, now: float) -> Actions:
    state.standing = AWAY
    return _lose_touch(state, event.trouble, now)


def _registered(state: MemberState, event: events.Registered, _now: float) -> Actions:
    state.standing, state.place, state.promised, state.began_at = PRESENT, event.place, event.promised, event.began_at
    told: Actions = [do.Tell("present", f"on engine {state.me.endpoint}")]
    if state.complained:
        told.append(do.Tell("engine back", "it answers again"))
    state.away_at, state.complained = None, False
    # Counted from when the lease was asked for: on a slow engine, the time of the answers is part of it (seed 101358).
    state.renewed_at, state.silent_at = event.asked_at, None
    if state.holds is None:
        # It came with a round that was given up meanwhile, and the others do not know that yet.
        state.holding = OWING if event.brought else NOTHING
    if state.entry is None or not event.brought:
        state.entry = None if state.holds is None else state.entry
        return [*told, do.WAKE]
    # The entry was put in one transaction with the key, so it bears the key's revision (T13.4).
    state.entry = msgspec.structs.replace(state.entry, created=event.created)
    return [*told, do.MoveWorld(), do.WAKE] if state.holds is not None else [*told, do.WAKE]


def _head_sent(state: MemberState, event: events.HeadSent, _now: float) -> Actions:
    # The engine may be emptied before it answers. The head that is made next must know of this fence (seed 131099997).
    _know_fence(state, event.fence)
    return []


def _know_fence(state: MemberState, fence: int) -> None:
    if fence > state.fence:
        state.fence, state.fence_place = fence, state.engine_place


def _head_seen(state: MemberState, event: events.HeadSeen, _now: float) -> Actions:
    """The head changed. Some changes end the presence."""
    old, new = state.head, event.head
    state.head = new
    if new is not None:
        _know_fence(state, new.fence)
    if state.standing is LEAVING:
        return [] if new is None else [do.TellHead(old, new)]
    if new is None:
        # T11.10, T11.12: a closed head has expired, or the head is gone or garbage. No member may be taken for one of the
        # next life.
        if old is not None and old.phase is CLOSED:
            return _end(state, closed_error(state.me, old))
        return _replaced(state) if state.holds is None else _evict(state, "the run's records are gone or cannot be read")
    actions: Actions = []
    if state.heard is not None and state.heard.run != new.run:
        state.heard_rank, state.left = -1, NO_ROUND
        if state.holds is not None:
            return _evict(state, "the run id has begun a new life without it")
        if old is not None:
            actions += _replaced(state)
    if state.heard is None or state.heard.table != new.table:
        state.heard_rank = -1
    state.heard = new
    if state.holds is not None and old is None and not still_ours(state.holds, new):
        return _evict(state, f"the others went on to round {new.number} while it was away")
    actions.append(do.TellHead(old, new))
    if old is not None or new.phase is not OPEN:
        actions.append(do.WAKE)  # Else the run begins: nothing to do for anybody, and thousands may hear of it at once.
    return actions


def _replaced(state: MemberState) -> Actions:
    """Come in again, as a new member of the run's next life."""
    state.standing = AWAY
    return [do.EndPresence(), do.WAKE]


def _renewed(state: MemberState, event: events.Renewed, _now: float) -> Actions:
    state.renewed_at, state.silent_at = event.sent_at, None
    return [do.WAKE]


def _renewal_failed(state: MemberState, event: events.RenewalFailed, _now: float) -> Actions:
    state.trouble = event.trouble
    if state.silent_at is None and not event.paused:
        state.silent_at = event.sent_at
    return [do.WAKE]


def _drain_asked(state: MemberState, event: events.DrainAsked, _now: float) -> Actions:
    state.asked = event.reason
    return [do.WAKE]


def _examined(state: MemberState, event: events.Examined, now: float) -> Actions:
    """T3 and T4.1: take the round, give it up, or note that it is not this member's."""
    head, entry = event.head, event.entry
    if state.holding is HOLDING:
        return [do.WAKE]  # Another join that is under way was given it, for all of them.
    result = take_result(head, event.table, entry, event.created)
    # An answer that came too late may be of a time when the member's key stood. Ask again once that is certain.
    stale = not is_fresh(state, now) or (head is not None and head.round <= state.left)
    if head is None or stale or result is LOOK_AGAIN:
        return [do.WAKE]
    if result is GIVEN and entry is not None:
        return _given(state, head, entry)
    state.examined = event.table
    state.spare = result is NOT_OURS and head.size >= state.me.capacity
    if result is not GIVE_UP:
        return [_outside(state, head)] if head.phase is SEALED else []
    state.left, state.holding = head.round, OWING
    return [do.WAKE]


def _outside(state: MemberState, head: Head) -> do.Tell:
    """The notice that a round runs without this member."""
    nodes = "1 node" if head.size == 1 else f"{head.size} nodes"
    waits = "is a spare" if state.spare else "waits to be let in"
    return do.Tell("outside", f"it has {nodes}, and this node {waits}")


def _given(state: MemberState, head: Head, entry: RankEntry) -> Actions:
    state.holding, state.holds, state.entry = HOLDING, report(head, entry.rank), entry
    state.heard, state.heard_rank = head, entry.rank
    given: Actions = [do.GiveRound(head, entry), do.WAKE]
    if state.spare:
        state.spare = False
        given.append(do.Tell("promoted", f"from spare to rank {entry.rank} of {head.size}"))
    return [*given, do.Tell("given", f"rank {entry.rank} of {head.size}")]


def _ready_put(state: MemberState, event: events.ReadyPut, _now: float) -> Actions:
    if state.holding is OWING and event.left >= state.left:  # Else another round was given up meanwhile.
        state.holding = NOTHING
    return []


def _work_done(state: MemberState, _event: events.WorkDone, _now: float) -> Actions:
    state.done = True
    return []


def _draining(state: MemberState, event: events.Draining, now: float) -> Actions:
    state.drain = event.reason
    if state.drained_at is None:
        state.drained_at, state.grace, state.noticed = now, event.grace, past_notices(state.head)
    return []


def _leave(state: MemberState, _event: events.Leave, _now: float) -> Actions:
    state.standing = LEAVING
    return [do.EndWorld("this member has left"), do.WAKE]


def _left(state: MemberState, _event: events.Left, _now: float) -> Actions:
    state.standing = LEFT
    return [do.WAKE]


_HANDLERS: Mapping[type[MemberEvent], Callable[[MemberState, Any, float], Actions]] = {
    events.Join: _join, events.Connected: _connected, events.Elsewhere: _elsewhere, events.EngineAway: _engine_away,
    events.Registered: _registered, events.HeadSeen: _head_seen, events.HeadSent: _head_sent,
    events.Examined: _examined, events.KeyGone: lambda state, event, _now: _evict(state, event.reason),
    events.Failed: lambda state, event, _now: _end(state, event.error),
    events.Leads: lambda _state, _event, _now: [do.Tell("leading", "it is the earliest of the members present")],
    events.Renewed: _renewed, events.RenewalFailed: _renewal_failed, events.ReadyPut: _ready_put,
    events.DrainAsked: _drain_asked, events.WorkDone: _work_done, events.Draining: _draining,
    events.Leave: _leave, events.Left: _left,
}  # fmt: skip
