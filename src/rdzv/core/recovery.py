"""T13-T15: an engine came back empty, and its members report what they know."""

# An engine without a disk forgets the run when it restarts, while the members train on. Each of them joins the new
# instance and reports, in its own record, the round that it *holds* and the newest head that it *heard* of. The leader
# rebuilds the head from the best report, and nobody restarts if all holders of the round are back (`restore_sealed`).
#
# Why rounds have eras
# --------------------
# Two rounds sealed after a loss of memory must never be taken for one, although both may get the same number:
#
#     1. Round 3 runs with A, B and C. The engine restarts empty.
#     2. Only A is back in time. Round 3 is restored as broken, and round 4 is sealed with A alone (`min_nodes` is 1).
#     3. The engine restarts empty again. Only B and C are back. They know of round 3 only, and seal their own round 4.
#
# So every head that is made from reports plans a new *era* for its next seal. The era's level is above every level
# reported, and its id is random and made with the head. Rounds are ordered by era first, then by number. In step 3 both
# heads plan level 2, because each saw level 1 only, but with different ids: still two different rounds.
#
# The id was that of the engine instance at first. Seed 201742 showed that this is not enough: a run that closed,
# expired and was begun again on the same instance, by members that came back late with old reports, made one era twice.

from __future__ import annotations

import msgspec

from .acts import Verdict, WriteHead, because
from .fence import restored_fence
from .model import BACK_S, Call, Cause, CauseKind, Era, Head, Phase, RoundReport
from .view import LiveMember, View


def best_report(view: View) -> RoundReport | None:
    """The newest round that any live member reports; a closed one wins, because a close is final."""
    reports = [report for _, report in view.reports]
    closed = [report for report in reports if report.phase is Phase.CLOSED]
    return max(closed or reports, key=lambda one: (one.incarnation, one.round, one.phase is Phase.BROKEN), default=None)


def reporters(view: View, table: str) -> dict[int, LiveMember]:
    """Live members that report to have been in that table, by rank, whether they still hold its round or not."""
    return {report.rank: live for live, report in view.reports if report.table == table and report.rank >= 0}


def holders(view: View, table: str) -> dict[int, RoundReport]:
    """Reports of live members that hold that table's round, by rank: two members with one rank count once."""
    found = {}
    for live in view.members.values():
        holds = live.record.holds
        if holds is not None and holds.table == table and live.record.left < holds.round:
            found[holds.rank] = holds
    return found


def missing_reports(view: View) -> int:
    """How many members of the broken round that was restored here have not come back."""
    head = view.head
    if head is None or head.cause is None or head.cause.kind is not CauseKind.RETOLD:
        # All members of an adopted round were there. Those it has lost since do not come back by waiting (seed 30021113).
        return 0
    return max(0, head.size - len(reporters(view, head.table)))


def restore_closed(view: View) -> Verdict | None:
    """T14: a member heard that the run was closed, so it stays closed."""
    report = best_report(view)
    if report is None or report.phase is not Phase.CLOSED:
        return None
    text = report.cause.text if report.cause else "closed before the engine came back empty"
    head = restored_head(view, report, Phase.CLOSED, Call.NONE, report.cause or because(CauseKind.CLOSED, text))
    return Verdict(WriteHead(head), f"the run was closed: {text}")


def restore_sealed(view: View) -> Verdict | None:
    """T14: every member of the best round is here and holds it, so the round goes on and nobody is disturbed."""
    # It goes on even if a member heard that the round was broken. A member that gave the round up no longer holds it,
    # and any other cause of the break will be seen again.
    report = best_report(view)
    if report is None or report.number == 0:
        return None
    held = holders(view, report.table)
    if len(held) < report.size or any(one.digest != report.digest for one in held.values()):
        return None
    head = restored_head(view, report, Phase.SEALED, Call.NONE, None)
    back = f"all {report.size} members" if report.size > 1 else "its only member"
    return Verdict(WriteHead(head), f"round {report.number} goes on: {back} came back to the engine")


def restore_broken(view: View) -> Verdict | None:
    """T15: not all members came back, or not all hold the round; re-form from there."""
    report = best_report(view)
    if report is None:
        return None
    back = reporters(view, report.table)
    here = len(back)
    all_here = report.number > 0 and here >= report.size
    # A full run ends the wait only if no round is known. Seed 2: spares were back first, as many as `max_nodes`, and
    # broke a running round whose members were a moment behind.
    full = view.is_full and report.number == 0
    if view.young and not all_here and not full:
        reason = f"{here} of {report.size} members of round {report.number} have come back to the engine"
        if report.number == 0:
            reason = f"{view.here} on an engine that came back empty"
        return Verdict(None, f"{reason}: waiting for the others", BACK_S - view.known_s)
    if report.number == 0:
        call, waited = view.first_call
        head = msgspec.structs.replace(restored_head(view, report, Phase.OPEN, call, None), waited=waited)
        return Verdict(WriteHead(head), f"{view.here}: the run begins again on an engine that came back empty")
    text = f"{here} of {report.size} members came back after the engine was restarted"
    if report.phase is Phase.BROKEN and report.cause is not None:
        text = report.cause.text
    # Members that gave the round up before they came here count as well as its holders: if a server and a member are
    # lost together, the others need not wait out a last call.
    call = Call.REGROUP if view.fits(back.values()) else Call.NONE
    head = restored_head(view, report, Phase.BROKEN, call, because(CauseKind.RETOLD, text))
    return Verdict(WriteHead(head), f"round {report.number} broken: {text}")


def next_era(view: View) -> Era:
    """The era of the next seal: the one planned, raised above every reported level of another head's era."""
    # A member may report after the head was made. If the seal ignored it, the round could be below one that this member
    # has given up, and it would never take it (found by scenario H10).
    head = view.head
    assert head is not None, "asked when sealing"
    era = head.next_era
    for _, report in view.reports:
        for other in _known_eras(report):
            if other.level >= era.level and other.id != era.id:
                era = Era(other.level + 1, era.id)
    return era


def _known_eras(report: RoundReport) -> tuple[Era, Era, Era]:
    """The eras that a report mentions: of its round, of the next seal, and of the highest round given up."""
    return report.era, report.next_era, report.left.era


def restored_head(view: View, report: RoundReport, phase: Phase, call: Call, cause: Cause | None) -> Head:
    """The head as reported, on this engine instance; its next seal is in a new era."""
    # `adopted` keeps the restored round for those who hold it: a waiting member is never given a round that it was not
    # sealed into on this instance.
    level = max(era.level for _, one in view.reports for era in _known_eras(one))
    return Head(
        run=report.run, era=report.era, number=report.number, phase=phase, table=report.table, size=report.size,
        digest=report.digest, boot=report.boot, call=call, call_seq=1, cause=cause, adopted=phase is Phase.SEALED,
        next_era=Era(level + 1, view.fresh), top=report.top, grown=report.grown, incarnation=report.incarnation,
        fence=restored_fence(view),
    )  # fmt: skip
