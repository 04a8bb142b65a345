r"""What the leader does: a pure function from what it sees to one write, with the reason.

Theory of operation
-------------------
A run has one *head*, which everybody watches, and one *leader*, the live member that came first. The leader alone lists the
members; it judges what it sees by the rules below and writes at most one thing: a new head, a rank table with the head that
names it, or the deletion of a member's key. Then it looks again. Nothing else decides anything.

The head moves through four phases:

    (none) --T2--> open --T6--> sealed --T7--> broken --T6--> sealed ...
       \                           |               |
        +--T2, T14--> sealed       +-----T11-------+--> closed
        +--T15--> broken

Safety never depends on the leader being the only one, or on its view being fresh. Every write is guarded by the create revision
of the leader's own key and the revision of the head it judged (GUARD, added by whoever carries the act out), and a seal
also by the keys of all it seals in. A stale leader's write is refused, and it reads again. So the rules below may be read as if
the view were the truth.

Time enters as ages only: how long ago, by the observer's own clock, it received the head write that started the present
timer. No instant is ever compared with another machine's. Every verdict says when to look again if nothing happens.

`RULES` lists, for each phase, the rules in the order in which they are asked; the first that has something to say decides.
The numbers are those of docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from . import recovery
from .acts import Act, Evict, Seal, Sweep, Verdict, WriteHead, because, call_for, close_head
from .model import (
    BACK_S,
    FLAP_WAIT_MAX_S,
    FLAP_WINDOW_S,
    FLAPS_MAX,
    Call,
    Cause,
    CauseKind,
    Era,
    Head,
    Phase,
    RankEntry,
)
from .ranks import assign, digest
from .view import LiveMember, View, candidate, names

Rule = Callable[[View], "Verdict | None"]


def lead(view: View) -> Verdict:
    """The one thing to do now, or what is being waited for."""
    phase = None if view.head is None else view.head.phase
    for rule in RULES[phase]:
        verdict = rule(view)
        if verdict is not None:
            return verdict
    raise AssertionError(f"no rule speaks for {phase}: the last one of each phase always does")


# ---- no head yet


def first_head(view: View) -> Verdict:
    """T2: make the head, unless members of a run that the engine forgot may still come back. All are here: sealed at once."""
    if view.young and not view.is_full:
        # Nearly always there was no such round; then what new users see is what they lack.
        back = "waiting for members of an earlier round to come back to this engine"
        return Verdict(None, f"{view.here}: {_too_few(view) or back}", BACK_S - view.known_s)
    era = Era(1, view.fresh)
    head = Head(run=view.fresh, era=era, next_era=era, incarnation=view.incarnation)
    if view.is_full:
        # As T6 would do next. Every head is told to all members, so this halves what a run tells them while it begins.
        return Verdict(_seal(msgspec.structs.replace(view, head=head), view.capacity), f"{view.here}: full")
    return Verdict(WriteHead(head), f"{view.here}: the run begins")


# ---- any phase but closed


def evict_banned(view: View) -> Verdict | None:
    """T8: an operator's ban takes effect at once."""
    banned = [live for live in view.members.values() if live.record.host in view.banned]
    if not banned:
        return None
    text = f"{names(banned)} banned: {view.banned[banned[0].record.host]}"
    return Verdict(Evict(_own_last(view, banned)), text)


def close_after_success(view: View) -> Verdict | None:
    """T11: all of the table are done."""
    head = _head(view)
    if not view.entries or len(view.done) < head.size:
        return None
    cause = because(CauseKind.SUCCESS, f"all {head.size} members of round {head.number} are done")
    return Verdict(WriteHead(close_head(head, cause)), cause.text)


def close_after_failure(view: View) -> Verdict | None:
    """T11: a member gave up, or was lost when others were done already, and quorum is out of reach."""
    if view.settings.on_failure != "close" or view.fitting(len(view.candidates)):
        return None
    left = f"{len(view.candidates)} of at least {view.settings.min_nodes} nodes remain"
    if view.gave_up:
        first = min(view.gave_up.values(), key=lambda line: line.rank)
        text = f"{first.name} gave up: {first.gave_up}; {left}"
        kind, about = CauseKind.GAVE_UP, [first]
    elif view.done and view.lost and view.candidates:
        # Those who are left would wait for nothing; if nobody is, whoever was lost may come back and go on.
        about = list(view.lost.values())
        text = f"{names(about)} lost after others were done; {left}"
        kind = CauseKind.LOST
    else:
        return None
    cause = because(kind, text, _about(about))
    return Verdict(WriteHead(close_head(_head(view), cause)), text)


# ---- sealed


def break_round(view: View) -> Verdict | None:
    """T7: the round lost a member, or one has given it up."""
    cause = _loss(view) or _restart(view)
    return None if cause is None else _broken(view, cause)


def _broken(view: View, cause: Cause) -> Verdict:
    """The survivors regroup by themselves if they are a quorum; else a last call will follow once others have come."""
    head = _head(view)
    call = Call.REGROUP if view.fitting(len(view.survivors)) else Call.NONE
    broken = msgspec.structs.replace(call_for(head, call), phase=Phase.BROKEN, cause=cause, flaps=_flaps(view))
    return Verdict(WriteHead(broken), f"round {head.number} broken: {cause.text}")


def _loss(view: View) -> Cause | None:
    lost = list(view.lost.values())
    if not lost:
        return None
    gave_up = [line for line in lost if line.gave_up]
    banned = [line for line in lost if line.host in view.banned]
    went = [line for line in lost if line.went]
    if gave_up:
        return because(CauseKind.GAVE_UP, f"{gave_up[0].name} gave up: {gave_up[0].gave_up}", _about(gave_up))
    if banned:
        text = f"{names(banned)} banned: {view.banned[banned[0].host]}"
        return because(CauseKind.BANNED, text, _about(banned))
    if len(went) == len(lost):
        return because(CauseKind.LEFT, f"{names(went)} left: {went[0].went}", _about(went))
    return because(CauseKind.LOST, f"{names(lost)} lost", _about(lost))


def _restart(view: View) -> Cause | None:
    if not view.restarted:
        return None
    text = f"the workers of {names(view.restarted)} stopped: a new round is wanted"
    return because(CauseKind.RESTARTED, text, _about(view.restarted))


def break_for_drains(view: View) -> Verdict | None:
    """T7: members are about to go. Gathered a while, because a scheduler signals all at once; not if too few would remain."""
    if not view.drains or not _can_do_without_drains(view):
        return None
    about = f"{names(view.drains)} draining"
    wait = view.settings.drain_settle - view.drain_age_s
    if wait > 0:
        return Verdict(None, f"round {_head(view).number}: {about}, gathering others", wait)
    why = view.drains[0].record.drain or view.asked.get(view.drains[0].id, "")
    return _broken(view, because(CauseKind.DRAINED, f"{about}: {why}", _about(view.drains)))


def _can_do_without_drains(view: View) -> bool:
    return view.fitting(len(view.survivors) + len(view.newcomers)) > 0


def grow(view: View) -> Verdict:
    """T7: let useful newcomers in once they have gathered; and say what a quiet round is waiting for."""
    head = _head(view)
    useful, why_not, wait = _useful(view)
    plural = "" if head.size == 1 else "s"
    calm = f"round {head.number} runs with {head.size} node{plural}" + (f"; {why_not}" if why_not else "")
    if view.drains:
        calm += f"; {names(view.drains)} draining, but too few would remain without"
    if not useful:
        if head.call is Call.SETTLE:
            return Verdict(WriteHead(call_for(head, Call.NONE)), calm)
        return Verdict(None, calm, wait)
    settle = 0.0 if view.settings.grow == "now" else min(_settle_for(view, live) for live in useful)
    who = names(useful)
    if settle > 0 and head.call is not Call.SETTLE:
        return Verdict(WriteHead(call_for(head, Call.SETTLE)), f"{calm}; {who} waiting to come in")
    if settle > view.call_age_s:
        return Verdict(None, f"{calm}; {who} waiting to come in", settle - view.call_age_s)
    return _broken(view, because(CauseKind.GROWTH, f"{who} came to join", _about(useful)))


def _useful(view: View) -> tuple[list[LiveMember], str, float | None]:
    """Newcomers worth a restart of the others; else why there are none and when that may change."""
    head, settings = _head(view), view.settings
    newcomers = sorted(view.newcomers, key=lambda live: live.created)
    size = view.fitting(len(view.survivors) + len(newcomers))
    gain = size - head.size
    if not newcomers:
        return [], "", None
    if settings.grow == "never":
        return [], f"{names(newcomers)} waiting: this run does not grow", None
    if view.done:
        return [], f"{names(newcomers)} waiting: some members are done already", None
    if gain <= 0:
        if head.size >= view.capacity:
            return [], f"{names(newcomers)} spare", None
        # With members draining, what is missing may be more than a unit; `grow` says so.
        unit = "" if view.drains else f" for a unit of {settings.unit}"
        return [], f"{names(newcomers)} waiting{unit}", None
    wait = settings.grow_every - view.grown_age_s
    as_before = view.fitting(min(len(view.survivors) + len(newcomers), head.top))
    if size > head.top and as_before <= head.size and head.grown and wait > 0:
        return [], f"{names(newcomers)} waiting: the run grew a moment ago", wait
    return newcomers[:gain], "", None


def _settle_for(view: View, live: LiveMember) -> float:
    """A host that was lost soon after it made the others restart waits twice as long each time."""
    flaps = _head(view).flaps.get(live.record.host, 0)
    return min(view.settings.settle * 2.0**flaps, max(FLAP_WAIT_MAX_S, view.settings.settle))


def _flaps(view: View) -> dict[str, int]:
    """Hosts that came in with this round and were lost soon after; those that stayed are forgiven."""
    head = _head(view)
    soon = view.sealed_age_s < FLAP_WINDOW_S
    flaps = dict(head.flaps)
    for id, line in view.entries.items():
        if id in view.lost:
            if soon and head.number > 1 and line.since == head.number:
                flaps[line.host] = min(flaps.get(line.host, 0) + 1, 30)
        elif not soon:
            flaps.pop(line.host, None)
    worst = sorted(flaps.items(), key=lambda item: (-item[1], item[0]))
    return dict(worst[:FLAPS_MAX])


# ---- open or broken


def stop_call(view: View) -> Verdict | None:
    """T5: quorum was lost while its timer ran."""
    head = _head(view)
    if head.call is Call.LAST and not view.fitting(len(view.ready)):
        why = "quorum lost"
    elif head.call is Call.REGROUP and not view.fitting(len(view.former)):
        why = f"too few of round {head.number} are left to go on without others"
    else:
        return None
    return Verdict(WriteHead(call_for(head, Call.NONE)), f"{view.here}: {why}")


def evict_stragglers(view: View) -> Verdict | None:
    """T8: the others have waited long enough for those who do not stop their workers."""
    head, settings = _head(view), view.settings
    if head.phase is not Phase.BROKEN or not view.stragglers:
        return None
    late = view.call_age_s >= settings.regroup
    if late and head.call in (Call.REGROUP, Call.LAST) and view.fitting(len(view.ready)):
        text = f"{names(view.stragglers)} did not stop within {settings.regroup:g} s: evicted"
        return Verdict(Evict(_own_last(view, view.stragglers)), text)
    return None


def seal(view: View) -> Verdict | None:
    """T6: fix the membership, if nothing speaks against it and waiting longer would bring nothing."""
    head, settings = _head(view), view.settings
    size = view.fitting(len(view.ready))
    if not size or view.stragglers:
        return None
    if view.young and not view.is_full and recovery.missing(view):
        return None
    if view.is_full:
        why = "full"
    elif head.call is Call.REGROUP and len(view.ready) >= head.size:
        why = "all are back"
    elif head.call is Call.REGROUP and view.call_age_s >= settings.replace_wait:
        why = "all who live are ready"
    elif head.call is Call.LAST and view.call_age_s >= settings.last_call:
        why = "last call over"
    else:
        return None
    return Verdict(_seal(view, size), f"{view.here}: {why}")


def start_call(view: View) -> Verdict | None:
    """T5: quorum is there; give others a last chance to come."""
    head = _head(view)
    if head.call is not Call.NONE or not view.fitting(len(view.ready)):
        return None
    return Verdict(WriteHead(call_for(head, Call.LAST)), f"{view.here}: last call")


def _too_few(view: View) -> str:
    """How many are missing; empty: none."""
    if view.fitting(len(view.ready)):
        return ""
    settings = view.settings
    return f"waiting for {-(-settings.min_nodes // settings.unit) * settings.unit - len(view.ready)} more"


def keep_waiting(view: View) -> Verdict:
    """Say what is missing, and until when. None of the times is over: the rules before this one would have acted."""
    head, settings = _head(view), view.settings
    age = view.call_age_s
    too_few = _too_few(view)
    if too_few:
        reason = f"{view.here}: {too_few}"
        if view.stragglers:
            reason += f" ({names(view.stragglers)} stopping their workers)"
        return Verdict(None, reason)
    if view.stragglers:
        wait = settings.regroup - age
        reason = f"{view.here}: waiting for {names(view.stragglers)} to stop their workers, at most {wait:.0f} s more"
        return Verdict(None, reason, wait)
    if view.young and recovery.missing(view):
        return Verdict(None, f"{view.here}: waiting for members of round {head.number} to come back", BACK_S - view.known_s)
    most = "at most " if view.late else ""
    if head.call is Call.REGROUP:
        wait = settings.replace_wait - age
        return Verdict(None, f"{view.here}: waiting {most}{wait:.0f} s for a replacement", wait)
    wait = settings.last_call - age
    return Verdict(None, f"{view.here}: last call, {most}{wait:.0f} s left", wait)


def sweep(view: View) -> Verdict | None:
    """T12: rank tables of seals that did not come about."""
    if not view.orphans:
        return None
    return Verdict(Sweep(tuple(view.orphans)), "removing rank tables that no head names")


def _seal(view: View, size: int) -> Seal:
    head = _head(view)
    former = {id: view.entries[id].rank for id in view.in_table}
    ordered = sorted(view.ready, key=lambda live: (former.get(live.id, 1 << 30), live.created))
    chosen = {live.id: candidate(live) for live in ordered[:size]}
    kept = {id: rank for id, rank in former.items() if id in chosen}
    vacant = [line for id, line in view.entries.items() if id not in kept]
    ranks = assign(list(chosen.values()), kept, vacant)
    number = max([head.number, *(told.number for _, told in view.told if told.run == head.run)]) + 1
    lines = {}
    for id, rank in ranks.items():
        one = chosen[id]
        since = view.entries[id].since if id in kept else number
        lines[id] = RankEntry(
            rank=rank, created=one.created, name=one.name, host=one.host, order=one.order, sealed_as=id, since=since
        )
    first = next(id for id, rank in ranks.items() if rank == 0)
    era = recovery.next_era(view)
    grown = number if size > head.top and head.number else head.grown
    sealed = msgspec.structs.replace(
        call_for(head, Call.NONE),
        era=era,
        next_era=era,
        number=number,
        phase=Phase.SEALED,
        table=view.fresh,
        size=size,
        digest=digest(lines.values()),
        boot=view.members[first].record.boot,
        seen=view.revision,
        cause=None,
        adopted=False,
        top=max(size, head.top),
        grown=grown,
    )
    return Seal(sealed, lines, first, head.table)


# ---- closed


def rest(view: View) -> Verdict:
    """T11: nothing is written to the head after it was closed."""
    head = _head(view)
    return Verdict(None, f"closed: {head.cause.text if head.cause else 'no reason was given'}")


def _head(view: View) -> Head:
    assert view.head is not None, "asked only in phases that have a head"
    return view.head


def _own_last(view: View, lives: list[LiveMember]) -> tuple[str, ...]:
    """A leader that evicts itself must do it last, for nothing it writes afterwards takes effect."""
    return tuple(live.id for live in sorted(lives, key=lambda live: (live.id == view.me, live.created)))


def _about(them: list[LiveMember] | list[RankEntry]) -> list[str]:
    return [one.record.name if isinstance(one, LiveMember) else one.name for one in them]


_FORMING: tuple[Rule, ...] = (
    evict_banned,
    close_after_success,
    close_after_failure,
    stop_call,
    evict_stragglers,
    seal,
    start_call,
    sweep,
    keep_waiting,
)

RULES: Mapping[Phase | None, tuple[Rule, ...]] = {
    None: (recovery.close_again, recovery.go_on, recovery.go_on_broken, first_head),
    Phase.OPEN: _FORMING,
    Phase.SEALED: (
        evict_banned,
        close_after_success,
        close_after_failure,
        break_round,
        break_for_drains,
        sweep,
        grow,
    ),
    Phase.BROKEN: _FORMING,
    Phase.CLOSED: (rest,),
}

__all__ = ["RULES", "Act", "Rule", "lead"]
