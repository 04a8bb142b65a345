"""Who gets which rank: a pure function.

Members keep their rank from round to round, so that what a machine has on its local disk stays useful. A newcomer takes the
rank of a lost member it resembles (same name, then order key, then host); failing that the lowest hole. When the world
shrinks, those whose rank no longer exists move into the holes. Rank 0 stays where it is while it lives.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from .model import RankEntry

_DIGITS = re.compile(r"([0-9]+)")


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A member that is to be in the next round."""

    id: str
    name: str
    host: str
    order: str
    created: int


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Sort key by which node2 comes before node10.

    Numbers are compared as text, the shorter first, and never converted: a name may hold more digits than Python converts,
    or digits that it does not, and no name that a member chose may stop its leader.
    """
    if not text:
        return ()
    key = []
    for index, part in enumerate(_DIGITS.split(text)):
        # Every second part is a number, so that a number is only ever compared with a number.
        digits = part.lstrip("0")
        key.append((len(digits), digits) if index % 2 else (0, part))
    return tuple(key)


def first_order(candidate: Candidate) -> tuple[object, ...]:
    """Sort key of members without a former rank: order key if given, then host by host, then who came first."""
    order, host, name = candidate.order, candidate.host, candidate.name
    by_host = natural(host)
    return (not order, natural(order), by_host, by_host if name == host else natural(name), candidate.created)


def assign(chosen: Sequence[Candidate], kept: Mapping[str, int], vacant: Iterable[RankEntry]) -> dict[str, int]:
    """Give each of `chosen` a rank from 0 to len(chosen)-1.

    `kept` maps those of them who were in the former table to their rank in it; `vacant` are the former lines whose members
    are not among the chosen.
    """
    size = len(chosen)
    ranks = {candidate.id: kept[candidate.id] for candidate in chosen if kept.get(candidate.id, size) < size}
    holes = sorted(set(range(size)) - set(ranks.values()))
    newcomers = sorted((c for c in chosen if c.id not in kept), key=first_order)
    free = set(holes)
    heirs = _heirs(newcomers, [line for line in vacant if line.rank in free])
    ranks.update(heirs)
    taken = set(heirs.values())
    rest = iter([rank for rank in holes if rank not in taken])
    displaced = sorted((c for c in chosen if c.id in kept and c.id not in ranks), key=lambda c: kept[c.id])
    for candidate in [*displaced, *(c for c in newcomers if c.id not in heirs)]:
        ranks[candidate.id] = next(rest)
    return ranks


_LIKENESS: tuple[tuple[Callable[[Candidate], str], Callable[[RankEntry], str]], ...] = (
    (lambda candidate: candidate.name, lambda line: line.name),
    (lambda candidate: candidate.order, lambda line: line.order),
    (lambda candidate: candidate.host, lambda line: line.host),
)


def _heirs(newcomers: Sequence[Candidate], vacant: Sequence[RankEntry]) -> dict[str, int]:
    """Newcomers that take the rank of a lost member they resemble; the closest likeness goes first."""
    heirs: dict[str, int] = {}
    for of_candidate, of_line in _LIKENESS:
        taken = set(heirs.values())
        open_ranks: dict[str, list[int]] = {}
        for line in sorted(vacant, key=lambda line: -line.rank):
            if line.rank not in taken:
                open_ranks.setdefault(of_line(line), []).append(line.rank)
        for candidate in newcomers:
            likeness = of_candidate(candidate)
            if likeness and candidate.id not in heirs and open_ranks.get(likeness):
                heirs[candidate.id] = open_ranks[likeness].pop()
    return heirs


def digest(lines: Iterable[RankEntry]) -> str:
    """Fingerprint of a member list, in rank order. Covers ids and names, not who has died since."""
    ordered = sorted(lines, key=lambda line: line.rank)
    text = "\n".join(f"{line.rank} {line.sealed_as} {line.name}" for line in ordered)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
