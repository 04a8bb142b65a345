"""Rank assignment."""

# Members keep their rank from round to round, so that what a node has on its local disk stays useful. A newcomer takes
# the rank of a lost member it resembles (same name, then order key, then host); failing that the rank of the lost member
# that was nearest to it in the network; failing that the lowest hole. When the world shrinks, those whose rank no longer
# exists move into the holes. Rank 0 stays where it is while it lives.
#
# With segments, ranks come in blocks of `segment`, and a block belongs to neighbours. Each neighbourhood keeps the blocks
# in which most of its members were, and its members keep their ranks within these.

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import msgspec

from .model import RankEntry, WorkerRanks
from .topology import neighbourhood, pair_nearest

_DIGITS = re.compile(r"([0-9]+)")


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A member chosen for the next round."""

    id: str
    name: str
    host: str
    order: str
    created: int
    path: str = ""


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


@lru_cache(maxsize=1024)  # Many nodes share each rack.
def path_order(path: str) -> tuple[tuple[object, str], ...]:
    """Return a sort key that keeps all places with a common beginning together, whatever their names."""
    # The text itself follows each natural key: r1 and r01 have the same key but are two racks.
    return tuple((natural(part), part) for part in path.split("/")) if path else ()


def first_order(candidate: Candidate) -> tuple[object, ...]:
    """Return the sort key of members without a former rank: path, order key, then host, name and time of coming."""
    path, order, host, name = candidate.path, candidate.order, candidate.host, candidate.name
    by_host = natural(host)
    by_name = by_host if name == host else natural(name)
    by_path: tuple[tuple[object, str], ...] = ()
    if path:
        where, _, node = path.rpartition("/")
        by_path = (*path_order(where), (by_host if node == host else natural(node), node))
    return (not path, by_path, not order, natural(order), by_host, by_name, candidate.created)


def assign(
    chosen: Sequence[Candidate], kept: Mapping[str, int], vacant: Iterable[RankEntry], segment: int = 1
) -> dict[str, int]:
    """Give each of `chosen` a rank from 0 to len(chosen)-1.

    `kept`: former ranks of chosen members. `vacant`: former entries whose members are not chosen. With a `segment`, the
    members of each neighbourhood are a multiple of it.
    """
    vacant = list(vacant)
    if segment == 1:
        return _assign(chosen, kept, vacant, range(len(chosen)))
    groups: dict[str, list[Candidate]] = {}
    for candidate in chosen:
        groups.setdefault(neighbourhood(candidate.path), []).append(candidate)
    ranks: dict[str, int] = {}
    for where, blocks in _blocks(groups, kept, vacant, segment).items():
        slots = [block * segment + index for block in sorted(blocks) for index in range(segment)]
        ranks |= _assign(groups[where], kept, vacant, slots)
    return ranks


def _blocks(
    groups: Mapping[str, Sequence[Candidate]], kept: Mapping[str, int], vacant: Sequence[RankEntry], segment: int
) -> dict[str, list[int]]:
    """Give each neighbourhood as many blocks of ranks as it has segments."""
    wanted = {where: len(members) // segment for where, members in groups.items()}
    free = dict.fromkeys(range(sum(wanted.values())))
    blocks: dict[str, list[int]] = {where: [] for where in groups}
    # 1. The blocks in which most members of a neighbourhood were, so that they keep their ranks.
    votes: dict[tuple[str, int], int] = {}
    for where, members in groups.items():
        for candidate in members:
            if candidate.id in kept:
                home = where, kept[candidate.id] // segment
                votes[home] = votes.get(home, 0) + 1
    for where, block in sorted(votes, key=lambda home: (-votes[home], home[1], home[0])):
        if block in free and len(blocks[where]) < wanted[where]:
            blocks[where].append(block)
            del free[block]
    # 2. The block of a lost segment that was near, then the lowest.
    missing = [
        (where, index)
        for where in sorted(groups, key=lambda where: (not where, path_order(where)))
        for index in range(wanted[where] - len(blocks[where]))
    ]
    former = {entry.rank // segment: entry.topology for entry in sorted(vacant, key=lambda entry: -entry.rank)}
    near = pair_nearest(
        [((where, index), where) for where, index in missing],
        [(block, neighbourhood(former[block])) for block in free if block in former],
    )
    rest = iter([block for block in free if block not in set(near.values())])
    for where, index in missing:
        blocks[where].append(near[where, index] if (where, index) in near else next(rest))
    return blocks


def _assign(
    chosen: Sequence[Candidate], kept: Mapping[str, int], vacant: Sequence[RankEntry], slots: Sequence[int]
) -> dict[str, int]:
    """Give each of `chosen` one of the ranks `slots`, which are as many, in order."""
    # 1. A member keeps its rank if the new size still has it; so rank 0 stays where it is while it lives.
    known = set(slots)
    ranks = {candidate.id: kept[candidate.id] for candidate in chosen if kept.get(candidate.id, -1) in known}
    holes = sorted(known.difference(ranks.values()))
    # 2. A newcomer takes the free rank of a lost member that it resembles.
    newcomers = sorted((c for c in chosen if c.id not in kept), key=first_order)
    free = set(holes)
    open_entries = [entry for entry in vacant if entry.rank in free]
    heirs = _heirs(newcomers, open_entries)
    ranks.update(heirs)
    # 3. The others: members whose rank no longer exists, then newcomers; each to the rank of the lost member that was
    #    nearest to it, if any was near.
    displaced = sorted((c for c in chosen if c.id in kept and c.id not in ranks), key=lambda c: kept[c.id])
    movers = [*displaced, *(c for c in newcomers if c.id not in heirs)]
    taken = set(heirs.values())
    places = sorted((entry.rank, entry.topology) for entry in open_entries if entry.topology and entry.rank not in taken)
    near = pair_nearest([(candidate.id, candidate.path) for candidate in movers], places) if places else {}
    ranks.update(near)
    # 4. The free ranks that are left, from the lowest.
    taken.update(near.values())
    rest = iter([rank for rank in holes if rank not in taken])
    for candidate in movers:
        if candidate.id not in near:
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
    if not vacant:
        return heirs
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
