"""T17: a host that broke several rounds within a time is kept out for a while, unless quorum needs it."""

# Strikes and quarantines are keys, each under a lease of its own that nobody renews. So the engine's clock alone counts the
# time, and a change of leaders forgets nothing. One act writes all that concerns one host, and its key names the round: a
# leader whose write had an unknown outcome does not count a round twice.

from __future__ import annotations

from collections.abc import Iterable

from .acts import StrikeHost, Verdict
from .duration import show_duration
from .model import CAUSE_MEMBERS_MAX, CauseKind, Phase, Quarantine, RankEntry, Strike
from .text import REASON_MAX, clip
from .view import View

QUARANTINE_MAX_S = 24 * 3600.0
"""Longest time that a host is kept out."""
STRIKES_MAX = 20
"""Most rounds that a host may be allowed to break: one act replaces as many strikes."""
HOSTS_MAX = CAUSE_MEMBERS_MAX
"""If more hosts than this failed together, something that they share did: none of them gets a strike."""


def strike(view: View) -> Verdict | None:
    """T17: note the next host that broke the round which is about to be followed, if it is not noted yet."""
    head, limit = view.head, view.settings.quarantine
    assert head is not None, "asked when a round is sealed"
    if limit is None or head.phase is not Phase.BROKEN:
        return None
    hosts = blamed(view)
    host = next((one for one in sorted(hosts) if head.table not in view.strikes.get(one, {})), None)
    if host is None or len(hosts) > HOSTS_MAX:
        return None
    before = view.strikes.get(host, {})
    # Below the limit every strike lives for the time that it counts. From there on one strike stands for all, and lives for
    # that long beyond the quarantine: the next round that the host breaks doubles it.
    count = sum(before.values()) + 1
    why = clip(head.cause.text if head.cause is not None else "", REASON_MAX // 2)
    rounds = f"{count} round{'s' if count > 1 else ''}"
    if count < limit.strikes:
        text = f"{view.here}: {host} has broken {rounds} within {show_duration(limit.within_s)}"
        return Verdict(StrikeHost(host, Strike(reason=why), limit.within_s), text)
    # Bounded, because a record that a member wrote by hand may claim any count.
    for_s = min(limit.for_s * 2.0 ** min(count - limit.strikes, 30), QUARANTINE_MAX_S)
    kept = count - (for_s == QUARANTINE_MAX_S)  # It cannot double any more, and 2**n stays small.
    reason = f"broke {rounds} within {show_duration(limit.within_s)}, kept out for {show_duration(for_s)}"
    struck, lasts_s = Strike(count=max(kept, limit.strikes), reason=why), limit.within_s + for_s
    act = StrikeHost(host, struck, lasts_s, tuple(sorted(before)), Quarantine(reason=reason), for_s)
    return Verdict(act, f"{view.here}: {host} {reason}")


def blamed(view: View) -> set[str]:
    """Hosts that broke the head's round, as far as its records tell."""
    # Members that vanished without a word come first, also those that did so after the break: a member that gave up, or
    # whose workers stopped, may have failed because of them. Workers fail one by one when a collective does, so members that
    # restarted tell nothing unless they are of one host.
    cause = view.head.cause if view.head is not None else None
    gone = _hosts(view, view.vanished) or _hosts(view, view.gave_up.values())
    if gone or cause is None or cause.kind not in (CauseKind.STALLED, CauseKind.RESTARTED):
        return gone
    named = _hosts(view, (entry for entry in view.entries.values() if entry.name in cause.members))
    return set() if cause.kind is CauseKind.RESTARTED and len(named) > 1 else named


def about_kept_out(view: View) -> str:
    """The end of a reason: the hosts that are kept out, and why the first of them is; empty if there are none."""
    # Those that were quarantined just now count even if they are not back yet: the journal shows the reason of each seal.
    if not view.quarantined:
        return ""
    table = view.head.table if view.head is not None else ""
    hosts = {live.record.host for live in view.kept_out.values()}
    hosts |= {host for host in view.quarantined if table in view.strikes.get(host, {})}
    first, *others = sorted(hosts - {live.record.host for live in view.ready}) or [""]
    more = f" and {len(others)} more" if others else ""
    return f"; {first}{more} quarantined: {view.quarantined[first]}" if first else ""


def _hosts(view: View, entries: Iterable[RankEntry]) -> set[str]:
    return {entry.host for entry in entries} - view.banned.keys()
