"""What a suspended coroutine can still read is part of its state, and nothing else is."""

from __future__ import annotations

import types

import pytest

from rdzv.testing.fingerprint import describe
from rdzv.testing.liveness import IS_KNOWN

pytestmark = pytest.mark.skipif(not IS_KNOWN, reason="the frames of this version of Python are not looked into")


@types.coroutine
def pause():
    yield


async def never_reads(value):
    del value
    await pause()


async def has_read(value):
    other = value * 2
    await pause()
    return other - other


async def will_read(value):
    await pause()
    return value


async def will_overwrite(value):
    await pause()
    value = 5
    return value + value


async def may_read_in_a_handler(value):
    try:
        await pause()
        value = 5
    except ValueError:
        return value
    return 0


async def may_read_in_the_next_turn(value):
    for _ in range(3):
        if value == 7:
            value = 5
        await pause()
    return 0


async def may_read_in_a_closure(value):
    def read():
        return value

    await pause()
    return read


async def keeps_it_on_the_stack(value):
    return [value, await pause()]


async def loops(value):
    for _ in [1] * (3 - value) + [2] * value:
        await pause()


def state(coroutine, turns=1):
    """Return what the fingerprint says of a coroutine that has been resumed so often."""
    try:
        for _ in range(turns):
            coroutine.send(None)
        return describe([coroutine], {})
    finally:
        coroutine.close()


@pytest.mark.parametrize("program", [never_reads, will_overwrite])
def test_a_variable_that_is_not_read_again_does_not_count(program):
    assert state(program(1)) == state(program(2))


def test_only_what_is_read_again_counts():
    assert " 2 " in state(has_read(1))
    assert state(has_read(11)).count("11") == 0


READERS = [will_read, may_read_in_a_handler, may_read_in_the_next_turn, may_read_in_a_closure, keeps_it_on_the_stack, loops]


@pytest.mark.parametrize("program", READERS)
def test_a_value_that_may_be_read_counts(program):
    assert state(program(1)) != state(program(2))


def test_the_position_in_a_loop_counts():
    """The variable of the loop is dead, and the coroutine waits at the same instruction each time."""
    assert len({state(loops(0), turns) for turns in (1, 2, 3)}) == 3
