"""Flaps: members that come in, make all others restart, and are lost soon after.

Each time, the next newcomer of that name waits twice as long before it is let in (T7.6, T7.12).
"""

from __future__ import annotations

from .model import FLAPS_MAX, Phase
from .view import View

FLAP_WINDOW_S = 60.0
"""A member lost this soon after the growth it caused is flapping."""
FLAP_WAIT_MAX_S = 600.0
"""Longest wait of a newcomer that flapped."""
FLAPS_COUNT_MAX = 30
"""Flaps counted per name. `settle` doubled so often exceeds FLAP_WAIT_MAX_S long before; the bound keeps 2**n small."""


def flap_wait_s(settle_s: float, flaps: int) -> float:
    """How long a newcomer waits: `settle`, doubled for each time that a member of its name flapped."""
    return min(settle_s * 2.0**flaps, max(FLAP_WAIT_MAX_S, settle_s))


def times(flaps: int) -> str:
    """Return the end of a sentence about a member that flapped."""
    return "" if flaps == 1 else f", {flaps} times"


def count_flaps(view: View) -> tuple[dict[str, int], tuple[str, ...]]:
    """Count the names that came in with this round and were lost soon after, each once; forgive those that stayed.

    Return the counts, and the names of this round that are counted by now.
    """
    # Names, because they are stable over restarts; several members on one host have names of their own if they have
    # slots. Members that share a name count as one.
    head = view.head
    assert head is not None, "asked when a round breaks, and when the next one is sealed"
    soon = view.sealed_age_s < FLAP_WINDOW_S
    flaps = dict(head.flaps)
    # In the first round nobody flaps: all came together and made nobody restart.
    lost = {entry.name for entry in view.lost.values() if entry.since == head.number > 1}
    more = lost - set(head.flapped) if soon else set()
    for name in more:
        flaps[name] = min(flaps.get(name, 0) + 1, FLAPS_COUNT_MAX)
    # A member that is lost between break and seal has not stayed, so nobody is forgiven before it is known who is lost.
    for id, entry in view.entries.items() if not soon and head.phase is Phase.SEALED else ():
        if id not in view.lost:
            flaps.pop(entry.name, None)
    # Every member receives the head, so its size must not depend on the number of members.
    worst = sorted(flaps.items(), key=lambda item: (-item[1], item[0]))
    return dict(worst[:FLAPS_MAX]), tuple(sorted({*head.flapped, *more})[:FLAPS_MAX])
