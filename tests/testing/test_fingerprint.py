"""Fingerprints: equal for states that behave alike, different for all others."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from rdzv.testing.fingerprint import AGE_MAX_S, CLOCK_STEP, FAR_S, REVISION, describe, fingerprint


class Thing:
    """An object with whatever attributes it is given."""

    def __init__(self, **attributes: object) -> None:
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("left", "unset")

    def __init__(self, left: object) -> None:
        self.left = left


class Client:
    __slots__ = ("heard_s", "run")

    def __init__(self, heard_s: float, run: str | None) -> None:
        self.heard_s, self.run = heard_s, run


class Frozen(msgspec.Struct, frozen=True):
    key: str
    revision: int


NOW = 5 * CLOCK_STEP + 1000.0


def text(*roots, now=NOW):
    return describe(roots, {5: now})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2), ("a", "b"), (b"a", b"b"), ([1], [1, 1]), ({1: 2}, {1: 3}), ({1}, {2}), (None, False), (0.5, 1.5),
        (Thing(a=1), Thing(a=2)), (Thing(a=1), Thing(b=1)), (Slotted(1), Slotted(2)), (ValueError("a"), ValueError("b")),
        (Frozen("a", 1), Frozen("b", 1)),
    ],
)  # fmt: skip
def test_what_differs_is_told_apart(one, other):
    assert fingerprint([one], {}) != fingerprint([other], {})
    assert fingerprint([one], {}) == fingerprint([one], {})


def test_references_to_one_object_are_told_from_two_equal_ones():
    shared = Thing(a=1)
    assert text(shared, shared) != text(shared, Thing(a=1))


def test_the_order_of_a_set_has_no_effect():
    assert text({"a", "b", "c"}) == text({"c", "b", "a"})


def test_a_cycle_is_walked_once():
    thing = Thing()
    thing.itself = thing
    assert text(thing) == text(thing)


def test_of_digests_only_counts_which_are_equal():
    low, high, other = "0" * 32, "f" * 32, "5" * 32
    assert text(low, high, low) == text(high, low, high) == text(other, low, other)
    assert text(low, high) != text(low, low)


def test_an_instant_is_its_distance_from_now():
    assert text(NOW - 2.0) == text(NOW + 8.0, now=NOW + 10.0)
    assert text(NOW - 2.0) != text(NOW - 1.0)
    assert text(NOW - AGE_MAX_S) == text(NOW - AGE_MAX_S - 50.0)
    assert text(NOW + FAR_S) == text(NOW + FAR_S + 50.0)


def test_an_instant_that_no_rule_reads_any_more_is_as_good_as_none():
    never = text(Thing(_away_asked_at=float("-inf")))
    assert text(Thing(_away_asked_at=NOW - 0.3)) == never
    assert text(Thing(_away_asked_at=NOW - 0.2)) != never
    assert text(Thing(_listed_at=NOW - 0.3)) != text(Thing(_listed_at=float("-inf")))


def test_a_duration_that_no_world_lasts_is_like_any_other():
    assert text(999_999.6) == text(90_000.0)
    assert text(900.0) != text(800.0)


def test_how_long_a_head_stood_is_only_told():
    told = [f'{{"seq":2,"lasted_s":{lasted_s},"cause":"{cause}"}}' for lasted_s, cause in ((0.05, "a"), (19, "a"), (19, "b"))]
    assert text(told[0]) == text(told[1]) != text(told[2])


def test_the_order_in_which_hosts_came_has_no_effect():
    assert text(Thing(_of_host={"a": 1, "b": 2})) == text(Thing(_of_host={"b": 2, "a": 1}))
    assert text(Thing(_of_host={"a": 1, "b": 2})) != text(Thing(_of_host={"a": 2, "b": 1}))


def test_a_client_that_has_said_hello_may_be_silent():
    """One that has not is dropped after some seconds."""
    assert text(Client(NOW, run="sim")) == text(Client(NOW - 3.0, run="sim"))
    assert text(Client(NOW, run=None)) != text(Client(NOW - 3.0, run=None))


def test_ids_and_revisions_are_replaced_by_their_rank():
    assert text("e100000000000008", REVISION + 3, REVISION + 9) == text("e10000000000000c", REVISION + 4, REVISION + 5)
    assert text(REVISION + 3, REVISION + 9) != text(REVISION + 9, REVISION + 3)
    assert text("e100000000000008", "e200000000000008") != text("e200000000000008", "e100000000000008")
    assert text(Frozen("members/e100000000000008", REVISION)) == text(Frozen("members/e100000000000010", REVISION + 7))


def test_a_rank_is_the_same_wherever_the_word_stands():
    assert text("e100000000000008", b'{"id":"e200000000000008"}') != text("e200000000000008", b'{"id":"e200000000000008"}')


def test_suspended_coroutines_are_told_apart_by_place_and_variables():
    async def wait(count: int) -> None:
        first = count
        await asyncio.sleep(0)
        await asyncio.sleep(first)

    def suspended(count: int, steps: int):
        coroutine = wait(count)
        for _ in range(steps):
            coroutine.send(None)
        return coroutine

    coroutines = [suspended(0, 1), suspended(0, 1), suspended(1, 1), suspended(0, 2)]
    one, same, other_variable, other_place = [fingerprint([coroutine], {}) for coroutine in coroutines]
    assert one == same
    assert len({one, other_variable, other_place}) == 3
    for coroutine in coroutines:
        coroutine.close()


def test_a_future_shows_its_result():
    async def main():
        done, pending = asyncio.get_running_loop().create_future(), asyncio.get_running_loop().create_future()
        done.set_result(1)
        assert text(done) != text(pending)

    asyncio.run(main())
