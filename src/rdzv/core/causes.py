"""The cause of a break: which member began it, and whose failure only followed."""

from __future__ import annotations

from .acts import because
from .model import BACK_S, BEHIND_MAX, Call, Cause, CauseKind
from .view import View, name_of, names

_WANTED = ": a new round is wanted"


def briefly(text: str) -> str:
    """Return the text of a cause as a part of another sentence."""
    return text.removesuffix(_WANTED)


def success(size: int, number: int) -> Cause:
    """All members of that round are done."""
    text = f"all {size} members of round {number} are done" if size > 1 else f"the only member of round {number} is done"
    return because(CauseKind.SUCCESS, text)


def loss(view: View) -> Cause | None:
    """The cause of the present losses: the most telling one, because others often follow from it."""
    lost = list(view.lost.values())
    if not lost:
        return None
    gave_up = [entry for entry in lost if entry.gave_up]
    banned = [entry for entry in lost if entry.host in view.banned]
    went = [entry for entry in lost if entry.went]
    if gave_up:
        return because(CauseKind.GAVE_UP, f"{gave_up[0].name} gave up: {gave_up[0].gave_up}", map(name_of, gave_up))
    if banned:
        text = f"{names(banned)} banned: {view.banned[banned[0].host]}"
        return because(CauseKind.BANNED, text, map(name_of, banned))
    if len(went) == len(lost):
        return because(CauseKind.LEFT, f"{names(went)} left: {went[0].went}", map(name_of, went))
    return because(CauseKind.LOST, f"{names(lost)} lost", map(name_of, lost))


def restart(view: View) -> Cause | None:
    """The cause that some members have stopped their workers by themselves."""
    if not view.restarted:
        return None
    text = f"the workers of {names(view.restarted)} stopped{_WANTED}"
    return because(CauseKind.RESTARTED, text, map(name_of, view.restarted))


def stall(view: View) -> Cause | None:
    """The cause that workers get no further: those at the lowest step, for which the others wait."""
    told = [(live, live.record.stalled) for live in view.stalled if live.record.stalled is not None]
    if not told:
        return None
    step, furthest = min(one.step for _, one in told), max(max(one.step, one.furthest) for _, one in told)
    last = [(live, one) for live, one in told if one.step == step]
    ranks = sorted(rank for _, one in last for rank in one.ranks)
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:BEHIND_MAX]))}"
    named += f" and {len(ranks) - BEHIND_MAX} more" if len(ranks) > BEHIND_MAX else ""
    others = f", others at {furthest}" if furthest > step else ""
    text = f"no progress for {max(one.for_s for _, one in last):.0f} s: {named} at step {step}{others}"
    lives = [live for live, _ in last]
    return because(CauseKind.STALLED, f"{text} ({names(lives)})", map(name_of, lives))


def root(view: View) -> Cause | None:
    """The loss from which the restart that broke the round most likely followed; None: there is none."""
    # When a node dies, the workers of the others fail in their next collective, and their agents say so at once. The
    # lost member is noticed only when its lease ends, up to `lease` seconds later. A loss that shows after that time is
    # another story, and so is that of a straggler, which is evicted `regroup` after the break.
    head, settings = view.head, view.settings
    if head is None or head.cause is None or head.cause.kind is not CauseKind.RESTARTED or head.call is not Call.REGROUP:
        return None
    if view.call_age_s >= min(settings.regroup, settings.lease + BACK_S):
        return None
    # A member that gave up may have failed in a collective too, as one more victim, so it is not taken for the root.
    went = [entry for entry in view.lost.values() if entry.went]
    if view.vanished:
        gone, kind, text = view.vanished, CauseKind.LOST, f"{names(view.vanished)} lost"
    elif went:
        gone, kind, text = went, CauseKind.LEFT, f"{names(went)} left: {went[0].went}"
    else:
        return None
    return because(kind, f"{text}; as a consequence {briefly(head.cause.text)}", map(name_of, gone))
