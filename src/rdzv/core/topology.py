"""Places in the network: paths such as `block/rack/host`, neighbours, and which place is nearest to which."""

# A path goes from the largest part of the network to the node. Two nodes are the nearer the more parts their paths have
# in common from the beginning. Nodes whose paths differ in the last part only are *neighbours*. Nodes without a path are
# neighbours of each other: nothing is known that would tell them apart.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

PARTS_MAX = 8
"""Parts of a path. Settings refuse more; the rules take what goes beyond for one part."""

T = TypeVar("T")
P = TypeVar("P")


def with_host(path: str, host: str) -> str:
    """Return the path to the node itself: the host is added unless the path ends with it. An empty path stays empty."""
    short = host.partition(".")[0]
    if not path or path.rpartition("/")[2].partition(".")[0] == short:
        return path
    return f"{path}/{short}"


def neighbourhood(path: str) -> str:
    """Return the part of the path that a node has in common with its neighbours."""
    return path.rpartition("/")[0]


def beginnings(path: str) -> list[str]:
    """Return all beginnings of the path, in whole parts, the shortest first; the last is the path."""
    if not path:
        return []
    parts = path.split("/", PARTS_MAX - 1)
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def pair_nearest(movers: Sequence[tuple[T, str]], places: Sequence[tuple[P, str]]) -> dict[T, P]:
    """Pair movers with places, each once, whose paths have a beginning in common: the longest beginnings first.

    Among those with the same beginning, the first mover gets the first place. The pairs come in the order of nearness.
    Movers and places that have nothing in common stay without a pair.
    """
    # Longest first loses nothing. All that share a rack share its block too, so a pair within a rack takes no place that
    # others of the block could have used without leaving one of this rack over.
    waiting = [(mover, beginnings(path)) for mover, path in movers if path]
    free = [(place, beginnings(path)) for place, path in places if path]
    pairs: dict[T, P] = {}
    for depth in range(max((len(known) for _, known in waiting), default=0) - 1, -1, -1):
        if not free:
            break
        offered: dict[str, list[P]] = {}
        for place, known in reversed(free):  # Reversed, so that pop() gives the first.
            if len(known) > depth:
                offered.setdefault(known[depth], []).append(place)
        for mover, known in waiting:
            if len(known) > depth and offered.get(known[depth]):
                pairs[mover] = offered[known[depth]].pop()
        taken = set(pairs.values())
        waiting = [one for one in waiting if one[0] not in pairs]
        free = [one for one in free if one[0] not in taken]
    return pairs


def in_segments(paths: Iterable[str], segment: int) -> int:
    """Return how many of the nodes with these paths can be in whole segments of neighbours."""
    counts: dict[str, int] = {}
    for path in paths:
        where = neighbourhood(path)
        counts[where] = counts.get(where, 0) + 1
    return sum(count // segment * segment for count in counts.values())
