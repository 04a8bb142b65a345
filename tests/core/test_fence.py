"""Fences: what a head begins with, what a seal makes of it, and what holds over restarts that members tell of differently."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.core.fence import LIFE, first_fence, next_fence, restored_fence
from rdzv.core.model import Call
from rdzv.core.rules import lead
from support.views import NUMBER, REVISION, broken, no_head, opened, report, seal_of, sealed

HERE, THERE = "place-1", "place-2"
ETCD = {"fence_floor": None, "place": "etcd/c1"}
EMBEDDED = {"fence_floor": 6400, "place": HERE}
REGISTER = {"fence_floor": 0, "place": HERE}


def told(**fences: tuple[int, str]) -> dict[str, dict[str, object]]:
    """Records of members by name that knew these fences when they came."""
    return {name: {"fence": fence, "fence_place": place} for name, (fence, place) in fences.items()}


@pytest.mark.parametrize(
    ("engine", "known", "expected"),
    [
        (ETCD, {}, 0),
        (ETCD, told(a=(7 * LIFE, HERE)), 0),
        (EMBEDDED, {}, 1000 * LIFE),
        (REGISTER, {}, 1000 * LIFE),
        (EMBEDDED, told(a=(999 * LIFE + 5, HERE)), 1000 * LIFE),
        # A closed run was replaced within the same second, or clocks do not agree.
        (EMBEDDED, told(a=(1000 * LIFE + 5, HERE), b=(3, THERE)), 1001 * LIFE),
    ],
)
def test_a_head_that_is_made_anew_begins_a_life(engine, known, expected):
    """T2.5."""
    view = no_head("a b", wall_s=1000, records=known, **engine)
    assert first_fence(view) == expected
    assert lead(view).act.head.fence == expected


@pytest.mark.parametrize(
    ("engine", "known", "expected"),
    [
        (EMBEDDED, told(a=(8 * LIFE + 5, HERE)), 8 * LIFE + 5),
        # Clocks that differ from those of the former life are not asked.
        (EMBEDDED, told(a=(2000 * LIFE + 5, HERE), b=(8 * LIFE, THERE)), 2000 * LIFE + 5),
        (EMBEDDED, told(a=(8 * LIFE + 5, THERE)), 1000 * LIFE),
        (EMBEDDED, told(a=(8 * LIFE + 5, HERE), b=(2000 * LIFE + 9, THERE)), 2001 * LIFE),
        (REGISTER, told(a=(8 * LIFE + 5, HERE)), 1000 * LIFE),
        (ETCD, told(a=(8 * LIFE + 5, HERE)), 8 * LIFE + 5),
        # A member of an earlier release.
        (EMBEDDED, {}, 1000 * LIFE),
    ],
)
def test_a_restored_head_keeps_the_life_of_its_place(engine, known, expected):
    """T14.4."""
    heard = report(size=2, rank=0)
    records = {name: {"heard": heard, **known.get(name, {})} for name in "ab"}
    view = no_head("a b", wall_s=1000, durable=False, known_s=9.0, records=records, **engine)
    assert restored_fence(view) == expected
    assert lead(view).act.head.fence == expected


@pytest.mark.parametrize(
    ("engine", "head", "known", "expected"),
    [
        (ETCD, 0, {}, REVISION),
        (ETCD, REVISION - 10, {}, REVISION),
        (ETCD, REVISION, {}, REVISION + 1),
        (ETCD, 0, told(a=(8 * LIFE, HERE)), 8 * LIFE + 1),
        (EMBEDDED, 8 * LIFE, {}, 8 * LIFE + 6401),
        (EMBEDDED, 8 * LIFE + 6401, {}, 8 * LIFE + 6402),
        (EMBEDDED, 8 * LIFE + 5, told(a=(8 * LIFE + 9000, HERE)), 8 * LIFE + 9001),
        (EMBEDDED, 8 * LIFE + 5, told(b=(9 * LIFE + 1, THERE)), 9 * LIFE + 2),
        (REGISTER, 8 * LIFE, {}, 8 * LIFE + 1),
        # A head of an earlier release.
        (EMBEDDED, 0, {}, 6401),
    ],
)
def test_a_seal_raises_the_fence(engine, head, known, expected):
    """T6.14: above all that is known, and above the floor of the server's start."""
    view = broken("a:ready b:ready", call=Call.REGROUP, fence=head, records=known, **engine)
    assert next_fence(view) == expected
    assert seal_of(lead(view)).head.fence == expected


def test_no_other_write_changes_the_fence():
    """T6.14."""
    for view in (sealed("a b c:lost", fence=9), opened("a b", fence=9), sealed("a:done b:done", fence=9)):
        assert lead(view).act.head.fence == 9


class Place:
    """Servers that start one after the other at one place and forget everything, with a clock that steps."""

    def __init__(self, name: str, booted_s: int) -> None:
        self.name, self.up_s = name, booted_s
        self.fences: list[int] = []

    def serve(self, seals: int, known: tuple[int, str] | None, wall_s: int) -> tuple[int, str]:
        """Start anew, be told that fence and seal so many rounds. Return the last fence, and the place."""
        self.up_s += 1
        engine = {"fence_floor": 64 * self.up_s, "place": self.name, "wall_s": wall_s}
        records = {"a": {"fence": known[0], "fence_place": known[1]}} if known else {}
        view = broken("a:ready b:ready", records=records, **engine)
        head = msgspec.structs.replace(view.head, fence=restored_fence(view) if known else first_fence(view))
        for number in range(seals):
            now = msgspec.structs.replace(view, head=head)
            head = msgspec.structs.replace(head, fence=next_fence(now), number=NUMBER + number)
            self.fences.append(head.fence)
        return head.fence, self.name


STEPS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 5), st.integers(0, 10**6)), min_size=1, max_size=12)


@given(STEPS, st.integers(0, 10**6))
def test_fences_grow_at_one_place_whoever_tells_and_whatever_the_clocks_show(steps, booted_s):
    """T6.14: each server is told of some earlier life by a member that knows no later one."""
    place = Place(HERE, booted_s)
    known = [place.serve(1, None, 500_000)]
    for seals, teller, wall_s in steps:
        known.append(place.serve(seals, known[teller % len(known)], wall_s))
    assert all(one < other for one, other in zip(place.fences, place.fences[1:], strict=False))


@given(STEPS, st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)))
def test_a_server_at_another_place_that_is_told_is_above_the_old_one(steps, booted):
    """T14.4: whatever the clocks show."""
    places = Place(HERE, booted[0]), Place(THERE, booted[1])
    known = places[0].serve(1, None, 500_000)
    for seals, which, wall_s in steps:
        before = known
        known = places[which % 2].serve(seals, before, wall_s)
        assert known[0] > before[0]
