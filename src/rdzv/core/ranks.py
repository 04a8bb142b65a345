"""Rank assignment."""

# Members keep their rank from round to round, so that what a node has on its local disk stays useful. A newcomer takes
# the rank of a lost member it resembles (same name, then order key, then host); failing that the lowest hole. When the
# world shrinks, those whose rank no longer exists move into the holes. Rank 0 stays where it is while it lives.

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from .model import RankEntry, WorkerRanks

_DIGITS = re.compile(r"([0-9]+)")


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A member chosen for the next round."""

    id: str
    name: str
    host: str
    order: str
    created: int


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """Return a sort key by which node2 comes before node10."""
    if not text:
        return ()
    key = []
    for index, part in enumerate(_DIGITS.split(text)):
        # Every second part is a number, so numbers are only compared with numbers. They are compared as text, the
        # shorter first, because int() refuses more than 4,300 digits: no name that a member chose may stop its leader.
        digits = part.lstrip("0")
        key.append((len(digits), digits) if index % 2 else (0, part))
    return tuple(key)


def first_order(candidate: Candidate) -> tuple[object, ...]:
    """Return the sort key of members without a former rank: order key if given, then host, name and time of coming."""
    order, host, name = candidate.order, candidate.host, candidate.name
    by_host = natural(host)
    return (not order, natural(order), by_host, by_host if name == host else natural(name), candidate.created)


def assign(chosen: Sequence[Candidate], kept: Mapping[str, int], vacant: Iterable[RankEntry]) -> dict[str, int]:
    """Give each of `chosen` a rank from 0 to len(chosen)-1.

    `kept`: former ranks of chosen members. `vacant`: former entries whose members are not chosen.
    """
    # 1. A member keeps its rank if the new size still has it; so rank 0 stays where it is while it lives.
    size = len(chosen)
    ranks = {candidate.id: kept[candidate.id] for candidate in chosen if kept.get(candidate.id, size) < size}
    holes = sorted(set(range(size)) - set(ranks.values()))
    # 2. A newcomer takes the free rank of a lost member that it resembles.
    newcomers = sorted((c for c in chosen if c.id not in kept), key=first_order)
    free = set(holes)
    heirs = _heirs(newcomers, [entry for entry in vacant if entry.rank in free])
    ranks.update(heirs)
    # 3. The other free ranks go to members whose rank no longer exists, then to the other newcomers.
    taken = set(heirs.values())
    rest = iter([rank for rank in holes if rank not in taken])
    displaced = sorted((c for c in chosen if c.id in kept and c.id not in ranks), key=lambda c: kept[c.id])
    for candidate in [*displaced, *(c for c in newcomers if c.id not in heirs)]:
        ranks[candidate.id] = next(rest)
    return ranks


_LIKENESS: tuple[tuple[Callable[[Candidate], str], Callable[[RankEntry], str]], ...] = (
    (lambda candidate: candidate.name, lambda entry: entry.name),
    (lambda candidate: candidate.order, lambda entry: entry.order),
    (lambda candidate: candidate.host, lambda entry: entry.host),
)


def _heirs(newcomers: Sequence[Candidate], vacant: Sequence[RankEntry]) -> dict[str, int]:
    """Return the ranks that newcomers inherit from lost members; the same name goes before order key and host."""
    heirs: dict[str, int] = {}
    for of_candidate, of_entry in _LIKENESS:
        taken = set(heirs.values())
        open_ranks: dict[str, list[int]] = {}
        # Highest first, so that pop() gives the lowest.
        for entry in sorted(vacant, key=lambda entry: -entry.rank):
            if entry.rank not in taken:
                open_ranks.setdefault(of_entry(entry), []).append(entry.rank)
        for candidate in newcomers:
            likeness = of_candidate(candidate)
            if likeness and candidate.id not in heirs and open_ranks.get(likeness):
                heirs[candidate.id] = open_ranks[likeness].pop()
    return heirs


def worker_ranks(shares: Sequence[tuple[str, int]]) -> list[WorkerRanks | None]:
    """Return the ranks of each member's workers, given every member's role and number of workers in rank order.

    If a member does not say how many workers it has, no worker gets a rank: any answer would be a guess.
    """
    if any(count <= 0 for _, count in shares):
        return [None] * len(shares)
    total = sum(count for _, count in shares)
    role_totals: dict[str, int] = {}
    firsts = []
    first = 0
    for role, count in shares:
        firsts.append((first, role_totals.get(role, 0)))
        first += count
        role_totals[role] = role_totals.get(role, 0) + count
    return [
        WorkerRanks(first, total, role_first, role_totals[role])
        for (first, role_first), (role, _) in zip(firsts, shares, strict=True)
    ]


def digest(entries: Iterable[RankEntry]) -> str:
    """Return the fingerprint of a member list."""
    # It covers the ids that were sealed, not the present ones, so it stays the same when members die, mark their
    # entries, or come back to an emptied engine under new ids.
    ordered = sorted(entries, key=lambda entry: entry.rank)
    text = "\n".join(f"{entry.rank} {entry.sealed_as} {entry.name}" for entry in ordered)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
