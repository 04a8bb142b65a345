"""A server with a declared place is replaced on another machine (T16.4): the platform keeps its promise, or breaks it."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

from rdzv.core.keys import Keys
from rdzv.core.model import Phase
from rdzv.engines.embedded.client import RemoteLife
from rdzv.engines.embedded.server_core import ServerCore
from rdzv.errors import EngineMoved
from rdzv.testing.history import Commit, Fault
from rdzv.testing.replay import State
from rdzv.testing.scenario import BROKEN, KEPT, REPLACED
from rdzv.testing.sim import simulate
from support.scripted_simulation import by_hand

SEEDS = int(os.environ.get("RDZV_PROMISE_SEEDS", "100"))
CHUNK = 25


def judge(seeds):
    """Fail with the command that repeats a wrong seed. Return how many runs went on on another server."""
    followed = 0
    for seed in seeds:
        result = simulate(seed, promise=KEPT)
        assert not result.wrong, "\n".join([f"seed {seed} is wrong; replay it: {result.replay}", *result.wrong[:10]])
        followed += len({one.server for one in result.history.of(Commit)}) > 1
    return followed


@pytest.mark.seeds
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_every_guarantee_holds_while_the_promise_is_kept(first):
    assert judge(range(first, first + CHUNK)) > CHUNK // 2, "most of the runs go on on another server"


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1_000_000, 1_005_000, 250))
def test_every_guarantee_holds_in_five_thousand_more_while_the_promise_is_kept(first):
    judge(range(first, first + 250))


def two_worlds(history):
    """Whether two servers had a sealed round of the run at once, with different members, while both lived."""
    states, two_live = {}, False
    for seen in history:
        if isinstance(seen, Fault) and seen.kind == REPLACED:
            two_live = not seen.stop
        elif isinstance(seen, Commit):
            state = states.setdefault(seen.server, State(seen.instance, Keys("sim")))
            if state.instance != seen.instance:
                state = states[seen.server] = State(seen.instance, Keys("sim"))
            state.apply(seen)
            sealed = {one.head.table for one in states.values() if one.head and one.head.phase is Phase.SEALED and one.seated}
            if two_live and len(sealed) > 1:
                return True
    return False


def broken(seeds):
    """Count what comes of a broken promise: runs with two worlds at once, and runs in which each guarantee was broken."""
    counted = Counter()
    for seed in seeds:
        result = simulate(seed, promise=BROKEN)
        counted["two worlds"] += two_worlds(result.history)
        counted.update({re.match(r"\w+", problem)[0] for problem in result.wrong})
    return counted


@pytest.mark.soak
def test_a_broken_promise_makes_two_worlds_whose_fences_are_ordered():
    """Why the promise is the platform's, and not a wish: the documents name what breaks."""
    counted = broken(range(2_000))
    assert counted["two worlds"] > 0
    assert counted["fences"] == 0
    assert set(counted) <= {"two worlds", "G3", "G5", "G7", "G8", "G9"}, counted


# ---- by hand


def an_older_server_goes_on():
    return [(ServerCore, "_is_succeeded", lambda _self, _hello: False)]


def the_former_server_is_not_asked():
    async def answers(_self, _since):
        return False

    return [(RemoteLife, "answers", answers)]


@by_hand(min_nodes=2, max_nodes=2, outage_grace=20.0, place="pod-0")
async def test_the_round_goes_on_at_the_next_server_of_the_declared_place(hands):
    """The former one has ended. No operator says so: the platform did."""
    a, b = await hands.form("a", "b")
    table, fence = hands.head.table, hands.head.fence
    hands.fault("engine crash")
    hands.engine.crash()
    await hands.pass_time(2.0)
    hands.engine = hands.serve("next")
    await hands.until(lambda: hands.head is not None, 10.0)
    assert (hands.head.table, hands.head.adopted, hands.phase) == (table, True, Phase.SEALED)
    assert hands.head.fence > fence
    await hands.pass_time(5.0)
    assert (a.kinds, b.kinds, a.is_in, b.is_in) == ([], [], True, True)


@by_hand(
    min_nodes=1,
    max_nodes=2,
    outage_grace=20.0,
    place="pod-0",
    catches={the_former_server_is_not_asked: "the second one was followed"},
)
async def test_a_second_server_of_the_name_is_refused_while_the_first_one_answers(hands):
    a, b = await hands.form("a", "b")
    second = hands.serve("second")
    hands.fault("moved", b)
    hands.routes["b"] = second
    hands.network.reset(b.node)
    hands.accepted.append("b was told of an outage")
    await hands.until(lambda: a.is_in and hands.sealed == 2)
    await hands.pass_time(10.0)
    assert (b.rounds, b.kinds, len(second.engine)) == ([1], [], 0), "the second one was followed"
    await hands.until(lambda: b.ended)
    assert isinstance(b.ended, EngineMoved)
    assert "the former server of place 'pod-0' still answers at engine:0, and the new one is at second:0" in b.ended.why


@by_hand(
    min_nodes=1,
    max_nodes=2,
    outage_grace=20.0,
    place="pod-0",
    catches={an_older_server_goes_on: "did not happen within"},
)
async def test_an_older_server_of_the_name_stops_when_it_hears_of_the_later_one(hands):
    """The promise was broken: B was cut off from the first server when the second was started, and followed it.

    When the name leads B back to the first, B does not follow, and the first one stops. Then A finds the second."""
    hands.accepted.append(".")  # The story breaks the promise that the checkers rely on.
    a, b = await hands.form("a", "b")
    first = hands.engine
    hands.network.cut(b.node, first)
    hands.network.reset(b.node)
    second = hands.serve("second")
    hands.routes["b"] = second
    await hands.until(lambda: b.rounds == [1, 2], 60.0)
    hands.network.heal(b.node, first)
    del hands.routes["b"]
    hands.routes["a"] = second
    hands.network.reset(b.node)
    await hands.until(lambda: first.dead, 30.0)
    hands.routes["b"] = second
    hands.engine = second
    await hands.until(lambda: a.is_in and b.is_in and a.world.table == b.world.table, 60.0)
    assert not second.dead
