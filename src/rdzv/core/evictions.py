"""T8: the rules by which a leader evicts members, and a follower a dead leader. Their order is in `rules.RULES`."""

from __future__ import annotations

import math

from .acts import Evict, Verdict
from .model import Call, Head, Phase, RoundId
from .view import LiveMember, View, name_of, names

AWAY_MAX = 3
"""Stragglers that are asked about at once. While there are more, the next round could not be sealed anyway."""
HEIRS_MAX = 3
"""Members that may ask whether the leader is away: the next to come after it. Otherwise a crowd would list the run at once."""
ASKING_SIZE_MAX = 32
"""Members of a broken round up to which they ask whether the leader is away (T8.7)."""
QUESTIONS = 4
"""Quarters of the linger at whose ends such a member asks. By then the linger itself has decided."""


def evict_banned(view: View) -> Verdict | None:
    """T8: an operator's ban takes effect at once."""
    # First in every phase: a banned member must neither count as done nor be sealed in. Its eviction is seen as a loss
    # in the next step, which breaks the round.
    banned = [live for live in view.members.values() if live.record.host in view.banned]
    if not banned:
        return None
    text = f"{names(banned)} banned: {view.banned[banned[0].record.host]}"
    return Verdict(Evict(_eviction_order(view, banned)), text)


def evict_stragglers(view: View) -> Verdict | None:
    """T8: evict members that have not stopped their workers within `regroup` seconds of the break."""
    # Only if the others are a quorum, since otherwise the eviction would help nobody. Nothing is ever sealed beside a
    # straggler, so without this rule one hung member would block the run for as long as it renews its lease (H7).
    head, settings = _head(view), view.settings
    if head.phase is not Phase.BROKEN or not view.stragglers:
        return None
    late = view.call_age_s >= settings.regroup
    if late and head.call in (Call.REGROUP, Call.LAST) and view.fits(view.ready):
        text = f"{names(view.stragglers)} did not stop within {settings.regroup:g} s: evicted"
        return Verdict(Evict(_eviction_order(view, view.stragglers)), text)
    return None


def evict_away(view: View) -> Verdict | None:
    """T8: evict stragglers whose process has ended, without waiting for the linger."""
    # The linger protects a running round from a needless break. This round is broken, so it protects nothing any more. But
    # only the engine can tell a dead process from a connection that was lost and is back by now: coming back writes
    # nothing, so neither the view nor any revision shows it. A leader that judged by itself evicted healthy members.
    # Nobody is evicted if quorum needs it: its process may be started anew before the run could go on without it.
    if away_wait_s(view) > 0:
        return None
    others = [live for live in view.stragglers if live.id != view.me]
    text = f"{view.here}: waiting for {names(others)}, unless their processes have ended"
    return Verdict(Evict(_eviction_order(view, others), view.linger_s / 4), text)


def away_wait_s(view: View) -> float:
    """In how many seconds to ask the engine whether stragglers are away; infinite: not at all."""
    head, others = _head(view), [live for live in view.stragglers if live.id != view.me]
    if head.phase is not Phase.BROKEN or head.call not in (Call.REGROUP, Call.LAST) or not 0 < len(others) <= AWAY_MAX:
        return math.inf
    pause_s = view.linger_s / 4
    wait_s = pause_s - min(view.call_age_s, view.away_asked_s)
    # Four questions: after the first linger, the connections that ended before the break are decided.
    over = view.call_age_s + max(wait_s, 0.0) >= view.linger_s + pause_s
    return math.inf if not pause_s or over or not view.fits(view.ready) else wait_s


def is_left_alone(head: Head | None, left: RoundId) -> bool:
    """Whether the head still stands at a round that this member has given up: a leader that lives would go on from there."""
    return head is not None and head.phase in (Phase.SEALED, Phase.BROKEN) and head.round == left


def is_worth_asking(head: Head) -> bool:
    """T8.7: whether members of the head's round ask if the leader that leaves them alone is dead."""
    # Each must ask to learn how many came earlier. A leader that has broken the round lived then, and in a large run waits
    # for workers to stop, as all do: thousands would ask in vain whenever that takes longer than a quarter of the linger.
    return head.phase is Phase.SEALED or head.size <= ASKING_SIZE_MAX


def evict_leader(view: View) -> Verdict | None:
    """T8: a follower that has given up the round evicts the leader, if its process has ended."""
    # Nobody leads until the key of a dead leader is gone. So nobody breaks the round that its death has ended, and nobody
    # asks as `evict_away` does. One follower may ask instead, and the engine judges as for any straggler.
    # It has given up the round itself, so the round is over: a leader that lived would break it (T7.3). That others only
    # say that their collectives fail would not do, because evicting from a running round breaks G7.
    # Only the oldest such follower asks. A leader that is done is left alone: its key is all that says so (W9).
    leader = min(view.members.values(), key=lambda live: live.created, default=None)
    heir = min((one for one in view.restarted if one is not leader), key=lambda live: live.created, default=None)
    if leader is None or heir is None or heir.id != view.me or not is_left_alone(view.head, heir.record.left):
        return None
    others = [live for live in view.ready if live is not leader]
    if leader.record.done or not view.linger_s or not view.fits(others):
        return None
    text = f"{view.here}: waiting for {name_of(leader)} to lead, unless its process has ended"
    return Verdict(Evict((leader.id,), view.linger_s / 4), text)


def _eviction_order(view: View, lives: list[LiveMember]) -> tuple[str, ...]:
    """Ids, oldest member first, but the leader's own last: the guard refuses all it writes after its key is gone."""
    return tuple(live.id for live in sorted(lives, key=lambda live: (live.id == view.me, live.created)))


def _head(view: View) -> Head:
    assert view.head is not None, "asked only in phases that have a head"
    return view.head
