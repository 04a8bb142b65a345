"""The cost of all notices for the engine: many members with all sinks, and with none."""

from __future__ import annotations

import logging

import pytest
from sim_form import form

from rdzv.core.keys import Keys
from rdzv.engines.port import Put
from rdzv.testing.driver import SimDriver, SimSession

ALLOWED = 1.1
JOURNAL = Keys("bench").journal


class Engine:
    """Lets members through to the simulated engine, counts what they ask of it, and keeps their journal from it if told to."""

    def __init__(self, *, journal):
        self.journal = journal
        self.operations = 0
        self.lines = 0

    def driver(self, *given):
        return Driver(self, *given)


class Driver(SimDriver):
    def __init__(self, engine, *given):
        super().__init__(*given)
        self.engine = engine


class Session(SimSession):
    async def txn(self, compares=(), then=(), otherwise=(), instead=()):
        engine, then, otherwise = self._driver.engine, list(then), list(otherwise)
        lines = [one for one in then if isinstance(one, Put) and one.key.startswith(JOURNAL)]
        engine.lines += len(lines)
        if not engine.journal:
            then = [one for one in then if one not in lines]
        engine.operations += len(then) + len(otherwise)
        return await super().txn(compares, then, otherwise, instead)


Driver.session_type = Session


def cost(members, engine, observer=None):
    """Requests, operations within them, messages received and bytes, of all members together."""
    counters, *_ = form(members, engine.driver, observer)
    sent = {what: sum(getattr(one, of) for one in counters.values()) for what, of in
            (("requests", "operations"), ("received", "received"), ("bytes", "bytes"))}  # fmt: skip
    return {**sent, "operations": engine.operations}


def torch_events():
    """torch's sink, which is told of every notice here and so of more than under torchrun; none without torch."""
    try:
        from rdzv.torchrun.events import Recorder
    except ImportError:
        return lambda _: None
    recorder = Recorder("rdzv", "bench")
    return lambda notice: recorder.record(f"{notice.kind}: {notice.reason}")


@pytest.fixture
def loud():
    """Everything is logged, and nothing is printed."""
    logger, heard = logging.getLogger("rdzv"), []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    before = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(handler)
    yield heard
    logger.removeHandler(handler)
    logger.level, logger.propagate = before


@pytest.mark.parametrize("members", [100, pytest.param(1_000, marks=pytest.mark.soak)])
def test_all_sinks_together_cost_the_engine_at_most_a_tenth_more(loud, members):
    """Logging, journal, observer and torch's events, against none of them."""
    logging.disable()
    try:
        silent = Engine(journal=False)
        without = cost(members, silent)
    finally:
        logging.disable(logging.NOTSET)
    assert loud == []
    told, events = [], torch_events()

    def observe(notice):
        told.append(notice)
        events(notice)

    engine = Engine(journal=True)
    with_all = cost(members, engine, observe)
    assert engine.lines == silent.lines > 0, "both wrote a journal, and one was kept"
    assert len(told) >= 3 * members
    assert len(loud) >= 3 * members
    for what, least in without.items():
        assert with_all[what] <= ALLOWED * least, (what, with_all, without)
    assert with_all != without, "the journal is seen in the count"
