"""The choice of members for the next round, where more are ready than fit (T6.7)."""

# Members of the former table go first, by rank, so that a survivor is never replaced by a spare that was quicker. The
# places that are left go to the newcomers nearest to the members that are missing, then to those that came first. With
# segments the choice is among whole segments of neighbours.

from __future__ import annotations

from collections.abc import Collection

from .topology import beginnings, neighbourhood, pair_nearest
from .view import LiveMember, View

_NO_RANK = 1 << 30


def choose(view: View, lives: Collection[LiveMember], size: int) -> list[LiveMember]:
    """Return the `size` of these members that would be in a round now."""
    former = {id: view.entries[id].rank for id in view.in_table}
    ordered = sorted(lives, key=lambda live: (former.get(live.id, _NO_RANK), live.created))
    if view.settings.segment > 1:
        return _whole_segments(view, ordered, size)
    if len(ordered) <= size:
        return ordered
    known = sum(live.id in former for live in ordered)
    if size <= known:
        return ordered[:size]
    # More newcomers than places.
    newcomers = ordered[known:]
    staying = {live.id for live in ordered[:known]}
    missing = [(entry.rank, entry.topology) for id, entry in view.entries.items() if entry.topology and id not in staying]
    near = pair_nearest([(live.id, live.record.topology) for live in newcomers], sorted(missing)) if missing else {}
    nearness = {id: index for index, id in enumerate(near)}
    newcomers.sort(key=lambda live: (nearness.get(live.id, _NO_RANK), live.created))
    return [*ordered[:known], *newcomers[: size - known]]


def _whole_segments(view: View, ordered: list[LiveMember], size: int) -> list[LiveMember]:
    """Return whole segments of neighbours: those with the most survivors, then those near to what is missing."""
    segment = view.settings.segment
    groups: dict[str, list[LiveMember]] = {}
    for live in ordered:
        groups.setdefault(neighbourhood(live.record.topology), []).append(live)
    places = {live.id: index for index, live in enumerate(ordered)}
    here = set(places)
    missing = {
        part for id, entry in view.entries.items() if id not in here for part in beginnings(neighbourhood(entry.topology))
    }

    def worth(members: list[LiveMember]) -> tuple[int, int, int]:
        survivors = sum(live.id in view.in_table for live in members)
        near = sum(part in missing for part in beginnings(neighbourhood(members[0].record.topology)))
        return -survivors, -near, places[members[0].id]

    segments = [
        members[start : start + segment]
        for members in groups.values()
        for start in range(0, len(members) - segment + 1, segment)
    ]
    return [live for members in sorted(segments, key=worth)[: size // segment] for live in members]
