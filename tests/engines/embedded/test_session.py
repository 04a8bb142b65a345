"""Server and client without an event loop: bytes are passed from one to the other by hand, and the test moves the clock."""

from __future__ import annotations

import inspect
import re

import pytest

from rdzv.engines.embedded import client_protocol, frames, limits, run, server_core, session, turns
from rdzv.engines.embedded.client_protocol import PING_S
from rdzv.engines.embedded.frames import LeaseGrant, Renew, Txn, WatchStart
from rdzv.engines.embedded.limits import Limits
from rdzv.engines.port import Get, LeaseGone, Put
from rdzv.errors import Unreachable
from support.sans_io import Core, Pair, Waiter


def come(pair, lease=7):
    return pair.ask(lambda number: Txn(number, (), (Put("k", b"v", lease),), (), (), (LeaseGrant(lease, 10.0),)))


@pytest.mark.parametrize("module", [client_protocol, frames, limits, run, server_core, session, turns])
def test_what_the_simulator_runs_does_no_io_by_itself(module):
    imported = re.findall(r"^ *(?:import|from) (\w+)", inspect.getsource(module), re.MULTILINE)
    assert not {"asyncio", "socket", "threading", "time"} & set(imported)


def test_requests_are_answered_and_errors_are_raised():
    pair = Pair(Core())
    assert come(pair).result.succeeded
    assert pair.ask(lambda number: Txn(number, (), (Get("k"),), ())).result.item(0).value == b"v"
    assert isinstance(pair.ask(lambda number: Renew(number, 8)).error, LeaseGone)


def test_news_wait_for_the_end_of_the_turn_or_go_before_the_next_answer():
    core = Core()
    watcher, writer = Pair(core), Pair(core, "other")
    watcher.client.tell(WatchStart(1, ("k",), 1))
    watcher.exchange()
    come(writer)
    watcher.exchange()
    assert watcher.news == []
    (deliver,) = core.turn
    deliver()
    watcher.exchange()
    assert [(watch, batch.revision) for watch, batch in watcher.news] == [(1, 2)]
    come(writer, 9)
    assert watcher.ask(lambda number: Txn(number, (), (), ())).result.revision == 3
    assert [batch.revision for _, batch in watcher.news] == [2, 3]


def test_a_silent_connection_is_asked_for_a_sign_of_life_and_given_up_without():
    core = Core()
    pair = Pair(core)
    for answered in (True, False):
        core.time_s += PING_S
        assert pair.client.check() == 5.0
        if answered:
            pair.exchange()
            assert pair.client.check() == 5.0
    waiter = Waiter()
    pair.client._new_waiter = lambda: waiter
    pair.client.ask(lambda number: Renew(number, 7))
    core.time_s += 5.0
    pair.client.check()
    assert pair.lost == ["no answer"]
    assert isinstance(waiter.error, Unreachable)


@pytest.mark.parametrize(
    ("given_up", "linger_s", "left"), [(False, -1.0, 0), (False, 0.2, 0), (False, 60.0, 1), (True, 0.2, 1)]
)
def test_a_member_whose_connection_broke_lingers_and_the_lease_decides_if_the_server_gave_it_up(given_up, linger_s, left):
    core = Core()
    pair, other = Pair(core, linger_s=linger_s), Pair(core, "other")
    come(pair)
    if given_up:
        core._drop(pair.session, "it has said nothing for 60 s")
    pair.session.closed()
    for _ in range(30):
        core.time_s += 0.1
        other.ask(lambda number: Txn(number, (), (), ()))
        core.pass_time(0.1)
    assert len(core.runs["job"].engine.leases) == left


def test_a_client_whose_buffer_fills_while_it_is_told_of_gaps_is_held_back_again():
    """Found by attack: a client that read a little from time to time was owed 243 MB where 1 MiB was promised."""
    pair = Pair(Core())
    session, transport = pair.session, pair.session.transport
    session.pause_writing()
    session._cut.append(1)
    write = transport.write

    def fill(data):
        write(data)
        session.pause_writing()

    transport.write = fill
    session.resume_writing()
    pair.core.end_turn()
    assert session.is_held
    assert not transport.reading
    transport.write = write
    session.resume_writing()
    pair.core.end_turn()
    assert not session.is_held
    assert transport.reading


def test_a_client_that_is_dropped_for_want_of_room_is_told_so_once():
    core = Core(limits=Limits(unread=3000))
    pairs = [Pair(core, name) for name in "abcd"]
    for pair in pairs:
        pair.session.transport.get_write_buffer_size = lambda: 10
        pair.session.received(memoryview((2000).to_bytes(4, "big") + bytes(900)))
    left = [pair for pair in pairs if not pair.session.transport.is_closing()]
    assert len(left) == 2
    for pair in pairs:
        assert sum(b"out of room" in data for data in pair.session.transport.sent) == (pair not in left)


def test_a_session_that_is_back_replaces_its_former_connection_and_keeps_its_lease():
    core = Core()
    former = Pair(core)
    come(former)
    back = Pair(core, attempt=2, instance=former.welcome.instance, leases=(7,))
    assert former.session.transport.is_closing()
    former.session.closed()
    for _ in range(30):
        core.time_s += 0.1
        assert back.ask(lambda number: Renew(number, 7)).error is None
        core.pass_time(0.1)
    late = Pair(core, attempt=1, instance=former.welcome.instance, leases=(7,))
    assert late.welcome is None
