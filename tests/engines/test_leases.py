"""Leases: what ends when, told by nothing but the time passed in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdzv.engines.leases import Leases
from rdzv.engines.port import LeaseGone


def granted(count: int, ttl_s: float = 10) -> tuple[Leases, list[int]]:
    leases = Leases()
    return leases, [leases.grant(ttl_s) for _ in range(count)]


def test_ids_are_never_zero_and_never_used_again():
    """0 means "no lease" in a put."""
    leases, ids = granted(3)
    leases.revoke(ids[-1])
    ids.append(leases.grant(1))
    assert 0 not in ids
    assert len(set(ids)) == 4


def test_ends_when_its_time_has_passed_and_not_before():
    """And is told once."""
    leases, [lease] = granted(1, 10)
    assert leases.pass_time(9.999) == []
    assert lease in leases
    assert leases.pass_time(0.001) == [lease]
    assert lease not in leases
    assert leases.pass_time(100) == []


def test_leases_end_in_the_order_of_their_times():
    """Also when one step ends them all."""
    leases = Leases()
    ids = {ttl_s: leases.grant(ttl_s) for ttl_s in (3, 1, 2)}
    assert leases.pass_time(5) == [ids[1], ids[2], ids[3]]


def test_only_what_is_passed_in_counts():
    """A stall that the caller caps is credited to every lease: ten times a long pause is ten short steps here."""
    leases, ids = granted(100, 10)
    for _ in range(10):
        assert leases.pass_time(min(3600.0, 0.5)) == []
    assert len(leases) == len(ids)


def test_renewing_starts_the_time_anew():
    """Each time in full."""
    leases, [lease] = granted(1, 10)
    for _ in range(5):
        assert leases.pass_time(9) == []
        leases.renew(lease)
    assert leases.pass_time(9.5) == []
    assert leases.pass_time(0.5) == [lease]


def test_an_ended_lease_cannot_be_used():
    """Whether it was revoked, expired or never granted."""
    leases, [revoked, expired] = granted(2, 1)
    assert leases.revoke(revoked)
    assert leases.pass_time(1) == [expired]
    for lease in (revoked, expired, 99):
        with pytest.raises(LeaseGone, match=str(lease)):
            leases.renew(lease)
        with pytest.raises(LeaseGone):
            leases.come_back(lease)
        assert not leases.revoke(lease)
        leases.hang_up(lease, 1)
    assert len(leases) == 0


@pytest.mark.parametrize("ttl_s", [0, -1, float("inf"), float("nan")])
def test_a_time_that_is_none_is_refused(ttl_s):
    """At the grant, where the mistake is."""
    with pytest.raises(ValueError, match="time to live"):
        Leases().grant(ttl_s)


def test_time_does_not_go_back():
    """A caller that measures with a clock that can be set would end up here."""
    with pytest.raises(ValueError, match="does not go back"):
        Leases().pass_time(-0.1)


# ---- hanging up


def test_a_hang_up_ends_it_after_the_linger():
    """Long before its time; others are not touched."""
    leases, [gone, stays] = granted(2, 10)
    leases.hang_up(gone, 1)
    assert leases.pass_time(0.9) == []
    assert leases.pass_time(0.1) == [gone]
    assert stays in leases


def test_a_linger_never_makes_a_lease_longer():
    """Its own time may be over first."""
    leases, [lease] = granted(1, 10)
    leases.pass_time(9.5)
    leases.hang_up(lease, 1)
    assert leases.pass_time(0.5) == [lease]


@pytest.mark.parametrize("back", [Leases.renew, Leases.come_back])
def test_who_is_back_within_the_linger_was_never_gone(back):
    """By its connection or by renewing through another one."""
    leases, [lease] = granted(1, 10)
    leases.hang_up(lease, 1)
    leases.pass_time(0.9)
    back(leases, lease)
    assert leases.pass_time(5) == []


def test_coming_back_does_not_renew():
    """A connection proves that a process is there, not that it makes progress."""
    leases, [lease] = granted(1, 10)
    leases.pass_time(6)
    leases.hang_up(lease, 1)
    leases.come_back(lease)
    assert leases.pass_time(3.9) == []
    assert leases.pass_time(0.1) == [lease]


def test_hanging_up_twice_is_hanging_up_once():
    """The linger does not start anew, and it is not counted twice."""
    leases, ids = granted(10)
    for _ in range(4):
        leases.hang_up(ids[0], 1)
        leases.pass_time(0.2)
    assert leases.pass_time(0.2) == [ids[0]]


@pytest.mark.parametrize(("count", "few"), [(5, 3), (30, 3), (40, 4), (1000, 100)])
def test_when_many_hang_up_together_their_time_decides(count, few):
    """Up to max(3, 10 %) within a linger are lost after it; one more, and none of them is."""
    leases, ids = granted(count)
    for lease in ids[:few]:
        leases.hang_up(lease, 1)
    assert leases.pass_time(1) == ids[:few]

    leases, ids = granted(count)
    for lease in ids[: few + 1]:
        leases.hang_up(lease, 1)
    assert leases.pass_time(5) == []
    leases.renew(ids[0])
    assert leases.pass_time(5) == ids[1:]


def test_hang_ups_further_apart_than_a_linger_are_single():
    """Ten members that are killed one after the other are lost one after the other."""
    leases, ids = granted(20, 100)
    lost = []
    for lease in ids[:10]:
        leases.hang_up(lease, 1)
        lost += leases.pass_time(0.5)
        lost += leases.pass_time(0.5)
    assert lost == ids[:10]


def test_stragglers_of_a_mass_hang_up_are_spared_too():
    """The window slides: who follows within a linger of many is one of them, who comes later is single again."""
    leases, ids = granted(50, 100)
    for lease in ids[:20]:
        leases.hang_up(lease, 1)
    leases.pass_time(0.9)
    leases.hang_up(ids[20], 1)
    leases.pass_time(2)
    leases.hang_up(ids[21], 1)
    assert leases.pass_time(10) == [ids[21]]


def test_those_who_came_back_still_tell_of_a_fault():
    """Three of four are back already when the fourth hangs up: it is a blip, and the fourth gets its time."""
    leases, ids = granted(20)
    for lease in ids[:3]:
        leases.hang_up(lease, 1)
        leases.come_back(lease)
    leases.hang_up(ids[3], 1)
    assert leases.pass_time(5) == []


def test_one_that_ended_while_it_lingered_is_not_spared():
    """It is gone already when the others turn out to be many."""
    leases, ids = granted(10)
    for lease in ids[:3]:
        leases.hang_up(lease, 1)
    leases.revoke(ids[0])
    leases.hang_up(ids[3], 1)
    assert leases.pass_time(5) == []
    assert ids[0] not in leases


def test_only_leases_with_a_connection_make_the_share():
    """After half of 200 are cut off, 10 % of the other half are enough for the next fault to be recognised."""
    leases, ids = granted(200, 100)
    for lease in ids[:100]:
        leases.hang_up(lease, 1)
    leases.pass_time(5)
    for lease in ids[100:111]:
        leases.hang_up(lease, 1)
    assert leases.pass_time(5) == []


def test_a_spared_lease_that_is_back_can_hang_up_again():
    """It is judged anew."""
    leases, ids = granted(10)
    for lease in ids[:4]:
        leases.hang_up(lease, 1)
    leases.pass_time(2)
    leases.come_back(ids[0])
    leases.hang_up(ids[0], 1)
    assert leases.pass_time(1) == [ids[0]]


def test_without_a_linger_a_hang_up_is_the_end():
    """At the next step, however short, however many."""
    leases, ids = granted(10)
    for lease in ids:
        leases.hang_up(lease, 0)
    assert leases.pass_time(0) == ids


# ---- costs


def test_the_queue_does_not_grow_with_what_is_over():
    """Neither revoked leases nor blips of long ones leave anything behind that lasts."""
    leases, [lease] = granted(1, 86400)
    for _ in range(10_000):
        leases.revoke(leases.grant(86400))
        leases.hang_up(lease, 1)
        leases.come_back(lease)
        leases.pass_time(0.01)
    assert len(leases._queue) < 200
    assert len(leases._hang_ups) < 200


def test_passing_time_looks_at_no_lease_that_is_not_due(monkeypatch):
    """Ten renewals of each of a thousand leases cost a step nothing."""
    leases, ids = granted(1000, 10)
    for _ in range(10):
        for lease in ids:
            leases.renew(lease)
    seen = []
    monkeypatch.setattr(leases, "_leases", type("Counted", (dict,), {"get": lambda _, key: seen.append(key)})())
    for _ in range(30):
        leases.pass_time(0.25)
    assert seen == []


# ---- against a naive model


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(1, 20)),
        st.tuples(st.just("renew"), st.integers(0, 9)),
        st.tuples(st.just("revoke"), st.integers(0, 9)),
        st.tuples(st.just("hang_up"), st.integers(0, 9)),
        st.tuples(st.just("come_back"), st.integers(0, 9)),
        st.tuples(st.just("pass"), st.integers(0, 6)),
    ),
    max_size=60,
)


class Naive:
    """The same rules, with a look at every lease for every question."""

    def __init__(self) -> None:
        self.now = 0
        self.due: dict[int, int] = {}
        self.ttl: dict[int, int] = {}
        self.cut: dict[int, int | None] = {}
        self.hang_ups: list[int] = []

    def hang_up(self, lease: int, linger: int) -> None:
        if lease in self.due and lease not in self.cut:
            self.hang_ups.append(self.now)
            self.cut[lease] = self.now + linger
            recent = sum(self.now - linger < when for when in self.hang_ups)
            spared = [one for one, cut in self.cut.items() if cut is None]
            if recent > max(3, (len(self.due) - len(spared)) / 10):
                self.cut = dict.fromkeys(self.cut)

    def end(self, lease: int) -> None:
        del self.due[lease]
        self.cut.pop(lease, None)

    def pass_time(self, elapsed: int) -> list[int]:
        self.now += elapsed
        ends = {lease: min(due, self.cut.get(lease) or due) for lease, due in self.due.items()}
        ended = sorted((end, lease) for lease, end in ends.items() if end <= self.now)
        for _, lease in ended:
            self.end(lease)
        return [lease for _, lease in ended]


@given(steps)
def test_agrees_with_a_naive_model(steps):
    """Whatever is done, in whatever order."""
    leases, model = Leases(), Naive()
    known = [0]
    for verb, number in steps:
        lease = known[-1 - number % len(known)]
        if verb == "grant":
            known.append(leases.grant(number))
            model.due[known[-1]], model.ttl[known[-1]] = model.now + number, number
        elif verb == "pass":
            assert leases.pass_time(number) == model.pass_time(number)
        elif verb == "hang_up":
            leases.hang_up(lease, 3)
            model.hang_up(lease, 3)
        elif verb == "revoke":
            assert leases.revoke(lease) == (lease in model.due)
            if lease in model.due:
                model.end(lease)
        elif lease in model.due:
            getattr(leases, verb)(lease)
            model.cut.pop(lease, None)
            if verb == "renew":
                model.due[lease] = model.now + model.ttl[lease]
        assert len(leases) == len(model.due)
