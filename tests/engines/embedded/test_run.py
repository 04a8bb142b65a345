"""A server's judgement of its members, by time that the tests pass themselves."""

from __future__ import annotations

import pytest

from rdzv.engines.embedded.lease_clock import STEP_MAX_S, TICK_S
from rdzv.engines.embedded.limits import Limits
from rdzv.engines.embedded.run import ABANDONED_S, PREFIXES_MAX, Run
from rdzv.engines.port import Away, Created, DeletePrefix, Get, LeaseGone, List, Put
from rdzv.errors import LimitExceeded


class Home:
    """A connection, as far as a run is concerned."""

    def __init__(self, session, attempt=1):
        self.session = session
        self.attempt = attempt
        self.leases = set()
        self.gone = self.process_ended = False

    def replaced(self):
        self.gone = True


class Small:
    """A run with members whose connections the test breaks, and a clock that the test moves."""

    def __init__(self, members=0, ttl_s=10.0, **limits):
        self.now = 100.0
        self.run = Run("job", "here", Limits(**limits), self.now)
        self.homes = {}
        self.leases = {}
        for n in range(members):
            self.come(f"n{n}", ttl_s)

    def come(self, name, ttl_s=10.0, presence=True):
        home = self.homes[name] = Home(name)
        assert self.run.enter(home, "", ())
        lease = self.leases[name] = self.run.grant(ttl_s, home if presence else None)
        self.run.txn((), (Put(f"members/{name}", b"", lease),), ())
        return home

    def say(self, *names):
        """Let these members renew."""
        for name in names:
            self.run.hear(self.now)
            self.run.renew(self.leases[name], self.homes[name])

    def break_off(self, name, linger_s=1.0, *, dead=False):
        self.run.leave(self.homes[name])
        self.homes[name].process_ended = dead
        self.run.hang_up(self.homes[name], linger_s, self.now)

    def is_away(self, name, s):
        self.run.hear(self.now)
        return self.run.txn((Away(f"members/{name}", s),), (), ()).succeeded

    def back(self, name, attempt=2):
        home = Home(name, attempt)
        entered = self.run.enter(home, self.run.engine.instance, (self.leases[name],))
        if entered:
            self.homes[name] = home
        return entered

    def pass_s(self, seconds, *talking, every_s=3.0):
        """Tick by tick, while those who talk renew."""
        said_at = self.now
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            if talking and self.now - said_at >= every_s:
                said_at = self.now
                self.say(*talking)
            self.run.pass_time(TICK_S, self.now)

    def here(self):
        return [item.key.removeprefix("members/") for item in self.run.txn((), (List("members/"),), ()).reads[0]]


# ---- leases and connections


def test_a_silent_member_loses_its_lease_and_not_before():
    small = Small(3)
    small.pass_s(10, "n0", "n1")
    assert small.here() == ["n0", "n1", "n2"]
    small.pass_s(STEP_MAX_S + TICK_S, "n0", "n1")
    assert small.here() == ["n0", "n1"]
    with pytest.raises(LeaseGone):
        small.say("n2")


def test_a_member_whose_connection_breaks_is_lost_after_the_linger():
    small = Small(3)
    small.break_off("n1", linger_s=1.0)
    small.pass_s(1.0, "n0")
    assert small.here() == ["n0", "n1", "n2"]
    small.pass_s(STEP_MAX_S + TICK_S, "n0")
    assert small.here() == ["n0", "n2"]


def test_a_member_that_is_back_within_the_linger_is_not_lost():
    small = Small(3)
    for attempt in range(2, 12):
        small.break_off("n1")
        small.pass_s(0.8, "n0", "n2", every_s=0.5)
        assert small.back("n1", attempt)
        small.pass_s(0.8, "n0", "n2", every_s=0.5)
        small.say("n1")
    assert small.here() == ["n0", "n1", "n2"]


def test_each_member_lingers_as_long_as_it_wants_to():
    small = Small(3)
    small.break_off("n1", linger_s=0.0)
    small.break_off("n2", linger_s=5.0)
    small.pass_s(TICK_S, "n0")
    assert small.here() == ["n0", "n2"]
    small.pass_s(5.0 + STEP_MAX_S, "n0")
    assert small.here() == ["n0"]


def test_when_many_connections_break_at_once_the_lease_decides():
    small = Small(20)
    for n in range(1, 6):
        small.break_off(f"n{n}")
    rest = [f"n{n}" for n in (0, *range(6, 20))]
    small.pass_s(9, *rest)
    assert len(small.here()) == 20
    small.pass_s(1.5, *rest)
    assert sorted(small.here()) == sorted(rest)


def test_a_goodbye_leaves_the_lease_alone_and_makes_it_an_ordinary_one():
    small = Small(1)
    small.run.let_go(small.homes["n0"])
    small.run.leave(small.homes["n0"])
    assert small.run.presences == 0
    small.pass_s(10)
    assert small.here() == ["n0"]
    small.pass_s(1)  # Though nobody is connected: there is nobody left whose life could be misjudged.
    assert small.here() == []
    assert small.run.is_empty


def test_only_a_presence_ends_with_its_connection():
    small = Small(1)
    home = small.come("n1")
    for key, ttl_s in (("closed", 4), ("run", 86_400)):
        small.run.txn((), (Put(key, b"", small.run.grant(ttl_s, None)),), ())
    small.break_off("n1")
    assert home.leases
    small.pass_s(2, "n0", every_s=1)
    assert [item.key for item in small.run.txn((), (List(""),), ()).reads[0]] == ["closed", "members/n0", "run"]


# ---- late words of connections that were given up


def test_a_late_goodbye_of_an_abandoned_connection_does_not_end_a_live_lease():
    small = Small(2)
    abandoned = small.homes["n1"]
    assert small.back("n1")
    assert abandoned.gone
    small.run.leave(abandoned)
    small.run.hang_up(abandoned, 1.0, small.now)
    small.pass_s(3, "n0", every_s=1)
    assert small.here() == ["n0", "n1"]
    assert "n1" in small.run.sessions


def test_a_late_hello_of_an_abandoned_connection_does_not_take_the_lease_with_it():
    small = Small(2)
    assert small.back("n1", attempt=3)
    assert not small.back("n1", attempt=2)
    small.break_off("n1")
    late = Home("n1", 2)
    assert small.run.enter(late, small.run.engine.instance, (small.leases["n1"],))
    small.run.leave(late)
    small.run.hang_up(late, 1.0, small.now)
    assert small.back("n1", attempt=4)
    small.pass_s(3, "n0", every_s=1)
    assert small.here() == ["n0", "n1"]


def test_another_session_does_not_take_the_lease_to_its_connection():
    small = Small(2)
    stranger = Home("other", 99)
    small.run.enter(stranger, small.run.engine.instance, (small.leases["n1"],))
    small.run.renew(small.leases["n1"], stranger)
    small.run.leave(stranger)
    small.run.hang_up(stranger, 1.0, small.now)
    small.pass_s(3, "n0", every_s=1)
    assert small.here() == ["n0", "n1"]


def test_leases_of_another_instance_mean_nothing():
    small = Small(1)
    small.break_off("n0")
    small.come("n1")
    back = Home("n0", 2)
    assert small.run.enter(back, "another instance", (small.leases["n0"],))
    small.pass_s(1.5, "n1", every_s=1)
    assert small.here() == ["n1"]


# ---- isolation


def test_a_server_that_hears_nobody_lets_no_presence_run_out():
    small = Small(3)
    small.pass_s(300)
    assert small.here() == ["n0", "n1", "n2"]
    small.say("n0")
    small.pass_s(9, "n0")
    assert small.here() == ["n0", "n1", "n2"], "the first to be back does not condemn the others"
    small.pass_s(2, "n0")
    assert small.here() == ["n0"]


def test_nor_if_all_connections_are_broken():
    small = Small(2)
    small.break_off("n0")
    small.break_off("n1")
    small.pass_s(300)
    assert small.here() == ["n0", "n1"]
    assert small.back("n0")
    small.pass_s(2, "n0", every_s=1)
    small.back("n1")
    small.pass_s(12, "n0", "n1")
    assert small.here() == ["n0", "n1"]


def test_one_that_is_heard_lets_time_pass_for_the_others():
    small = Small(3)
    small.pass_s(11, "n1")
    assert small.here() == ["n1"]


def test_what_nobody_comes_back_for_ends_after_all():
    small = Small(2)
    small.now += ABANDONED_S
    small.pass_s(11)
    assert small.here() == []


def test_without_presences_time_passes_whoever_is_there():
    small = Small()
    small.come("closed", 5.0, presence=False)
    small.pass_s(6)
    assert small.here() == []


def test_a_short_presence_that_ended_no_longer_decides_what_silence_is():
    small = Small(2)
    small.come("brief", 1.0)
    small.run.revoke(small.leases["brief"])
    small.pass_s(11, "n0", every_s=4.0)
    assert small.here() == ["n0"]


# ---- limits


def test_a_run_has_room_for_so_many_bytes():
    run = Run("job", "here", Limits(bytes=100), 0.0)
    run.txn((), (Put("/kv/a", bytes(60)),), ())
    with pytest.raises(LimitExceeded, match="run 'job' on this server has 130 bytes, at most 100 are allowed"):
        run.txn((), (Put("/kv/b", bytes(60)),), ())
    with pytest.raises(LimitExceeded):
        run.txn((Created("absent", 5),), (), (Put("/kv/b", bytes(60)),))
    run.txn((), (Put("/kv/a", bytes(90)),), ())
    assert run.bytes == 95
    run.txn((), (DeletePrefix(""),), ())
    run.txn((), (Put("/kv/b", bytes(60)),), ())
    assert run.bytes == 65


def test_a_run_has_room_for_so_many_keys_and_a_full_one_can_still_be_changed():
    run = Run("job", "here", Limits(keys=2), 0.0)
    run.txn((), (Put("/kv/a", b""), Put("/kv/b", b"")), ())
    with pytest.raises(ValueError, match="run 'job' would have 3 keys, at most 2 are allowed"):
        run.txn((), (Put("/kv/c", b""),), ())
    run.txn((), (Put("/kv/a", b"longer"),), ())
    assert run.txn((), (Get("/kv/a"),), ()).item(0).value == b"longer"


def test_what_expires_makes_room():
    run = Run("job", "here", Limits(keys=1), 0.0)
    run.txn((), (Put("a", bytes(5), run.grant(1.0, None)),), ())
    for _ in range(20):
        run.pass_time(TICK_S, 0.0)
    assert run.bytes == 0
    run.txn((), (Put("b", b""),), ())


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 1e12])
def test_a_lease_of_no_sensible_length_is_refused(ttl_s):
    with pytest.raises(ValueError, match="its time to live must be positive and at most"):
        Run("job", "here", Limits(), 0.0).grant(ttl_s, None)


def test_there_are_so_many_leases_and_no_more():
    run = Run("job", "here", Limits(leases=2), 0.0)
    run.grant(1, None)
    run.grant(1, None)
    with pytest.raises(ValueError, match="run 'job' has 2 leases, at most 2 are allowed"):
        run.grant(1, None)


def test_a_transaction_has_so_many_parts_and_no_more():
    run = Run("job", "here", Limits(operations=10), 0.0)
    with pytest.raises(ValueError, match="a transaction with 11 operations"):
        run.txn((), (Get("a"),) * 11, ())
    with pytest.raises(ValueError, match="a transaction with 11 compares"):
        run.txn((Created("a", 0),) * 11, (), ())
    with pytest.raises(ValueError, match="1001 of prefixes"):
        Run("job", "here", Limits(), 0.0).txn((), (List("a"),) * (PREFIXES_MAX + 1), ())


def test_a_list_that_would_fail_after_a_write_is_refused_before_it():
    run = Run("job", "here", Limits(), 0.0)
    with pytest.raises(ValueError, match="neither is negative"):
        run.txn((), (Put("a", b""), List("", limit=-1)), ())
    assert run.engine.revision == 1


def test_a_key_that_is_too_long_is_refused():
    run = Run("job", "here", Limits(), 0.0)
    with pytest.raises(ValueError, match="has 2049 characters, at most 2048 are allowed"):
        run.txn((), (Put("/" * 2049, b""),), ())


# ---- the end of a process


def test_a_process_that_ended_is_away_to_the_moment():
    """Between two steps, too: the next question need not wait for a step."""
    small = Small(3)
    small.now += 0.03
    small.break_off("n0", dead=True)
    small.break_off("n1")
    small.now += 0.06
    assert not small.is_away("n0", 0.07)
    assert small.is_away("n0", 0.05)
    small.now += 0.01
    small.run.pass_time(0.1, small.now)
    assert small.is_away("n0", 0.069)
    assert not small.is_away("n0", 0.08)
    assert not small.is_away("n1", 0.0)
    assert not small.is_away("n2", 0.0)
    assert small.back("n0")
    assert not small.is_away("n0", 0.0)


def test_the_time_of_a_stopped_server_makes_nobody_away():
    """What waits in its sockets may be the greeting of the one that is asked about."""
    small = Small(2)
    small.break_off("n0", dead=True)
    small.now += 30.0
    assert not small.is_away("n0", 0.01)
    small.run.pass_time(STEP_MAX_S, small.now)
    assert not small.is_away("n0", 0.01), "a silence so long makes all presences begin anew"


def test_an_end_that_is_noticed_late_counts_from_its_notice():
    small = Small(2)
    small.now += 0.5
    small.break_off("n0", dead=True)
    small.run.pass_time(STEP_MAX_S, small.now)
    assert not small.is_away("n0", 0.01)
    small.now += 0.1
    assert small.is_away("n0", 0.09)
