"""Verdicts of the rules: all that must hold for each of them, and a verdict as one line of text."""

from __future__ import annotations

from typing import Any

from rdzv.core.acts import Evict, Seal, StrikeHost, Sweep, Verdict, WriteHead
from rdzv.core.evictions import AWAY_MAX
from rdzv.core.model import Call, Cause, CauseKind, Era, Head, Phase
from rdzv.core.ranks import digest
from rdzv.core.rules import lead
from rdzv.core.view import View

from .generated_views import CALLS

STEPS = {
    Phase.OPEN: {Phase.OPEN, Phase.CLOSED},
    Phase.SEALED: {Phase.SEALED, Phase.BROKEN, Phase.CLOSED},
    Phase.BROKEN: {Phase.BROKEN, Phase.CLOSED},
}
"""Phases that a write of the head may lead to; a seal leads from open or broken to sealed."""

KEPT = ["run", "era", "number", "table", "size", "digest", "boot", "seen", "adopted", "next_era", "top", "grown", "incarnation"]
"""Fields of the head that only a seal changes."""


def check(view: View, verdict: Verdict) -> None:
    """Assert all that must hold for every verdict, whatever the view."""
    assert verdict.reason
    act = verdict.act
    if act is None:
        assert verdict.look_again_s is None or verdict.look_again_s > 0
        return
    assert verdict.look_again_s is None
    assert view.head is None or view.head.phase is not Phase.CLOSED
    if isinstance(act, WriteHead):
        check_head(view, act.head)
    elif isinstance(act, Seal):
        check_seal(view, act)
    elif isinstance(act, Evict):
        check_evict(view, act)
    elif isinstance(act, StrikeHost):
        check_strike(view, act)
    else:
        assert isinstance(act, Sweep)
        assert act.tables == tuple(view.orphans) != ()


def check_head(view: View, new: Head) -> None:
    assert new.call in CALLS[new.phase]
    old = view.head
    if old is None:
        assert new.seq == 1
        assert new.call is Call.NONE or new.call_seq == 1
        assert new.next_era.id == view.fresh
        assert new.next_era > new.era or (new.number, new.next_era) == (0, new.era)
        for _, report in view.reports:
            assert new.run != report.run or new.next_era.level > report.era.level
        return
    assert new.phase in STEPS[old.phase]
    assert [name for name in KEPT if getattr(new, name) != getattr(old, name)] == []
    assert new.seq == old.seq + 1
    assert new.call_seq == (old.call_seq if new.call is old.call else new.seq)
    if new.phase is old.phase:
        # The head was written for the call, for the notice that runs (T7.17), or to name the root cause (T7.14), and for
        # nothing else.
        is_notice = new.call is old.call is Call.NOTICE and new.notice != old.notice
        assert (new.call is not old.call or is_notice) is ((new.cause, new.flaps) == (old.cause, old.flaps))
        assert new.cause == old.cause or (old.cause.kind, old.call) == (CauseKind.RESTARTED, Call.REGROUP)
    else:
        assert new.cause is not None
        assert new.cause.text
    if new.phase is Phase.CLOSED:
        assert new.call is Call.NONE
    check_notice(view, new)


def check_notice(view: View, new: Head) -> None:
    """T7.17, T7.18: workers have the time that they were told, and no notice is given without the setting."""
    old = view.head
    assert old is not None
    assert new.notice is None or old.notice is not None or view.settings.drain_notice
    assert new.call is not Call.NOTICE or (new.notice is not None and new.notice.limit_s > 0)
    if old.call is Call.NOTICE and new.call is Call.NOTICE and old.notice is not None and new.notice is not None:
        assert new.notice.limit_s <= old.notice.limit_s
    drained = new.cause is not None and new.cause.kind is CauseKind.DRAINED and new.phase is Phase.BROKEN
    if drained and old.call is Call.NOTICE and old.notice is not None and view.settings.drain_notice:
        answered = all(one.record.saved == old.call_seq or one.record.done for one in view.in_table.values())
        assert answered or view.call_age_s >= old.notice.limit_s


def check_seal(view: View, act: Seal) -> None:
    old, new, entries, agreed = view.head, act.head, act.entries, view.settings
    step = max(agreed.unit, agreed.segment)
    if old is None:
        # T2.4: the run is full, so there is nobody to wait for.
        assert (new.number, new.size, list(view.reports)) == (1, agreed.max_nodes // step * step, [])
        era = Era(1, view.fresh)
        old = Head(run=view.fresh, era=era, next_era=era, incarnation=view.incarnation)
    assert old.phase in (Phase.OPEN, Phase.BROKEN)
    assert new.phase is Phase.SEALED
    # G2
    assert sorted(entry.rank for entry in entries.values()) == list(range(new.size))
    assert agreed.min_nodes <= new.size <= agreed.max_nodes
    assert new.size % step == 0
    # R8: each block of ranks belongs to neighbours.
    by_rank = {entry.rank: entry.topology.rpartition("/")[0] for entry in entries.values()}
    for rank, where in by_rank.items():
        assert where == by_rank[rank // agreed.segment * agreed.segment] or agreed.segment == 1
    # Nobody is sealed in whose workers may run. Written out here again, without the terms that the rules use.
    inside = {
        id for id, entry in view.entries.items() if id in view.members and view.members[id].created == entry.created
    }
    behind = {id for id in inside if view.members[id].record.left < old.round}
    for id in behind:
        going = view.members[id].record
        assert going.done or going.drain or id in view.asked
    holding = {one.id for one, report in view.reports if report is one.record.holds and one.record.left < report.round}
    assert not (behind | holding) & set(entries)
    for id, entry in entries.items():
        one = view.members[id]
        assert (entry.created, entry.sealed_as, entry.name) == (one.created, id, one.record.name)
        assert (one.record.done, one.record.drain, id in view.asked) == (False, "", False)
        assert one.record.host not in view.banned
        assert (entry.done, entry.gave_up, entry.went) == (False, "", "")
    # T17.4: nobody of a quarantined host is in without need.
    held = [id for id, entry in entries.items() if entry.host in view.quarantined]
    free = [one for one in view.ready if one.record.host not in view.quarantined]
    assert not held or not view.fits(free, [view.members[id] for id in held[1:]])
    # G3
    assert new.round > old.round
    assert new.number > old.number
    assert new.era == new.next_era >= old.next_era
    for _, report in view.reports:
        assert new.number > report.number or report.run != old.run
        assert report.era.id == new.era.id or new.era.level > report.era.level
    # R1, T6.7
    for id in set(entries) & inside:
        before = view.entries[id].rank
        assert entries[id].rank == before or before >= new.size or agreed.segment > 1
    if agreed.segment == 1 and {one.id for one in view.ready} & inside - set(entries):
        assert set(entries) <= inside
    # What all must agree on.
    assert entries[act.first].rank == 0
    assert new.boot == view.members[act.first].record.boot
    assert new.digest == digest(entries.values())
    assert (new.table, new.seen, act.former_table) == (view.fresh, view.revision, old.table)
    assert (new.run, new.cause, new.adopted, new.call, new.seq) == (old.run, old.cause, False, Call.NONE, old.seq + 1)
    assert new.top == max(old.top, new.size)
    assert new.fence > max([old.fence, *(one.record.fence for one in view.members.values())])


def check_evict(view: View, act: Evict) -> None:
    assert act.ids
    assert len(set(act.ids)) == len(act.ids)
    assert view.me not in act.ids[:-1]
    banned = {one.id for one in view.members.values() if one.record.host in view.banned}
    if banned:
        assert set(act.ids) == banned
        return
    stragglers = {one.id for one in view.stragglers}
    assert view.head is not None
    assert view.head.phase is Phase.BROKEN
    assert view.fits(view.ready)
    if act.away_s is None:
        assert set(act.ids) == stragglers
        assert view.call_age_s >= view.settings.regroup
        return
    # T8.5: the engine is asked at most four times, and about few.
    assert set(act.ids) == stragglers - {view.me}
    assert len(act.ids) <= AWAY_MAX
    assert 0 < act.away_s == view.linger_s / 4 <= min(view.call_age_s, view.away_asked_s)
    assert view.call_age_s < view.linger_s * 1.25


def check_strike(view: View, act: StrikeHost) -> None:
    limit, head = view.settings.quarantine, view.head
    assert limit is not None
    assert head is not None
    assert head.phase is Phase.BROKEN
    assert act.host in {entry.host for entry in view.entries.values()} - view.banned.keys()
    before = view.strikes.get(act.host, {})
    assert head.table not in before
    assert (act.quarantine is not None) is (sum(before.values()) + 1 >= limit.strikes)
    assert act.lasts_s == limit.within_s + act.quarantine_s
    assert act.replaced == (() if act.quarantine is None else tuple(sorted(before)))
    assert view.fits(view.ready)


def said(view: View) -> str:
    """The verdict for a view as text: "reason @ seconds to the next look", or "reason | act".

    Of a written head the changed fields are shown, without the counters that every write moves.
    """
    verdict = lead(view)
    check(view, verdict)
    act = verdict.act
    if act is None:
        return verdict.reason if verdict.look_again_s is None else f"{verdict.reason} @ {verdict.look_again_s:g}"
    if isinstance(act, Evict):
        shown = f"evict {' '.join(act.ids)}" + ("" if act.away_s is None else f" if away for {act.away_s:g} s")
    elif isinstance(act, Sweep):
        shown = f"sweep {' '.join(act.tables)}"
    elif isinstance(act, StrikeHost):
        out = "" if act.quarantine is None else f", quarantine for {act.quarantine_s:g} s"
        shown = f"strike {act.host} {act.strike.count} for {act.lasts_s:g} s instead of {len(act.replaced)}{out}"
    elif isinstance(act, Seal):
        shown = f"seal {' '.join(entry.name for entry in sorted(act.entries.values(), key=lambda entry: entry.rank))}"
    else:
        old = view.head or Head(run="", era=Era(), next_era=Era())
        cause = act.head.cause
        assert cause is None or cause == old.cause or verdict.reason.endswith(cause.text)
        fields = [name for name in Head.__struct_fields__ if name not in ("seq", "call_seq")]
        changed = [name for name in fields if getattr(act.head, name) != getattr(old, name)]
        shown = " ".join(f"{name}={_plain(getattr(act.head, name))}" for name in changed)
    return f"{verdict.reason} | {shown}"


def _plain(value: Any) -> str:
    if isinstance(value, Cause):
        return f"{value.kind.value}({' '.join(value.members)})"
    if isinstance(value, Era):
        return f"{value.level}.{value.id}"
    return str(getattr(value, "value", value))
