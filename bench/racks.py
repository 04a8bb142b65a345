"""The cost of a leader's decision when ranks follow the network, and how many racks it splits.

python bench/racks.py [--members 1000 4000] [--repeat 15] [--out bench/results]

The rules are pure, so one thread calls them: n members over racks of 31 or 32 form a round (`form`), 20 of them are lost while
each rack has four spares, and the next round is sealed (`again`). `rule` is the part of the latter that chooses the members and
assigns the ranks. Times are CPU times of the thread. `cuts` counts racks whose ranks do not stand side by side.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from common import Book

from rdzv.core.acts import Seal, WriteHead
from rdzv.core.choice import choose
from rdzv.core.model import Era, Head, MemberRecord, Phase, RankEntry, RoundId, RunSettings
from rdzv.core.ranks import assign
from rdzv.core.rules import lead
from rdzv.core.topology import neighbourhood
from rdzv.core.view import LiveMember, View, candidate

RACK = 31
LOST = 20
SPARES = 4
"""Spares of each rack. With seed 1, no rack loses more."""


def member(index: int, racks: int, **record: Any) -> LiveMember:
    rack = index % racks
    name = f"node{index}"
    path = f"block{rack // 8}/rack{rack}/{name}"
    known = MemberRecord(name=name, host=name, boot=f"{name}:29500", topology=path, **record)
    return LiveMember(f"id{index}", known, 100 + index, 100 + index)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.thread_time()
    done = work()
    return time.thread_time() - began, done


def cuts(entries: Mapping[str, RankEntry]) -> int:
    """Return how many more pieces than racks there are; 0: the ranks of each rack stand side by side."""
    ordered = sorted(entries.values(), key=lambda entry: entry.rank)
    pieces = [rack for rack, _ in groupby(neighbourhood(entry.topology) for entry in ordered)]
    return len(pieces) - len(set(pieces))


def measure(size: int, repeat: int, book: Book) -> None:
    racks = round(size / RACK)
    settings = RunSettings(min_nodes=1, max_nodes=size)
    era = Era(1, "e")
    head = Head(run="r", era=era, next_era=era, phase=Phase.OPEN, seq=1, call_seq=1)
    first = {one.id: one for one in (member(index, racks) for index in range(size))}
    gone = {f"id{index}" for index in random.Random(1).sample(range(size), LOST)}
    took: dict[str, list[float]] = {"form_s": [], "again_s": [], "rule_s": []}
    for turn in range(repeat):
        common: dict[str, Any] = {"settings": settings, "me": "id0", "fresh": f"t{turn}", "revision": 9 * size}
        # A view keeps what it has computed, so each turn has its own.
        form_s, sealed = timed(lambda common=common: lead(View(head=head, members=first, **common)).act)
        assert isinstance(sealed, Seal)
        left = {id: one for id, one in first.items() if id not in gone}
        broken = lead(View(head=sealed.head, members=left, entries=sealed.entries, **common)).act
        assert isinstance(broken, WriteHead)
        assert broken.head.phase is Phase.BROKEN
        given_up = RoundId(era, 1)
        there = {one.id: member(int(one.id[2:]), racks, left=given_up) for one in left.values()}
        there |= {one.id: one for one in (member(index, racks) for index in range(size, size + SPARES * racks))}
        common |= {"me": next(iter(there)), "fresh": f"u{turn}", "entries": sealed.entries, "head": broken.head}
        again_s, again = timed(lambda common=common, there=there: lead(View(members=there, **common)).act)
        assert isinstance(again, Seal)
        assert len(again.entries) == len(sealed.entries) == size
        moved = [id for id, one in again.entries.items() if id in sealed.entries and sealed.entries[id].rank != one.rank]
        assert moved == []
        view = View(members=there, **common)
        ready = view.ready

        def rule(view: View = view, ready: Any = ready, entries: Any = sealed.entries) -> None:
            chosen = {one.id: candidate(one) for one in choose(view, ready, size)}
            kept = {id: entries[id].rank for id in chosen if id in entries}
            assign(list(chosen.values()), kept, [one for id, one in entries.items() if id not in chosen])

        for name, seconds in (("form_s", form_s), ("again_s", again_s), ("rule_s", timed(rule)[0])):
            took[name].append(seconds)
    counts = {"cuts_first": cuts(sealed.entries), "cuts_again": cuts(again.entries)}
    book.add(what="ours", n=size, racks=racks, lost=LOST, **took, **counts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    book = Book("racks", args.out)
    for size in args.members:
        measure(size, args.repeat, book)


if __name__ == "__main__":
    main()
