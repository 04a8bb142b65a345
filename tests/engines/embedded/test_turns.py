"""The server's time is shared between runs: a heavy run waits for the others, and goes on once they have had their turn."""

from __future__ import annotations

from collections import deque

from rdzv.engines.embedded.frames import Acknowledged, Hello, Ping, Txn, answer_decoder, encode
from rdzv.engines.embedded.limits import Limits
from rdzv.engines.embedded.server_core import ServerCore
from rdzv.engines.embedded.session import ServerSession
from rdzv.engines.embedded.turns import CROWDED, PAUSE_MAX_S, RATE, Share, Turns, Waiting
from rdzv.engines.port import Empty, Put
from support.embedded_server import PREAMBLE, FakeTransport

BURST = 1000


class Clock:
    """Time that the test moves, and the callbacks that wait for it."""

    def __init__(self):
        self.now_s = 100.0
        self.later = deque()

    def now(self):
        return self.now_s

    def call_later(self, delay_s, callback):
        self.later.append((delay_s, callback))

    def go_on(self):
        """Let the next callback come; return how long that took."""
        delay_s, callback = self.later.popleft()
        self.now_s += delay_s
        callback()
        return delay_s


class Client(Waiting):
    """Has so many requests, each of so many steps."""

    def __init__(self, turns, share, requests, steps):
        self.turns, self.share, self.requests, self.steps = turns, share, requests, steps
        self.served = 0

    def take_turn(self):
        while self.requests and not self.share.is_waiting:
            self.requests -= 1
            self.served += 1
            self.share.steps += self.steps
            if self.share.steps > self.share.end:
                self.turns.settle(self.share)
        if self.requests:
            self.share.clients.append(self)


def test_a_run_that_is_alone_goes_on_in_the_next_turn():
    clock = Clock()
    turns = Turns(BURST, clock.now, clock.call_later)
    client = Client(turns, Share(100.0), 1000, CROWDED)
    client.take_turn()
    for served in range(1, 1001):
        assert client.served == served, "a turn for each"
        assert clock.go_on() == 0.0


def test_runs_that_compete_are_served_one_by_one_with_as_much_time_for_the_others():
    clock = Clock()
    turns = Turns(BURST, clock.now, clock.call_later)
    turns.active = 6
    heavy = [Client(turns, Share(100.0), 1000, CROWDED // 2) for _ in range(5)]
    for client in heavy:
        client.take_turn()
    began_at = clock.now_s
    for _ in range(500):
        pause_s = clock.go_on()
    assert len(clock.later) == 1, "one callback, however many wait"
    assert pause_s == CROWDED / 2 / RATE
    assert clock.now_s - began_at > 0.9 * 500 * pause_s
    assert {client.served for client in heavy} == {101}


def test_turns_are_short_while_strangers_wait():
    for strangers, served in (False, 4), (True, 1):
        clock = Clock()
        turns = Turns(BURST, clock.now, clock.call_later)
        turns.are_strangers_there = strangers
        client = Client(turns, Share(100.0), 10, BURST // 3 + 10)
        client.take_turn()
        assert client.served == served
        assert clock.go_on() == 0.0


def test_clients_of_a_heavy_run_take_turns():
    clock = Clock()
    turns, share = Turns(BURST, clock.now, clock.call_later), Share(100.0)
    clients = [Client(turns, share, 100, BURST + 1) for _ in range(4)]
    clients[0].take_turn()
    share.clients.extend(clients[1:])
    for _ in range(40):
        clock.go_on()
    assert {client.served for client in clients} <= {10, 11}


def test_a_light_run_never_waits_and_one_long_request_is_forgiven_soon():
    clock = Clock()
    turns, light, heavy = Turns(BURST, clock.now, clock.call_later), Share(100.0), Share(100.0)
    turns.active = 2
    Client(turns, heavy, 2, 100 * RATE).take_turn()
    for _ in range(100):
        clock.now_s += 0.1
        Client(turns, light, 1, RATE // 100).take_turn()
        assert not light.is_waiting
    assert heavy.is_waiting
    assert clock.go_on() == PAUSE_MAX_S


class Core(ServerCore):
    """A server without sockets."""

    stalled = False

    def __init__(self, clock, **limits):
        self.clock = clock
        super().__init__(limits=Limits(**limits))

    def now(self):
        return self.clock.now_s

    def fence_floor(self):
        return 1

    def call_soon(self, callback):
        self.clock.call_later(0.0, callback)

    def call_later(self, delay_s, callback):
        self.clock.call_later(delay_s, callback)

    def client(self, run_id, name):
        session = ServerSession(self)
        session.opened(FakeTransport())
        session.received(memoryview(PREAMBLE + encode(Hello(run_id, name, 1))))
        session.transport.sent.clear()
        return session


def answered(session):
    """The numbers of the answers so far."""
    data, numbers = b"".join(session.transport.sent), []
    while data:
        size = int.from_bytes(data[:4], "big")
        numbers.append(answer_decoder.decode(data[4 : 4 + size]).number)
        data = data[4 + size :]
    return numbers


def test_requests_of_a_run_that_used_its_share_wait_and_are_answered_in_order():
    clock = Clock()
    core = Core(clock, turn=200)
    one, two, other = core.client("job", "one"), core.client("job", "two"), core.client("other", "s")
    for session in (one, two, other):
        session.received(memoryview(b"".join(encode(Ping(number)) for number in range(5 if session is other else 30))))
    assert answered(one) == list(range(10))
    assert answered(two) == [], "of the same run"
    assert answered(other) == list(range(5)), "of another"
    assert not one.transport.reading
    assert not two.transport.reading
    while clock.later:
        clock.go_on()
    assert answered(one) == answered(two) == list(range(30))
    assert one.transport.reading
    assert two.transport.reading


def test_a_client_that_waits_for_its_turn_and_does_not_read_is_held_until_both_are_over():
    clock = Clock()
    core = Core(clock, turn=200)
    session = core.client("job", "one")
    session.received(memoryview(b"".join(encode(Ping(number)) for number in range(10))))
    session.pause_writing()
    while clock.later:
        clock.go_on()
    assert session.is_held
    session.resume_writing()
    while clock.later:
        clock.go_on()
    assert not session.is_held
    assert answered(session) == list(range(10))
    session.received(memoryview(b"".join(encode(Ping(number)) for number in range(10))))
    session.pause_writing()
    session.resume_writing()
    session._catch_up()
    assert session.is_held, "its turn has not come"


def test_a_client_that_is_gone_when_its_turn_comes_is_left_alone():
    clock = Clock()
    core = Core(clock, turn=200)
    session = core.client("job", "one")
    session.received(memoryview(b"".join(encode(Ping(number)) for number in range(20))))
    session.transport.close()
    session.closed()
    clock.go_on()
    assert answered(session) == list(range(10))


def test_a_transaction_that_looks_at_too_many_keys_is_refused_and_the_next_is_served():
    clock = Clock()
    core = Core(clock, steps=1000)
    session = core.client("job", "one")
    puts = tuple(Put(f"d/{number}", b"") for number in range(200))
    empties = tuple(Empty(f"d/x{number}") for number in range(100))
    session.received(memoryview(b"".join(encode(one) for one in (Txn(1, (), puts, ()), Txn(2, empties, (), ()), Ping(3)))))
    done, refused, pong = (answer_decoder.decode(data[4:]) for data in session.transport.sent)
    assert done.outcome.succeeded
    assert "looks at more keys than this server allows at once" in refused.text
    assert pong == Acknowledged(3)
