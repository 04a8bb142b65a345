"""Leases: a naive model that they must agree with, and what it does not reach: many leases, mistakes, costs."""

from __future__ import annotations

from random import Random

import pytest

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
    leases, [lease] = granted(1, 10)
    assert leases.pass_time(9.999) == []
    assert lease in leases
    assert leases.pass_time(0.001) == [lease]
    assert lease not in leases
    assert leases.pass_time(100) == []


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
    with pytest.raises(ValueError, match="time to live"):
        Leases().grant(ttl_s)


def test_time_does_not_go_back():
    """A caller that measures with a clock that can be set would end up here."""
    with pytest.raises(ValueError, match="does not go back"):
        Leases().pass_time(-0.1)


# ---- hanging up


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


def test_only_leases_with_a_connection_make_the_share():
    """After half of 200 are cut off, 10 % of the other half are enough for the next fault to be recognised."""
    leases, ids = granted(200, 100)
    for lease in ids[:100]:
        leases.hang_up(lease, 1)
    leases.pass_time(5)
    for lease in ids[100:111]:
        leases.hang_up(lease, 1)
    assert leases.pass_time(5) == []


def test_without_a_linger_a_hang_up_is_the_end():
    leases, ids = granted(10)
    for lease in ids:
        leases.hang_up(lease, 0)
    assert leases.pass_time(0) == ids


# ---- the end of a process


def test_a_lease_is_away_since_its_process_ended():
    leases, [ended, lost, held] = granted(3)
    leases.passing_s = 0.1
    leases.hang_up(ended, 5, process_ended=True)
    leases.hang_up(lost, 5)
    leases.pass_time(0.3)
    assert leases.away_s(ended) == pytest.approx(0.2)
    leases.passing_s = 0.15
    assert leases.away_s(ended) == pytest.approx(0.35)
    assert [leases.away_s(one) < 0 for one in (lost, held, 99)] == [True] * 3
    leases.come_back(ended)
    assert leases.away_s(ended) < 0


@pytest.mark.parametrize("verb", ["renew", "come_back"])
def test_a_member_that_is_heard_again_is_not_away(verb):
    leases, [lease] = granted(1)
    leases.hang_up(lease, 5, process_ended=True)
    getattr(leases, verb)(lease)
    leases.pass_time(1)
    assert leases.away_s(lease) < 0


def test_when_many_hang_up_together_none_is_away():
    leases, ids = granted(10)
    for lease in ids[:3]:
        leases.hang_up(lease, 1, process_ended=True)
    leases.pass_time(0.5)
    assert [leases.away_s(lease) for lease in ids[:3]] == [0.5] * 3
    leases.hang_up(ids[3], 1, process_ended=True)
    assert max(leases.away_s(lease) for lease in ids[:4]) < 0


# ---- costs


def test_the_queue_does_not_grow_with_what_is_over():
    """Revoked leases and short hang-ups of long leases leave no entries that last."""
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
        ended = sorted(lease for lease, end in ends.items() if end <= self.now)
        for lease in ended:
            self.end(lease)
        return ended


@pytest.mark.parametrize("seed", range(200))
def test_agrees_with_a_naive_model(seed):
    """Few leases, a linger of 3 and short steps, so that every act meets every state."""
    random = Random(seed)
    leases, model = Leases(), Naive()
    known: list[int] = []
    size = random.choice([4, 4, 4, 60])
    for _ in range(150 + 4 * size):
        verb = random.choice(["grant", "renew", "revoke", "hang_up", "hang_up", "hang_up", "come_back", "pass", "pass"])
        if verb == "grant" or len(known) < size:
            ttl_s = random.randint(1, 20)
            known.append(leases.grant(ttl_s))
            model.due[known[-1]], model.ttl[known[-1]] = model.now + ttl_s, ttl_s
            continue
        lease = random.choice(known[-size * 2 :])
        if verb == "pass":
            elapsed_s = random.randint(0, 3)
            assert sorted(leases.pass_time(elapsed_s)) == model.pass_time(elapsed_s)
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
        assert leases._spared | leases._lingering <= leases._leases.keys()
