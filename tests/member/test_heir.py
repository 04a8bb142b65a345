"""The heir asks seldom, and only if few came before it (T8.7). What it decides is in tests/core and tests/sim."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from rdzv.config.settings import Settings
from rdzv.core import evictions
from rdzv.core.keys import Keys
from rdzv.core.model import Era, Head, Phase, RoundId
from rdzv.engines.port import Item, List, Order, Outcome
from rdzv.errors import Unreachable
from rdzv.member.head_tracker import HeadTracker
from rdzv.member.heir import Heir
from rdzv.system.node import LocalNode

KEYS = Keys("job")
HEAD = Head(run="r", era=Era(1, "e"), next_era=Era(1, "e"), number=3, phase=Phase.SEALED, table="t")
EARLIER = List(KEYS.members, Order.OLDEST, evictions.HEIRS_MAX + 1, created_below=99)
EVERYTHING = [List(KEYS.group)]


class Engine:
    """An engine on which that many came earlier, and which otherwise has nothing to show."""

    sees_ends = True
    durable = False

    def __init__(self, earlier):
        self.earlier = earlier
        self.asked = []
        self.is_away = False

    async def txn(self, compares=(), then=()):
        assert not compares
        self.asked += then
        if self.is_away:
            raise Unreachable("x", "no answer")
        found = [Item(f"{KEYS.members}{number}", b"", number, number) for number in range(self.earlier)]
        return Outcome(True, 1, (tuple(found[: EARLIER.limit]) if then == [EARLIER] else (),))


def heir_of(engine, **given):
    node = LocalNode("b")
    tracker = HeadTracker(node.now)
    tracker.head = HEAD
    settings = Settings.make("memory://", run_id="job", min_nodes=1, max_nodes=2, linger=0.02)
    presence = SimpleNamespace(
        session=engine, settings=settings, node=node, keys=KEYS, created=99, leader=None, tracker=tracker, id="b",
        record=SimpleNamespace(left=HEAD.round), known_at=0.0,
    )  # fmt: skip
    vars(presence).update(given)
    return Heir(presence)


async def test_one_with_few_before_it_lists_the_run_four_times_at_most():
    engine = Engine(evictions.HEIRS_MAX)
    await heir_of(engine).run()
    assert engine.asked == [EARLIER, *EVERYTHING] * 4


async def test_one_with_many_before_it_asks_for_no_more_than_that():
    engine = Engine(evictions.HEIRS_MAX + 1)
    await heir_of(engine).run()
    assert engine.asked == [EARLIER]


async def test_an_engine_that_does_not_answer_is_asked_again():
    engine = Engine(1)
    engine.is_away = True
    await heir_of(engine).run()
    assert engine.asked == [EARLIER] * 4


@pytest.mark.parametrize(
    "given",
    [{"leader": object()}, {"record": SimpleNamespace(left=RoundId())}, {"tracker": SimpleNamespace(head=None)}],
    ids=["it leads", "another round stands", "no head"],
)
async def test_nothing_is_asked_when_somebody_goes_on(given):
    engine = Engine(1)
    heir = heir_of(engine, **given)
    assert not heir.is_needed
    await heir.run()
    assert engine.asked == []


@pytest.mark.parametrize(
    ("phase", "size", "asks"),
    [
        (Phase.SEALED, 10_000, True),
        (Phase.BROKEN, evictions.ASKING_SIZE_MAX, True),
        (Phase.BROKEN, evictions.ASKING_SIZE_MAX + 1, False),
        (Phase.OPEN, 3, False),
    ],
)
def test_members_of_a_large_round_that_is_broken_do_not_ask(phase, size, asks):
    """T8.7: the leader that broke it lived then, and each of thousands would ask how many came earlier."""
    tracker = SimpleNamespace(head=msgspec.structs.replace(HEAD, phase=phase, size=size))
    assert heir_of(Engine(1), tracker=tracker).is_needed is asks


def test_an_engine_that_sees_no_processes_is_not_asked():
    engine = Engine(1)
    assert heir_of(engine).pause_s == 0.005
    engine.sees_ends = False
    assert heir_of(engine).pause_s == 0.0
