"""T7: the notice that a drain gives to all workers of a round, who save before the round is broken.

The notice is a call of the head, so that its age survives a change of leaders. Each member answers in its own record once all
its workers have saved. The time is limited by `drain_notice` and by the grace of each node that drains.
"""

from __future__ import annotations

import msgspec

from .acts import Verdict, WriteHead, with_call
from .model import Call, DrainNotice, Head, Phase, RoundReport
from .text import clip
from .view import LiveMember, View, names

SHORTER_S = 1.0
"""The limit of a notice that runs is lowered only by more than this: a head write goes to every member, and the ages that two
leaders measure differ a little."""


def give_notice(view: View) -> Verdict | None:
    """Tell all workers of the round that it will end, and wait until they have saved. None: they have had their time."""
    head, drains = _head(view), len(view.drains)
    given, runs = head.notice, head.call is Call.NOTICE
    graces = [live.record.grace for live in view.drains if live.record.grace]
    if given is None or (not runs and drains > given.drains):
        limit_s = min([view.settings.drain_notice, *graces])
        return _write(view, Call.NOTICE, DrainNotice(reason=_why(view), limit_s=limit_s, drains=drains))
    if not runs:
        return None
    # Another member that drains shares the notice, and those that have saved need not do so again. It may have less time.
    limit_s = min([given.limit_s, *(view.call_age_s + grace for grace in graces)])
    if drains > given.drains or limit_s < given.limit_s - SHORTER_S:
        return _write(view, Call.NOTICE, DrainNotice(reason=_why(view), limit_s=round(limit_s, 3), drains=drains))
    left_s, missing = given.limit_s - view.call_age_s, unsaved(view)
    if missing and left_s > 0:
        who = f"the workers of {names(missing)}"
        return Verdict(None, f"round {head.number}: {given.reason}; waiting at most {left_s:.0f} s for {who} to save", left_s)
    if view.fits(view.survivors, view.newcomers):
        return None
    # The round is not broken, but the members that drain can go: this write tells them so.
    return _write(view, Call.NONE, given)


def stop_notice(view: View) -> Verdict | None:
    """End a notice that no member needs any more: those that were about to go are done."""
    head = _head(view)
    return _write(view, Call.NONE, None) if head.call is Call.NOTICE else None


def unsaved(view: View) -> list[LiveMember]:
    """Members of the table whose workers have not answered the notice that runs."""
    seq = _head(view).call_seq
    return [live for live in view.in_table.values() if live.record.saved != seq and not live.record.done]


def outcome(view: View) -> str:
    """Return the end of the cause of a break after a notice; empty: no notice was running."""
    head = _head(view)
    if head.call is not Call.NOTICE or head.notice is None:
        return ""
    missing = unsaved(view)
    if not missing:
        return "; all workers have saved"
    return f"; the workers of {names(missing)} have not saved within {head.notice.limit_s:g} s"


def notice_for(holds: RoundReport | None, head: Head | None) -> DrainNotice | None:
    """Return the notice that runs for the workers of a round."""
    if holds is None or head is None or head.table != holds.table or head.phase is not Phase.SEALED:
        return None
    return head.notice if head.call is Call.NOTICE else None


def past_notices(head: Head | None) -> int:
    """How many drains of the round have had their notice. One that runs does not count: a new drain shares it."""
    return 0 if head is None or head.notice is None or head.call is Call.NOTICE else head.notice.drains


def _why(view: View) -> str:
    first = view.drains[0]
    return clip(f"{names(view.drains)} draining: {first.record.drain or view.asked.get(first.id, '')}")


def _write(view: View, call: Call, notice: DrainNotice | None) -> Verdict:
    head = _head(view)
    passed_s = view.call_age_s if head.call is Call.NOTICE else 0.0
    said = {
        Call.NOTICE: "" if notice is None else f"{notice.reason}; the workers have {notice.limit_s - passed_s:.0f} s to save",
        Call.NONE: f"{names(view.drains)} may go" if view.drains else "nobody drains any more",
    }[call]
    return Verdict(
        WriteHead(msgspec.structs.replace(with_call(head, call), notice=notice)), f"round {head.number}: {said}"
    )


def _head(view: View) -> Head:
    assert view.head is not None, "asked while a round runs"
    return view.head
