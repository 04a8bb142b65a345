"""T13-T15: an engine came back empty, and its members tell it what they know.

Each member that comes back says which round it *holds* and which head it *heard* last. The leader goes on from the best of
these. Rounds sealed under different heads can bear the same number, so every seal under a head that was made from what was told
is in a new *era*, whose level is above every level told and whose id is made with that head: wherever, and however often, a
run is gone on with from the same round, there are never two records of one round.
"""

from __future__ import annotations

from .acts import Verdict, WriteHead, because
from .model import BACK_S, Call, Cause, CauseKind, Era, Head, Phase, RoundReport
from .view import View


def best(view: View) -> RoundReport | None:
    """The newest round that anybody live tells of; a closed one wins, because a close is final."""
    told = [one for _, one in view.told]
    closed = [one for one in told if one.phase is Phase.CLOSED]
    return max(closed or told, key=lambda one: (one.incarnation, one.round, one.phase is Phase.BROKEN), default=None)


def tellers(view: View, table: str) -> dict[int, RoundReport]:
    """By rank: live members of that table, holding it or not."""
    return {told.rank: told for _, told in view.told if told.table == table and told.rank >= 0}


def holders(view: View, table: str) -> dict[int, RoundReport]:
    """By rank: live members that hold that table's round."""
    found = {}
    for live in view.members.values():
        holds = live.record.holds
        if holds is not None and holds.table == table and live.record.left < holds.round:
            found[holds.rank] = holds
    return found


def missing(view: View) -> int:
    """How many of the broken round that this engine was told of have not come back."""
    head = view.head
    if head is None or head.next_era == head.era:
        return 0
    return max(0, head.size - len(tellers(view, head.table)))


def close_again(view: View) -> Verdict | None:
    """T14: somebody heard that the run was closed."""
    told = best(view)
    if told is None or told.phase is not Phase.CLOSED:
        return None
    text = told.cause.text if told.cause else "closed before the engine came back empty"
    head = _again(view, told, Phase.CLOSED, Call.NONE, told.cause or because(CauseKind.CLOSED, text))
    return Verdict(WriteHead(head), f"the run was closed: {text}")


def go_on(view: View) -> Verdict | None:
    """T14: every member of the best round is here and holds it, so nobody need be disturbed.

    Even if one heard that it was broken: whoever gave it up no longer holds it, and any other cause will be seen again.
    """
    told = best(view)
    if told is None or told.number == 0:
        return None
    held = holders(view, told.table)
    if len(held) < told.size or any(one.digest != told.digest for one in held.values()):
        return None
    head = _again(view, told, Phase.SEALED, Call.NONE, None)
    return Verdict(WriteHead(head), f"round {told.number} goes on: all {told.size} members came back to the engine")


def go_on_broken(view: View) -> Verdict | None:
    """T15: not all came back, or not all hold the round; re-form from there."""
    told = best(view)
    if told is None:
        return None
    here = len(tellers(view, told.table))
    all_here = told.number > 0 and here >= told.size
    # Spares that are back first must not break a round whose members are a moment behind, however many they are.
    full = view.is_full and told.number == 0
    if view.young and not all_here and not full:
        reason = f"{here} of {told.size} members of round {told.number} have come back to the engine"
        if told.number == 0:
            reason = f"{view.here} on an engine that came back empty"
        return Verdict(None, f"{reason}: waiting for the others", BACK_S - view.known_s)
    if told.number == 0:
        head = _again(view, told, Phase.OPEN, Call.NONE, None)
        return Verdict(WriteHead(head), f"{view.here}: the run begins again on an engine that came back empty")
    text = f"{here} of {told.size} members came back after the engine was restarted"
    if told.phase is Phase.BROKEN and told.cause is not None:
        text = told.cause.text
    call = Call.REGROUP if view.fitting(here) else Call.NONE
    head = _again(view, told, Phase.BROKEN, call, because(CauseKind.RETOLD, text))
    return Verdict(WriteHead(head), f"round {told.number} broken: {text}")


def next_era(view: View) -> Era:
    """The era of the next seal: above every level told that is not of this head's own line."""
    head = view.head
    assert head is not None, "asked when sealing"
    era = head.next_era
    for _, told in view.told:
        for other in _eras(told):
            if other.level >= era.level and other.id != era.id:
                era = Era(other.level + 1, era.id)
    return era


def _eras(told: RoundReport) -> tuple[Era, Era, Era]:
    """Every era that somebody knows of: of the round told, of the next one planned there, and of what was given up."""
    return told.era, told.next_era, told.left.era


def _again(view: View, told: RoundReport, phase: Phase, call: Call, cause: Cause | None) -> Head:
    """The head as it was told, on this instance; the next seal is in a new era."""
    level = max(era.level for _, one in view.told for era in _eras(one))
    return Head(
        run=told.run,
        era=told.era,
        number=told.number,
        phase=phase,
        table=told.table,
        size=told.size,
        digest=told.digest,
        boot=told.boot,
        call=call,
        call_seq=1,
        cause=cause,
        adopted=phase is Phase.SEALED,
        next_era=Era(level + 1, view.fresh),
        top=told.top,
        grown=told.grown,
        incarnation=told.incarnation,
    )
