"""The leader's decisions: a pure function from a view of the run to one act, with a reason."""

# Theory of operation
# -------------------
# All members of a run share one record, the *head*, which every member watches. It says which round was sealed last and
# whether that round still runs. One member is the *leader*: the live member whose key is oldest. Only the leader lists
# the members. It builds a `View` of the run at one revision and passes it to `lead`, which returns a `Verdict`: one act
# or none, the reason in words, and when to look again. The leader carries the act out and looks again. No other code
# decides anything.
#
# There are five acts: write a new head, seal a round (a rank table and the head that names it), evict members (delete
# their keys), sweep rank tables that no head names, and strike a host that broke a round.
#
# The head moves through four phases:
#
#     (none) --T2--> open --T6--> sealed --T7--> broken --T6--> sealed ...
#        \                           |               |
#         +--T2, T14--> sealed       +-----T11-------+--> closed
#         +--T15--> broken
#
#     open      no round yet; members gather
#     sealed    a round runs; its rank table is fixed
#     broken    the round is over; its members stop their workers and gather again
#     closed    the run is over, for good
#
# Forming a round uses one timer, the *call*, which is part of the head so that a new leader inherits it:
#
#     last      quorum is there; other members get `last_call` seconds to come too
#     regroup   a broken round re-forms from its own members; nobody else is waited for (except for `replace_wait`)
#     settle    a sealed round has useful newcomers; it is broken for all of them together after `settle` seconds
#     notice    members of a sealed round drain; its workers are told to save, and then it is broken (drain_notice.py)
#
# Why this is safe
# ----------------
# Safety depends neither on there being only one leader nor on its view being fresh. Two members may both believe that
# they lead, for example when one was paused. Both may decide; only one write takes effect:
#
#     1. A leads, reads the run at revision 100, and is paused.
#     2. A's lease ends. B is now the oldest, reads at 120, and writes a new head at 121.
#     3. A wakes up and sends the write that it decided on at revision 100.
#     4. The engine refuses it: A's key is gone, and the head's revision is no longer the one that A read.
#
# The comparisons of step 4 are the GUARD. The code that carries an act out adds them to every write: the create
# revision of the leader's own key, and the modify revision of the head. A seal also compares the keys of all members it
# seals in. A refused leader reads again and decides anew. Therefore each rule below may treat its view as the truth.
#
# Why this needs no common clock
# ------------------------------
# Time enters as ages only: how long ago, by the leader's own clock, it received the head write that started the present
# call. No instant is stored or compared with another node's clock. A new leader measures the age from when it saw that
# write itself, so a change of leaders may lengthen a wait but never shortens it.
#
# How to read the rules
# ---------------------
# `RULES`, at the end, lists the rules of each phase in the order in which they are tried. The first rule that returns a
# verdict decides. The order is part of the protocol: for example, bans come before success, and a loss comes before a
# drain. The numbers (T6, T7.2) are those of docs/protocol.md; tests/core cites each of them.

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from . import causes, drain_notice, recovery
from .acts import Seal, Sweep, Verdict, WriteHead, because, close_head, with_call
from .choice import choose
from .evictions import away_wait_s, evict_away, evict_banned, evict_stragglers
from .fence import first_fence, next_fence
from .flaps import count_flaps, flap_wait_s, times
from .futile import close_as_futile, next_reach
from .model import BACK_S, CAUSE_MEMBERS_MAX, STALL_GATHER_S, Call, Cause, CauseKind, Era, Head, Phase, RankEntry
from .quarantine import about_kept_out, strike
from .ranks import assign, digest, worker_ranks
from .text import clip
from .view import LiveMember, View, candidate, name_of, names

Rule = Callable[[View], "Verdict | None"]


def lead(view: View) -> Verdict:
    """Return the one thing to do now or, if there is nothing to do, what the run waits for."""
    phase = None if view.head is None else view.head.phase
    for rule in RULES[phase]:
        verdict = rule(view)
        if verdict is not None:
            return msgspec.structs.replace(verdict, rule=rule.__name__)
    raise AssertionError(f"no rule speaks for {phase}: the last one of each phase always does")


# ---- no head: the run is new, or its engine came back empty (then the rules of recovery.py are tried first)


def first_head(view: View) -> Verdict:
    """T2: make the head, unless members of a run that the engine forgot may still come back."""
    if view.may_be_followed and not view.is_full:
        # An engine that lost its memory looks like a new one. Members of the old run reconnect within BACK_S and report
        # their round; a head made before that would begin at round 1 beside their running workers (H9). The reason
        # still names what a new run lacks, because nearly always the run is simply new.
        back = "waiting for members of an earlier round to come back to this engine"
        return Verdict(None, f"{view.here}: {_missing_for_quorum(view) or back}", view.first_wait_s - view.known_s)
    era = Era(1, view.fresh)
    head = Head(run=view.fresh, era=era, next_era=era, incarnation=view.incarnation, fence=first_fence(view))
    if view.is_full:
        # T6 would seal this round in the next step anyway. Every head write notifies all members, so making the head
        # already sealed halves the notifications of a starting run.
        return Verdict(_seal(msgspec.structs.replace(view, head=head), view.capacity), f"{view.here}: full")
    call, waited = view.first_call
    head = msgspec.structs.replace(head, call=call, call_seq=int(call is Call.LAST), waited=waited)
    return Verdict(WriteHead(head), f"{view.here}: {'last call' if call is Call.LAST else 'the run begins'}")


# ---- any phase but closed


def close_after_success(view: View) -> Verdict | None:
    """T11: close the run when all members of the table are done."""
    # Done members may have left already: their entries stay marked. Broken rounds count too, because a round may be
    # broken for newcomers while its last members finish.
    # Ranks are counted, not entries: a member that did not hear that it was let in on an emptied engine comes again under
    # a new id and then has two entries of one rank (steered seed 1892).
    head = _head(view)
    if not view.entries or len({view.entries[id].rank for id in view.done}) < head.size:
        return None
    cause = causes.success(head.size, head.number)
    return Verdict(WriteHead(close_head(head, cause)), cause.text)


def close_after_failure(view: View) -> Verdict | None:
    """T11: close the run when a member failed for good and too few members are left to go on without it."""
    # Two kinds of failure count: a member gave up, or a member was lost after others were done. The done ones will not
    # train again, so the lost one cannot be made good. A plain loss never closes a run: the cluster may restart the
    # agent.
    #
    # A close is final, so a stale view must not close over a member that has just come and would make up the quorum.
    # Seed 1216 closed a run 50 ms after such a join. The write of a close therefore also compares that no member has
    # come since the view's revision (`Empty(members/, since)`, added by the leader).
    if view.settings.on_failure != "close" or view.fits(view.candidates.values(), view.unhealthy):
        return None
    left = f"{len(view.candidates)} of at least {view.settings.min_nodes} nodes remain"
    if view.gave_up:
        first = min(view.gave_up.values(), key=lambda entry: entry.rank)
        lost = f"{names(view.vanished)} lost; " if view.vanished else ""  # Its workers may have failed because of that.
        text = f"{lost}{first.name} gave up: {first.gave_up}; {left}"
        kind, about = CauseKind.GAVE_UP, [first]
    elif view.done and view.lost and view.candidates:
        # The candidates would wait in vain. With no candidate nobody waits, so the lost member may still come back.
        about = list(view.lost.values())
        text = f"{names(about)} lost after others were done; {left}"
        kind = CauseKind.LOST
    else:
        return None
    cause = because(kind, text, map(name_of, about))
    return Verdict(WriteHead(close_head(_head(view), cause)), text)


# ---- sealed: a round runs


def break_round(view: View) -> Verdict | None:
    """T7: the round lost a member, or a member has given it up to restart its workers."""
    # A restart often follows from a loss (collectives fail on the survivors), so the loss is named as the cause.
    # If the loss is noticed later than the restart, `name_root_cause` names it.
    cause = causes.loss(view) or causes.restart(view)
    return None if cause is None else _broken(view, cause)


def _broken(view: View, cause: Cause) -> Verdict:
    """Break the round: its members are told, stop their workers and become ready again."""
    # Only survivors that are a quorum by themselves regroup without waiting. If newcomers counted too, the first of
    # them would be sealed in at once, and those a moment behind would make everybody restart again (H18). If the
    # survivors are no quorum, the head has no call, and T5 starts a last call as soon as a quorum is ready.
    call = Call.REGROUP if view.fits(view.survivors) else Call.NONE
    return _write_cause(view, cause, call)


def _write_cause(view: View, cause: Cause, call: Call) -> Verdict:
    """Write the broken head with that cause, and count the members that flapped."""
    head = _head(view)
    flaps, flapped = count_flaps(view)
    more = sorted(name for name, count in flaps.items() if count > head.flaps.get(name, 0))
    if more:
        name = more[0]
        said = f"{name} was lost soon after it came in{times(flaps[name])}"
        said += f": it waits {flap_wait_s(view.settings.settle, flaps[name]):g} s when it comes again"
        cause = msgspec.structs.replace(cause, text=clip(f"{cause.text} ({said})"))
    broken = msgspec.structs.replace(
        with_call(head, call), phase=Phase.BROKEN, cause=cause, flaps=flaps, flapped=flapped, notice=None
    )
    return Verdict(WriteHead(broken), f"round {head.number} broken: {cause.text}")


def break_for_stall(view: View) -> Verdict | None:
    """T7: workers get no further, as their members report."""
    # All workers stop within one step of each other, in the same collective, and their members report it one by one. The
    # rank that all others wait for may be reported last, so the leader gathers for a moment before it names any.
    cause = causes.stall(view)
    if cause is None:
        return None
    wait = min(STALL_GATHER_S, view.settings.stall) - view.stall_age_s
    if wait > 0 and len(view.stalled) < sum(not live.record.done for live in view.in_table.values()):
        return Verdict(None, f"round {_head(view).number}: {cause.text}, gathering others", wait)
    return _broken(view, cause)


def break_for_drains(view: View) -> Verdict | None:
    """T7: members announced that they are about to go."""
    # A scheduler signals many nodes at once, so drains gather for `drain_settle` and cost one restart together. If too
    # few members would remain, the round is left alone: training until the last moment beats standing still.
    # A notice to the workers comes first, if the run has one, and gathers drains as well. It is given even if the round is
    # left alone then: the members will go, and with them the round.
    if not view.drains:
        return drain_notice.stop_notice(view)
    if view.settings.drain_notice or _head(view).call is Call.NOTICE:
        verdict = drain_notice.give_notice(view)
        if verdict is not None:
            return verdict
    if not view.fits(view.survivors, view.newcomers):
        return None
    draining = f"{names(view.drains)} draining"
    wait = 0.0 if view.settings.drain_notice else view.settings.drain_settle - view.drain_age_s
    if wait > 0:
        return Verdict(None, f"round {_head(view).number}: {draining}, gathering others", wait)
    why = view.drains[0].record.drain or view.asked.get(view.drains[0].id, "")
    text = f"{draining}: {why}{drain_notice.outcome(view)}"
    return _broken(view, because(CauseKind.DRAINED, text, map(name_of, view.drains)))


def grow(view: View) -> Verdict:
    """T7: let useful newcomers in once they have gathered; otherwise describe the quiet round."""
    head = _head(view)
    useful, why_not, wait = useful_newcomers(view)
    plural = "" if head.size == 1 else "s"
    calm = f"round {head.number} runs with {head.size} node{plural}" + (f"; {why_not}" if why_not else "")
    calm += about_kept_out(view)
    if view.drains:
        calm += f"; {names(view.drains)} draining, but too few would remain without"
    if not useful:
        if head.call is Call.SETTLE:
            # The newcomers have gone. The next one waits from the beginning.
            return Verdict(WriteHead(with_call(head, Call.NONE)), calm)
        return Verdict(None, calm, wait)
    # The shortest wait counts: a well-behaved newcomer need not wait for a flapping one. Later newcomers do not restart
    # the timer, or one newcomer per second would keep all of them out (H26).
    first = min(useful, key=lambda live: head.flaps.get(live.record.name, 0))
    flaps = head.flaps.get(first.record.name, 0)
    settle_s = 0.0 if view.settings.grow == "now" else flap_wait_s(view.settings.settle, flaps)
    who = names(useful)
    starts = settle_s > 0 and head.call is not Call.SETTLE
    left_s = settle_s if starts else settle_s - view.call_age_s
    calm += f"; {who} waiting to come in"
    if flaps:
        most = "at most " if view.late else ""
        calm += f": {first.record.name} was lost soon after it came in{times(flaps)}, {most}{max(left_s, 0):.0f} s left"
    if starts:
        return Verdict(WriteHead(with_call(head, Call.SETTLE)), calm)
    if left_s > 0:
        return Verdict(None, calm, left_s)
    return _broken(view, because(CauseKind.GROWTH, f"{who} came to join", map(name_of, useful)))


def useful_newcomers(view: View) -> tuple[list[LiveMember], str, float | None]:
    """Return the newcomers worth a restart of the others; if none, why not, and in how many seconds that may change."""
    head, settings = _head(view), view.settings
    newcomers = sorted(view.newcomers, key=lambda live: live.created)
    size = view.fits(view.survivors, newcomers)
    gain = size - head.size
    if not newcomers:
        return [], "", None
    if settings.grow == "never":
        return [], f"{names(newcomers)} waiting: this run does not grow", None
    if view.done:
        # A round that is about to end is not worth breaking: the done members would not be in the next one.
        return [], f"{names(newcomers)} waiting: some members are done already", None
    if gain <= 0:
        if head.size >= view.capacity:
            return [], f"{names(newcomers)} spare", None
        # With members draining, more than a unit may be missing; `grow` mentions the drains itself.
        whole = f"segment of {settings.segment}" if settings.segment > 1 else f"unit of {settings.unit}"
        unit = "" if view.drains else f" for a {whole}"
        return [], f"{names(newcomers)} waiting{unit}", None
    wait = settings.grow_every - view.grown_age_s
    # `grow_every` limits growth beyond the largest size so far. Coming back to that size replaces a lost member, and is
    # let in at once, even if further newcomers come along with it.
    as_before = view.fitting(min(view.usable(view.survivors, newcomers), head.top))
    if size > head.top and as_before <= head.size and head.grown and wait > 0:
        return [], f"{names(newcomers)} waiting: the run grew a moment ago", wait
    if settings.segment > 1:
        chosen = {live.id for live in choose(view, [*view.survivors, *newcomers], size)}
        newcomers = [live for live in newcomers if live.id in chosen]
    return newcomers[:gain], "", None


# ---- open or broken: a round is being formed


def name_root_cause(view: View) -> Verdict | None:
    """T7: workers stopped because a member was lost, which is noticed only now; the cause names that member."""
    # One more head write, once per break: without it nobody would ever read which node had died.
    cause = causes.root(view)
    return None if cause is None else _write_cause(view, cause, _head(view).call)


def stop_call(view: View) -> Verdict | None:
    """T5: stop the timer when the quorum that started it is gone, so that the next quorum gets the full time again."""
    # This comes before `seal`: a last call that is over does not seal without a quorum.
    head = _head(view)
    if head.call is Call.LAST and not view.fits(view.ready):
        why = "quorum lost"
    elif head.call is Call.REGROUP and not view.fits(view.former):
        why = f"too few of round {head.number} are left to go on without others"
    else:
        return None
    return Verdict(WriteHead(with_call(head, Call.NONE)), f"{view.here}: {why}")


def seal(view: View) -> Verdict | None:
    """T6: fix the membership when a quorum is ready, no worker of the former round runs, and waiting gains nothing."""
    head, settings = _head(view), view.settings
    size = view.fits(view.ready)
    if not size or view.stragglers:
        # A straggler holds up even a full round. Otherwise quick survivors and spares would fill the round and throw
        # out survivors that merely take longer to stop (H17).
        return None
    if view.young and not view.is_full and recovery.missing_reports(view):
        return None
    if view.is_full:
        why = "full"
    elif head.call is Call.REGROUP and view.usable(view.ready) >= head.size:
        why = "all are back"
    elif head.call is Call.REGROUP and view.call_age_s >= max(settings.replace_wait, _return_wait_s(view)):
        why = "all who live are ready"
    elif head.call is Call.LAST and view.call_age_s + head.waited >= settings.last_call:
        why = "last call over"
    else:
        return None
    closed = close_as_futile(view, head, next_reach(view))
    if closed is not None:
        return Verdict(WriteHead(closed[0]), closed[1].text)
    # Before the seal, and not at the break: whoever is lost in between counts too.
    return strike(view) or Verdict(_seal(view, size), f"{view.here}: {why}{about_kept_out(view)}")


def start_call(view: View) -> Verdict | None:
    """T5: a quorum is ready; give other members `last_call` seconds to come too, unless they were a round before."""
    head = _head(view)
    if head.call is not Call.NONE or not view.fits(view.ready):
        return None
    if head.phase is Phase.BROKEN and view.fits(view.former):
        # Connections were cut, so that too few were left, and have healed. These members know each other from the round
        # that broke; no newcomer is waited for. Processes that were started anew do not count: others that were started
        # with them may be right behind (H18).
        text = f"{view.here}: enough of round {head.number} are back to go on"
        return Verdict(WriteHead(with_call(head, Call.REGROUP)), text)
    return Verdict(WriteHead(with_call(head, Call.LAST)), f"{view.here}: last call")


def _return_wait_s(view: View) -> float:
    """How long a round that lost its quorum by cut connections waits for the last of its members to come back."""
    # One that is a moment behind would otherwise make all restart. A head that was restored has waited for them already:
    # its first write set the call.
    head = _head(view)
    return BACK_S if head.call_seq > 1 and view.may_return and not view.fits(view.survivors) else 0.0


def _missing_for_quorum(view: View) -> str:
    """How many members are missing, in whole units, and which are here and not ready; empty if the ready ones are a quorum."""
    if view.fits(view.ready):
        return ""
    settings = view.settings
    whole = f" in whole segments of {settings.segment} neighbours" if settings.segment > 1 else ""
    missing = f"waiting for {-(-settings.min_nodes // view.step) * view.step - view.usable(view.ready)} more{whole}"
    if view.head is not None and view.stragglers:
        missing += f" ({names(view.stragglers)} stopping their workers)"
    if view.unhealthy:
        missing += f" ({names(view.unhealthy)} unhealthy: {view.unhealthy[0].record.unhealthy})"
    return missing


def keep_waiting(view: View) -> Verdict:
    """T5: say what is missing, and for how long at most."""
    # None of these waits is over: the rules before this one would have acted.
    head, settings = _head(view), view.settings
    age = view.call_age_s
    missing = _missing_for_quorum(view)
    if missing:
        return Verdict(None, f"{view.here}: {missing}")
    if view.stragglers:
        wait = settings.regroup - age
        reason = f"{view.here}: waiting for {names(view.stragglers)} to stop their workers, at most {wait:.0f} s more"
        return Verdict(None, reason, min(wait, away_wait_s(view)))
    if view.young and recovery.missing_reports(view):
        reason = f"{view.here}: waiting for members of round {head.number} to come back"
        return Verdict(None, reason, BACK_S - view.known_s)
    most = "at most " if view.late else ""
    if head.call is Call.REGROUP:
        back_s = _return_wait_s(view)
        who = "a replacement" if settings.replace_wait >= back_s else f"members of round {head.number} to come back"
        wait = max(settings.replace_wait, back_s) - age
        return Verdict(None, f"{view.here}: waiting {most}{wait:.0f} s for {who}", wait)
    wait = settings.last_call - age - head.waited
    return Verdict(None, f"{view.here}: last call, {most}{wait:.0f} s left", wait)


def sweep(view: View) -> Verdict | None:
    """T12: delete rank tables that no head names: a leader died or was refused between the table and the head."""
    if not view.orphans:
        return None
    return Verdict(Sweep(tuple(view.orphans)), "removing rank tables that no head names")


def _seal(view: View, size: int) -> Seal:
    """Choose `size` of the ready members, give them ranks, and make the head that announces them."""
    # The entries carry the create revisions of the chosen members. The engine compares them when it applies the seal,
    # so a member that dies between the view and the write is not sealed in (H1). An engine that takes enough writes in
    # one transaction (memory, embedded) gets the whole seal as one; others get the entries first, in batches, and the
    # head last. A third of the simulator's seeds allow only six writes per transaction, so that both ways are walked.
    head = _head(view)
    chosen = {live.id: candidate(live) for live in choose(view, view.ready, size)}
    kept = {id: view.entries[id].rank for id in view.in_table if id in chosen}
    vacant = [entry for id, entry in view.entries.items() if id not in kept]
    ranks = assign(list(chosen.values()), kept, vacant, view.settings.segment)
    # A chosen member may have heard of a round that this engine has forgotten. The new number must be above that too,
    # or the member would not take it.
    number = max([head.number, *(report.number for _, report in view.reports if report.run == head.run)]) + 1
    # The ranks of the workers are part of the seal too. Agents that exchanged them after it could be left without an
    # answer when a member was lost in between, and each then started workers in a world of its own (H31).
    in_order = sorted(ranks, key=ranks.__getitem__)
    records = [view.members[id].record for id in in_order]
    workers = worker_ranks([(record.role, record.workers) for record in records])
    entries = {}
    for id, rank in ranks.items():
        one = chosen[id]
        since = view.entries[id].since if id in kept else number
        entries[id] = RankEntry(
            rank=rank, created=one.created, name=one.name, host=one.host, order=one.order, topology=one.path,
            sealed_as=id, since=since, workers=workers[rank],
        )  # fmt: skip
    first = in_order[0]
    era = recovery.next_era(view)
    grown = number if size > head.top and head.number else head.grown
    # Also those that were lost after the break, which was noted for another reason.
    flaps, _ = count_flaps(view) if head.number else (head.flaps, ())
    came = sorted(entry.name for entry in entries.values() if entry.since == number)
    sealed = msgspec.structs.replace(
        with_call(head, Call.NONE),
        era=era, next_era=era, number=number, phase=Phase.SEALED,
        # Table ids are random and never reused, so a late write to the former round's store cannot reach this one
        # (H16).
        table=view.fresh,
        size=size, digest=digest(entries.values()), came=tuple(came) if len(came) <= CAUSE_MEMBERS_MAX else (),
        # Rank 0 bound its socket before it became ready. Asking for the address after the seal would leave all members
        # waiting if rank 0 died in between (H23).
        boot=view.members[first].record.boot,
        # The cause of the break stays, so that every member, however late it looks, can say why there is this round.
        seen=view.revision, fence=next_fence(view), adopted=False, top=max(size, head.top), grown=grown,
        flaps=flaps, flapped=(), notice=None, reach=next_reach(view),
    )  # fmt: skip
    return Seal(sealed, entries, first, head.table)


# ---- closed


def stay_closed(view: View) -> Verdict:
    """T11: nothing is written to the head after the close, whatever members do."""
    head = _head(view)
    return Verdict(None, f"closed: {head.cause.text if head.cause else 'no reason was given'}")


def _head(view: View) -> Head:
    assert view.head is not None, "asked only in phases that have a head"
    return view.head


_FORMING: tuple[Rule, ...] = (
    evict_banned, close_after_success, close_after_failure,
    name_root_cause, stop_call, evict_stragglers, evict_away, seal, start_call, sweep, keep_waiting,
)  # fmt: skip
_SEALED: tuple[Rule, ...] = (
    evict_banned, close_after_success, close_after_failure,
    break_round, break_for_stall, break_for_drains, sweep, grow,
)  # fmt: skip
RULES: Mapping[Phase | None, tuple[Rule, ...]] = {
    None: (recovery.restore_closed, recovery.restore_sealed, recovery.restore_broken, first_head),
    Phase.OPEN: _FORMING,
    Phase.SEALED: _SEALED,
    Phase.BROKEN: _FORMING,
    Phase.CLOSED: (stay_closed,),
}
